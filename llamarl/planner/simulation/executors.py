"""Trainer, scorer, reference and storage without a model.

Owns: what they do in modelled time. Does not own: durations (`costs.py`) or replicas
(`replica.py`). Invariant: they answer as the real ones do, in time that the real ones would take;
what they compute is made up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from llamarl.algorithms.policy_loss import is_inert
from llamarl.config import Config
from llamarl.errors import StaleVersion
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.receiving import layouts, travel
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload
from llamarl.types import (
    Batch,
    Columns,
    Outcome,
    Prompt,
    RolloutInfo,
    Score,
    ScoreStatus,
    StepStats,
)
from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle

DIFFERENCE = 1e-6  # what log-prob checks differ by: nothing is wrong in a simulation


class ModelledGroup:
    """cluster.ExecutorGroup around one modelled executor, which answers for all its ranks."""

    def __init__(self, name: str, executor: Any) -> None:
        self.name = name
        self.pids: list[int] = []
        self.call_one = self.call_all = executor

    async def watch(self) -> None:
        """Nothing is ever lost."""

    async def stop(self) -> None:
        """Nothing to stop."""


class ModelledStorage:
    """protocols.Storage that keeps what replicas wrote as rows, without arrays."""

    def __init__(self, costs: Costs, cores: Cores, timeline: SimulatedTimeline) -> None:
        self._costs, self._cores, self._timeline = costs, cores, timeline
        self.rows: dict[int, RolloutInfo] = {}

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        await self._serve("write_rows", row_ids)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        await self._serve("read_rows", row_ids)
        return {name: [] for name in names}

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        await self._serve("retire_rows", row_ids)
        for row_id in row_ids:
            self.rows.pop(row_id, None)

    async def _serve(self, name: str, row_ids: list[int]) -> None:
        await travel(self._costs)
        start_s = asyncio.get_running_loop().time()
        await self._cores.work(self._costs.store_row_s * len(row_ids))
        self._timeline.record("storage", name, start_s, asyncio.get_running_loop().time())


class ModelledScorer:
    """protocols.Scorer: rewards of 0 and 1 in turns, or one for the whole group."""

    def __init__(
        self,
        config: Config,
        costs: Costs,
        workload: Workload,
        cores: Cores,
        timeline: SimulatedTimeline,
    ) -> None:
        self._costs, self._workload = costs, workload
        self._cores, self._timeline = cores, timeline
        self._num_workers = config.reward.num_workers
        self._lock = asyncio.Lock()

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        await travel(self._costs)
        seconds = self._costs.score_row_s * len(rollouts) / self._num_workers
        async with self._lock:
            start_s = asyncio.get_running_loop().time()
            await self._cores.work(self._costs.score_call_s + seconds)
            end_s = asyncio.get_running_loop().time()
        self._timeline.record("scorer", "score", start_s, end_s)
        return [self._score(row_id, prompt) for row_id, prompt in rollouts]

    def _score(self, row_id: int, prompt: Prompt) -> Score:
        reward = 0.0 if self._workload.is_equal(prompt) else float(row_id % 2)
        return Score(row_id=row_id, status=ScoreStatus.OK, reward=reward, parts={"made up": reward})


class ModelledReference:
    """protocols.Reference for all ranks, on `device`, which the trainer computes on too."""

    def __init__(
        self,
        config: Config,
        costs: Costs,
        storage: ModelledStorage,
        *,
        device: Cores,
        timeline: SimulatedTimeline,
    ) -> None:
        self._costs, self._storage = costs, storage
        self._device, self._timeline = device, timeline
        self._weight = config.trainer.num_ranks
        self._lock = asyncio.Lock()

    async def infer(self, row_ids: list[int]) -> None:
        await travel(self._costs)
        rows = [self._storage.rows[row_id] for row_id in row_ids]
        lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
        async with self._lock:
            start_s = asyncio.get_running_loop().time()
            await self._device.work(self._costs.infer_s(lengths), self._weight)
            end_s = asyncio.get_running_loop().time()
            self._timeline.record("reference", "infer", start_s, end_s)


class ModelledTrainer:
    """protocols.Trainer, Sender and Offloadable for all ranks: the slowest one paces each
    micro-batch. It computes on `device`; what goes beside that takes `cores`.

    As the real one it leaves out rows without a gradient, and can write the version before its
    present one, from a snapshot.
    """

    def __init__(
        self,
        config: Config,
        costs: Costs,
        storage: ModelledStorage,
        *,
        host: str,
        cores: Cores,
        device: Cores,
        timeline: SimulatedTimeline,
    ) -> None:
        self._config, self._costs, self._storage = config, costs, storage
        self._cores, self._device, self._timeline, self._host = cores, device, timeline, host
        self._weight = config.trainer.num_ranks
        has_bucket = config.weights.staging == "bucket"
        self._parts = ("first", "rest") if has_bucket else ("rest",)
        self._lock = asyncio.Lock()
        self._idle_since_s = 0.0
        self._num_writing = 0
        self._away: set[str] = set()
        self._version = 0
        self._num_tokens = 0
        self._ages: Counter[int] = Counter()

    # Trainer

    async def accumulate(self, batch: Batch) -> None:
        async with self._lock:
            await travel(self._costs)
            assert batch.version == self._version, (batch.version, self._version)
            for row in batch.rows:
                for span in self._storage.rows[row.row_id].spans:
                    if span.version >= row.oldest_version:
                        self._ages[batch.version - span.version] += span.num_tokens
            self._num_tokens += sum(row.num_tokens for row in batch.rows)
            await self._cores.work(self._costs.store_row_s * len(batch.rows))
            self._end_idle("batch")
            await self._compute(self._costs.part_s + self._passes_s(batch), "accumulate")

    async def step(self) -> StepStats:
        async with self._lock:
            await travel(self._costs)
            if self._num_writing:
                await self._compute(self._costs.snapshot_s, "snapshot")
            await self._compute(self._costs.optimizer_s, "optimizer_step")
            self._version += 1
            self._timeline.num_tokens.append(self._num_tokens)
            self._timeline.ages.append(dict(self._ages))
            self._num_tokens, self._ages = 0, Counter()
        if self._costs.turnaround_s:
            await asyncio.sleep(self._costs.turnaround_s)
        return StepStats(version=self._version, scalars={})

    async def save(self, folder: str) -> None: ...

    async def restore(self, folder: str) -> int:
        return self._version

    async def export(self, folder: str, dtype: str) -> None: ...

    async def infer(self, row_ids: list[int]) -> list[float]:
        async with self._lock:
            self._end_idle("batch")
            rows = [self._storage.rows[row_id] for row_id in row_ids]
            lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
            per_rank = lengths[:: self._config.trainer.num_data_ranks]
            seconds = self._costs.arithmetic_s(per_rank) * self._costs.forward_share
            await self._compute(self._costs.micro_batch_s + seconds, "infer")
        return [DIFFERENCE] * len(row_ids)

    # Sender

    async def source_layout(self) -> list[RankLayout]:
        return layouts((self._host,), (self._parts,))

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None]

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        await travel(self._costs)
        part = self._parts[handles[0].bucket]
        self._num_writing += 1
        start_s = asyncio.get_running_loop().time()
        if part == "rest":
            await self._cores.work(self._costs.write_s)
        self._num_writing -= 1
        end_s = asyncio.get_running_loop().time()
        self._timeline.record(f"publish-{handles[0].replica}", "write", start_s, end_s, "publish")
        if version not in (self._version, self._version - 1):
            raise StaleVersion(f"version {version} is gone, the present one is {self._version}")
        return [{part: version * len(handles)}]

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        await self._move("offload", [tag for tag in tags if tag not in self._away])
        self._away |= set(tags)

    async def prefetch(self, tags: list[str]) -> None: ...

    async def onload(self, tags: list[str]) -> None:
        await self._move("onload", [tag for tag in tags if tag in self._away])
        self._away -= set(tags)

    async def _move(self, name: str, tags: list[str]) -> None:
        seconds = sum(self._costs.moves_s.get(f"trainer {tag}", 0.0) for tag in tags)
        async with self._lock:
            await travel(self._costs)
            if name == "onload":
                self._end_idle("phase")
            await self._compute(seconds, name)

    def _passes_s(self, batch: Batch) -> float:
        """Forward and backward of all micro-batches; the ranks meet at each one's gathers."""
        algorithm, costs = self._config.algorithm, self._costs
        lengths = [
            0
            if is_inert(row.advantage, algorithm) or not row.num_tokens
            else row.num_prompt_tokens + row.num_tokens - 1
            for row in batch.rows
        ]
        total_s = 0.0
        for ranks in zip(*batch.assignment, strict=True):
            active = [[lengths[i] for i in positions if lengths[i]] for positions in ranks]
            if any(active):
                slowest_s = max(costs.arithmetic_s(each) for each in active)
                total_s += costs.micro_batch_s + max(slowest_s, costs.hidden_s)
        return total_s

    async def _compute(self, seconds: float, name: str) -> None:
        start_s = asyncio.get_running_loop().time()
        await self._device.work(seconds, self._weight)
        self._idle_since_s = asyncio.get_running_loop().time()
        self._timeline.record("trainer", name, start_s, self._idle_since_s)

    def _end_idle(self, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timeline.record("trainer", reason, self._idle_since_s, now_s, "wait")


class SilentRunLogger:
    """What a simulation asks of the run logger: when steps and publishes end."""

    def __init__(self, timeline: SimulatedTimeline) -> None:
        self._timeline = timeline

    def log_group(self, group: object, verdict: object) -> None:
        """Dropped groups cost what their rollouts cost."""

    def log_evaluation(self, evaluation: object) -> None:
        """A simulation evaluates nothing."""

    def log_publish(self, seconds: float) -> None:
        """The publisher's own clock is the machine's, so `seconds` means nothing here."""
        now_s = asyncio.get_running_loop().time()
        newest = max(self._timeline.offered_s)
        self._timeline.publishes_s.append(now_s - self._timeline.offered_s[newest])

    async def log_step(self, stats: StepStats, *details: object) -> None:
        """An optimizer step is done."""
        self._timeline.step_ends_s.append(asyncio.get_running_loop().time())
