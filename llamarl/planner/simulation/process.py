"""The process of a simulated executor, and what goes wrong with it.

Owns: its end, its silence, the errors and delays of its calls. Does not own: what the executor
does. Invariant: a call ends as on a cluster: with the executor's answer or error or, once the
process is lost, with GroupLost; a caller that gives up does not end the work.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llamarl.errors import GroupLost
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs

LIVENESS_TIMEOUT_S = 5.0  # after so long a silence a process counts as lost
STOP_S = 0.2  # what it takes to stop one


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with one process; times are the event loop's, in seconds.

    It dies at `dies_at_s`. From `silent_s[0]` to `silent_s[1]` it neither computes nor answers,
    then it goes on with what it was asked. A method in `errors` raises from its n-th call on: (n,
    error). A call of a method in `delays_s` begins later by a random time between two bounds.
    `ignores_stop`: nothing can end it. `costs`: its own, as of a slow machine. A replica computes
    wrong log-probs from version `wrong_from` on.
    """

    dies_at_s: float | None = None
    silent_s: tuple[float, float] | None = None
    errors: Mapping[str, tuple[int, Exception]] = field(default_factory=dict)
    delays_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ignores_stop: bool = False
    costs: Costs | None = None
    wrong_from: float = math.inf


class ProcessCalls:
    """The methods of an executor, each passed to `call` with its name."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)


class SimulatedProcess:
    """cluster.ExecutorGroup around one simulated executor, which answers for all its ranks.

    Without `faults` nothing happens to it, and calls go to the executor directly. `cores` are what
    it computes on. `num_calls` counts calls by method.
    """

    def __init__(
        self, name: str, executor: Any, faults: Faults | None = None, cores: Cores | None = None
    ) -> None:
        self.name, self.executor = name, executor
        self.pids: list[int] = []
        self.num_calls: Counter[str] = Counter()
        self.is_stopped = False
        self.call_one = self.call_all = executor if faults is None else ProcessCalls(self._call)
        self._faults, self._cores = faults or Faults(), cores or Cores()
        self._random = random.Random(name)
        self._answers: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}  # of calls under way
        self._awake = asyncio.Event()
        self._awake.set()
        self._loss: asyncio.Future[None] | None = None

    async def watch(self) -> None:
        """Raise GroupLost once the process is lost."""
        await asyncio.shield(self._begin())

    async def stop(self) -> None:
        """End the process."""
        if self._faults.ignores_stop:
            await asyncio.Event().wait()
        self._begin()
        await asyncio.sleep(STOP_S)
        self.is_stopped = True
        self.die("stopped")

    def die(self, reason: str = "died") -> None:
        """The process ends amid whatever it does."""
        self._cores.freeze()
        self.lose(reason)
        for work in self._answers:
            work.cancel()

    def lose(self, reason: str) -> None:
        """The process counts as lost, whatever it goes on doing."""
        loss = GroupLost(self.name, 0, reason)
        if not self._begin().done():
            self._begin().set_exception(loss)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(loss)

    def freeze(self) -> None:
        """The process neither computes nor answers until `thaw`."""
        self._awake.clear()
        self._cores.freeze()

    def thaw(self) -> None:
        """The process goes on."""
        self._awake.set()
        self._cores.thaw()

    @property
    def is_frozen(self) -> bool:
        return not self._awake.is_set()

    def _begin(self) -> asyncio.Future[None]:
        """Its loss; what is to happen to the process is set at the first use."""
        if self._loss is None:
            loop = asyncio.get_running_loop()
            self._loss = loop.create_future()
            self._loss.add_done_callback(asyncio.Future.exception)
            if self._faults.dies_at_s is not None:
                loop.call_at(self._faults.dies_at_s, self.die)
            if self._faults.silent_s is not None:
                start_s, end_s = self._faults.silent_s
                loop.call_at(start_s, self.freeze)
                loop.call_at(end_s, self.thaw)
                if end_s > start_s + LIVENESS_TIMEOUT_S:
                    loop.call_at(start_s + LIVENESS_TIMEOUT_S, self.lose, "silent")
        return self._loss

    async def _call(self, method: str, *args: Any) -> Any:
        loss = self._begin()
        if loss.done():
            return loss.result()
        work = asyncio.create_task(self._work(method, args))
        self._answers[work] = asyncio.get_running_loop().create_future()
        work.add_done_callback(self._answer)
        return await self._answers[work]

    async def _work(self, method: str, args: tuple[Any, ...]) -> Any:
        self.num_calls[method] += 1
        if method in self._faults.delays_s:
            await asyncio.sleep(self._random.uniform(*self._faults.delays_s[method]))
        await self._awake.wait()
        first, error = self._faults.errors.get(method, (0, None))
        if error is not None and self.num_calls[method] >= first:
            raise error
        result = await getattr(self.executor, method)(*args)
        await self._awake.wait()
        return result

    def _answer(self, work: asyncio.Task[Any]) -> None:
        answer = self._answers.pop(work)
        error = None if work.cancelled() else work.exception()
        if answer.done():  # the process is lost, or the caller has given up
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(work.result())
