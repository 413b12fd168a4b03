"""What goes wrong with the processes of simulated executors."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from llamarl.cluster.executor import Call, Face, Handle
from llamarl.core.config import Config
from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import Storage
from llamarl.core.groups import version_spans
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    TOKEN_VERSIONS,
    Request,
    RolloutInfo,
    StageResult,
)
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.generator.worker import read_written, write_finished
from llamarl.planner.simulation.clock import Cores, Job
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import Rollout, SimulatedRollouts, tokens_of
from llamarl.planner.simulation.simulated_cluster import SimulatedCluster, SimulatedProcess

LIVENESS_TIMEOUT_S = 5.0  # after so long a silence a process counts as lost
STOP_S = 0.2  # what it takes to stop one
WRONG = 3.0  # log-prob of a replica that computes something else; the trainer's are 0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with one process; times are the event loop's, in seconds.

    It dies at `dies_at_s`, of `dies_of`, or when it has done what the n-th call of a method in
    `dies_after` asked for, before it answers. From `silent_s[0]` to `silent_s[1]` it neither
    computes nor answers, then it goes on with what it was asked. A method in `errors` raises from
    its n-th call on: (n, error). A call of a method in `delays_s` begins later by a random time
    between two bounds. `ignores_stop`: nothing can end it. `costs`: its own, as of a slow machine.
    A replica computes wrong log-probs from version `wrong_from` on.
    """

    dies_at_s: float | None = None
    dies_of: str = "died"
    dies_after: Mapping[str, int] = field(default_factory=dict)
    silent_s: tuple[float, float] | None = None
    errors: Mapping[str, tuple[int, Exception]] = field(default_factory=dict)
    delays_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ignores_stop: bool = False
    costs: Costs | None = None
    wrong_from: float = math.inf


def dying(name: str, *times_s: float) -> dict[str, Faults]:
    """Processes of one executor that die at these times, one after another."""
    names = [name + (f" {i}" if i > 1 else "") for i in range(1, len(times_s) + 1)]
    return {each: Faults(dies_at_s=time_s) for each, time_s in zip(names, times_s, strict=True)}


class FaultyCluster(SimulatedCluster):
    """Processes with `faults`, by executor name; "generator-0 2" is what takes the place of
    "generator-0"."""

    def __init__(self, config: Config, costs: Costs, faults: Mapping[str, Faults]) -> None:
        super().__init__(config, costs)
        self._faults = faults
        self._num_spawned = Counter[str]()
        self.spawned: dict[str, FaultyProcess] = {}

    def spawn(
        self,
        name: str,
        make: Callable[[Costs, Cores], Any],
        costs: Costs | None = None,
        cores: Cores | None = None,
    ) -> SimulatedProcess:
        """Each process has processors of its own, which may stand still."""
        self._num_spawned[name] += 1
        again = f" {self._num_spawned[name]}" if self._num_spawned[name] > 1 else ""
        faults, own = self._faults.get(name + again, Faults()), FreezableCores()
        process = FaultyProcess(name, make(faults.costs or costs or self.costs, own), faults, own)
        self.spawned[name + again] = process
        process.writer = process.executor.writer = name + again
        return process


class FreezableCores(Cores):
    """Processors of one process, which may stand still."""

    def __init__(self) -> None:
        super().__init__()
        self._is_frozen = False
        self._thawed = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        while self._is_frozen:
            await self._thawed.wait()

    def freeze(self) -> None:
        """Stop all jobs, and those that begin from now on, until `thaw`."""
        self._advance()
        self._is_frozen = True
        self._thawed.clear()
        for job in self._jobs:
            assert job.timer is not None
            job.timer.cancel()

    def thaw(self) -> None:
        """Let all jobs go on."""
        self._advance()
        self._is_frozen = False
        self._thawed.set()
        for job in self._jobs:
            self._schedule(job)

    def _schedule(self, job: Job) -> None:
        if not self._is_frozen:
            return super()._schedule(job)
        if job.timer is not None:
            job.timer.cancel()
        job.timer = asyncio.get_running_loop().call_at(math.inf, self._end, job)

    def _speed(self) -> float:
        return 0.0 if self._is_frozen else super()._speed()


class FaultyProcess(SimulatedProcess):
    """A process that `faults` happen to, on `cores`. A call ends as on a cluster: with the
    executor's answer or error or, once the process is lost, with ExecutorLost; a caller that gives
    up does not end the work. `num_calls` counts calls by method."""

    def __init__(self, name: str, executor: Any, faults: Faults, cores: FreezableCores) -> None:
        super().__init__(name, executor)
        self.num_calls: Counter[str] = Counter()
        self.is_stopped = False
        self._faults, self._cores = faults, cores
        self._random = random.Random(name)
        self._answers: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}  # of calls under way
        self._awake = asyncio.Event()
        self._awake.set()
        self._loss: asyncio.Future[None] | None = None

    def one(self, face: type[Face]) -> Face:
        async def run(call: Call, is_first: bool) -> list[Any]:
            method, args, _ = call
            return [await self._call(method, *args)]

        return cast(Face, Handle(run, face))

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return await self._call(method.__name__, *args)

    async def watch(self) -> None:
        """Raise ExecutorLost once the process is lost."""
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
        loss = ExecutorLost(self.name, 0, reason)
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
                loop.call_at(self._faults.dies_at_s, self.die, self._faults.dies_of)
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
        if self.num_calls[method] == self._faults.dies_after.get(method):
            self.die()
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


class StoredRollouts(SimulatedRollouts):
    """Rollouts as columns in `storage`, which is set before the run, with all that it refuses."""

    storage: Storage

    def __init__(self, faults: Mapping[str, Faults]) -> None:
        super().__init__()
        self._faults = faults

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], writer: str) -> None:
        finished = []
        for request, row in stopped:
            wrong_from = self._faults.get(f"generator-{row.replica}", Faults()).wrong_from
            written = tokens_of(row)
            written.logprobs[written.versions >= wrong_from] = WRONG
            finished.append(
                RequestOutput(
                    request=request,
                    written=written,
                    reason=row.finish_reason,
                    episode=row.episode,
                    conversations=tuple(
                        RequestOutput(
                            request=replace(request, row_id=each.row_id),
                            written=tokens_of(each),
                            reason=each.finish_reason,
                        )
                        for each in row.conversations
                    ),
                )
            )
        if finished:
            await write_finished(self.storage, finished, writer)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        names = [PROMPT_IDS, TOKEN_VERSIONS, GENERATOR_LOGPROBS]
        columns = await self.storage.read(row_ids, names)
        return [
            Rollout(len(prompt), len(versions), version_spans(versions), max(logprobs, default=0.0))
            for prompt, versions, logprobs in zip(*(columns[n] for n in names), strict=True)
        ]

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        found = await read_written(self.storage, requests)
        return {row_id: written for row_id, (_, written) in found.items()}

    async def add_rewards(self, scores: list[StageResult], writer: str) -> None:
        """The completions are read, as by reward code."""
        await self.storage.read([score.row_id for score in scores], [RESPONSE_IDS])
        good = {score.row_id: np.array([score.reward]) for score in scores if not score.error}
        await self.storage.write(list(good), {REWARD: list(good.values())}, writer)

    def forget(self, row_ids: Iterable[int]) -> None:
        """Storage does."""
