"""Executors without models: they satisfy the protocols and take virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from llamarl.errors import GroupLost, StaleVersion
from llamarl.executors.rollout_columns import read_written, row_of, write_finished
from llamarl.executors.specs import StorageSpec
from llamarl.executors.storage import StorageExecutor
from llamarl.generation.protocol import RequestOutput
from llamarl.generation.scheduler import PartialOutput, nothing_written
from llamarl.metrics.span import Spans
from llamarl.types import (
    RESPONSE_IDS,
    REWARD,
    Batch,
    Dropped,
    FinishReason,
    Outcome,
    Prompt,
    Request,
    RolloutInfo,
    Score,
    ScoreStatus,
    StepStats,
)
from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout, Route, StagingHandle

T = TypeVar("T")

SILENCE_S = 5.0
STOP_S = 0.2
GATHER_S = 0.05


class FakeStorage(StorageExecutor):
    """A storage unit without an archive; `fates[row_id]` is what `retire` said last."""

    def __init__(self) -> None:
        super().__init__(
            StorageSpec(
                unit=0,
                archive_folder=None,
                archive_tokens=False,
            ),
            rank=0,
            num_ranks=1,
            spans=Spans("storage", None),
        )
        self.outcomes: dict[int, Outcome] = {}

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        for row_id in row_ids:
            before = self.outcomes.get(row_id, {"outcome": "lost"})["outcome"]
            assert before == "lost", f"row {row_id} retired twice: {before} then {outcome}"
            self.outcomes[row_id] = dict(outcome)
        await super().retire(row_ids, outcome)


class FakeTenant:
    """Remembers which kinds are on the device, and whose they are."""

    tags: tuple[str, ...]
    move_s = 0.02

    def __init__(self) -> None:
        self.here = set(self.tags)
        self.returned = asyncio.Event()
        self.returned.set()

    async def offload(self, tags: list[str]) -> None:
        self.returned.clear()
        self.here -= set(tags)
        await asyncio.sleep(self.move_s)

    async def prefetch(self, tags: list[str]) -> None:
        assert set(tags) <= set(self.tags)

    async def onload(self, tags: list[str]) -> None:
        await asyncio.sleep(self.move_s)
        self.here |= set(tags)
        if self.here == set(self.tags):
            self.returned.set()


class FakeReplica(FakeTenant):
    """Writes `length(request)` tokens at `token_s` each, `max_num_seqs` rollouts at a time.

    It is a Generator, a Receiver and, for the other replicas of its host, a Sender: a commit takes
    effect at the next token, so long rollouts carry several versions. Stored are a rollout's
    columns by `collect`, as by the real one.

    At `dies_at_s` its process ends. From `silent_s[0]` to `silent_s[1]` it does and answers
    nothing; after SILENCE_S of that it counts as lost, and whoever asks it is told so, but the
    process wakes up again and goes on with what it was asked before, unless `stop` ends it.
    """

    tags = ("weights", "kv")

    def __init__(
        self,
        index: int,
        *,
        length: Callable[[Request], int],
        token_s: float = 0.01,
        max_num_seqs: int = 64,
        dies_at_s: float | None = None,
        silent_s: tuple[float, float] | None = None,
        commit_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.index, self.version, self.token_s, self.commit_s = index, -1, token_s, commit_s
        self.dies_at_s, self.silent_s = dies_at_s, silent_s
        self.storage = FakeStorage()
        self._length = length
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._done: list[RequestOutput] = []
        self._has_done = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, Request] = {}
        self._committed = asyncio.Condition()
        self._awake = asyncio.Event()
        self._awake.set()
        self._work: set[asyncio.Future[Any]] = set()
        self._lost: asyncio.Future[None] | None = None
        self.is_stopped = False
        self.started: list[tuple[Request, int]] = []
        self.written: dict[int, RolloutInfo] = {}

    # The process and what the cluster knows of it

    def _begin(self) -> asyncio.Future[None]:
        """The future that says why it is lost; what happens to the process is set at first use."""
        if self._lost is None:
            loop = asyncio.get_running_loop()
            self._lost = loop.create_future()
            self._lost.add_done_callback(lambda lost: lost.exception())
            if self.dies_at_s is not None:
                loop.call_at(self.dies_at_s, self._die, "died")
            if self.silent_s is not None:
                start_s, end_s = self.silent_s
                loop.call_at(start_s, self._awake.clear)
                loop.call_at(end_s, self._awake.set)
                if end_s > start_s + SILENCE_S:
                    loop.call_at(start_s + SILENCE_S, self._lose, "was silent")
        return self._lost

    def _die(self, how: str) -> None:
        for work in [*self._tasks.values(), *self._work]:
            work.cancel()
        self._lose(how)

    def _lose(self, how: str) -> None:
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_exception(GroupLost(f"generator-{self.index} {how}"))

    async def watch(self) -> None:
        """As an executor group's: raises once the replica is lost."""
        await asyncio.shield(self._begin())

    async def stop(self) -> None:
        """As an executor group's: the process ends."""
        self._begin()
        await asyncio.sleep(STOP_S)
        self.is_stopped = True
        self._die("was stopped")

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the process do something; GroupLost if it is lost before it answers."""
        lost = self._begin()
        if lost.done():
            work.close()
            lost.result()
        doing = asyncio.ensure_future(work)
        self._work.add(doing)
        doing.add_done_callback(self._work.discard)
        await asyncio.wait({doing, lost}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        return doing.result()

    async def _sleep(self, seconds: float) -> None:
        """Time passes in the process."""
        await asyncio.sleep(seconds)
        await self._awake.wait()

    # Generator

    async def submit(self, requests: list[Request]) -> None:
        await self._call(self._submit(requests))

    async def _submit(self, requests: list[Request]) -> None:
        await self._sleep(0.0)
        resumed = [request for request in requests if request.resume]
        written = await read_written(self.storage, resumed)
        for request in requests:
            assert request.row_id not in self._tasks, "asked twice"
            before = written.get(request.row_id, nothing_written())
            self._requests[request.row_id] = request
            self._tasks[request.row_id] = asyncio.create_task(self._write(request, before))

    async def collect(self) -> list[RolloutInfo]:
        return await self._call(self._collect())

    async def _collect(self) -> list[RolloutInfo]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_done.wait(), 1.0)
        await self._sleep(GATHER_S)
        done, self._done = self._done, []
        self._has_done.clear()
        if done:
            await write_finished(self.storage, done)
        rows = [row_of(each, self.index) for each in done]
        self.written |= {row.row_id: row for row in rows}
        return rows

    async def abort_requests(self, row_ids: list[int]) -> None:
        await self._call(self._abort(row_ids))

    async def _abort(self, row_ids: list[int]) -> None:
        await self._sleep(0.0)
        for row_id in row_ids:
            if row_id in self._tasks:
                self._tasks.pop(row_id).cancel()
                self._finish(self._requests[row_id], [], FinishReason.ABORTED)

    async def _write(self, request: Request, before: PartialOutput) -> None:
        async with self._committed:
            await self._committed.wait_for(lambda: self.version >= request.min_version)
        async with self._slots:
            versions = before.versions.tolist()
            total = self._length(request)
            self.started.append((request, self.version))
            room = request.segment_tokens or total
            for _ in range(min(room, total - len(versions))):
                await self.returned.wait()
                versions.append(self.version)
                await self._sleep(self.token_s)
        is_cut = len(versions) < total
        del self._tasks[request.row_id]
        self._finish(request, versions, FinishReason.SEGMENT if is_cut else FinishReason.STOP)

    def _finish(self, request: Request, versions: list[int], reason: FinishReason) -> None:
        written = PartialOutput(
            ids=np.ones(len(versions), np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            versions=np.array(versions, np.int32),
        )
        self._done.append(RequestOutput(request=request, written=written, reason=reason))
        self._has_done.set()

    # Receiver

    async def target_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_source(self, route: Route) -> list[None]:
        await self._call(self._sleep(0.0))
        return [None]

    async def prepare(self, version: int, bucket: int) -> list[StagingHandle]:
        await self._call(self._sleep(0.0))
        assert version > self.version
        handle = StagingHandle(
            version=version,
            bucket=bucket,
            replica=self.index,
            rank=0,
            host="h",
            address="",
            num_bytes=4,
        )
        return [handle]

    async def verify(self, version: int, bucket: int) -> list[dict[str, int]]:
        await self._call(self._sleep(0.0))
        return [{"w": version}]

    async def commit(self, version: int, bucket: int) -> list[int]:
        return await self._call(self._commit(version))

    async def _commit(self, version: int) -> list[int]:
        await self._sleep(self.commit_s)
        async with self._committed:
            self.version = version
            self._committed.notify_all()
        return [len(self._tasks)]

    async def abort(self, version: int) -> list[None]:
        return [None]

    # Sender

    async def source_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        await self._call(self._sleep(0.0))
        return [None]

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        await self._call(self._sleep(0.0))
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        return [{"w": version}]


def one_parameter(rank: int) -> RankLayout:
    box = Box(start=(0,), stop=(1,), buffer="w", offset=0, strides=(1,))
    layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters={"w": layout}, buckets=(("w",),))


@dataclass
class FakeScorer:
    """Random rewards: `drop_share` of the prompts get equal ones, `fail_share` of rollouts fail."""

    drop_share: float = 0.0
    fail_share: float = 0.0
    score_s: float = 0.001
    storage: FakeStorage | None = None

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        await asyncio.sleep(self.score_s)
        assert self.storage is not None
        await self.storage.read([row_id for row_id, _ in rollouts], [RESPONSE_IDS])
        scores = []
        for row_id, prompt in rollouts:
            rng = random.Random(f"{prompt.epoch}/{prompt.prompt_id}")
            is_equal = rng.random() < self.drop_share
            if random.Random(row_id).random() < self.fail_share:
                scores.append(Score(row_id=row_id, status=ScoreStatus.RAISED, error="boom"))
                continue
            reward = 0.0 if is_equal else float(row_id % 2)
            parts = {"fake": reward}
            scores.append(Score(row_id=row_id, status=ScoreStatus.OK, reward=reward, parts=parts))
            await self.storage.write([row_id], {REWARD: [np.array([reward])]})
        return scores


@dataclass
class FakeTrainer(FakeTenant):
    """Records every batch; it is a Trainer and a Sender. `part_starts` are virtual times.

    Like the real one it can still write the version before its present one, from a snapshot.
    """

    step_s: float = 0.1
    write_s: float = 0.01
    version: int = 0
    batches: list[Batch] = field(default_factory=list)
    part_starts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    fails_at: int = -1
    writes: list[tuple[int, int]] = field(default_factory=list)
    inferred: list[tuple[int, int]] = field(default_factory=list)
    difference: Callable[[int], float] = lambda row_id: 1e-6
    storage: FakeStorage | None = None
    tags = ("weights", "state")

    def __post_init__(self) -> None:
        super().__init__()

    async def accumulate(self, batch: Batch) -> None:
        assert batch.version == self.version
        assert self.returned.is_set(), "trained away from the device"
        self.part_starts[batch.version].append(asyncio.get_running_loop().time())
        assert self.storage is not None
        columns = await self.storage.read([row.row_id for row in batch.rows], [RESPONSE_IDS])
        sizes = [len(cell) for cell in columns[RESPONSE_IDS]]
        assert sizes == [row.num_tokens for row in batch.rows]
        await asyncio.sleep(self.step_s)
        self.batches.append(batch)

    async def step(self) -> StepStats:
        if self.version == self.fails_at:
            raise ArithmeticError("the trainer broke")
        self.version += 1
        return StepStats(version=self.version, scalars={"loss": 0.0})

    async def save(self, folder: str) -> None: ...

    async def restore(self, folder: str) -> int:
        return self.version

    async def export(self, folder: str, dtype: str) -> None: ...

    async def source_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None]

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        for pause_s in (self.write_s, 0.0):
            if version not in (self.version, self.version - 1):
                raise StaleVersion(f"version {version} is gone")
            await asyncio.sleep(pause_s)
        self.writes.append((version, handles[0].replica))
        return [{"w": version}]

    async def infer(self, row_ids: list[int]) -> list[float]:
        self.inferred += [(self.version, row_id) for row_id in row_ids]
        return [self.difference(row_id) for row_id in row_ids]


class FakeJournal:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.evaluations: list[object] = []
        self.steps: list[int] = []

    def log_group(self, group: object, verdict: object) -> None:
        if isinstance(verdict, Dropped):
            self.drops.append(verdict.reason)

    def log_publish(self, seconds: float) -> None: ...

    def log_evaluation(self, evaluation: object) -> None:
        if evaluation is not None:
            self.evaluations.append(evaluation)

    async def log_step(self, stats: StepStats, *details: object) -> None:
        self.steps.append(stats.version)
