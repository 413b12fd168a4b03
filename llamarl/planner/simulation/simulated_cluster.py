"""The simulated executors of a recipe.

A call goes straight to its executor, so a large simulation pays nothing for messages that cost
nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Concatenate, cast

from llamarl.cluster.executor import Face
from llamarl.controller.starter import Executors, collector_spec, name_executor
from llamarl.core.config import Config, rank_assignment
from llamarl.core.config.generator import number_of, pools_of
from llamarl.core.faces import Environment, P, Storage, T
from llamarl.generator.collector import CollectorWorker
from llamarl.generator.specs import CollectorSpec
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import (
    SimulatedEnvironment,
    SimulatedModel,
    SimulatedScorer,
    SimulatedStage,
    SimulatedStorage,
    SimulatedTrainer,
)
from llamarl.planner.simulation.replica import SimulatedReplica
from llamarl.planner.simulation.setting import Setting
from llamarl.recipe.prompt_inputs import context_of
from llamarl.scoring.environment import EnvironmentLink, Environments
from llamarl.scoring.stages import ENVIRONMENT, SCORE, Graph
from llamarl.storage.client import Store


class SimulatedProcess:
    """A cluster.Executor around one simulated executor, which answers for all its ranks. It is
    never lost."""

    def __init__(self, name: str, executor: Any) -> None:
        self.name, self.executor = name, executor
        self.writer = name

    def one(self, face: type[Face]) -> Face:
        """Return the executor itself."""
        return cast(Face, self.executor)

    async def all(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Return the executor's results for all its ranks."""
        found: list[T] = await getattr(self.executor, method.__name__)(*args, **kwargs)
        return found

    async def watch(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Do nothing, since there is no process to end."""


class SimulatedCluster:
    """Makes processes for executors of `config`, on processors as `costs` says."""

    def __init__(self, config: Config, costs: Costs) -> None:
        self.costs = costs
        self._shared = Cores(costs.num_cores, costs.shared_speed) if costs.num_cores else None
        # One GPU per trainer rank, which the reference computes on too: each has half of it then.
        self.trainer_device = self._shared or Cores(config.trainer.num_ranks)
        # Where replicas have the same GPUs it takes time from these too.
        is_shared = config.placement.colocated and config.has_reference_model
        self.replica_device = self.trainer_device if is_shared else self._shared
        self._config, self._pools = config, pools_of(config.generator)
        places = rank_assignment.assign(config)
        self.hosts = {name: self._name_hosts(devices) for name, devices in places.items()}

    def hosts_of(self, replica: int) -> tuple[str, ...]:
        """Return the hosts of a replica, whose index may be beyond those of the recipe."""
        known = self.hosts.get(f"generator-{replica}")
        return known or self._name_hosts(rank_assignment.place_generator(self._config, replica))

    def _name_hosts(self, devices: Sequence[rank_assignment.Device]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._config.cluster.name_host(d.host) for d in devices))

    def costs_of(self, replica: int) -> Costs:
        """Return the costs of a replica's pool."""
        return self.costs.of_pool(number_of(self._pools, replica))

    def spawn(
        self,
        name: str,
        make: Callable[[Costs, Cores], Any],
        costs: Costs | None = None,
        cores: Cores | None = None,
    ) -> SimulatedProcess:
        """Return a process around the executor that `make` returns for its costs (default: the
        cluster's) and processors."""
        return SimulatedProcess(name, make(costs or self.costs, cores or self._shared or Cores()))


def make_executors(
    setting: Setting,
    cluster: SimulatedCluster,
    graph: Graph,
    make_storage: Callable[[Costs, Cores], Any] | None = None,
) -> Executors:
    """Return the executors of the recipe and its `graph`, in processes of `cluster`. `make_storage`
    replaces the simulated storage unit."""
    config, device, hosts = setting.config, cluster.trainer_device, cluster.hosts

    played = [f"{ENVIRONMENT}-0"] * graph.has_episodes

    def spawn(name: str, kind: Callable[..., Any], **options: Any) -> SimulatedProcess:
        return cluster.spawn(name, partial(kind, setting, **options))

    def spawn_named(name: str) -> SimulatedProcess:
        kind, _, number = name.partition("-")
        if kind == "generator":
            index = int(number)
            links = [
                EnvironmentLink(name, found.by_name[name].one(Environment), None) for name in played
            ]
            make = partial(
                SimulatedReplica,
                setting,
                index=index,
                hosts=cluster.hosts_of(index),
                environments=Environments((*links,), 0, context_of(config)) if links else None,
            )
            return cluster.spawn(name, make, cluster.costs_of(index), cluster.replica_device)
        if kind == "collector":
            spec = collector_spec(config, found.generators, int(number))
            return cluster.spawn(name, lambda costs, cores: _collector(spec))
        if kind == ENVIRONMENT:
            return spawn(name, SimulatedEnvironment)
        stage = found.stage_of[name]
        if stage.name == SCORE:
            return spawn(name, SimulatedScorer)
        if stage.is_model:
            return spawn(name, SimulatedModel, device=device)
        return spawn(name, SimulatedStage, stage=stage)

    async def start(name: str) -> SimulatedProcess:
        await asyncio.sleep(cluster.costs.start_s)
        return spawn_named(name)

    storage = cluster.spawn("storage-0", make_storage or partial(SimulatedStorage, setting))
    found = Executors(
        storage=Store([storage.one(Storage)]),
        by_name={storage.name: storage},
        stage_of={name_executor(stage): stage for stage in graph.between},
        start=start,
    )
    replicas = map("generator-{}".format, range(config.generator.num_replicas))
    collectors = map("collector-{}".format, range(config.generator.num_collectors))
    for name in (*played, *replicas, *collectors, *found.stage_of):
        found.by_name[name] = spawn_named(name)
    trainer = partial(SimulatedTrainer, setting, hosts=hosts["trainer"][:1], device=device)
    found.by_name["trainer"] = cluster.spawn("trainer", trainer)
    return found


def _collector(spec: CollectorSpec) -> CollectorWorker:
    """Return a real collector."""
    return CollectorWorker(spec, rank=0, num_ranks=1, spans=Spans("collector", None))
