"""Objects in processes of their own, asked from one event loop."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
"""Forks of one that has imported what takes long: there are dozens of them."""
PROCESSES.set_forkserver_preload(["llamarl.generator.worker", "llamarl.publish.publisher"])


class Remote:
    """An object that `make(*args)` creates in a new process; make it within a running event loop.

    One thread per process. Plain methods run one after the other, asynchronous ones side by side.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the new process imports torch
        self._pipe, there = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(make, args, there), daemon=True)
        self._process.start()
        there.close()
        self.pid = self._process.pid
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)

    async def call(self, name: str, *args: Any) -> Any:
        """What the method returns or raises."""
        number = next(self._numbers)
        self._calls[number] = self._loop.create_future()
        self._pipe.send((number, name, args))
        return await self._calls[number]

    def close(self) -> None:
        """End the process."""
        self._loop.remove_reader(self._pipe.fileno())
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _read(self) -> None:
        try:
            number, is_good, answer = self._pipe.recv()
        except EOFError:
            self._loop.remove_reader(self._pipe.fileno())
            for call in self._calls.values():
                call.set_exception(RuntimeError(f"process {self.pid} has ended"))
            return
        call = self._calls.pop(number)
        if not call.done():
            call.set_result(answer) if is_good else call.set_exception(answer)


async def call_all(remotes: Sequence[Remote], name: str, *args: Any) -> list[Any]:
    """The same call to all, at the same time; their answers in order."""
    return list(await asyncio.gather(*(remote.call(name, *args) for remote in remotes)))


def _serve(make: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)

    async def serve() -> None:
        loop, ended, target = asyncio.get_running_loop(), asyncio.Event(), make(*args)
        tasks = set()

        async def answer(number: int, name: str, args: tuple[Any, ...]) -> None:
            try:
                result = getattr(target, name)(*args)
                result = await result if inspect.isawaitable(result) else result
                pipe.send((number, True, result))
            except Exception as error:  # noqa: BLE001 - raised again where it was called
                error.add_note(traceback.format_exc())
                pipe.send((number, False, error))

        def read() -> None:
            try:
                task = loop.create_task(answer(*pipe.recv()))
            except EOFError:
                return ended.set()
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_reader(pipe.fileno(), read)
        await ended.wait()

    asyncio.run(serve())
