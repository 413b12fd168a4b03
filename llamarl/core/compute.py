"""The one compute thread of an executor process, and the calls that run beside it.

Everything that touches autograd, CUDA or many torch threads in this process runs on the thread, one
piece at a time; commands run between two work steps."""

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command:
    """A call to run on the thread; `key` says which call it is (see `generator/decoding.py`).
    Nothing waits for a command without a future."""

    key: object
    call: Callable[[], Any]
    future: Future[Any] | None = None


class ComputeThread:
    """Runs commands in order and, once `begin` has named it, `work` as long as it returns True.

    `work` does one bounded step, such as a decode step, and returns whether more is to be done;
    when it returns False the thread sleeps until the next command. An exception from `work` goes to
    `on_error` and stops the work, not the thread.
    """

    def __init__(
        self, name: str, on_error: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._work: Callable[[], bool] | None = None
        self._on_error = on_error
        self._last: Callable[[], None] | None = None
        self._is_closing = False  # the thread has seen it
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], bool]) -> None:
        """Run `work` from now on. Call it on the thread."""
        self._work = work

    async def run(self, call: Callable[[], T], key: object = "") -> T:
        """Run `call` on the thread, after the commands before it; its exceptions come back."""
        future: Future[T] = Future()
        self._commands.put(Command(key, call, future))
        return await asyncio.wrap_future(future)

    def post(self, call: Callable[[], None], key: object = "") -> None:
        """Run `call` as `run` does, without waiting for it. If it raises, the work stops. Any
        thread may call this."""
        self._commands.put(Command(key, call))

    def share(self, numbers: Sequence[int] | None) -> Sequence[int]:
        """Return rank 0's `numbers` on all ranks. Call it in a command that all of them run."""
        assert numbers is not None, "there is one rank"
        return numbers

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Stop after the commands already queued, and after `last`; return once the thread has
        ended."""
        self._last = last
        self._commands.put(None)
        self._thread.join()

    def _loop(self) -> None:
        has_work = False
        while True:
            commands, goes_on = self._next(has_work)
            for command in commands:
                self._run(command)
            if not goes_on:
                break
            has_work = self._step()
        if self._last is not None:
            self._last()

    def _next(self, has_work: bool) -> tuple[list[Command], bool]:
        """Return the commands to run before the next step, and whether there will be a next step;
        wait for a command if there is no work."""
        commands = self._take(has_work)
        return commands, not self._is_closing

    def _take(self, has_work: bool, most: float = math.inf) -> list[Command]:
        """Return the commands that have come, up to `most`; wait for one if there is no work."""
        commands: list[Command] = []
        while not self._is_closing and len(commands) < most:
            try:
                command = self._commands.get(block=not has_work and not commands)
            except queue.Empty:
                break
            if command is None:
                self._is_closing = True
            else:
                commands.append(command)
        return commands

    def _step(self) -> bool:
        if self._work is None:
            return False
        try:
            return self._work()
        except BaseException as error:  # noqa: BLE001 - `on_error` gets whatever ended the work
            self._stop_work(error)
            return False

    def _run(self, command: Command) -> None:
        future = command.future
        if future and not future.running() and not future.set_running_or_notify_cancel():
            return
        try:
            found = command.call()
            if future is not None:
                future.set_result(found)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, or `on_error` does
            if future is not None:
                future.set_exception(error)
            else:
                self._stop_work(error)

    def _stop_work(self, error: BaseException) -> None:
        self._work = None
        self._on_error(error)


class Background:
    """Runs an executor's calls beside its compute thread: on other threads, and to other executors.

    A caller that gives up does not end its work; `drained` returns only while none runs.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call on a thread; its exceptions come back."""
        return await self.wait_for(asyncio.to_thread(call, *args))

    async def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of `call`; its exceptions come back."""
        work = asyncio.ensure_future(call)
        self._running.add(work)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    async def drained(self, limit_s: float) -> None:
        """Wait until all calls have ended; RuntimeError if that takes longer than `limit_s`."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=limit_s)
            if late:
                raise RuntimeError(f"{len(late)} calls must end within {limit_s:g} s")

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._running.discard(work)
        # Looked at here, too: asyncio logs a failure that is not, as when the caller gave up.
        if not work.cancelled():
            work.exception()
