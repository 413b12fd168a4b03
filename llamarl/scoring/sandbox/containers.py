"""The containers for programs that a model wrote, where they can do no harm.

A program reaches no network, no file but the interpreter's and a scratch folder that is removed
afterwards, and no process but its own, of which none is left behind; its resources and its output
are limited. It cannot fake its result: its output comes through pipes of its own, its exit code
from the kernel.

With bubblewrap a program has a file system, processes, a network and users of its own, and its
scratch folder is memory with a quota of the kernel. Where bubblewrap is not available, Landlock
(through sandlock) keeps the program from all but a few files."""

import asyncio
import functools
import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from llamarl.core.config import RewardConfig
from llamarl.core.memory import sealed_file
from llamarl.scoring.sandbox import launcher
from llamarl.scoring.sandbox.folders import make_folder, remove_left_once
from llamarl.scoring.sandbox.limits import (
    FILE_BYTES,
    below,
    compile_filter,
    disk_bytes,
    in_group,
    memory_bytes,
    num_threads,
)

LAUNCHER = Path(launcher.__file__)
CHILDREN = "/proc/thread-self/children"  # by which the processes of a container are found
PROGRAM, INPUT, PREFIX = "program.py", "input.txt", "llamarl-program-"
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache")
INTERPRETER = ("-I", "-S", "-B")  # no environment, no site-packages, no files written
SCRATCH = "/tmp"  # in a file system of its own
MAX_OPEN_FILES = 64
END_S = 10.0  # a killed process that still exists then is stuck in the kernel
GONE_S = 0.002  # between two looks whether killed processes are gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """The limits of a program: seconds of time, bytes of memory, of scratch files and of output
    (each of standard output and error), and the number of its processes and threads at once. A
    program that is not sandboxed has the rights of the run, and only its time and output are
    limited."""

    seconds: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 16 * 2**20
    output_bytes: int = 64 * 2**10
    num_processes: int = 32
    is_sandboxed: bool = True


class Container:
    """A program that runs. Only its own processes can write to its two pipes: first `greeting`,
    once it is sandboxed, then the program's output."""

    greeting = launcher.STARTED
    folder: str | None = None
    """The scratch folder that has to be measured; None if the kernel limits files and threads."""
    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]

    def members(self) -> set[int]:
        """Return the pids of its processes now, as far as their memory and threads are limited."""
        return set()

    def end(self) -> int:
        """End all processes that are left. Returns the program's exit code: 128 + n if signal n has
        ended it."""
        raise NotImplementedError

    def close(self) -> None:
        """End the program, close its pipes and remove the files that it wrote."""
        self.end()
        self.stdout.close()
        self.stderr.close()


class Bubblewrap(Container):
    """A program in namespaces of its own; as root, also with a user of its own."""

    def __init__(self, source: str, stdin: str, limits: ProgramLimits) -> None:
        if not (bwrap := shutil.which("bwrap")):
            raise FileNotFoundError("the program bwrap is not installed")
        if not os.path.exists(CHILDREN):
            raise FileNotFoundError(f"this kernel has no {CHILDREN}")
        user = _spare_user() if os.geteuid() == 0 else None
        quota = f"size={max(FILE_BYTES, limits.disk_bytes)},mode=700"
        quota += f",nr_inodes={2 + limits.disk_bytes // FILE_BYTES}"
        told = _tell(
            limits,
            program=f"/{PROGRAM}",
            folder=SCRATCH,
            mount=quota if user is None else f"{quota},uid={user},gid={user}",
            user=user,
            most={"RLIMIT_NPROC": limits.num_processes + 1},  # one is bubblewrap's own
        )
        told_by, telling = os.pipe()
        # The launcher needs these capabilities in the namespaces, until it gives them up.
        needed = ["SYS_ADMIN"] if user is None else ["SYS_ADMIN", "SETUID", "SETGID"]
        rights = ["--unshare-user"] if user is None else []
        rights += ["--cap-drop", "ALL", *(w for cap in needed for w in ("--cap-add", f"CAP_{cap}"))]
        with sealed_file(source) as program, sealed_file(stdin) as given, open(told_by) as info:
            wrap = [bwrap, "--info-fd", str(telling), *rights, *_files(program)]
            try:
                self._process = subprocess.Popen(
                    [*wrap, "--", interpreter(), *INTERPRETER, f"/{LAUNCHER.name}", told],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    pass_fds=(program, telling),
                )
            finally:
                os.close(telling)
            self._first: int | None = None
            """A pidfd of the process whose end ends the namespaces, if there is one."""
            with suppress(ValueError, ProcessLookupError):
                self._first = os.pidfd_open(json.loads(info.read())["child-pid"])
        self.pid = self._process.pid
        self.stdout, self.stderr = _pipes(self._process)

    def members(self) -> set[int]:
        return below(self.pid)

    def end(self) -> int:
        """Kill the first process of the container, with which the kernel ends all others."""
        if self._first is None:
            self._process.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            ended = select.poll()
            ended.register(self._first, select.POLLIN)
            ended.poll(END_S * 1000)
        return self._process.wait(END_S)

    def close(self) -> None:
        super().close()
        if self._first is not None:
            os.close(self._first)


class InFolder(Container):
    """A program in a process group of its own, with two folders in one: `given`, with the program
    and its input, and `scratch`, where it may write."""

    def __init__(self, source: str, stdin: str, limits: ProgramLimits) -> None:
        remove_left_once(PREFIX)
        self._folder = make_folder(PREFIX)
        self.given, self.scratch = (f"{self._folder.path}/{name}" for name in ("given", "scratch"))
        try:
            for folder in (self.given, self.scratch):
                os.mkdir(folder)
            for name, text in ((PROGRAM, source), (INPUT, stdin)):
                Path(self.given, name).write_text(text, encoding="utf-8", errors="replace")
            self.start(limits)
        except BaseException:
            self._folder.remove()
            raise

    def start(self, limits: ProgramLimits) -> None:
        """Start the program, and set `pid` and the two pipes."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._folder.remove()


class Sandlock(InFolder):
    """A program that Landlock keeps from files and processes that are not its own."""

    def __init__(self, source: str, stdin: str, limits: ProgramLimits) -> None:
        import sandlock  # here, for it is an extra

        found, least = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < least:
            kernel = f"this kernel ({os.uname().release}) has {max(found, 0)}"
            raise RuntimeError(f"Landlock ABI {least} (Linux 6.12), {kernel}")
        super().__init__(source, stdin, limits)

    def start(self, limits: ProgramLimits) -> None:
        import sandlock

        self.folder = self.scratch
        told = _tell(
            limits,
            program=f"{self.given}/{PROGRAM}",
            folder=self.folder,
            stdin=f"{self.given}/{INPUT}",
            may_leave_group=False,  # by which its processes are known
        )
        sandbox = sandlock.Sandbox(
            fs_readable=[*readable(), self.given, str(LAUNCHER)],
            fs_writable=[self.folder, os.devnull],
            max_processes=limits.num_processes,
            clean_env=True,
        )
        command = [interpreter(), *INTERPRETER, str(LAUNCHER), told]
        pipe, null = sandlock.StdioMode.PIPED, sandlock.StdioMode.NULL
        self._process = sandbox.popen(command, null, pipe, pipe)
        self.pid = self._process.pid
        self.stdout, self.stderr = self._process.stdout, self._process.stderr

    def members(self) -> set[int]:
        return in_group(self.pid)

    def end(self) -> int:
        _end_group(self.pid)
        ended = self._process.wait(END_S)
        end_s = time.monotonic() + END_S
        while in_group(self.pid) and time.monotonic() < end_s:
            time.sleep(GONE_S)
        if ended.exit_code >= 0:
            return int(ended.exit_code)
        return 128 + (ended.signal if ended.signal > 0 else signal.SIGKILL)


class Unsandboxed(InFolder):
    """A program that deliberately has the rights of the run: only its output and its time are
    limited."""

    greeting = b""

    def start(self, limits: ProgramLimits) -> None:
        with open(f"{self.given}/{INPUT}", "rb") as file:
            self._process = subprocess.Popen(
                [interpreter(), *INTERPRETER, f"{self.given}/{PROGRAM}"],
                cwd=self.scratch,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.stdout, self.stderr = _pipes(self._process)

    def end(self) -> int:
        _end_group(self.pid)
        code = self._process.wait(END_S)
        return code if code >= 0 else 128 - code


def interpreter() -> str:
    """Return the real path of this Python, not a link to it."""
    return os.path.realpath(sys.executable)


def readable() -> list[str]:
    """Return the paths that a program may read: the Python installation, and the libraries that it
    needs."""
    return [sys.base_prefix, *(path for path in LIBRARIES if os.path.exists(path))]


def _files(program: int) -> list[str]:
    """Return the options for the file system of a container: only /dev/null and the scratch folder
    can be written."""
    words = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    words += ["--die-with-parent", "--new-session"]
    for path in readable():
        for parent in reversed(Path(path).parents):  # which may be closed to others outside
            words += ["--dir", str(parent)]
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", str(LAUNCHER), f"/{LAUNCHER.name}"]
    words += ["--perms", "0444", "--ro-bind-data", str(program), f"/{PROGRAM}"]
    words += ["--dir", "/dev", "--dev-bind", os.devnull, os.devnull, "--dir", SCRATCH]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def _tell(
    limits: ProgramLimits,
    *,
    program: str,
    folder: str,
    mount: str | None = None,
    stdin: str | None = None,
    user: int | None = None,
    most: Mapping[str, int] = MappingProxyType({}),
    may_leave_group: bool = True,
) -> str:
    """Return the launcher's instructions as JSON, with limits in the order in which they can be
    set."""
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_AS": limits.memory_bytes,
    }
    told = {
        "folder": folder,
        "mount": mount,
        "stdin": stdin,
        "user": user,
        "limits": {**most, **values},
        "filter": compile_filter(may_leave_group=may_leave_group).hex(),
        "command": [interpreter(), *INTERPRETER, program],
        "environment": {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
    }
    return json.dumps(told)


def _spare_user() -> int:
    """Return a user id that nobody uses, of the upper half of those that root has here."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[-3:])
    return first + count - 1 - secrets.randbelow(count // 2)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout
    assert process.stderr
    return process.stdout, process.stderr


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


Kind = type[Bubblewrap] | type[Sandlock] | type[Unsandboxed]
CONTAINERS: tuple[Kind, ...] = (Bubblewrap, Sandlock)
"""The kinds of containers, of which the first that is available is taken."""
AT_ONCE = asyncio.Semaphore(os.cpu_count() or 1)
"""Limits the programs of one process of rewards or tools that run at once."""
START_S = 30.0  # for a container to start, on a machine that is busy
LOOK_S = 0.01  # between two looks at what a program takes
LOOK_SHARE = 0.5  # of the time at most, where a look takes long
CHUNK_BYTES = 65_536
PROBE = """
import os, threading
if os.fork() == 0:
    os._exit(0)
os.wait()
thread = threading.Thread(target=print, args=(6 * 7,))
thread.start()
thread.join()
"""
PROBED = "42\n"
TOLD_CHARS = 300  # of why no container could be had


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of a program: `exit_code` is 128 + n for signal n, None if the program was ended for
    exceeding the limit that `ended_for` names: time, output, memory, disk or processes."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    ended_for: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.exit_code == 0


def limits_of(config: RewardConfig) -> ProgramLimits:
    """Return the limits of a program by the recipe."""
    return ProgramLimits(seconds=config.program_s, is_sandboxed=config.sandbox)


def run_program(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """Run a Python program with this standard input. Raises RuntimeError if programs cannot be
    sandboxed here."""
    if not limits.is_sandboxed:
        return run_in(Unsandboxed, source, stdin, limits)
    kind, reasons = chosen_container()
    if kind is None:
        raise RuntimeError(f"programs cannot be sandboxed here: {'; '.join(reasons)}")
    return run_in(kind, source, stdin, limits)


async def run_in_turn(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """Run a program as `run_program` does, beside the event loop: as many at once as there are
    processors."""
    async with AT_ONCE:
        return await asyncio.to_thread(run_program, source, stdin, limits)


def missing() -> str:
    """Return, in one line, why programs cannot be sandboxed here; empty if they can."""
    kind, reasons = chosen_container()
    return "" if kind else "; ".join(reasons)


def lacking() -> str:
    """Return, in one line, what a sandboxed program can do here that bubblewrap would prevent;
    empty if there is nothing."""
    kind, reasons = chosen_container()
    if kind is not Sandlock:
        return ""
    return (
        "programs that the model writes run without user, mount, pid and network namespaces "
        f"({'; '.join(reasons)}), by sandlock: they can ask whether any file exists and how large "
        f"it is, and their memory, files and threads together are limited every {LOOK_S} s only"
    )


@functools.cache
def chosen_container() -> tuple[Kind | None, list[str]]:
    """Return the first kind of container that holds a program here, and the reasons why those
    before it do not."""
    reasons: list[str] = []
    for kind in CONTAINERS:
        try:
            ran = run_in(kind, PROBE, "", ProgramLimits(seconds=START_S))
        except Exception as error:  # noqa: BLE001 - sandlock raises kinds of its own
            reason = str(error)
        else:
            if ran.stdout == PROBED:
                return kind, reasons
            reason = f"Python does not run in it, got {asdict(ran)}"
        reasons.append(f"{kind.__name__.lower()}: {' '.join(reason.split()):.{TOLD_CHARS}}")
    return None, reasons


def run_in(kind: Kind, source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """Run a program as `run_program` does, in this kind of container. Raises RuntimeError if it is
    not available here."""
    container = kind(source, stdin, limits)
    try:
        out = _Pipe(container.stdout.fileno(), limits.output_bytes, container.greeting)
        err = _Pipe(container.stderr.fileno(), limits.output_bytes)
        ended_for = _wait(container, limits, out, err)
        code = container.end()
        for pipe in (out, err):
            while not pipe.is_full and pipe.read():
                pass
        if not out.has_started:
            raise RuntimeError(f"no program starts in it: {err.text or f'exit code {code}'}")
        if out.is_full or err.is_full:
            ended_for = ended_for or "output"
        ended_for = ended_for or _too_much(container, limits)  # since the last look
        code_told = None if ended_for else code
        return Ran(exit_code=code_told, stdout=out.text, stderr=err.text, ended_for=ended_for)
    finally:
        container.close()


class _Pipe:
    """Reads a pipe, up to `most` bytes, after a greeting that is not part of the text."""

    def __init__(self, descriptor: int, most: int, greeting: bytes = b"") -> None:
        self.descriptor, self._greeting = descriptor, greeting
        self._most, self._data = most + len(greeting), b""
        os.set_blocking(descriptor, False)

    @property
    def has_started(self) -> bool:
        return self._data.startswith(self._greeting)

    @property
    def is_full(self) -> bool:
        return len(self._data) >= self._most

    @property
    def text(self) -> str:
        return self._data.removeprefix(self._greeting).decode(errors="replace")

    def read(self) -> bool:
        """Read what is there, but no more than is wanted. Returns False if that is nothing."""
        try:
            data = os.read(self.descriptor, min(CHUNK_BYTES, self._most - len(self._data)))
        except BlockingIOError:
            return False
        self._data += data
        return bool(data)


def _wait(container: Container, limits: ProgramLimits, out: _Pipe, err: _Pipe) -> str:
    """Read until the program has ended or must be ended. Returns the limit that it exceeded; empty
    if none."""
    pipes, ready = {pipe.descriptor: pipe for pipe in (out, err)}, select.poll()
    with suppress(ProcessLookupError), open(os.pidfd_open(container.pid), "rb", 0) as ended:
        for descriptor in (ended.fileno(), *pipes):
            ready.register(descriptor, select.POLLIN)
        end_s, look_s = time.monotonic() + START_S, math.inf
        while (now_s := time.monotonic()) < end_s:
            if look_s == math.inf and out.has_started:  # no look and no limit before
                end_s, look_s = now_s + limits.seconds, now_s
            for descriptor, _ in ready.poll(max(0.0, min(end_s, look_s) - now_s) * 1000):
                if descriptor == ended.fileno():
                    return ""
                if not pipes[descriptor].read():
                    ready.unregister(descriptor)
            if out.is_full or err.is_full:
                return "output"
            if (now_s := time.monotonic()) >= look_s:
                if what := _too_much(container, limits):
                    return what
                took_s = time.monotonic() - now_s
                look_s = now_s + max(LOOK_S, took_s / LOOK_SHARE)
        return "time"
    return ""


def _too_much(container: Container, limits: ProgramLimits) -> str:
    """Return the limit that the program exceeds; empty if none."""
    pids = container.members()
    if memory_bytes(pids, limits.memory_bytes) > limits.memory_bytes:
        return "memory"
    if container.folder is None:
        return ""
    if num_threads(pids) > limits.num_processes:
        return "processes"
    is_full = disk_bytes(container.folder, pids, limits.disk_bytes) > limits.disk_bytes
    return "disk" if is_full else ""
