"""Executors that sleep, each in a process of its own.

Owns: the modelled executors as classes that a cluster spawns, and their wiring. Does not own: what
they do (`llamarl/planner`). Invariant: the controller, its messages and the processes are those of
a run; only computing is replaced by sleeping. What a process would read from another one's memory
in a simulation (rollouts, for the trainer) it makes up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from llamarl.build import Executors
from llamarl.cluster import make_cluster
from llamarl.config import Config
from llamarl.experience.store import Store
from llamarl.loop.logprob_check import NUM_TOKENS
from llamarl.metrics.run_logger import RunLogger
from llamarl.models.architecture import Architecture
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import (
    ModelledGroup,
    ModelledScorer,
    ModelledStorage,
    ModelledTrainer,
)
from llamarl.planner.simulation.replica import ModelledReplica
from llamarl.planner.simulation.run import drive
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload
from llamarl.types import FinishReason, RolloutInfo, StepStats

HOST = "host 0"
NUM_CALLS = 200  # timed for `message_s`


class Rows(dict[int, RolloutInfo]):
    """Rollouts that another process wrote: only log-prob checks' lengths are ever asked for."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._prompt_tokens = workload.prompt_tokens

    def __missing__(self, row_id: int) -> RolloutInfo:
        return RolloutInfo(
            row_id=row_id,
            num_prompt_tokens=self._prompt_tokens,
            num_tokens=NUM_TOKENS,
            spans=(),
            finish_reason=FinishReason.LENGTH,
        )


@dataclass(frozen=True, kw_only=True)
class SleepingSpec:
    """What a sleeping executor is made from; `index` is a replica's."""

    config: Config
    costs: Costs
    workload: Workload
    index: int = 0


class SleepingStorage(ModelledStorage):
    """A storage unit in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(spec.costs, Cores(), SimulatedTimeline())
        self.rows = Rows(spec.workload)

    async def answer(self) -> None:
        """The shortest call."""


class SleepingReplica(ModelledReplica):
    """A replica in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(
            spec.index,
            spec.config,
            spec.costs,
            spec.workload,
            hosts=(HOST,),
            cores=Cores(),
            timeline=SimulatedTimeline(),
            partials={},
            storage=SleepingStorage(spec),
        )


class SleepingTrainer(ModelledTrainer):
    """The trainer in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(
            spec.config,
            spec.costs,
            SleepingStorage(spec),
            host=HOST,
            cores=Cores(),
            timeline=SimulatedTimeline(),
        )


class SleepingScorer(ModelledScorer):
    """The scorer in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(spec.config, spec.costs, spec.workload, Cores(), SimulatedTimeline())


class SilentRunLogger:
    """What is asked of the run logger: when steps end."""

    def __init__(self) -> None:
        self.step_ends_s: list[float] = []

    def log_group(self, group: object, verdict: object) -> None: ...

    def log_evaluation(self, evaluation: object) -> None: ...

    def log_publish(self, seconds: float) -> None: ...

    async def log_step(self, stats: StepStats, *details: object) -> None:
        self.step_ends_s.append(time.monotonic())


async def replay(
    config: Config,
    costs: Costs,
    architecture: Architecture,
    workload: Workload,
    num_steps: int,
    logs_folder: Path,
) -> tuple[list[float], float]:
    """When the steps ended, and what the shortest call took, both in seconds.

    Of `costs` the durations of executors are slept; messages and the controller take what they do.
    """
    costs = replace(costs, message_s=0.0, row_s=0.0)
    cluster = make_cluster(config.cluster, spans_folder=None, logs_folder=str(logs_folder))

    async def spawn(name: str, kind: type, index: int = 0) -> ModelledGroup:
        spec = SleepingSpec(config=config, costs=costs, workload=workload, index=index)
        return ModelledGroup(name, (await cluster.spawn(name, kind, spec)).call_one)

    try:
        storage = await spawn("storage-0", SleepingStorage)
        replicas = range(config.generator.num_replicas)
        executors = Executors(
            vital=[],
            storage=Store([storage.call_one]),
            generators={
                i: await spawn(f"generator-{i}", SleepingReplica, index=i) for i in replicas
            },
            scorer=await spawn("scorer", SleepingScorer),
            trainer=await spawn("trainer", SleepingTrainer),
            reference=None,
        )
        message_s = await _time_call(storage.call_one)
        diary = SilentRunLogger()
        run_logger = cast(RunLogger, diary)
        await drive(config, architecture, executors, workload, num_steps, run_logger)
        return diary.step_ends_s[:num_steps], message_s
    finally:
        await cluster.stop()


async def _time_call(storage: Any) -> float:
    """Median seconds of the shortest call."""
    seconds = []
    for _ in range(NUM_CALLS):
        start_s = time.monotonic()
        await storage.answer()
        seconds.append(time.monotonic() - start_s)
    return median(seconds)
