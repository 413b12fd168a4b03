"""Programs that a model wrote, run where they can do no harm.

A program reaches no network, no file but the interpreter's and a scratch folder that is gone
afterwards, and no process but its own, none of which is left behind; what it takes, and what it
gives back, is limited. It has no hand in how its run is told: its output comes through pipes of
its own, its end from the kernel."""

import asyncio
import functools
import math
import os
import select
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from llamarl.core.config import RewardConfig
from llamarl.scoring.sandbox.containers import (
    Bubblewrap,
    Container,
    ProgramLimits,
    Sandlock,
    Uncontained,
)
from llamarl.scoring.sandbox.limits import disk_bytes, memory_bytes, num_threads

Kind = type[Bubblewrap] | type[Sandlock] | type[Uncontained]
CONTAINERS: tuple[Kind, ...] = (Bubblewrap, Sandlock)
"""The first that can be had is taken."""
AT_ONCE = asyncio.Semaphore(os.cpu_count() or 1)
"""Programs of one process of rewards or tools."""
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
    """How a program ended: `exit_code` is 128 + n for signal n, None if it had to be ended, as
    `ended_for` says: time, output, memory, disk or processes."""

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
    return ProgramLimits(seconds=config.program_s, is_contained=config.contained)


def run_program(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """Run a Python program with this standard input. RuntimeError if programs cannot be contained
    here."""
    if not limits.is_contained:
        return run_in(Uncontained, source, stdin, limits)
    kind, reasons = chosen_container()
    if kind is None:
        raise RuntimeError(f"programs cannot be contained here: {'; '.join(reasons)}")
    return run_in(kind, source, stdin, limits)


async def run_in_turn(source: str, stdin: str, limits: ProgramLimits) -> Ran:
    """As `run_program`, beside the event loop: as many at once as there are processors."""
    async with AT_ONCE:
        return await asyncio.to_thread(run_program, source, stdin, limits)


def missing() -> str:
    """What is missing here to contain programs, in one line; empty if nothing is."""
    kind, reasons = chosen_container()
    return "" if kind else "; ".join(reasons)


def lacking() -> str:
    """What a contained program can do here that it could not elsewhere, in one line; empty if
    there is nothing."""
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
    """The first kind that holds a program here, and why those before it do not."""
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
    """As `run_program`, in a container of this kind. RuntimeError if it cannot be had here."""
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
    """What comes through a pipe, up to `most` bytes, after a greeting that is not part of it."""

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
        """Read what is there, or no more than is wanted; False if that is nothing."""
        try:
            data = os.read(self.descriptor, min(CHUNK_BYTES, self._most - len(self._data)))
        except BlockingIOError:
            return False
        self._data += data
        return bool(data)


def _wait(container: Container, limits: ProgramLimits, out: _Pipe, err: _Pipe) -> str:
    """Read until the program has ended, or must be ended: returns what for."""
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
    """What the program takes more of than it may; empty if nothing."""
    pids = container.members()
    if memory_bytes(pids, limits.memory_bytes) > limits.memory_bytes:
        return "memory"
    if container.folder is None:
        return ""
    if num_threads(pids) > limits.num_processes:
        return "processes"
    is_full = disk_bytes(container.folder, pids, limits.disk_bytes) > limits.disk_bytes
    return "disk" if is_full else ""
