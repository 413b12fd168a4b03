"""Executors that sleep, each in a process of its own.

Owns: the simulated executors as classes that a cluster spawns, and their wiring. Does not own: what
they do (`llamarl/planner`). Invariant: the controller, its messages and the processes are those of
a run; only computing is replaced by sleeping. What a process would read from another one's memory
in a simulation (rollouts, for the trainer) it makes up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from llamarl.cluster import make_cluster
from llamarl.controller.logprob_check import NUM_TOKENS
from llamarl.controller.starter import Executors
from llamarl.core.config import Config
from llamarl.model.architecture import Architecture
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import (
    SimulatedRunLogger,
    SimulatedScorer,
    SimulatedStorage,
    SimulatedTrainer,
)
from llamarl.planner.simulation.replica import SimulatedReplica
from llamarl.planner.simulation.setting import DIFFERENCE, Rollout, Setting, SimulatedRollouts
from llamarl.planner.simulation.simulated_cluster import SimulatedProcess
from llamarl.planner.simulation.simulated_run import drive, make_inputs
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload
from llamarl.scoring.stages import SCORE, make_graph
from llamarl.storage.client import Store

HOST = "host 0"
NUM_CALLS = 200  # timed for `message_s`


@dataclass(frozen=True, kw_only=True)
class SleepingSpec:
    """What a sleeping executor is made from; `index` is a replica's."""

    config: Config
    costs: Costs
    workload: Workload
    index: int = 0

    def setting(self) -> Setting:
        """That of the executor's process."""
        return Setting(config=self.config, workload=self.workload)


class MadeUpRollouts(SimulatedRollouts):
    """Those of other processes are made up: only lengths of log-prob checks are asked for."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._rollout = Rollout(workload.prompt_tokens, NUM_TOKENS, (), DIFFERENCE)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        return [self._rollout] * len(row_ids)


class SleepingStorage(SimulatedStorage):
    """A storage unit in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(spec.setting(), spec.costs, Cores())

    async def answer(self) -> None:
        """The shortest call."""


class SleepingReplica(SimulatedReplica):
    """A replica in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(spec.setting(), spec.costs, Cores(), index=spec.index, hosts=(HOST,))


class SleepingTrainer(SimulatedTrainer):
    """The trainer in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        setting, cores = replace(spec.setting(), rollouts=MadeUpRollouts(spec.workload)), Cores()
        super().__init__(setting, spec.costs, cores, hosts=(HOST,), device=cores)


class SleepingScorer(SimulatedScorer):
    """The scorer in its process."""

    def __init__(self, spec: SleepingSpec, **place: Any) -> None:
        super().__init__(spec.setting(), spec.costs, Cores())


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
    graph = make_graph(config)
    cluster = make_cluster(config.cluster, spans_folder=None, logs_folder=str(logs_folder))

    async def spawn(name: str, kind: type, index: int = 0) -> SimulatedProcess:
        spec = SleepingSpec(config=config, costs=costs, workload=workload, index=index)
        return SimulatedProcess(name, (await cluster.spawn(name, kind, spec)).call_one)

    try:
        storage = await spawn("storage-0", SleepingStorage)
        names = [f"generator-{i}" for i in range(config.generator.num_replicas)]
        groups = {n: await spawn(n, SleepingReplica, i) for i, n in enumerate(names)}
        groups["scorer"] = await spawn("scorer", SleepingScorer)
        groups["trainer"] = await spawn("trainer", SleepingTrainer)

        async def start(name: str) -> SimulatedProcess:
            raise RuntimeError(f"{name} must not be lost here")

        executors = Executors(
            storage=Store([storage.call_one]),
            by_name={storage.name: storage, **groups},
            stage_of={"scorer": graph.stages[SCORE]},
            start=start,
        )
        message_s = await _time_call(storage.call_one)
        timeline = SimulatedTimeline()
        run_logger = SimulatedRunLogger(timeline)
        inputs = make_inputs(workload.prompts(), graph, architecture)
        await drive(config, inputs, executors, num_steps, run_logger)
        return timeline.step_ends_s[:num_steps], message_s
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
