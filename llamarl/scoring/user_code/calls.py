"""Calls of user code in this process, beside each other, and the reading of their results."""

from __future__ import annotations

import asyncio
import inspect
import numbers
import reprlib
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from itertools import takewhile
from typing import Any

from llamarl.core.config.inputs import LARGEST
from llamarl.core.errors import mark_seen
from llamarl.scoring.user_code.watchdog import IT_WAS_AT, is_own_frame

MAX_TRACEBACK_CHARS = 8000


class InvalidReturnError(ValueError):
    """User code returned a wrong value; the text follows "what it returns must"."""


class InvalidRewardError(InvalidReturnError):
    """A reward returned a wrong value; the text is a whole sentence."""


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error` without frames that are not user code's."""
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    has_frames = False
    while part is not None:
        frames = [frame for frame in part.stack if not is_own_frame(frame.filename)]
        part.stack = traceback.StackSummary.from_list(frames)
        part, has_frames = part.__cause__ or part.__context__, has_frames or bool(frames)
    lines = report.format() if has_frames else report.format_exception_only()
    text = "".join(lines).rstrip()
    return text if len(text) <= MAX_TRACEBACK_CHARS else "..." + text[-MAX_TRACEBACK_CHARS:]


def shown(value: Any) -> str:
    """Return the value on one short line, however large it is."""
    return " ".join(reprlib.repr(value).split())


def as_number(value: Any) -> float | None:
    """Return a real number as a float, also for numpy's truth values and an array or tensor of no
    dimension; None for anything else. Raises OverflowError for a whole number that no float
    holds."""
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        value = item()
    return float(value) if isinstance(value, float | numbers.Real | Decimal) else None


def checked_number(value: Any, of: str) -> float:
    """Return the result of the function `of` as a number. Raises InvalidReturnError if it is none,
    or not finite."""
    number = as_number(value)
    if number is None or not abs(number) <= LARGEST:
        must = f"be a finite number for {of}, at most {LARGEST:g} either way"
        raise InvalidReturnError(f"{must}, got {shown(value)}")
    return number


async def awaited(found: Any) -> Any:
    """Return what `found` gives in the end: itself, or what an awaitable gives, which may be
    another one."""
    while inspect.isawaitable(found):
        found = await found
    return found


class Raised(Exception):  # noqa: N818 - what user code has done
    """User code raised `error`, whatever that is."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException = error.error if isinstance(error, Raised) else error
        super().__init__(type(self.error).__name__)

    def __str__(self) -> str:
        """Return the error's text, after its type unless it is an Exception with a text."""
        name = type(self.error).__name__
        try:
            text = str(self.error)
        except BaseException:  # noqa: BLE001 - a user's __str__ may do anything
            text = ""
        if isinstance(self.error, Exception):
            return text or name
        return f"{name}: {text}" if text else name


class Overdue(Exception):  # noqa: N818 - what user code has done
    """A program of user code has worked for too long; the text is the stack where it was."""


class Runner:
    """Runs functions in up to `max_threads` threads, and coroutines in tasks of their own. It
    belongs to one event loop at a time."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_threads, name)
        self.num_left = 0
        """The number of threads whose calls were given up and have not ended."""

    async def run(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Run the function and return its result. Raises Raised, or CancelledError if this call is
        cancelled: a coroutine is then cancelled too, a function is left behind in its thread."""
        call = partial(function, *args, **named)
        if inspect.iscoroutinefunction(function):
            return await _in_task(call)
        found = await self._in_thread(call)
        return await _in_task(lambda: found) if inspect.isawaitable(found) else found

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        thread: list[int] = []
        begun = self._threads.submit(_called, call, thread)
        running = asyncio.wrap_future(begun)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError as cancelled:
            if not begun.cancel():
                self.num_left += 1
                running.add_done_callback(self._ended_late)
            cancelled.add_note(_stack(thread))
            raise

    def _ended_late(self, _: asyncio.Future[Any]) -> None:
        self.num_left -= 1


def _called(call: Callable[[], Any], thread: list[int]) -> Any:
    """Return the result of a call in this thread, and append the thread's id to `thread`. Raises
    Raised."""
    thread.append(threading.get_ident())
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        raise Raised(error) from None


async def _awaited(call: Callable[[], Any]) -> Any:
    try:
        return await awaited(call())
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        raise Raised(error) from None


async def _in_task(call: Callable[[], Any]) -> Any:
    """Return the result of a coroutine function. It runs in a task of its own, so that a
    CancelledError that it raises itself is told from the caller's. Raises Raised."""
    task = asyncio.create_task(_awaited(call))
    task.add_done_callback(mark_seen)  # it may be that nothing waits for it any more
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raised = None if task.cancelled() else task.exception()
        if isinstance(raised, Raised) and isinstance(raised.error, asyncio.CancelledError):
            raise raised.error from None  # it says where the coroutine was
        raise
    if task.cancelled():
        raise Raised(asyncio.CancelledError())
    return task.result()


def _stack(thread: list[int]) -> str:
    """Return the stack of user code in a thread, if it has begun."""
    frame = sys._current_frames().get(thread[0]) if thread else None
    own = takewhile(
        lambda each: each[0].f_code is not _called.__code__, traceback.walk_stack(frame)
    )
    lines = traceback.StackSummary.extract(own if frame is not None else ()).format()
    return "".join([IT_WAS_AT, *reversed(lines)]).rstrip() if lines else "it waited for a thread"
