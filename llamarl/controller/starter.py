"""The executors of a run: which there are, where they sit, the specs with which they are
constructed, and how all are started and ended at once.

One executor runs each stage of the graph, except settle, which the controller runs."""

import asyncio
import logging
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, product
from pathlib import Path

from llamarl.cluster import Cluster, Executor, make_cluster
from llamarl.core.config import Config, LoraConfig
from llamarl.core.config.generator import generator_of
from llamarl.core.config.rank_assignment import (
    Device,
    assign,
    companions,
    far_sites,
    home_hosts,
    num_storage_units,
    place_generator,
)
from llamarl.core.errors import ExecutorLost, all_at_once
from llamarl.core.faces import Environment, GeneratorReplica, Storage, Worker
from llamarl.generator.specs import CollectorSpec, GeneratorSpec, Resettable
from llamarl.metrics.console import ReportState
from llamarl.model.architecture import Architecture, read_any_architecture
from llamarl.model.inventory import replays_routing
from llamarl.publish.layout import kinds_of
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.prompt_inputs import context_of
from llamarl.scoring.agent.command import read_command
from llamarl.scoring.environment import EnvironmentLink, Environments, EnvironmentSpec
from llamarl.scoring.external import ExternalSpec
from llamarl.scoring.loader import SOCKETS
from llamarl.scoring.sandbox.containers import limits_of
from llamarl.scoring.stage_worker import StageSpec
from llamarl.scoring.stages import (
    ENVIRONMENT,
    EXECUTORS,
    GENERATE,
    SCORE,
    TRAIN,
    FrozenModel,
    Graph,
    Stage,
)
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec
from llamarl.trainer.specs import ReferenceSpec, TrainerSpec

log = logging.getLogger(__name__)

WARN_SHARE = 0.1  # of the limit of a start


@dataclass(kw_only=True)
class Executors:
    """The executors of a run, started.

    `by_name` has the present processes of each executor by its name, such as generator-0; when they
    are lost, others take their place there. `stage_of` has the stages between generate and settle,
    by the name of the executor that runs each. `start` starts new processes of the executor of a
    name.
    """

    storage: Store
    by_name: dict[str, Executor]
    stage_of: Mapping[str, Stage]
    start: Callable[[str], Awaitable[Executor]]
    places: dict[str, list[Device]] = field(default_factory=dict)
    """The device of each rank by executor name, also of generators that are yet to be started."""
    add_host: Callable[[str], Awaitable[int]] | None = None
    """Attaches the host at an address and returns its index."""

    @property
    def generators(self) -> dict[int, Executor]:
        """The generators by replica number."""
        return self._numbered("generator")

    @property
    def collectors(self) -> list[Executor]:
        """The collectors in the order of their numbers."""
        return [each for name, each in self.by_name.items() if name.startswith("collector-")]

    @property
    def trainer(self) -> Executor | None:
        """The trainer; None in a run that does not train."""
        return self.by_name.get("trainer")

    @property
    def environments(self) -> dict[int, Executor]:
        """The environment executors by number; none in a run without episodes."""
        return self._numbered(ENVIRONMENT)

    def renewals(self, new: Executor) -> Iterator[Awaitable[None]]:
        """Yield the calls that tell a new replica of all environments, or all replicas of a new
        environment."""
        for replica, each in product(self.generators.values(), self.environments.values()):
            if new in (replica, each):
                yield replica.one(GeneratorReplica).renew_environment(
                    each.name, each.one(Environment)
                )

    def _numbered(self, kind: str) -> dict[int, Executor]:
        found = self.by_name.items()
        return {int(n.partition("-")[2]): e for n, e in found if n.startswith(f"{kind}-")}


Spec = (
    GeneratorSpec
    | TrainerSpec
    | ReferenceSpec
    | StageSpec
    | ExternalSpec
    | EnvironmentSpec
    | StorageSpec
    | CollectorSpec
)


def storage_specs(config: Config, run_dir: str) -> list[StorageSpec]:
    """Return the specs of all storage units."""
    return [
        StorageSpec(
            unit=unit,
            archive_folder=f"{run_dir}/archive",
            socket=f"{run_dir}/.rendezvous-storage/{unit}" if has_sockets(config) else None,
            spill_folder=f"{run_dir}/spill",
            max_bytes=config.experience.max_bytes // config.experience.units_per_host,
        )
        for unit in range(num_storage_units(config))
    ]


def has_sockets(config: Config) -> bool:
    """Return whether executors of one host meet at sockets; otherwise all run in one process."""
    return config.cluster.backend == "monarch"


@dataclass(frozen=True)
class Specs:
    """Makes the specs of all executors except storage units. These are reached through `storage`,
    and through `far_storage` by replicas at other sites. `names` are the executors that run, and
    `places` has the device of each of their ranks."""

    config: Config
    inputs: Inputs
    run_dir: str
    names: Collection[str]
    places: dict[str, list[Device]]
    storage: Store
    far_storage: Store

    def of(self, name: str, executors: Executors) -> Spec:
        """Return the spec of an executor, which may be started at any time, with the replicas and
        environments that there are then."""
        kind, _, number = name.partition("-")
        if kind == "collector":
            return collector_spec(self.config, executors.generators, int(number))
        if kind == "generator":
            return self._generator(int(number), executors.environments)
        if kind == ENVIRONMENT:
            return self._environment(int(number))
        return self._trainer() if name == "trainer" else self._stage(executors.stage_of[name])

    def _trainer(self) -> TrainerSpec:
        config, inputs = self.config, self.inputs
        return TrainerSpec(
            checkpoint=inputs.checkpoint,
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            rendezvous=f"{self.run_dir}/.rendezvous-trainer-{_new_id()}",
            config=config.trainer,
            algorithm=config.algorithm,
            sampling=config.sampling,
            weights=config.weights,
            placement=config.placement,
            storage=self.storage,
            run_dir=self.run_dir,
            num_steps=config.most_steps,
            seed=config.seed,
            adapter=inputs.adapter,
            kinds=kinds_of(config.generator, inputs.architecture),
            replays_routing=replays_routing(config, inputs.architecture),
        )

    def _generator(self, replica: int, played: Mapping[int, Executor]) -> GeneratorSpec:
        """Return the spec of a replica that takes turns with these environments."""
        config, run_id, name = self.config, _new_id(), f"generator-{replica}"
        place = self.places.get(name) or place_generator(config, replica)
        self.places.setdefault(name, place)
        host = place[0].host
        storage = self.far_storage if host in far_sites(config) else self.storage
        is_near = {i: self.places[each.name][0].host == host for i, each in played.items()}
        links = tuple(
            EnvironmentLink(
                each.name,
                each.one(Environment),
                self._environment_socket(index) if is_near[index] else None,
            )
            for index, each in played.items()
        )
        near = [*compress(range(len(links)), is_near.values()), replica % max(1, len(links))]
        return GeneratorSpec(
            replica=replica,
            checkpoint=self.inputs.checkpoint,
            load_weights=EXECUTORS[TRAIN] not in self.names,
            tokenizer=self.inputs.tokenizer_folder,
            lora=config.trainer.lora,
            base_dtype=config.trainer.compute_dtype,
            records_experts=replays_routing(config, self.inputs.architecture),
            num_kept_ids=config.sampling.top_k,
            adapter=self.inputs.adapter,
            config=generator_of(config.generator, replica),
            weights=config.weights,
            placement=config.placement,
            storage=storage.signed(f"{name}/{run_id}"),
            run_dir=self.run_dir,
            run_id=run_id,
            environments=Environments(links, near[0], context_of(config)) if links else None,
        )

    def _can_replay(self, frozen: FrozenModel) -> bool:
        """Return whether a frozen model can send tokens to the experts that generators record."""
        config, policy = self.config, self.inputs.architecture
        if not replays_routing(config, policy):
            return False
        model = read_any_architecture(Path(config.recipe_dir, frozen.checkpoint))
        if not (isinstance(policy, Architecture) and isinstance(model, Architecture)):
            return False
        a, b = policy.experts, model.experts
        if a is None or b is None or policy.sparse_layers != model.sparse_layers:
            return False
        return (a.num_experts, a.num_chosen) == (b.num_experts, b.num_chosen)

    def _environment(self, index: int) -> EnvironmentSpec:
        return environment_spec(self.config, self.inputs, self._environment_socket(index))

    def _environment_socket(self, index: int) -> str | None:
        folder = f"{self.run_dir}/.rendezvous-environment"
        return f"{folder}/{index}" if has_sockets(self.config) else None

    def _stage(self, stage: Stage) -> Spec:
        config, inputs = self.config, self.inputs
        storage = self.storage.signed(f"{stage.name}/{_new_id()}")
        if isinstance(stage.run, FrozenModel):
            return ReferenceSpec(
                checkpoint=os.path.abspath(Path(config.recipe_dir, stage.run.checkpoint)),
                column=stage.writes[0].name,
                rendezvous=f"{self.run_dir}/.rendezvous-{stage.name}-{_new_id()}",
                config=replace(config.trainer, lora=LoraConfig()),
                sampling=config.sampling,
                storage=storage,
                replays_routing=self._can_replay(stage.run),
            )
        if stage.is_external:
            units = storage_specs(config, self.run_dir)
            return ExternalSpec(
                stage=stage,
                socket=f"{self.run_dir}/{SOCKETS}/{stage.name}",
                units=tuple((f"storage-{unit.unit}", str(unit.socket)) for unit in units),
                tokenizer=inputs.tokenizer_folder,
                storage=storage,
            )
        return StageSpec(
            stage=stage,
            numbers=inputs.graph.numbers & {*stage.reads},
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            storage=storage,
            reward=config.reward if stage.name == SCORE else None,
            has_openings=any(kind.is_kept for kind in inputs.kinds.values()),
        )


def environment_spec(config: Config, inputs: Inputs, socket: str | None) -> EnvironmentSpec:
    """Return the spec of an executor of environments, to which generators on its host connect at
    this socket."""
    agent = None
    if config.environment.command:
        contained = config.reward.sandbox
        agent = read_command(config.environment, config.recipe_dir, contained=contained)
    return EnvironmentSpec(
        agent=agent,
        config=config.environment,
        kinds=inputs.kinds,
        limits=limits_of(config.reward),
        task_source=inputs.task_source,
        data=config.data,
        tokenizer=inputs.tokenizer_folder,
        socket=socket,
        rewards=config.reward.episode_rewards,
    )


def collector_spec(
    config: Config, generators: Mapping[int, Executor], number: int
) -> CollectorSpec:
    """Return the spec of a collector, which asks an equal share of the replicas."""
    num = config.generator.num_collectors
    return CollectorSpec(
        generators={
            i: executor.one(GeneratorReplica)
            for i, executor in generators.items()
            if i % num == number
        }
    )


def _new_id() -> str:
    """Return an id for files that no earlier processes of the run used."""
    return uuid.uuid4().hex[:8]


def name_executors(graph: Graph) -> set[str]:
    """Return the names of the executors besides storage, such as generator, trainer and scorer;
    `spawn_executors` starts some or all of them."""
    names = {EXECUTORS[GENERATE], EXECUTORS[TRAIN], *map(name_executor, graph.between)}
    return names | ({ENVIRONMENT} if graph.has_episodes else set())


@asynccontextmanager
async def running_cluster(config: Config, run_dir: str) -> AsyncIterator[Cluster]:
    """Provide the cluster of a run. At the end its processes are stopped, and the files through
    which ranks met are removed."""
    cluster = make_cluster(
        config.cluster,
        spans_folder=f"{run_dir}/spans",
        logs_folder=f"{run_dir}/logs",
    )
    try:
        yield cluster
    finally:
        await cluster.stop()
        for path in Path(run_dir).glob(".rendezvous-*"):  # a killed run's too
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def name_executor(stage: Stage) -> str:
    """Return the name of the executor that runs a stage; for a stage of the recipe's own it is the
    stage's name."""
    return EXECUTORS.get(stage.name, stage.name)


def place_executors(config: Config, graph: Graph) -> dict[str, list[Device]]:
    """Return the device of each rank, by executor name.

    A frozen model sits on the trainer's devices, the recipe's own code on one host of the trainer's
    site after another, environments on each host with a replica. ValueError, with the numbers, if
    the hosts have too few GPUs.
    """
    places, hosts = assign(config) | companions(config), home_hosts(config)
    for number, stage in enumerate(stage for stage in graph.between if stage.name != SCORE):
        on_host = [Device(host=hosts[number % len(hosts)], gpu=None)]
        places[name_executor(stage)] = places["trainer"] if stage.is_model else on_host
    if graph.has_episodes:
        replicas = (devices for name, devices in places.items() if name.startswith("generator-"))
        for number, host in enumerate(sorted({devices[0].host for devices in replicas})):
            places[f"{ENVIRONMENT}-{number}"] = [Device(host=host, gpu=None)]
    return places


@dataclass(frozen=True)
class Starter:
    """Starts executors in processes of `cluster`, each rank on the device that `places` has for
    it."""

    cluster: Cluster
    places: dict[str, list[Device]]
    timeout_s: float
    started: list[Executor] = field(default_factory=list)

    async def start(self, name: str, spec: Spec, report: ReportState) -> Executor:
        """Spawn the executor and let it load what it needs; if it cannot, its processes end.

        ExecutorLost if that takes longer than `timeout_s`.
        """
        doing, places = ["starting its processes"], self.places[name]

        def warn() -> None:
            words = "%s is still %s after %g s; after cluster.start_timeout_s=%g it counts as lost"
            log.warning(words, name, doing[-1], WARN_SHARE * self.timeout_s, self.timeout_s)

        warning = asyncio.get_running_loop().call_later(WARN_SHARE * self.timeout_s, warn)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                report(name, "starting")
                executor = await self.cluster.spawn(name, spec.executor, spec, len(places), places)
                self.started.append(executor)
                _sign(executor, spec)
                doing.append("loading")
                report(name, "loading")
                try:
                    await executor.all(Worker.start)
                except BaseException:
                    await executor.stop()
                    raise
        except TimeoutError as error:
            if not limit.expired():  # the executor's own
                raise
            reason = f"still {doing[-1]} after {self.timeout_s:g} s (cluster.start_timeout_s)"
            raise ExecutorLost(name, None, reason) from error
        finally:
            warning.cancel()
        report(name, "ready")
        return executor

    async def start_all(
        self, specs: Mapping[str, Spec], report: ReportState, kept: Mapping[str, Executor] = {}
    ) -> dict[str, Executor]:
        """Start the executors of these names; generators that were `kept` go on."""
        starts = (self._go_on(name, spec, report, kept) for name, spec in specs.items())
        return dict(zip(specs, await all_at_once(starts), strict=True))

    async def _go_on(
        self, name: str, spec: Spec, report: ReportState, kept: Mapping[str, Executor]
    ) -> Executor:
        """Give a generator that was `kept` its storage; start an executor that was not."""
        if isinstance(spec, GeneratorSpec) and (executor := kept.get(name)) is not None:
            try:
                await executor.one(Resettable).use(spec.storage, spec.environments)
                _sign(executor, spec)
                return executor
            except Exception as error:  # noqa: BLE001 - whatever it is, a new one does without
                log.warning("%s is started again: %s", name, error)
                await executor.stop()
        return await self.start(name, spec, report)


async def end_others(executors: Executors, replicas: Collection[int]) -> Executors:
    """End all executors except these replicas, which forget their session; return those that are
    left.

    The replicas forget it first, since a message to a process that is gone would end them. A
    replica that cannot forget it is ended too.
    """
    asking = (collector.one(Worker).close() for collector in executors.collectors)
    await asyncio.gather(*asking, return_exceptions=True)  # one that is lost asks nothing
    wanted = {f"generator-{index}" for index in replicas}
    those = [executor for name, executor in executors.by_name.items() if name in wanted]
    is_reset = await asyncio.gather(*map(_reset, those))
    kept = {executor.name: executor for executor in compress(those, is_reset)}
    others = (executor for name, executor in executors.by_name.items() if name not in kept)
    await asyncio.gather(*(executor.stop() for executor in others))
    return replace(executors, by_name=kept)


async def _reset(executor: Executor) -> bool:
    try:
        await executor.one(Resettable).reset()
        return True
    except Exception as error:  # noqa: BLE001 - whatever it is, a new one does without
        log.warning("%s is started again: %s", executor.name, error)
        return False


async def spawn_executors(
    config: Config,
    inputs: Inputs,
    cluster: Cluster,
    run_dir: str,
    *,
    names: Collection[str],
    report: ReportState,
    replicas: Collection[int] | None = None,
    before: Executors | None = None,
) -> Executors:
    """Start storage and the executors of these `names` (of `name_executors`), all at once; with
    generators, also the environments that their rollouts take turns with. Without the trainer the
    generators load the checkpoint's weights as version 0.

    `replicas` are the replica numbers to start (None: the recipe's). Generators of an earlier
    session that are left of the executors `before`, and were reset, go on. If an executor does not
    start, or is lost meanwhile, none that was started here is left.
    """
    graph = inputs.graph
    if replicas is None:
        replicas = range(config.generator.num_replicas if EXECUTORS[GENERATE] in names else 0)
    if EXECUTORS[GENERATE] in names and graph.has_episodes:
        names = {*names, ENVIRONMENT}
    earlier, kept = ({}, {}) if before is None else (before.places, before.by_name)
    places = place_executors(config, graph)
    generators = {f"generator-{index}": index for index in replicas}
    for name, index in generators.items():
        places[name] = earlier.get(name) or places.get(name) or place_generator(config, index)
    starter = Starter(cluster, places, config.cluster.start_timeout_s)
    log_state = partial(log.info, "%s: %s")
    try:
        unit_specs = {f"storage-{each.unit}": each for each in storage_specs(config, run_dir)}
        units = await starter.start_all(unit_specs, report)
        storages = (_store(units, unit_specs, is_far) for is_far in (False, True))
        specs = Specs(config, inputs, run_dir, names, places, *storages)
        stages = {name_executor(stage): stage for stage in graph.between}
        found = Executors(
            storage=specs.storage,
            by_name=units,
            stage_of={name: stage for name, stage in stages.items() if name in names},
            start=lambda name: starter.start(name, specs.of(name, found), log_state),
            places=places,
            add_host=cluster.add_host,
        )
        played = [name for name in places if name.startswith(f"{ENVIRONMENT}-")]
        trainer = ["trainer"] if EXECUTORS[TRAIN] in names else []
        num_collectors = config.generator.num_collectors if trainer else 0
        for some in (  # some call those before
            played if ENVIRONMENT in names else [],
            [*generators, *found.stage_of, *trainer],
            [f"collector-{number}" for number in range(num_collectors)],
        ):
            of_some = {name: specs.of(name, found) for name in some}
            found.by_name |= await starter.start_all(of_some, report, kept)
        return found
    except BaseException:
        await asyncio.gather(*(executor.stop() for executor in starter.started))
        raise


def _sign(executor: Executor, spec: Spec) -> None:
    """Note the writer's name with which these processes sign what they write."""
    storage = getattr(spec, "storage", None)
    if isinstance(storage, Store):
        executor.writer = storage.writer


def _store(units: dict[str, Executor], specs: dict[str, StorageSpec], is_far: bool) -> Store:
    """Return the client of all units; with `is_far`, the one for executors at other sites."""

    calls = {name: unit.one(Storage) for name, unit in units.items()}
    sockets = {name: specs[name].socket for name in units}
    return Store(
        [
            each if (socket := sockets[name]) is None else Unit(name, each, socket, is_far=is_far)
            for name, each in calls.items()
        ]
    )
