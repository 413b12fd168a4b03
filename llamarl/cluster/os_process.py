"""The processes of a run as the operating system sees them: environment, output, end.

Every process started for an executor, and every process that one starts, has the executor's mark in
its environment, so none can be missed at the end. Everything that a run prints is in its
logs/controller.log too, whether lines are printed or a display is drawn."""

import asyncio
import faulthandler
import fcntl
import io
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl.core.device.names import PROCESS_VARIABLES

if TYPE_CHECKING:
    from rich.console import Console


log = logging.getLogger(__name__)

MARK = "LLAMARL_EXECUTOR"  # environment variable: <cluster id>/<executor name>
KILL_LIMIT_S = 5.0  # a killed process that is still there after this is stuck in the kernel
HIDDEN = 0o027  # of the modes of files: writing by the group, and all by others
USER_CODE = "llamarl.scoring.user_code"  # logs what rewards and stages print
POLL_S = 1.0  # between checks whether a process is there, where nothing tells it
REAP_TRIES = 20  # every 10 ms: has the parent asked how its process ended?
PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # Linux: include/uapi/linux/pidfd.h
PIDFD_INFO = struct.Struct("Q52xi")  # mask, ..., exit_code
LOG_TAIL_LINES = 12
LOG_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
LOG_TAIL_BYTES = 4000
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
ESCAPED = "backslashreplace"  # what becomes of letters that an output cannot hold


def environment(mark: str, num_threads: int) -> dict[str, str]:
    """Return the variables that the process's environment adds to its host's. They are set before
    exec, for OpenMP and BLAS read them when their library loads."""
    return {
        MARK: mark,
        "OMP_NUM_THREADS": str(num_threads),
        # Threads that spin while they wait take the cores from the other executors.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Else glibc frees and maps again the activations of every micro-batch: 4 to 9 % of a step.
        "MALLOC_MMAP_THRESHOLD_": "1000000000",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "TOKENIZERS_PARALLELISM": "false",
        **PROCESS_VARIABLES,
    }


def import_path() -> str:
    """Return this process's import path, as a value of PYTHONPATH."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard what the block writes to standard error, also from C libraries."""
    console = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)
        os.close(null)


def hide_files() -> int:
    """Let files that this process makes be written by the user and read by the group at most,
    whatever mask the user has chosen; return that mask."""
    before = os.umask(HIDDEN)
    os.umask(before | HIDDEN)
    return before


@contextmanager
def hidden_files() -> Iterator[None]:
    """Hide files as `hide_files` does in this block alone, and in processes that it starts."""
    before = hide_files()
    try:
        yield
    finally:
        os.umask(before)


def log_path(folder: str, process: str) -> Path:
    """Return the path of the file that a process's output goes to."""
    return Path(folder) / f"{process}.log"


def take_any_letter(*streams: object) -> None:
    """Write a letter that a stream's encoding lacks, or half of one, as its escape: text from user
    code must not end the run that shows it."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def redirect_output(folder: str, process: str) -> None:
    """Send this process's output to its log file, and warnings also to the console.

    Standard output and error are redirected as file descriptors, so that C libraries and crashes
    write into the file too.
    """
    path = log_path(folder, process)
    path.parent.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(2), "w", buffering=1, errors=ESCAPED)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    faulthandler.enable(all_threads=False)
    to_file = logging.StreamHandler(sys.stderr)
    to_file.setFormatter(LOG_FORMAT)
    to_console = logging.StreamHandler(console)
    to_console.setLevel(logging.WARNING)
    to_console.setFormatter(logging.Formatter(f"[{process}] %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_console], force=True)
    logging.captureWarnings(True)


class _ConsoleLog(logging.Handler):
    """Prints records as lines between those of the run, with the same time and never wrapped, so
    that a traceback stays whole; above the live display, which they never tear."""

    def __init__(self, console: "Console", elapsed: Callable[[], str]) -> None:
        super().__init__()
        self._console, self._elapsed = console, elapsed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"[{self._elapsed()}] {record.levelname} {self.format(record)}"
            style = STYLES.get(record.levelno)
            self._console.out(text, style=style, highlight=False)
        except Exception:  # noqa: BLE001 - a full disk or a closed pipe, as logging's own handlers do
            self.handleError(record)


def show_warnings(console: "Console", elapsed: Callable[[], str], *, shows_user_code: bool) -> None:
    """Print warnings with the time that has `elapsed`, and with `shows_user_code` the output of the
    recipe's own code, where no other process logs it."""

    def is_shown(record: logging.LogRecord) -> bool:
        is_user_code = shows_user_code and record.name.startswith(USER_CODE)
        return record.levelno >= logging.WARNING or is_user_code

    handler = _ConsoleLog(console, elapsed)
    handler.addFilter(is_shown)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("llamarl").setLevel(logging.INFO)
    logging.raiseExceptions = False  # of a full disk the run itself says one line


@contextmanager
def kept_log(run_dir: str) -> Iterator[None]:
    """Write the log to the run's folder too, appending to the file that may be there."""
    path = log_path(f"{run_dir}/logs", "controller")
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors=ESCAPED)
    handler.setFormatter(LOG_FORMAT)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def log_tail(folder: str, process: str) -> str:
    """Return the last lines a process wrote, for the message about its end; "" if there are
    none."""
    path = log_path(folder, process)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def marked(mark: str) -> list[int]:
    """Return the living processes that have `mark`, found in /proc; empty where there is no
    /proc."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


def is_alive(pid: int) -> bool:
    """Return whether the process has not ended yet; a zombie has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):  # no /proc, or it ended just now: the next call sees it
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return True


async def wait_first_exit(pids: list[int]) -> tuple[int, str]:
    """Wait until one of these processes has ended; return its index, and " by SIGKILL" or " with
    exit code 3", or "" where the system does not tell that of a process that is no child."""
    if hasattr(os, "pidfd_open"):
        try:
            return await _wait_told(pids)
        except OSError as error:  # a sandbox without this call, or too many open files
            log.info("processes are looked at every %g s: %s", POLL_S, error)
    while True:
        for index, pid in enumerate(pids):
            if not is_alive(pid):
                return index, ""
        await asyncio.sleep(POLL_S)


async def _wait_told(pids: list[int]) -> tuple[int, str]:
    """Wait as `wait_first_exit` does, until the kernel tells it; OSError where the kernel has no
    descriptors of processes."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    with ExitStack() as opened:
        for index, pid in enumerate(pids):
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                return index, ""
            opened.callback(os.close, file)
            loop.add_reader(file, ended.put_nowait, (index, file))
            opened.callback(loop.remove_reader, file)
        index, file = await ended.get()
        for _ in range(REAP_TRIES):
            if (how := exit_words(file)) is not None:
                return index, how
            await asyncio.sleep(0.01)
        return index, ""


def exit_words(pidfd: int) -> str | None:
    """Return how a process has ended; None before its parent has asked, "" on Linux before 6.15."""
    info = bytearray(PIDFD_INFO.size)
    PIDFD_INFO.pack_into(info, 0, PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:  # an older kernel
        return ""
    known, status = PIDFD_INFO.unpack(info)
    if not known & PIDFD_INFO_EXIT:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f" with exit code {code}"
    names = (each.name for each in signal.Signals if each == -code)
    return f" by {next(names, f'signal {-code}')}"  # those for real time have no names


async def kill_marked(mark: str) -> list[int]:
    """Kill every process that has `mark`; return the pids that still exist after KILL_LIMIT_S,
    normally none."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
    return pids
