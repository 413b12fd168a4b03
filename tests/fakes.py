"""What stands in for a part of a run in several tests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.controller.rollouts import Rollouts
from llamarl.core.groups import Group
from llamarl.core.records import (
    REWARD,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
    Outcome,
    Prompt,
    Purpose,
    Request,
    RolloutInfo,
    Sampling,
    StageItem,
    StageResult,
    StageStatus,
    VersionSpan,
)
from llamarl.metrics.span import Spans
from llamarl.planner.simulation import clock
from llamarl.scoring.stages import Graph, Stage, make_graph
from llamarl.storage.wire import write_message
from llamarl.storage.worker import StorageSpec, StorageWorker
from llamarl.trainer.losses.aipo import AIPOConfig
from tests.planner.planner_recipes import make_recipe

Rows = Mapping[int, Mapping[str, np.ndarray]]
"""Row id -> column -> cell."""

SHARD = "__0_0.distcp"  # of a checkpoint


class WatchedStorage(StorageWorker):
    """A real storage unit, without an archive unless in `run_dir`, that remembers what it was
    asked; it needs no start and no close.

    `writes` has the row ids and the names of each write, in vain or not; `num_writes` how often a
    replica has written each row; `outcomes` what became of each row, `versions` which version wrote
    each of its tokens. It holds `cells` from the start. A retire takes `retire_s`.
    """

    def __init__(
        self, run_dir: Path | None = None, *, cells: Rows | None = None, retire_s: float = 0.0
    ) -> None:
        folder = str(run_dir / "archive") if run_dir is not None else None
        spec = StorageSpec(unit=0, archive_folder=folder)
        super().__init__(spec, rank=0, num_ranks=1, spans=Spans("storage", None))
        self.writes: list[tuple[list[int], list[str]]] = []
        self.num_writes: Counter[int] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.versions: dict[int, list[int]] = {}
        self._retire_s = retire_s
        self.put(cells or {})

    def __del__(self) -> None:
        self._slabs.close()

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        self.writes.append((row_ids, sorted(columns)))
        if TOKEN_VERSIONS in columns:
            self.num_writes.update(row_ids)
        await super().write(row_ids, columns, writer)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        for row_id in row_ids:
            before = self.outcomes.get(row_id, {"outcome": "lost"})["outcome"]
            assert before == "lost", f"row {row_id} retired twice: {before} then {outcome}"
            self.outcomes[row_id] = dict(outcome)
        if self._retire_s:
            await asyncio.sleep(self._retire_s)
        with_others = self._table.with_conversations(row_ids)
        stored = [row_id for rows, _ in self._table.groups(with_others) for row_id in rows]
        versions = (await self.read(stored, [TOKEN_VERSIONS]))[TOKEN_VERSIONS]
        self.versions |= {i: each.tolist() for i, each in zip(stored, versions, strict=True)}
        await super().retire(row_ids, outcome)

    def count(self, outcome: str) -> int:
        """Rows with this outcome."""
        return sum(found["outcome"] == outcome for found in self.outcomes.values())

    def put(self, rows: Rows) -> None:
        """Hold these cells too; it is not one of the `writes`."""
        for row_id, cells in rows.items():
            columns = {name: [cell] for name, cell in cells.items()}
            header, body = write_message([row_id], columns, "")
            self._write(header, memoryview(b"".join(body)))

    @property
    def rows(self) -> dict[int, dict[str, np.ndarray]]:
        """Copies of what is held."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for row_ids, names in self._table.groups(sorted(self._table._slots)):
            cells, memory = self._slabs.copy(self._table.locate(row_ids, names))
            columns = cells.views([memory])
            for place, row_id in enumerate(row_ids):
                found[row_id] = {name: columns[name][place] for name in names}
        return dict(sorted(found.items()))


class SavingTrainer:
    """faces.Checkpointed with little to save: its `version` in a file SHARD of 100 bytes.

    It is saved as it is, or as it was copied if it `has_room` for a copy, once `may_write` is set
    (which it is unless the trainer `waits`). If there is an `error`, every save ends in it.
    """

    def __init__(
        self, *, has_room: bool = True, waits: bool = False, error: Exception | None = None
    ) -> None:
        self.version, self.copied, self.has_room, self.error = 1, 0, has_room, error
        self.may_write = asyncio.Event()
        if not waits:
            self.may_write.set()
        self.num_writing = 0

    async def snapshot(self) -> bool:
        self.copied = self.version
        return self.has_room

    async def save(self, folder: str, from_snapshot: bool) -> None:
        assert self.num_writing == 0
        self.num_writing += 1
        await self.may_write.wait()
        self.num_writing -= 1
        version = self.copied if from_snapshot else self.version
        Path(folder, SHARD).write_text(f"{version:<100}")
        if self.error is not None:
            raise self.error


PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1,))


def request(row_id: int, purpose: Purpose = Purpose.TRAIN) -> Request:
    sampling = Sampling(max_tokens=8)
    return Request(row_id=row_id, prompt_ids=(1,), sampling=sampling, seed=0, purpose=purpose)


def group_of(*row_ids: int, **fields: Any) -> Group:
    return Group(group_id=row_ids[0], prompt=PROMPT, row_ids=row_ids, min_version=0, **fields)


def stopped(
    row_id: int,
    *spans: tuple[int, int],
    reason: FinishReason = FinishReason.STOP,
    num_prompt_tokens: int = 1,
    replica: int = 0,
) -> RolloutInfo:
    """A rollout with these spans: (version, its tokens)."""
    return RolloutInfo(
        row_id=row_id,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=sum(count for _, count in spans),
        spans=tuple(VersionSpan(version=version, num_tokens=count) for version, count in spans),
        finish_reason=reason,
        replica=replica,
    )


@dataclass
class FakeDispatch:
    """Replicas whose rollouts stop after at most `longest_s`, as `stop` says (None: never); a row
    in `num_cuts` is cut so often before. `replicas` may have their versions, `units` the storage
    units on their hosts; `error` is what every request raises."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    longest_s: float = 1.0
    num_cuts: Counter[int] = field(default_factory=Counter)
    stop: Callable[[Request], RolloutInfo | None] = lambda request: stopped(request.row_id, (0, 2))
    error: Exception | None = None
    asked: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    stopped: asyncio.Queue[RolloutInfo | Exception] = field(default_factory=asyncio.Queue)
    replicas: dict[int, int | tuple[int, ...]] = field(default_factory=dict)
    units: dict[int, int] = field(default_factory=dict)

    async def submit(self, requests: list[Request]) -> None:
        for each in requests:
            assert each.resume == any(each.row_id == other.row_id for other in self.asked)
            self.asked.append(each)
            if self.error is not None:
                raise self.error
            asyncio.get_running_loop().call_later(
                self.rng.uniform(0, self.longest_s), self._stop, each
            )

    def _stop(self, request: Request) -> None:
        if self.num_cuts[request.row_id]:
            self.num_cuts[request.row_id] -= 1
            self.stopped.put_nowait(stopped(request.row_id, (0, 2), reason=FinishReason.SEGMENT))
        elif (found := self.stop(request)) is not None:
            self.stopped.put_nowait(found)

    async def collect(self) -> list[RolloutInfo]:
        found = await self.stopped.get()
        if isinstance(found, Exception):
            raise found
        return [found]

    async def abort_requests(self, row_ids: list[int]) -> None:
        self.aborted += row_ids

    def hold(self, replicas: set[int]) -> None: ...

    @property
    def balance(self) -> FakeDispatch:
        return self

    def unit_near(self, replica: int) -> int | None:
        return self.units.get(replica)


@dataclass
class FakeStage:
    """A stage's executor. `begun` has each call's items; `done` the rows of calls that ended, with
    `drops` and scores as `result` says."""

    stage: Stage
    needs: frozenset[str]
    done: defaultdict[str, set[int]]
    dropped: set[int]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    longest_s: float = 1.0
    result: Callable[[int], StageResult] | None = None
    begun: list[list[StageItem]] = field(default_factory=list)
    num_running: int = 0

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        rows = [row_id for row_ids, _ in items for row_id in row_ids]
        assert rows, "a call for nothing"
        for name in self.needs - {"generate"}:
            assert self.done[name] >= {*rows}, f"{self.stage.name} before {name}"
        assert not {*rows} & self.dropped, "it was dropped"
        before = [row_id for call in self.begun for row_ids, _ in call for row_id in row_ids]
        assert not {*rows} & {*before}, "a stage gets a rollout once"
        self.begun.append(items)
        self.num_running += 1
        assert self.num_running == 1 or not self.stage.is_model
        await asyncio.sleep(self.rng.uniform(0, self.longest_s))
        self.num_running -= 1
        self.done[self.stage.name].update(rows)
        found = [self.result(row_id) for row_id in rows] if self.result else []
        for each in found:
            if self.stage.name != "score" and (each.reason or each.status != StageStatus.OK):
                self.dropped.add(each.row_id)
        return found

    @property
    def rows(self) -> list[int]:
        return [row_id for call in self.begun for row_ids, _ in call for row_id in row_ids]


def nothing(*read: object) -> None:
    """What a stage runs where that does not matter, as it is not called."""


def good(row_id: int) -> StageResult:
    return StageResult(row_id=row_id, numbers={REWARD: 1.0})


KL = make_graph(make_recipe(algorithm=AIPOConfig(kl_coefficient=0.1)))


class RolloutSetting:
    """`rollouts` of a graph among fakes; `stages` by name."""

    def __init__(self, graph: Graph = KL, rng: random.Random | None = None) -> None:
        rng = rng or random.Random(0)
        self.dispatch, self.storage = FakeDispatch(rng), WatchedStorage(retire_s=0.01)
        done: defaultdict[str, set[int]] = defaultdict(set)
        dropped: set[int] = set()
        shared = done, dropped, rng
        self.stages = {
            stage.name: FakeStage(stage, graph.needs[stage.name], *shared)
            for stage in graph.between
        }
        self.stages["score"].result = good
        executors = {fake.stage: fake for fake in self.stages.values()}
        self.rollouts = Rollouts(self.dispatch, executors, graph, self.storage)  # type: ignore[arg-type]

    def run(self, work: Callable[[Rollouts], Awaitable[None]]) -> None:
        async def main() -> None:
            serving = asyncio.create_task(self.rollouts.serve())
            try:
                await work(self.rollouts)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

        clock.run(main())

    def roll_out(self, *groups: Group) -> None:
        async def work(rollouts: Rollouts) -> None:
            await asyncio.gather(
                *(rollouts.roll_out(each, [request(r) for r in each.row_ids]) for each in groups)
            )

        self.run(work)
