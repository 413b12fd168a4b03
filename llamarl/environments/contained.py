"""Programs that a model wrote, run where they can do no harm.

Owns: one run of a Python program, its limits and what came of it. Does not own: what the run means
(a reward, a tool). Invariant: contained by the kernel (Landlock and seccomp, through sandlock), a
program has no network, sees no files but the interpreter's and a scratch folder that is gone
afterwards, leaves no process behind, and gives back at most so many bytes in at most so many
seconds.

The program runs below a process of ours in the same container, which cuts its output off; if the
program ends that, the run has no result.
"""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llamarl.config import RewardConfig
from llamarl.environments import program_parent

PARENT, PROGRAM, INPUT = "parent.py", "program.py", "input.txt"
FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib")
SHORT = 2.0  # seconds by which the container ends later than the program should have
AT_ONCE = asyncio.Semaphore(os.cpu_count() or 1)
"""Programs of one process of rewards or tools."""
INTERPRETER = ("-I", "-S", "-B")  # no environment, no site-packages, no files written


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What a program may take: seconds of time, bytes of memory, of scratch files and of output
    (each of standard output and error), processes at once. If it is not contained it runs with the
    rights of the run, and only time and output are limited."""

    seconds: float = 5.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 16 * 2**20
    output_bytes: int = 64 * 2**10
    num_processes: int = 8
    is_contained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended: `exit_code` is negative for a signal, None if it had to be ended, as
    `ended_for` says: time, output, or its own doing."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    ended_for: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.exit_code == 0


def limits_of(config: RewardConfig) -> ProgramLimits:
    """What a program may take by the recipe."""
    return ProgramLimits(
        seconds=config.program_s,
        memory_bytes=config.program_memory_bytes,
        disk_bytes=config.program_disk_bytes,
        output_bytes=config.program_output_bytes,
        num_processes=config.program_processes,
        is_contained=config.contained,
    )


def run_program(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """Run a Python program with this standard input. RuntimeError if programs cannot be contained
    here."""
    with tempfile.TemporaryDirectory(prefix="llamarl-program-") as folder:
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        (scratch / PROGRAM).write_text(source, errors="replace")
        (scratch / INPUT).write_text(stdin, errors="replace")
        parent = Path(program_parent.__file__).read_text()
        (scratch / PARENT).write_text(parent)
        told = json.dumps({"seconds": limits.seconds, "output_bytes": limits.output_bytes})
        command = [interpreter(), *INTERPRETER, PARENT, told]
        run = _run_contained if limits.is_contained else _run_freely
        found = run(command, scratch, Path(folder, "written"), limits)
    try:
        return Ran(**json.loads(found))
    except (ValueError, TypeError):  # whatever a program wrote in our place
        return Ran(exit_code=None, ended_for="its own doing")


async def run_in_turn(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """As `run_program`, beside the event loop: as many at once as there are processors."""
    async with AT_ONCE:
        return await asyncio.to_thread(run_program, source, stdin, limits)


@functools.cache
def missing() -> str:
    """What is missing here to contain programs, in one line; empty if nothing is."""
    try:
        import sandlock
    except ImportError as error:
        return f"the package sandlock ({error}): pip install 'llamarl[code]'"
    found, least = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if found < least:
        kernel = os.uname().release
        return f"Landlock ABI {least} (Linux 6.12), this kernel ({kernel}) has {max(found, 0)}"
    try:
        ran = run_program("print(6 * 7)", "", ProgramLimits(seconds=20.0))
    except Exception as error:  # noqa: BLE001 - sandlock raises kinds of its own
        return f"a system that lets processes be contained: {' '.join(str(error).split())}"
    return "" if ran.stdout == "42\n" else f"a container in which Python runs, got {asdict(ran)}"


def interpreter() -> str:
    """The real file of this Python, not a link to it."""
    return os.path.realpath(sys.executable)


def _run_contained(
    command: list[str], scratch: Path, written: Path, limits: ProgramLimits
) -> str | bytes:
    from sandlock import BranchAction, Sandbox  # here, for it is an extra

    written.mkdir()
    readable = [sys.base_prefix, *(folder for folder in FOLDERS if os.path.isdir(folder))]
    sandbox = Sandbox(
        fs_readable=readable,
        fs_writable=[str(scratch)],
        workdir=str(scratch),
        cwd=str(scratch),
        fs_storage=str(written),
        max_disk=limits.disk_bytes,
        on_exit=BranchAction.ABORT,
        on_error=BranchAction.ABORT,
        max_memory=limits.memory_bytes,
        max_processes=limits.num_processes + 1,
        max_open_files=64,
        clean_env=True,
        env={"HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONHASHSEED": "0"},
        no_coredump=True,
        extra_deny_syscalls=["chroot"],
    )
    result = sandbox.run(command, timeout=limits.seconds + SHORT)
    found: bytes = result.stdout
    return found


def _run_freely(
    command: list[str], scratch: Path, written: Path, limits: ProgramLimits
) -> str | bytes:
    with subprocess.Popen(
        command, cwd=scratch, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=limits.seconds + SHORT)[0]
        except subprocess.TimeoutExpired:
            return b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
