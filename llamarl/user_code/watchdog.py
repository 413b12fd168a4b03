"""Ends a coroutine that blocks its process, and says which call it is of.

Owns: how long the event loop has not run, and the interruption of what holds it up. Does not own:
the time limit of a call that waits (`worker.py`), or the end of a process in which nothing can be
interrupted (`pool.py`). Invariant: only code that runs for a call is interrupted, and that call
then fails, whatever it makes of it; the others go on.

Coroutines share one thread, so one that computes, or waits without `await`, holds up all. A thread
of its own sees that and sends the main thread a signal, whose handler raises Blocked right there:
in Python code, a sleep, a lock, or a read. A library that computes without looking for signals goes
on; then the stack of the process, for which its pool asks, names the call: each of its tasks runs
below a function that has the call's token in its name.
"""

import asyncio
import math
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

OWN_FRAMES = (  # of a stack, not shown
    *("llamarl/user_code/", "llamarl/dataflow/", "llamarl/task_file.py"),
    "llamarl/environments/rewards/score.py",
    "llamarl/environments/episodes.py",
    *("asyncio/base_events.py", "asyncio/events.py", "asyncio/runners.py", "<frozen runpy>"),
)
TICK_S = 0.2  # between two signs that the event loop runs
SIGNAL = signal.SIGUSR2
NAME = "call_"
NAMED = re.compile(rf"\b{NAME}([0-9a-f]+)\b")
CALL: ContextVar["RunningCall | None"] = ContextVar("CALL", default=None)
"""The call that code runs for, also in tasks that it has made."""


MUST = "a coroutine must wait by await, or be a plain function, which gets a thread of its own"


class Blocked(BaseException):
    """The code that gets this has held up its process for too long."""


@dataclass(slots=True, eq=False)
class RunningCall:
    """The call of this token; `stack` is where it blocked, if it did."""

    token: str
    code: CodeType
    task: asyncio.Task[Any] = field(init=False)
    stack: str = ""


class Watchdog:
    """Of the event loop of the main thread. What holds that up for `limit_s` is interrupted."""

    def __init__(self, limit_s: float, sign: Callable[[], None]) -> None:
        """`sign` is called every TICK_S while none holds the others up."""
        self._limit_s, self._sign = limit_s, sign
        self._late_s = 0.0
        self._signed_s = 0.0
        self._began_s = math.inf  # the present step
        self._due_s = time.monotonic() + TICK_S  # when the loop runs next, if nothing holds it up
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch from now on."""
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
        """For how long, in all, the event loop was held up."""
        return self._late_s + max(0.0, time.monotonic() - self._due_s)

    def begin_step(self) -> None:
        """Code of a call runs until `end_step`, or until another step begins."""
        self._began_s = time.monotonic()
        if self._began_s > self._signed_s + TICK_S:
            self._signed_s = self._began_s
            self._sign()

    def end_step(self) -> None:
        """It waits, or has ended."""
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
        """The signal's handler, which runs amid what holds the main thread up."""
        call = CALL.get()
        if call is None or not self._is_blocked:
            return
        call.stack = call.stack or _shown(frame)
        call.task.get_loop().call_soon_threadsafe(call.task.cancel)
        raise Blocked(MUST)


def is_own_frame(line: str) -> bool:
    """Whether this line of a stack is none of the user's."""
    return any(name in line for name in OWN_FRAMES)


def named_calls(stack: str) -> list[str]:
    """The tokens of the calls that a process runs for, by its stack."""
    return NAMED.findall(stack)


class Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed, each below a function with the name of its call."""

    def __init__(self, work: Coroutine[Any, Any, Any], call: RunningCall, dog: "Watchdog") -> None:
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
    """Runs under the name of a call."""
    dog.begin_step()
    try:
        return step(*args)
    finally:
        dog.end_step()


def _shown(frame: FrameType | None) -> str:
    """The stack as `faulthandler` writes it, the last call first."""
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    lines = [
        f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
        for each, line in frames
    ]
    return "\n".join(line for line in lines if not is_own_frame(line))
