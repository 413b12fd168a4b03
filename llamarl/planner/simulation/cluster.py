"""All executors of a recipe, simulated.

Owns: which simulated executor gets which processors, rollouts and faults. Does not own: what they
do, or the controller that drives them (`run.py`). Invariant: without faults a call goes straight to
its executor, so a large simulation pays nothing for what never happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamarl.build import Executors, collector_specs
from llamarl.config import Config, rank_assignment
from llamarl.executors.collector import CollectorExecutor
from llamarl.experience.store import Store
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import (
    SimulatedReference,
    SimulatedScorer,
    SimulatedStorage,
    SimulatedTrainer,
)
from llamarl.planner.simulation.process import Faults, SimulatedProcess
from llamarl.planner.simulation.replica import SimulatedReplica
from llamarl.planner.simulation.rollouts import RolloutRows, Rollouts, StoredRollouts
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload
from llamarl.protocols import Storage


class SimulatedCluster:
    """Makes processes for executors of `config`, on processors as `costs` says.

    With `faults` (by executor name) something may happen to each; without, to none.
    """

    def __init__(self, config: Config, costs: Costs, faults: Mapping[str, Faults] | None) -> None:
        self._costs, self._faults = costs, faults
        self._shared = Cores(costs.num_cores, costs.shared_speed) if costs.num_cores else None
        # One GPU per trainer rank, which the reference computes on too: each has half of it then.
        self.trainer_device = self._shared or Cores(config.trainer.num_ranks)
        self.hosts = {
            name: tuple(dict.fromkeys(f"host {device.host}" for device in devices))
            for name, devices in rank_assignment.assign(config).items()
        }

    def spawn(self, name: str, make: Callable[[Costs, Cores, Faults], Any]) -> SimulatedProcess:
        """A process around what `make` returns for its costs, processors and faults."""
        own = Faults() if self._faults is None else self._faults.get(name, Faults())
        cores = self._shared or Cores()
        executor = make(own.costs or self._costs, cores, own)
        return SimulatedProcess(name, executor, None if self._faults is None else own, cores)


def make_executors(
    config: Config,
    costs: Costs,
    workload: Workload,
    timeline: SimulatedTimeline,
    *,
    faults: Mapping[str, Faults] | None = None,
    storage: Storage | None = None,
) -> Executors:
    """All executors of `config`. With `storage` rollouts are arrays in it."""
    cluster = SimulatedCluster(config, costs, faults)
    device, hosts = cluster.trainer_device, cluster.hosts
    rollouts: Rollouts = RolloutRows()

    def make_storage(costs: Costs, cores: Cores, _: Faults) -> Storage:
        return storage or SimulatedStorage(costs, rollouts, cores, timeline)

    def make_scorer(costs: Costs, cores: Cores, _: Faults) -> SimulatedScorer:
        return SimulatedScorer(config, costs, workload, rollouts, cores=cores, timeline=timeline)

    def make_trainer(costs: Costs, cores: Cores, _: Faults) -> SimulatedTrainer:
        place = hosts["trainer"][0]
        return SimulatedTrainer(
            config, costs, rollouts, host=place, cores=cores, device=device, timeline=timeline
        )

    def make_reference(costs: Costs, cores: Cores, _: Faults) -> SimulatedReference:
        return SimulatedReference(config, costs, rollouts, device=device, timeline=timeline)

    def spawn_replica(index: int) -> SimulatedProcess:
        name = f"generator-{index}"

        def make(costs: Costs, cores: Cores, faults: Faults) -> SimulatedReplica:
            return SimulatedReplica(
                index,
                config,
                costs,
                workload,
                rollouts,
                hosts=hosts[name],
                cores=cores,
                timeline=timeline,
                wrong_from=faults.wrong_from,
            )

        return cluster.spawn(name, make)

    store = Store([cluster.spawn("storage-0", make_storage).call_one])
    rollouts = rollouts if storage is None else StoredRollouts(store)
    generators = {i: spawn_replica(i) for i in range(config.generator.num_replicas)}
    has_reference = config.algorithm.kl_coefficient > 0
    return Executors(
        vital=[],
        storage=store,
        generators={**generators},
        collectors=[*_collectors(config, generators)],
        scorer=cluster.spawn("scorer", make_scorer),
        trainer=cluster.spawn("trainer", make_trainer),
        reference=cluster.spawn("reference", make_reference) if has_reference else None,
    )


def _collectors(
    config: Config, generators: Mapping[int, SimulatedProcess]
) -> list[SimulatedProcess]:
    """Real collectors, each with an equal share of the replicas."""
    spans = Spans("collector", None)
    collectors = [
        CollectorExecutor(spec, rank=0, num_ranks=1, spans=spans)
        for spec in collector_specs(config, {**generators})
    ]
    return [SimulatedProcess(f"collector-{i}", each) for i, each in enumerate(collectors)]
