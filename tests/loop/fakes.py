"""Executors without models: they satisfy the protocols and take virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamarl.cluster.errors import GroupLost
from llamarl.types import (
    Batch,
    Columns,
    FinishReason,
    Prompt,
    Request,
    Row,
    Score,
    ScoreStatus,
    StepStats,
    VersionSpan,
)
from llamarl.weights.errors import StaleVersion
from llamarl.weights.layout import Box, Offer, ParameterLayout, RankLayout, Route


class FakeStorage:
    """Remembers fates; `fates[row_id]` is what `retire` said last."""

    def __init__(self) -> None:
        self.fates: dict[int, dict[str, str | int | float]] = {}

    async def write(self, row_ids: list[int], columns: Columns) -> None: ...

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        return {name: [np.zeros(1, np.int32) for _ in row_ids] for name in names}

    async def retire(self, row_ids: list[int], fate: dict[str, str | int | float]) -> None:
        for row_id in row_ids:
            before = self.fates.get(row_id, {"fate": "lost"})["fate"]
            assert before == "lost", f"row {row_id} retired twice: {before} then {fate}"
            self.fates[row_id] = dict(fate)


class FakeTenant:
    """Remembers which kinds are on the device, and whose they are."""

    kinds: tuple[str, ...]
    move_s = 0.02

    def __init__(self) -> None:
        self.here = set(self.kinds)
        self.returned = asyncio.Event()
        self.returned.set()

    async def leave(self, kinds: list[str]) -> None:
        self.returned.clear()
        self.here -= set(kinds)
        await asyncio.sleep(self.move_s)

    async def prefetch(self, kinds: list[str]) -> None:
        assert set(kinds) <= set(self.kinds)

    async def enter(self, kinds: list[str]) -> None:
        await asyncio.sleep(self.move_s)
        self.here |= set(kinds)
        if self.here == set(self.kinds):
            self.returned.set()


class FakeReplica(FakeTenant):
    """Writes `length(request)` tokens at `token_s` each, `max_running` rollouts at a time.

    It is a Generator, a Receiver and, for the other replicas of its host, a Sender: a flip takes
    effect at the next token, so long rollouts carry several versions.
    """

    kinds = ("weights", "kv")

    def __init__(
        self,
        index: int,
        *,
        length: Callable[[Request], int],
        token_s: float = 0.01,
        max_running: int = 64,
        dies_at_s: float | None = None,
        flip_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.index, self.version, self.token_s, self.flip_s = index, -1, token_s, flip_s
        self.dies_at_s = dies_at_s
        self._length = length
        self._slots = asyncio.Semaphore(max_running)
        self._done: asyncio.Queue[Row] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._partial: dict[int, list[int]] = PARTIALS
        self._flipped = asyncio.Condition()
        self.started: list[tuple[Request, int]] = []
        self.written: dict[int, Row] = {}

    def _check_alive(self) -> None:
        if self.dies_at_s is not None and asyncio.get_running_loop().time() >= self.dies_at_s:
            for task in self._tasks.values():
                task.cancel()
            raise GroupLost(f"generator-{self.index} died")

    async def watch(self) -> None:
        """As an executor group's: raises once the replica is lost."""
        if self.dies_at_s is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(self.dies_at_s - asyncio.get_running_loop().time())
            raise GroupLost(f"generator-{self.index} died")

    async def submit(self, requests: list[Request]) -> None:
        self._check_alive()
        for request in requests:
            self._tasks[request.row_id] = asyncio.create_task(self._write(request))

    async def collect(self) -> list[Row]:
        try:
            rows = [await asyncio.wait_for(self._done.get(), 1.0)]
        except TimeoutError:
            rows = []
        self._check_alive()
        while not self._done.empty():
            rows.append(self._done.get_nowait())
        return rows

    async def abort(self, row_ids: list[int]) -> None:
        for row_id in row_ids:
            if row_id in self._tasks:
                self._tasks[row_id].cancel()

    async def _write(self, request: Request) -> None:
        async with self._flipped:
            await self._flipped.wait_for(lambda: self.version >= request.min_version)
        async with self._slots:
            if not request.resume:
                self._partial.pop(request.row_id, None)
            versions = self._partial.pop(request.row_id, [])
            total = self._length(request)
            self.started.append((request, self.version))
            room = request.segment_tokens or total
            for _ in range(min(room, total - len(versions))):
                await self.returned.wait()
                versions.append(self.version)
                await asyncio.sleep(self.token_s)
        is_cut = len(versions) < total
        if is_cut:
            self._partial[request.row_id] = versions
        self.written[request.row_id] = Row(
            row_id=request.row_id,
            num_prompt_tokens=len(request.prompt_ids),
            num_tokens=len(versions),
            spans=spans(versions),
            finish_reason=FinishReason.SEGMENT if is_cut else FinishReason.STOP,
            replica=self.index,
        )
        self._done.put_nowait(self.written[request.row_id])

    async def target_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_source(self, route: Route) -> list[None]:
        self._check_alive()
        return [None]

    async def offer(self, version: int, part: int) -> list[Offer]:
        self._check_alive()
        assert version > self.version
        offer = Offer(
            version=version,
            part=part,
            replica=self.index,
            rank=0,
            host="h",
            address="",
            num_bytes=4,
        )
        return [offer]

    async def fingerprint(self, version: int, part: int) -> list[dict[str, int]]:
        self._check_alive()
        return [{"w": version}]

    async def flip(self, version: int, part: int) -> list[int]:
        self._check_alive()
        await asyncio.sleep(self.flip_s)
        async with self._flipped:
            self.version = version
            self._flipped.notify_all()
        return [len(self._tasks)]

    async def discard(self, version: int) -> list[None]:
        return [None]

    async def source_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        self._check_alive()
        return [None]

    async def write(self, version: int, offers: list[Offer]) -> list[dict[str, int]]:
        self._check_alive()
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        return [{"w": version}]


PARTIALS: dict[int, list[int]] = {}  # what storage would hold: any replica may resume it


def spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    counts: dict[int, int] = {}
    for version in versions:
        counts[version] = counts.get(version, 0) + 1
    return tuple(VersionSpan(version=v, num_tokens=n) for v, n in counts.items())


def one_parameter(rank: int) -> RankLayout:
    box = Box(start=(0,), stop=(1,), buffer="w", offset=0, strides=(1,))
    layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters={"w": layout}, parts=(("w",),))


@dataclass
class FakeScorer:
    """Random rewards: `drop_share` of the prompts get equal ones, `fail_share` of rollouts fail."""

    drop_share: float = 0.0
    fail_share: float = 0.0
    score_s: float = 0.001

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        await asyncio.sleep(self.score_s)
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
    kinds = ("weights", "state")

    def __post_init__(self) -> None:
        super().__init__()

    async def accumulate(self, batch: Batch) -> None:
        assert batch.version == self.version
        assert self.returned.is_set(), "trained away from the device"
        self.part_starts[batch.version].append(asyncio.get_running_loop().time())
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

    async def export(self, folder: str) -> None: ...

    async def source_layout(self) -> list[RankLayout]:
        return [one_parameter(0)]

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None]

    async def write(self, version: int, offers: list[Offer]) -> list[dict[str, int]]:
        for pause_s in (self.write_s, 0.0):
            if version not in (self.version, self.version - 1):
                raise StaleVersion(f"version {version} is gone")
            await asyncio.sleep(pause_s)
        self.writes.append((version, offers[0].replica))
        return [{"w": version}]

    async def infer(self, row_ids: list[int]) -> list[float]:
        self.inferred += [(self.version, row_id) for row_id in row_ids]
        return [self.difference(row_id) for row_id in row_ids]


class FakeJournal:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.evaluations: list[object] = []

    def verdict(self, group: object, reason: str | None) -> None:
        if reason is not None:
            self.drops.append(reason)

    def publish(self, seconds: float) -> None: ...

    def evaluation(self, evaluation: object) -> None:
        self.evaluations.append(evaluation)

    async def step(self, *args: object) -> None: ...
