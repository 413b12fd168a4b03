"""Sandboxes for the programs of agents: each has a folder of its own, in which several commands run
one after another.

A local one contains a program as far as the kernel can: it sees the files of the system that it
needs, its folder and no other, and reaches the server of its model and no other. Whatever it leaves
running ends with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from llamarl.scoring.sandbox import forwarder
from llamarl.scoring.sandbox.containers import END_S, Ran, interpreter, missing
from llamarl.scoring.sandbox.folders import LockedFolder, make_folder, remove, remove_left_once
from llamarl.scoring.sandbox.limits import below, disk_bytes, in_group, memory_bytes, num_threads
from llamarl.scoring.sandbox.watched import READ_BYTES, Program, Tail, watch

PREFIX = "llamarl-agent-"
INSIDE, WAY_OUT = "/episode", "/run/llamarl"  # folders in a sandbox: its own, that of the socket
FORWARDER = Path(forwarder.__file__)
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt"),
    *("/etc/alternatives", "/etc/group", "/etc/hosts", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/ssl"),
)
LOOK_S = 1.0  # between two looks at what a program takes, of which each reads all of /proc
MIB = 2**20
MARK = "LLAMARL_SANDBOX"
THREADS = ThreadPoolExecutor(4096, "sandbox")  # each waits for a program


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of a sandbox: bytes of memory and of files, and processes and threads at once."""

    memory_bytes: int = 2048 * MIB
    disk_bytes: int = 256 * MIB
    num_processes: int = 256


class Sandbox(Protocol):
    """A place where commands run, in a folder of their own. One that lacks something raises
    RuntimeError."""

    async def start(self) -> None:
        """Make the sandbox and its empty folder."""

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        has_model: bool = True,
    ) -> Ran:
        """Run a command in the folder, which reaches the model's server if it `has_model`; it is
        ended after `timeout_s`, or beyond a limit."""

    async def write(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """Write a file at this path in the folder, or at an absolute one in its other folders."""

    async def read(self, path: str) -> bytes:
        """Return the file at such a path. Raises FileNotFoundError if there is none."""

    async def empty(self, path: str) -> None:
        """Make an empty folder at such a path, in the place of whatever programs left there."""

    async def stop(self) -> None:
        """End whatever runs, and remove the folder."""


def located(path: str, tops: Sequence[str], *, is_folder: bool = False) -> tuple[str, str]:
    """Return which of these folders has the path, or is it if it `is_folder`, and the whole path; a
    relative one starts at the first. Raises ValueError if it leads out of all of them."""
    place = os.path.normpath(os.path.join(tops[0], path))
    for top in tops:
        if place == top and is_folder:
            return top, place
        if place.startswith(f"{top.rstrip('/')}/") and place != top:
            return top, place
    raise ValueError(f"a file of a sandbox must lie in its folder, got {path}")


async def start_relay(
    url: str, path: str, is_open: Callable[[], bool] = lambda: True
) -> asyncio.Server:
    """Connect who comes to the socket `path` to the server at `url`, while that `is_open`."""
    address = urlsplit(url)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_open():
            return writer.close()
        out_reader, out_writer = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(_pump(reader, out_writer), _pump(out_reader, writer))

    return await asyncio.start_unix_server(pass_on, path)


@dataclass(eq=False)
class LocalSandbox:
    """A sandbox on this machine, with the server at `url` as its only network. `readable` are paths
    that its programs may read too. One that is not `contained` has the rights of the run. Programs
    start in the folder `home`, and may have other `folders`; both need bubblewrap."""

    url: str
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    readable: Sequence[str] = ()
    contained: bool = True
    home: str = INSIDE
    folders: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._folder: LockedFolder | None = None
        self._mark = secrets.token_hex(8)  # by which its processes are known, whoever has them
        self._programs: set[Program] = set()
        self._relay: asyncio.Server | None = None
        self._has_namespaces = self.contained and shutil.which("bwrap") is not None

    async def start(self) -> None:
        if self.contained and (why := missing()):
            raise RuntimeError(f"programs cannot be sandboxed here: {why}")
        self._check_folders()
        await _in_thread(remove_left_once, PREFIX)
        self._folder = make_folder(PREFIX)
        (self._folder.path / "way").mkdir()
        for place in self._places().values():
            Path(place).mkdir(parents=True)
        if self._has_namespaces:
            self._relay = await start_relay(self.url, str(self._folder.path / "way" / "socket"))

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        has_model: bool = True,
    ) -> Ran:
        home = self.home if self._has_namespaces else self._files
        variables = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        variables |= {"HOME": home, "TMPDIR": "/tmp" if self._has_namespaces else home}
        variables |= {MARK: self._mark, **environment}
        run = partial(self._run, [*command], variables, timeout_s, has_model=has_model)
        return await asyncio.get_running_loop().run_in_executor(THREADS, run)

    async def write(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        forwarder.write(*self._find(path), data, is_executable)

    async def read(self, path: str) -> bytes:
        return forwarder.read(*self._find(path))

    async def empty(self, path: str) -> None:
        top, place = self._find(path, is_folder=True)
        if place != top:
            forwarder.refuse_links(top, os.path.dirname(place))
        await _in_thread(remove, place)
        forwarder.make_folder(place)

    async def stop(self) -> None:
        for program in [*self._programs]:
            program.end()
        if self._folder is not None and not self._has_namespaces:
            await _in_thread(_end_marked, self._mark)
        if self._relay is not None:
            self._relay.close()
        if self._folder is not None:
            await _in_thread(self._folder.remove)

    @property
    def _files(self) -> str:
        return next(iter(self._places().values()))

    def _places(self) -> dict[str, str]:
        """Return where its folders are on this machine, the home first."""
        if self._folder is None:
            raise RuntimeError("a sandbox must be started first")
        names = {self.home: "home"} | {each: f"{i}" for i, each in enumerate(self.folders)}
        return {inside: str(self._folder.path / "files" / name) for inside, name in names.items()}

    def _find(self, path: str, *, is_folder: bool = False) -> tuple[str, str]:
        """Return where the folder that has this path is on this machine, and the path there."""
        places = self._places()
        if not self._has_namespaces and os.path.isabs(path):
            raise ValueError(f"a file of a sandbox must lie in its folder, got {path}")
        top, inside = located(path, [*places], is_folder=is_folder)
        return places[top], places[top] + inside.removeprefix(top)

    def _check_folders(self) -> None:
        """Raise RuntimeError if the folders cannot be at their places here."""
        own = [*self.folders] + [self.home] * (self.home != INSIDE)
        if own and not self._has_namespaces:
            must = "have bubblewrap, or environment.sandbox=docker, for folders at fixed places"
            raise RuntimeError(f"a sandbox must {must}, got {', '.join(own)}")
        for folder in own:
            for path in self._seen():
                if os.path.commonpath([folder, os.path.abspath(path)]) in (folder, path):
                    must = "be none of the system's, except with environment.sandbox=docker"
                    raise RuntimeError(f"a folder of a sandbox must {must}, got {folder}: {path}")

    def _seen(self) -> list[str]:
        """Return the paths that a program may read, besides its folder."""
        return [*dict.fromkeys((*SYSTEM, sys.base_prefix, sys.prefix, *self.readable))]

    def _wrapped(self, *, has_model: bool) -> list[str]:
        """Return bubblewrap's command, up to that of the program."""
        assert self._folder is not None
        words = ["bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        words += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
        words += [] if os.geteuid() == 0 else ["--unshare-user"]
        words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
        for path in self._seen():
            if os.path.islink(path) and path in SYSTEM:
                words += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                words += ["--ro-bind", path, path]
        for inside, place in self._places().items():
            words += ["--bind", place, inside]
        words += ["--chdir", self.home]
        if not has_model:  # the shell exits with 127 where there is no such program
            return [*words, "--", "/bin/sh", "-c", 'exec "$@"', "sh"]
        words += ["--ro-bind", str(self._folder.path / "way"), WAY_OUT]
        words += ["--ro-bind", str(FORWARDER), f"{WAY_OUT}.py", "--"]
        port = urlsplit(self.url).port
        return [*words, interpreter(), "-I", "-S", f"{WAY_OUT}.py", f"{WAY_OUT}/socket", str(port)]

    def _run(
        self,
        command: list[str],
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        has_model: bool,
    ) -> Ran:
        if self.contained and not self._has_namespaces:
            program = self._start_in_sandlock(command, environment, has_model=has_model)
        else:
            program = self._start_program(command, environment, has_model=has_model)
        self._programs.add(program)
        try:
            out, err = Tail(program.stdout), Tail(program.stderr)
            end_s, look = time.monotonic() + timeout_s, partial(self._too_much, program.pid)
            ended_for = watch(program.pid, (out, err), end_s, look, LOOK_S)
            ended_for = ended_for or self._is_full()
            program.end()
            for tail in (out, err):
                tail.read()
            code = program.wait()
            exit_code = None if ended_for else code
            return Ran(exit_code=exit_code, stdout=out.text, stderr=err.text, ended_for=ended_for)
        finally:
            self._programs.discard(program)
            program.close()

    def _start_program(
        self, command: list[str], environment: Mapping[str, str], *, has_model: bool
    ) -> Program:
        wrapped = self._wrapped(has_model=has_model) if self._has_namespaces else []
        try:
            process = subprocess.Popen(
                [*wrapped, *command],
                cwd=self._files,
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"{command[0]} must be a program, got {error.strerror}") from error
        assert process.stdout is not None
        assert process.stderr is not None

        def wait() -> int:
            code = process.wait(END_S)
            return code if code >= 0 else 128 - code

        # With the first process of its namespace the kernel ends all others.
        is_whole = self._has_namespaces
        return Program(process.pid, process.stdout, process.stderr, wait, is_whole)

    def _start_in_sandlock(
        self, command: list[str], environment: Mapping[str, str], *, has_model: bool
    ) -> Program:
        import sandlock  # here, for it is an extra

        address = urlsplit(self.url)
        sandbox = sandlock.Sandbox(
            fs_readable=[path for path in self._seen() if os.path.exists(path)],
            fs_writable=[self._files, os.devnull],
            net_allow=[f"tcp://{address.hostname}:{address.port}"] * has_model,
            max_processes=self.limits.num_processes,
            clean_env=True,
            env={**environment},
            cwd=self._files,
        )
        pipe, null = sandlock.StdioMode.PIPED, sandlock.StdioMode.NULL
        process = sandbox.popen(command, null, pipe, pipe)

        def wait() -> int:
            ended = process.wait(END_S)
            signalled = 128 + (ended.signal if ended.signal > 0 else signal.SIGKILL)
            return int(ended.exit_code) if ended.exit_code >= 0 else signalled

        return Program(process.pid, process.stdout, process.stderr, wait)

    def _too_much(self, pid: int) -> str:
        """Return the limit that the program exceeds; empty if none."""
        pids, limits = {pid} | below(pid) | in_group(pid), self.limits
        if memory_bytes(pids, limits.memory_bytes) > limits.memory_bytes:
            return "memory"
        if num_threads(pids) > limits.num_processes:
            return "processes"
        return self._is_full(pids)

    def _is_full(self, pids: Iterable[int] = ()) -> str:
        """Return "disk" if the folder has too much in it, with what these processes have deleted
        and keep open."""
        assert self._folder is not None
        most, folder = self.limits.disk_bytes, str(self._folder.path / "files")
        return "disk" if disk_bytes(folder, {*pids}, most) > most else ""


async def _in_thread(function: Callable[..., object], *arguments: object) -> None:
    await asyncio.get_running_loop().run_in_executor(THREADS, partial(function, *arguments))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, until it ends."""
    with closing(writer), suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


def _end_marked(mark: str) -> None:
    """End the processes that were started with this mark in their environment."""
    word = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if word in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
