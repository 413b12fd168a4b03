"""The parent process of a worker, which ends it with all that it started, and the watchdog that
interrupts a coroutine that blocks its process."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 5.0  # a killed process that still exists then is stuck in the kernel
POLL_S = 0.005  # between two checks whether killed processes are gone
WATCHED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}
OUT_OF_MEMORY_SCORE = 500  # of -1000 to 1000: the kernel kills this before trainer or generator


def supervise(pool: int) -> None:
    """Fork. It returns in the child, the worker; this process becomes its supervisor.

    `pool` is the pid of the process that started this one. SIGTERM ends the worker and its
    descendants, SIGUSR1 is passed on to the worker. The supervisor exits with the worker's
    status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _call_kernel(PR_SET_CHILD_SUBREAPER, 1)
    _tie_to(pool, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps: each may take gigabytes
    own, worker = os.getpid(), os.fork()
    if worker:
        _watch(worker)
    _tie_to(own, signal.SIGKILL)
    os.setpgid(0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def end_descendants(root: int) -> None:
    """Kill every descendant of the live process `root`. Returns once all are gone."""
    deadline = time.monotonic() + KILL_LIMIT_S
    seen: set[int] = set()
    while new := descendants(root) - seen:  # stopped first, so that none can fork and escape
        _signal(new, signal.SIGSTOP)
        seen |= new
        if time.monotonic() > deadline:
            break
    while (left := descendants(root)) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        if root == os.getpid():
            _reap()
        time.sleep(POLL_S)


def descendants(root: int) -> set[int]:
    """Return the pids of all processes below `root`, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(folder.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _watch(worker: int) -> NoReturn:
    """Wait for the end of the worker or the pool, end all descendants, and exit."""
    for descriptor in (0, 1):  # so that the pool sees them closed when the worker closes its own
        os.close(descriptor)
    status = None
    while status is None:
        number = signal.sigwait(WATCHED)
        if number == signal.SIGUSR1:
            _signal({worker}, number)
        elif number == signal.SIGTERM:
            status = 0
        else:
            status = _reap().get(worker)
    with suppress(ProcessLookupError):  # the only means where there is no /proc
        os.killpg(worker, signal.SIGKILL)
    end_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap() -> dict[int, int]:
    """Return the wait statuses of the children that have ended since the last call, by pid."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _tie_to(parent: int, number: signal.Signals) -> None:
    """Make the kernel send `number` to this process when the thread that started it ends."""
    _call_kernel(PR_SET_PDEATHSIG, number)
    if sys.platform == "linux" and os.getppid() != parent:  # it had ended before the call above
        os._exit(1)


def _call_kernel(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


OWN_FRAMES = (  # of a stack, not shown
    *("llamarl/scoring/user_code/", "llamarl/scoring/stage_function.py"),
    *("llamarl/scoring/rewards.py", "llamarl/scoring/episodes.py", "llamarl/scoring/agent/"),
    *("llamarl/core/extensions.py", "asyncio/tasks.py", "asyncio/base_events.py"),
    *("asyncio/events.py", "asyncio/runners.py", "<frozen runpy>"),
)
IT_WAS_AT = "it was at\n"  # before the stack of a call that took too long
TICK_S = 0.2  # between two signs that the event loop runs
SIGNAL = signal.SIGUSR2
NAME = "call_"
NAMED = re.compile(rf"\b{NAME}([0-9a-f]+)\b")
"""Finds the tokens of the calls that a process runs for, in its stack."""
CALL: ContextVar[RunningCall | None] = ContextVar("CALL", default=None)
"""The call that code runs for, also in tasks that the code has made."""

MUST = "a coroutine must wait by await, or be a plain function, which gets a thread of its own"


class Blocked(BaseException):
    """Raised in code that has held up its process for too long."""


@dataclass(slots=True, eq=False)
class RunningCall:
    """The call of this token; `stack` is where it blocked, if it did."""

    token: str
    code: CodeType
    task: asyncio.Task[Any] = field(init=False)
    stack: str = ""


class Watchdog:
    """Interrupts code that holds up the event loop of the main thread for `limit_s`."""

    def __init__(self, limit_s: float, sign: Callable[[], None]) -> None:
        """`sign` is called every TICK_S while no call holds the others up."""
        self._limit_s, self._sign = limit_s, sign
        self._late_s = 0.0
        self._signed_s = 0.0
        self._began_s = math.inf  # the present step
        self._due_s = time.monotonic() + TICK_S  # when the loop runs next, if nothing holds it up
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to watch."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        signal.signal(SIGNAL, self._interrupt)
        self._ticking = loop.create_task(self._tick())
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def call(self, token: str, work: Coroutine[Any, Any, Any]) -> RunningCall:
        """Run the work of this call in a task."""
        name = f"{NAME}{token}"
        call = RunningCall(token, _step.__code__.replace(co_name=name, co_qualname=name))
        before = CALL.set(call)
        try:
            call.task = asyncio.create_task(work)
        finally:
            CALL.reset(before)
        return call

    @property
    def late_s(self) -> float:
        """The seconds that the event loop was held up, in all."""
        return self._late_s + max(0.0, time.monotonic() - self._due_s)

    def take_step(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run code of a call, until it waits or has ended."""
        self._began_s = time.monotonic()
        if self._began_s > self._signed_s + TICK_S:
            self._signed_s = self._began_s
            self._sign()
        try:
            return step(*args)
        finally:
            self._began_s = math.inf

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._late_s = self.late_s
            self._due_s = time.monotonic() + TICK_S
            self._signed_s = time.monotonic()
            self._sign()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, Any, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        call = CALL.get()
        if call is not None and isinstance(work, Coroutine):
            work = Steps(work, call, self)
        return asyncio.Task(work, loop=loop, **options)

    @property
    def _is_blocked(self) -> bool:
        return time.monotonic() - self._began_s > self._limit_s

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            time.sleep(TICK_S)
            if self._is_blocked:
                signal.pthread_kill(main, SIGNAL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, amid the code that holds the main thread up."""
        call = CALL.get()
        if call is None or not self._is_blocked:
            return
        call.stack = call.stack or _shown(frame)
        call.task.get_loop().call_soon_threadsafe(call.task.cancel)
        raise Blocked(MUST)


def is_own_frame(line: str) -> bool:
    """Return whether this line of a stack belongs to this package, and not to user code."""
    return any(name in line for name in OWN_FRAMES)


class Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed, each below a function with the name of its call."""

    def __init__(self, work: Coroutine[Any, Any, Any], call: RunningCall, dog: Watchdog) -> None:
        self._work, self._dog = work, dog
        self._named = FunctionType(call.code, globals())

    def send(self, value: Any) -> Any:
        return self._named(self._dog, self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._named(self._dog, self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


def _step(dog: Watchdog, step: Callable[..., Any], *args: Any) -> Any:
    """Take a step, under the name of its call."""
    return dog.take_step(step, *args)


def _shown(frame: FrameType | None) -> str:
    """Return the stack as `faulthandler` writes it, the last call first."""
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    lines = [
        f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
        for each, line in frames
    ]
    return "\n".join(line for line in lines if not is_own_frame(line))
