"""A dispatcher and stages under `Rollouts`, which take random times and do what a test says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamarl.dataflow.graph import Stage
from llamarl.types import (
    FinishReason,
    Group,
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

PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1,))


def request(row_id: int, purpose: Purpose = Purpose.TRAIN) -> Request:
    sampling = Sampling(max_tokens=8)
    return Request(row_id=row_id, prompt_ids=(1,), sampling=sampling, seed=0, purpose=purpose)


def group_of(*row_ids: int) -> Group:
    return Group(group_id=row_ids[0], prompt=PROMPT, row_ids=row_ids, min_version=0)


def row(row_id: int, reason: FinishReason = FinishReason.STOP, version: int = 0) -> RolloutInfo:
    spans = (VersionSpan(version=version, num_tokens=2),)
    is_aborted = reason is FinishReason.ABORTED
    return RolloutInfo(
        row_id=row_id,
        num_prompt_tokens=1,
        num_tokens=0 if is_aborted else 2,
        spans=() if is_aborted else spans,
        finish_reason=reason,
    )


@dataclass
class FakeDispatch:
    """Rollouts stop after at most `longest_s`; a row in `num_cuts` is cut so often before."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    longest_s: float = 1.0
    num_cuts: Counter[int] = field(default_factory=Counter)
    stop: Callable[[Request], RolloutInfo] = lambda request: row(request.row_id)
    asked: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    stopped: asyncio.Queue[RolloutInfo | Exception] = field(default_factory=asyncio.Queue)
    replicas: dict[int, object] = field(default_factory=dict)

    async def submit(self, requests: list[Request]) -> None:
        for each in requests:
            assert each.resume == any(each.row_id == other.row_id for other in self.asked)
            self.asked.append(each)
            asyncio.get_running_loop().call_later(
                self.rng.uniform(0, self.longest_s), self._stop, each
            )

    def _stop(self, request: Request) -> None:
        if self.num_cuts[request.row_id]:
            self.num_cuts[request.row_id] -= 1
            self.stopped.put_nowait(row(request.row_id, FinishReason.SEGMENT))
        else:
            self.stopped.put_nowait(self.stop(request))

    async def collect(self) -> list[RolloutInfo]:
        found = await self.stopped.get()
        if isinstance(found, Exception):
            raise found
        return [found]

    async def abort_requests(self, row_ids: list[int]) -> None:
        self.aborted += row_ids

    def hold(self, replicas: set[int]) -> None: ...


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
