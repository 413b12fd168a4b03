"""The one compute thread of an executor process.

Owns: the thread, its command queue, and the loop that alternates commands with background work.
Does not own: what is computed. Invariant: everything that touches autograd, CUDA or many torch
threads in this process runs here, one piece at a time; commands run between two work steps.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs commands in order, and `work` repeatedly while it returns True.

    `work` does one bounded step (a decode step, say) and returns whether more is to be done; when
    it returns False the thread sleeps until the next command. An exception from `work` goes to
    `on_error` and stops the work, not the thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], bool] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._commands = queue.SimpleQueue()
        self._work = work
        self._on_error = on_error
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    async def run(self, command: Callable[[], T]) -> T:
        """Run `command` on the thread, after the commands before it; its exceptions come back."""
        future: Future[T] = Future()
        self._commands.put((command, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop after the commands already queued; returns once the thread has ended."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        has_work = self._work is not None
        while True:
            try:
                item = self._commands.get(block=not has_work)
            except queue.Empty:
                has_work = self._step()
                continue
            if item is None:
                return
            command, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                    future.set_exception(error)
            has_work = self._work is not None

    def _step(self) -> bool:
        assert self._work is not None
        try:
            return self._work()
        except BaseException as error:  # noqa: BLE001 - a dead engine must tell its executor
            self._work = None
            if self._on_error is not None:
                self._on_error(error)
            return False
