"""Sandboxes for the programs of agents: each has a folder of its own, in which several commands run
one after another.

A local one contains a program as far as the kernel can: it sees the files of the system that it
needs, its folder and no other, and reaches the server of its model and no other. Whatever it leaves
running ends with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlsplit

from llamarl.scoring.sandbox import forwarder
from llamarl.scoring.sandbox.containers import END_S, Ran, interpreter, missing
from llamarl.scoring.sandbox.limits import below, disk_bytes, in_group, memory_bytes, num_threads
from llamarl.scoring.user_code.watchdog import end_descendants

PREFIX = "llamarl-agent-"
INSIDE, WAY_OUT = "/episode", "/run/llamarl"  # folders in a sandbox: its own, that of the socket
FORWARDER = Path(forwarder.__file__)
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt"),
    *("/etc/alternatives", "/etc/group", "/etc/hosts", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/ssl"),
)
LOOK_S = 1.0  # between two looks at what a program takes, of which each reads all of /proc
TAIL_BYTES = 65536  # of what a program prints, which are kept
READ_BYTES = 65536
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

    async def write(self, path: str, data: bytes) -> None:
        """Write a file at this path in the folder."""

    async def read(self, path: str) -> bytes:
        """Return the file at this path in the folder. Raises FileNotFoundError if there is none."""

    async def stop(self) -> None:
        """End whatever runs, and remove the folder."""


def place_in(folder: Path, path: str) -> Path:
    """Return where this path lies. Raises ValueError if it leads out of the folder."""
    place = Path(os.path.normpath(folder / path))
    if not place.is_relative_to(folder) or place == folder:
        raise ValueError(f"a file of a sandbox must lie in its folder, got {path}")
    return place


@dataclass(eq=False)
class LocalSandbox:
    """A sandbox on this machine, with the server at `url` as its only network. `readable` are paths
    that its programs may read too. One that is not `contained` has the rights of the run."""

    url: str
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    readable: Sequence[str] = ()
    contained: bool = True

    def __post_init__(self) -> None:
        self._folder: Path | None = None
        self._mark = secrets.token_hex(8)  # by which its processes are known, whoever has them
        self._programs: set[_Program] = set()
        self._relay: asyncio.Server | None = None
        self._has_namespaces = self.contained and shutil.which("bwrap") is not None

    async def start(self) -> None:
        if self.contained and (why := missing()):
            raise RuntimeError(f"programs cannot be sandboxed here: {why}")
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        for name in ("files", "way"):
            (self._folder / name).mkdir()
        if self._has_namespaces:
            path = self._folder / "way" / "socket"
            self._relay = await asyncio.start_unix_server(self._pass_on, str(path))

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        has_model: bool = True,
    ) -> Ran:
        home = INSIDE if self._has_namespaces else str(self._files)
        variables = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        variables |= {"HOME": home, "TMPDIR": "/tmp" if self._has_namespaces else home}
        variables |= {MARK: self._mark, **environment}
        run = partial(self._run, [*command], variables, timeout_s, has_model=has_model)
        return await asyncio.get_running_loop().run_in_executor(THREADS, run)

    async def write(self, path: str, data: bytes) -> None:
        place = place_in(self._files, path)
        self._refuse_links(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(secrets.token_hex(8))  # what is there may be a pipe, which blocks
        new.write_bytes(data)
        new.replace(place)

    async def read(self, path: str) -> bytes:
        place = place_in(self._files, path)
        self._refuse_links(place)
        if place.exists() and not place.is_file():
            raise ValueError(f"a file of a sandbox must be a plain file to be read, got {path}")
        return place.read_bytes()

    async def stop(self) -> None:
        for program in [*self._programs]:
            program.end()
        if self._folder is not None and not self._has_namespaces:
            await asyncio.get_running_loop().run_in_executor(THREADS, _end_marked, self._mark)
        if self._relay is not None:
            self._relay.close()
        if self._folder is not None:
            command = ["rm", "-rf", "--", str(self._folder)]
            remove = partial(subprocess.run, command, check=False, capture_output=True)
            await asyncio.get_running_loop().run_in_executor(THREADS, remove)

    @property
    def _files(self) -> Path:
        if self._folder is None:
            raise RuntimeError("a sandbox must be started first")
        return self._folder / "files"

    def _refuse_links(self, place: Path) -> None:
        """Raise ValueError if a program has put a link on the way to this file."""
        for part in (place, *place.parents):
            if part == self._files:
                return
            if part.is_symlink():
                raise ValueError(f"a file of a sandbox must be no link, got {part.name}")

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a program to the server of its model."""
        address = urlsplit(self.url)
        out_reader, out_writer = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(_pump(reader, out_writer), _pump(out_reader, writer))

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
        words += ["--bind", str(self._files), INSIDE, "--chdir", INSIDE]
        if not has_model:  # the shell exits with 127 where there is no such program
            return [*words, "--", "/bin/sh", "-c", 'exec "$@"', "sh"]
        words += ["--ro-bind", str(self._folder / "way"), WAY_OUT]
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
            out, err = _Tail(program.stdout), _Tail(program.stderr)
            ended_for = self._watch(program.pid, (out, err), time.monotonic() + timeout_s)
            ended_for = ended_for or self._is_full()
            program.end()
            for tail in (out, err):
                tail.read()
            code = program.wait()
            exit_code = None if ended_for else code
            return Ran(exit_code=exit_code, stdout=out.text, stderr=err.text, ended_for=ended_for)
        finally:
            self._programs.discard(program)
            program.stdout.close()
            program.stderr.close()

    def _start_program(
        self, command: list[str], environment: Mapping[str, str], *, has_model: bool
    ) -> _Program:
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
        return _Program(process.pid, process.stdout, process.stderr, wait, is_whole)

    def _start_in_sandlock(
        self, command: list[str], environment: Mapping[str, str], *, has_model: bool
    ) -> _Program:
        import sandlock  # here, for it is an extra

        address = urlsplit(self.url)
        sandbox = sandlock.Sandbox(
            fs_readable=[path for path in self._seen() if os.path.exists(path)],
            fs_writable=[str(self._files), os.devnull],
            net_allow=[f"tcp://{address.hostname}:{address.port}"] * has_model,
            max_processes=self.limits.num_processes,
            clean_env=True,
            env={**environment},
            cwd=str(self._files),
        )
        pipe, null = sandlock.StdioMode.PIPED, sandlock.StdioMode.NULL
        process = sandbox.popen(command, null, pipe, pipe)

        def wait() -> int:
            ended = process.wait(END_S)
            signalled = 128 + (ended.signal if ended.signal > 0 else signal.SIGKILL)
            return int(ended.exit_code) if ended.exit_code >= 0 else signalled

        return _Program(process.pid, process.stdout, process.stderr, wait)

    def _watch(self, pid: int, tails: Sequence[_Tail], end_s: float) -> str:
        """Read what the program prints until it has ended or must be ended. Returns the limit that
        it exceeded; empty if none."""
        look_s = time.monotonic() + LOOK_S
        with open(os.pidfd_open(pid), "rb", 0) as ended:
            while (now_s := time.monotonic()) < end_s:
                if now_s >= look_s:
                    if what := self._too_much(pid):
                        return what
                    look_s = now_s + LOOK_S
                files = [ended, *(tail.pipe for tail in tails if not tail.is_closed)]
                ready, _, _ = select.select(files, [], [], max(0.0, min(end_s, look_s) - now_s))
                for tail in tails:
                    if tail.pipe in ready:
                        tail.read()
                if ended in ready:
                    return ""
        return "time"

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
        most = self.limits.disk_bytes
        return "disk" if disk_bytes(str(self._files), {*pids}, most) > most else ""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """A program that runs; `wait` returns its exit code."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    wait: Callable[[], int]
    is_whole: bool = False  # all that it starts ends with it

    def end(self) -> None:
        """End it with all that it has started, also what has left its group."""
        if not self.is_whole:
            end_descendants(self.pid)
        for kill, number in ((os.killpg, self.pid), (os.kill, self.pid)):
            with suppress(ProcessLookupError):
                kill(number, signal.SIGKILL)


class _Tail:
    """The end of what comes through a pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe, self.is_closed = pipe, False
        self._data = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> None:
        """Read what is there."""
        with suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), READ_BYTES):
                self._data = (self._data + data)[-TAIL_BYTES:]
            self.is_closed = True

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")
