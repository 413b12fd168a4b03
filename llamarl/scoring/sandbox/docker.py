"""The sandbox that is a container of an image, by the command line of docker or of podman.

Its first process is the forwarder, with this machine's own Python, so that an image needs neither
Python nor a shell. It ends with the standard input that this process has opened, and the container
with it, however this process ends."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import re
import secrets
import select
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from llamarl.scoring.sandbox.containers import END_S, Ran, interpreter
from llamarl.scoring.sandbox.folders import LockedFolder, left_folders, make_folder, remove
from llamarl.scoring.sandbox.forwarder import KEEP, START, STARTED
from llamarl.scoring.sandbox.sandboxes import (
    FORWARDER,
    INSIDE,
    THREADS,
    WAY_OUT,
    SandboxLimits,
    located,
    start_relay,
)
from llamarl.scoring.sandbox.watched import READ_BYTES, Program, Tail, watch

PREFIX = "llamarl-container-"
ENGINE_FILE = "engine"  # in the folder of a container
LABEL = "llamarl"  # of a container; its value is the folder that a run keeps for it
CALL_S = 120.0  # for a call of the program to end, on a machine that is busy
LOOK_S = 5.0  # between two looks at what a container has written, of which each reads all of it
SOCKET, PYTHON = f"{WAY_OUT}/way/socket", f"{WAY_OUT}/python"
AT_ONCE = 50  # images that one call is asked about
TOLD_CHARS = 300  # of what the program says
ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "ValueError": ValueError,
    "FileNotFoundError": FileNotFoundError,
}
"""Errors of files that a caller may expect, by their names."""
T = TypeVar("T")


@dataclass(eq=False)
class ContainerSandbox:
    """A sandbox that is a container of `image`, made by the program `engine`, with the server at
    `url` as its only network unless it has the `internet`. Programs start in the folder `home`,
    None for the image's own, and have other `folders`. They see the paths of this machine that are
    `readable`, and may take `num_cpus` processors, None for any."""

    engine: str
    image: str
    url: str
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    home: str | None = INSIDE
    folders: Sequence[str] = ()
    readable: Sequence[str] = ()
    internet: bool = False
    num_cpus: float | None = None

    def __post_init__(self) -> None:
        self._name = f"llamarl-{secrets.token_hex(8)}"
        self._folder: LockedFolder | None = None
        self._relay: asyncio.Server | None = None
        self._keeper: _Keeper | None = None
        self._user, self._tops = "", list[str]()
        self._has_model = False
        self._num_killed = 0
        self._programs: set[Program] = set()

    async def start(self) -> None:
        await _in_thread(remove_left, self.engine)
        config = await _in_thread(image_config, self.engine, self.image)
        self._user = config.get("User") or ""
        self._folder = make_folder(PREFIX)
        (self._folder.path / ENGINE_FILE).write_text(self.engine)
        way = self._folder.path / "way"
        way.mkdir()
        self._relay = await start_relay(self.url, str(way / "socket"), lambda: self._has_model)
        for path, mode in ((way, 0o755), (way / "socket", 0o666)):  # for the image's user
            path.chmod(mode)
        self._keeper = _Keeper(self._command())
        own = await _in_thread(self._keeper.read)
        self._tops = [self.home or own, *self.folders]
        for top in self._tops:
            await self._ask("make", top)

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        has_model: bool = True,
    ) -> Ran:
        self._has_model = has_model
        return await _in_thread(self._run, [*command], environment, timeout_s)

    async def write(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        text = base64.b64encode(data).decode()
        await self._ask("write", *located(path, self._tops), text, is_executable)

    async def read(self, path: str) -> bytes:
        return base64.b64decode(await self._ask("read", *located(path, self._tops)))

    async def empty(self, path: str) -> None:
        await self._ask("empty", *located(path, self._tops, is_folder=True))

    async def stop(self) -> None:
        for program in [*self._programs]:
            program.end()
        if self._relay is not None:
            self._relay.close()
        if self._folder is not None:
            await _in_thread(self._remove)

    def _remove(self) -> None:
        assert self._folder is not None
        try:
            if self._keeper is not None:
                remove_containers(self.engine, str(self._folder.path))
                self._keeper.close()
        except BaseException:
            os.close(self._folder.lock)  # the next process that can removes the folder too
            raise
        self._folder.remove()

    def _command(self) -> list[str]:
        """Return the command that makes the container."""
        assert self._folder is not None
        limits, port, folder = self.limits, str(urlsplit(self.url).port), self._folder.path
        words = [self.engine, "run", "--rm", "-i", "--pull", "never"]
        words += ["--name", self._name, "--label", f"{LABEL}={folder}"]
        words += ["--network", "bridge" if self.internet else "none"]
        words += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        words += ["--pids-limit", str(limits.num_processes)]
        words += ["--cpus", f"{self.num_cpus:g}"] if self.num_cpus else []
        words += ["--security-opt", "no-new-privileges", "--user", "0"]
        python, files = own_python()
        files = {**files, f"{folder}/way": os.path.dirname(SOCKET)}
        files |= {path: path for path in self.readable}
        for source, target in files.items():
            words += ["--mount", f"type=bind,src={source},dst={target},readonly"]
        loader, *options = python
        words += ["--entrypoint", loader, self.image, *options]
        return [*words, KEEP, SOCKET, port, self._user]

    async def _ask(self, *order: Any) -> Any:
        if self._keeper is None:
            raise RuntimeError("a sandbox must be started first")
        return await _in_thread(self._keeper.ask, *order)

    def _run(self, command: list[str], environment: Mapping[str, str], timeout_s: float) -> Ran:
        assert self._keeper is not None
        words = [self.engine, "exec", "--workdir", self._tops[0]]
        words += ["--user", self._user] if self._user else []
        home = {"HOME": INSIDE} if self.home == INSIDE else {}  # else the image's
        for name, value in {**home, **environment}.items():
            words += ["--env", f"{name}={value}"]
        words += [self._name, *own_python()[0], START, *command]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            words, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        program = Program(process.pid, process.stdout, process.stderr, process.wait)
        self._programs.add(program)
        try:
            out, err = Tail(program.stdout), Tail(program.stderr)
            end_s = time.monotonic() + timeout_s
            ended_for = watch(program.pid, (out, err), end_s, self._is_full, LOOK_S)
            num_killed = self._keeper.ask("end")  # also what it has left running
            code = process.wait(CALL_S)
            for tail in (out, err):
                tail.read()
            if num_killed > self._num_killed and not ended_for:
                ended_for = "memory"
            self._num_killed = num_killed
            ended_for = ended_for or self._is_full()
            if not (ended_for or err.began_with(STARTED)):  # the exit code is the engine's own
                raise RuntimeError(_failed([self.engine, "exec"], err.text))
            exit_code = None if ended_for else code
            errors = err.text.split(STARTED, 1)[-1]  # without what the engine has said before
            return Ran(exit_code=exit_code, stdout=out.text, stderr=errors, ended_for=ended_for)
        finally:
            if process.poll() is None:
                program.end()
                process.wait(END_S)
            self._programs.discard(program)
            program.close()

    def _is_full(self) -> str:
        """Return "disk" if the container has written too much."""
        size = _call(self.engine, "inspect", "--size", "--format", "{{.SizeRw}}", self._name)
        return "disk" if int(size) > self.limits.disk_bytes else ""


class _Keeper:
    """The first process of a container, which follows orders."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise RuntimeError(_failed(command, str(error.strerror))) from error
        self._command, self._data, self._lock = command, b"", threading.Lock()

    def ask(self, *order: Any) -> Any:
        """Give an order, and return what it finds. Raises its error, or RuntimeError if the
        container is not there any more."""
        with self._lock, suppress(BrokenPipeError):  # then there is no answer
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return self.read()
        return self.read()

    def read(self) -> Any:
        """Return what the answer that comes says, or raise as `ask` does."""
        assert self._process.stdout is not None
        end_s, pipe = time.monotonic() + CALL_S, self._process.stdout
        while b"\n" not in self._data:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(pipe.fileno(), READ_BYTES) if ready else b""
            if not data:
                raise RuntimeError(_failed(self._command, self._end() if ready else "no answer"))
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ERRORS.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["found"]

    def close(self) -> None:
        """Wait until the program that made the container has ended."""
        with self._lock:  # a thread may still wait for an answer
            self._end()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    def _end(self) -> str:
        """End that program, and return what it said."""
        assert self._process.stderr is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait(END_S)
        tail = Tail(self._process.stderr)
        tail.read()
        return tail.text


def missing_engine(engine: str) -> str:
    """Return, in one line, why containers cannot be had here; empty if they can."""
    try:
        _call(engine, "ps", "--quiet", "--filter", f"label={LABEL}")
    except RuntimeError as error:
        return str(error)
    return ""


def missing_image(engine: str, images: Sequence[str]) -> str:
    """Return the first of these images that is not here; empty if all are."""

    def is_here(some: Sequence[str]) -> bool:
        with suppress(RuntimeError):
            return bool(_call(engine, "image", "inspect", "--format", "{{.Id}}", *some))
        return False

    for start in range(0, len(images), AT_ONCE):
        some = images[start : start + AT_ONCE]
        if not is_here(some):
            return next(image for image in some if not is_here([image]))
    return ""


@functools.cache
def image_config(engine: str, image: str) -> dict[str, Any]:
    """Return the config of an image. Raises RuntimeError if it is not here."""
    found: dict[str, Any] = json.loads(
        _call(engine, "image", "inspect", "--format", "{{json .Config}}", image)
    )
    return found


@functools.cache
def own_python() -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the forwarder by this Python in any container, and the files of
    this machine that it needs, with their places there: the interpreter, its library, and the
    system's libraries with their loader."""
    maps = Path("/proc/self/maps").read_text()
    mapped = sorted({line.split()[-1] for line in maps.splitlines() if "/" in line})
    loader = next(path for path in mapped if re.search(r"/ld-[^/]+$", path))
    needed = [path for path in mapped if re.search(r"/(libc[.-]|libpython)[^/]*$", path)]
    folders = [*dict.fromkeys(map(os.path.dirname, [loader, *needed]))]
    files = {folder: f"{WAY_OUT}/lib{i}" for i, folder in enumerate(folders)}
    library = Path(sysconfig.get_path("stdlib"))
    files |= {str(library): f"{PYTHON}/{'/'.join(library.parts[-2:])}"}
    files |= {interpreter(): f"{PYTHON}/bin/python3", str(FORWARDER): f"{WAY_OUT}/forwarder.py"}
    command = [f"{files[folders[0]]}/{os.path.basename(loader)}"]
    command += ["--library-path", ":".join(files[folder] for folder in folders)]
    return [*command, f"{PYTHON}/bin/python3", "-I", "-S", f"{WAY_OUT}/forwarder.py"], files


@functools.cache
def remove_left(engine: str) -> None:
    """Remove, once per process, the containers of this engine that killed processes of this user
    have left, with their folders."""
    for folder in left_folders(PREFIX):
        file = folder / ENGINE_FILE
        if file.is_file() and file.read_text() == engine:
            remove_containers(engine, str(folder))
            remove(str(folder))


def remove_containers(engine: str, folder: str) -> None:
    """Remove the containers with this folder in their label. Raises RuntimeError if one stays."""
    search = "ps", "--all", "--quiet", "--filter", f"label={LABEL}={folder}"
    if found := _call(engine, *search).split():
        try:
            _call(engine, "rm", "--force", *found)
        except RuntimeError:  # it may be gone by itself, as --rm asks for
            if _call(engine, *search).split():
                raise


def _call(engine: str, *arguments: str) -> str:
    """Return what the program prints. Raises RuntimeError, with its reason, if it fails."""
    command = [engine, *arguments]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = "it is not installed" if isinstance(error, FileNotFoundError) else str(error)
        raise RuntimeError(_failed(command, reason)) from error
    if done.returncode:
        raise RuntimeError(_failed(command, done.stderr))
    return done.stdout.strip()


def _failed(command: Sequence[str], said: str) -> str:
    """Return why a call of the program failed, in one line."""
    return f"{' '.join(command[:2])} must succeed, got: {' '.join(said.split())[-TOLD_CHARS:]}"


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(THREADS, partial(function, *arguments))
