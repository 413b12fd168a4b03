"""The containers that programs run in.

With bubblewrap a program has a file system, processes, a network and users of its own, and its
scratch folder is memory with a quota of the kernel. Where that cannot be had, Landlock (through
sandlock) keeps it from all files but a few. Once `close` has returned, every process of the program
is gone, and what it wrote."""

import functools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from types import MappingProxyType
from typing import IO

from llamarl.core.memory import sealed_file
from llamarl.scoring.sandbox import launcher
from llamarl.scoring.sandbox.limits import FILE_BYTES, below, compile_filter, in_group

LAUNCHER = Path(launcher.__file__)
CHILDREN = "/proc/thread-self/children"  # by which the processes of a container are found
PROGRAM, INPUT, PREFIX = "program.py", "input.txt", "llamarl-program-"
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache")
INTERPRETER = ("-I", "-S", "-B")  # no environment, no site-packages, no files written
SCRATCH = "/tmp"  # in a file system of its own
MAX_OPEN_FILES = 64
END_S = 10.0  # a killed process that still exists then is stuck in the kernel
LOOK_S = 0.002  # between two looks whether killed processes are gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What a program may take: seconds of time, bytes of memory, of scratch files and of output
    (each of standard output and error), processes and their threads at once. If it is not contained
    it runs with the rights of the run, and only time and output are limited."""

    seconds: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 16 * 2**20
    output_bytes: int = 64 * 2**10
    num_processes: int = 32
    is_contained: bool = True


class Container:
    """A program that runs. No process but its own can write to its two pipes: first `greeting`,
    when it is contained, then what the program writes."""

    greeting = launcher.STARTED
    folder: str | None = None
    """Its scratch folder, if no quota of the kernel bounds that and its threads."""
    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]

    def members(self) -> set[int]:
        """Pids of its processes now."""
        raise NotImplementedError

    def end(self) -> int:
        """End all processes that there still are. Returns the program's exit code: 128 + n if
        signal n has ended it."""
        raise NotImplementedError

    def close(self) -> None:
        """End it, close its pipes and remove what it wrote."""
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
        with sealed_file(source) as program, sealed_file(stdin) as given, open(told_by) as info:
            wrap = [bwrap, "--info-fd", str(telling), *_rights(user), *_files(program)]
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
            self._first = _first_process(info.read())
        self.pid = self._process.pid
        self.stdout, self.stderr = _pipes(self._process)

    def members(self) -> set[int]:
        return below(self.pid)

    def end(self) -> int:
        """The kernel ends all processes of a container with its first one, and before it."""
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
    """A program in a process group of its own, with a folder of two: `given`, with the program and
    its input, and `scratch`, where it may write. The folder is locked by this process, so that
    another one can tell whether it is left of a process that was killed."""

    def __init__(self, source: str, stdin: str, limits: ProgramLimits) -> None:
        remove_left()
        self._folder = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        flock(self._lock, LOCK_EX)
        self.given, self.scratch = f"{self._folder}/given", f"{self._folder}/scratch"
        try:
            for folder in (self.given, self.scratch):
                os.makedirs(folder)  # also if `remove_left` of another process was between
            for name, text in ((PROGRAM, source), (INPUT, stdin)):
                Path(self.given, name).write_text(text, encoding="utf-8", errors="replace")
            self.start(limits)
        except BaseException:
            self._remove()
            raise

    def start(self, limits: ProgramLimits) -> None:
        """Start the program: sets `pid` and the two pipes."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._remove()

    def _remove(self) -> None:
        _remove(self._folder)
        os.close(self._lock)


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
            time.sleep(LOOK_S)
        if ended.exit_code >= 0:
            return int(ended.exit_code)
        return 128 + (ended.signal if ended.signal > 0 else signal.SIGKILL)


class Uncontained(InFolder):
    """A program with the rights of the run, on purpose: its pipes and its time are limited."""

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

    def members(self) -> set[int]:
        return set()

    def end(self) -> int:
        _end_group(self.pid)
        code = self._process.wait(END_S)
        return code if code >= 0 else 128 - code


def interpreter() -> str:
    """The real file of this Python, not a link to it."""
    return os.path.realpath(sys.executable)


def readable() -> list[str]:
    """What a program may read: the Python installation, and the libraries that it needs."""
    return [sys.base_prefix, *(path for path in LIBRARIES if os.path.exists(path))]


def _rights(user: int | None) -> list[str]:
    """What the launcher may do in the namespaces, until it gives it up."""
    needed = ["CAP_SYS_ADMIN"] if user is None else ["CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"]
    who = ["--unshare-user"] if user is None else []
    return [*who, "--cap-drop", "ALL", *(word for cap in needed for word in ("--cap-add", cap))]


def _files(program: int) -> list[str]:
    """The file system of a container: nothing can be written but the device that drops all."""
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
    """What the launcher has to do, in the order in which the limits can be set."""
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


def _first_process(info: str) -> int | None:
    """A descriptor of the process whose end ends the namespaces; None if there is none."""
    with suppress(ValueError, ProcessLookupError):
        return os.pidfd_open(json.loads(info)["child-pid"])
    return None


def _spare_user() -> int:
    """The number of a user that nobody is, of the upper half of those that root has here."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[-3:])
    return first + count - 1 - secrets.randbelow(count // 2)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout
    assert process.stderr
    return process.stdout, process.stderr


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@functools.cache
def remove_left() -> None:
    """Once per process: remove the folders that killed processes of this user have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or one at work
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    flock(descriptor, LOCK_EX | LOCK_NB)
                    _remove(str(folder))
            finally:
                os.close(descriptor)


def _remove(folder: str) -> None:
    """However deep it is."""
    subprocess.run(["rm", "-rf", "--", folder], check=True, capture_output=True)
