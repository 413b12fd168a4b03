"""The executors of a run: which there are, where they sit, and how all are started and ended at
once.

One executor runs each stage of the graph, except settle, which the controller runs."""

import asyncio
import logging
import shutil
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, product
from pathlib import Path

from llamarl.cluster import LOSS_GRACE_S, Cluster, Executor, make_cluster
from llamarl.controller.specs import Spec, Specs, collector_spec, storage_specs
from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import (
    Device,
    assign,
    companions,
    home_hosts,
    place_generator,
)
from llamarl.core.errors import ExecutorLost, all_at_once
from llamarl.core.faces import Environment, GeneratorReplica, Storage, Worker
from llamarl.generator.specs import GeneratorSpec, Resettable
from llamarl.metrics.console import ReportState
from llamarl.recipe.inputs import Inputs
from llamarl.scoring.stages import ENVIRONMENT, EXECUTORS, GENERATE, SCORE, TRAIN, Graph, Stage
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec

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
    def stages(self) -> dict[Stage, Executor]:
        """The executors of the stages between generate and settle, by stage."""
        return {stage: self.by_name[name] for name, stage in self.stage_of.items()}

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

    def hosts_of(self, name: str) -> list[int]:
        """Return the host of each rank of an executor."""
        return [device.host for device in self.places.get(name, ())]


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
                await self._load(executor)
        except TimeoutError as error:
            if not limit.expired():  # the executor's own
                raise
            reason = f"still {doing[-1]} after {self.timeout_s:g} s (cluster.start_timeout_s)"
            raise ExecutorLost(name, None, reason) from error
        finally:
            warning.cancel()
        report(name, "ready")
        return executor

    async def _load(self, executor: Executor) -> None:
        try:
            await executor.all(Worker.start)
        except BaseException:
            await executor.stop()
            raise

    async def start_all(
        self, specs: Mapping[str, Spec], report: ReportState, kept: Mapping[int, Executor] = {}
    ) -> dict[str, Executor]:
        """Start the executors of these names; generators that were `kept` go on."""
        starts = (self._go_on(name, spec, report, kept) for name, spec in specs.items())
        return dict(zip(specs, await all_at_once(starts), strict=True))

    async def _go_on(
        self, name: str, spec: Spec, report: ReportState, kept: Mapping[int, Executor]
    ) -> Executor:
        """Give the generator of `spec`, if it was `kept`, its storage; start an executor that was
        not."""
        executor = kept.get(spec.replica) if isinstance(spec, GeneratorSpec) else None
        if executor is not None and isinstance(spec, GeneratorSpec):
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


async def find_losses(executors: Collection[Executor]) -> list[ExecutorLost]:
    """Return the losses of these executors. It waits up to LOSS_GRACE_S for the first, since an
    error that a loss causes may come before the loss is noticed."""
    if not executors:
        return []
    watches = [asyncio.ensure_future(executor.watch()) for executor in executors]
    done, pending = await asyncio.wait(
        watches, timeout=LOSS_GRACE_S, return_when=asyncio.FIRST_COMPLETED
    )
    for watch in pending:
        watch.cancel()
    errors = [watch.exception() for watch in done]
    return [error for error in errors if isinstance(error, ExecutorLost)]


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
    if replicas is None:
        replicas = range(config.generator.num_replicas if EXECUTORS[GENERATE] in names else 0)
    if EXECUTORS[GENERATE] in names and inputs.graph.has_episodes:
        names = {*names, ENVIRONMENT}
    earlier, kept = ({}, {}) if before is None else (before.places, before.generators)
    places = place_executors(config, inputs.graph)
    generators = {f"generator-{index}": index for index in replicas}
    for name, index in generators.items():
        places[name] = earlier.get(name) or places.get(name) or place_generator(config, index)
    starter = Starter(cluster, places, config.cluster.start_timeout_s)
    try:
        unit_specs = {f"storage-{each.unit}": each for each in storage_specs(config, run_dir)}
        units = await starter.start_all(unit_specs, report)
        storages = (_store(units, unit_specs, is_far) for is_far in (False, True))
        specs = Specs(config, inputs, run_dir, names, *storages)
        return await _spawn(starter, specs, units, [*generators], report, kept)
    except BaseException:
        await asyncio.gather(*(executor.stop() for executor in starter.started))
        raise


async def _spawn(
    starter: Starter,
    specs: Specs,
    units: dict[str, Executor],
    generators: Sequence[str],
    report: ReportState,
    kept: Mapping[int, Executor],
) -> Executors:
    config, graph, has_trainer = specs.config, specs.inputs.graph, EXECUTORS[TRAIN] in specs.names
    stages = {name_executor(stage): stage for stage in graph.between}
    found = Executors(
        storage=specs.storage,
        by_name=units,
        stage_of={name: stage for name, stage in stages.items() if name in specs.names},
        start=lambda name: starter.start(name, spec_of(name), partial(log.info, "%s: %s")),
        places=starter.places,
        add_host=starter.cluster.add_host,
    )

    def spec_of(name: str) -> Spec:
        """Return the spec of an executor, which may be started at any time, with the replicas that
        there are then."""
        kind, _, number = name.partition("-")
        if kind == "collector":
            return collector_spec(config, found.generators, int(number))
        if kind == "generator":
            place = starter.places.get(name) or place_generator(config, int(number))
            starter.places.setdefault(name, place)
            played = found.environments
            hosts = {i: starter.places[f"{ENVIRONMENT}-{i}"][0].host for i in played}
            own = specs.environments(played, hosts, int(number), place[0].host)
            return specs.generator(int(number), place, own)
        if kind == ENVIRONMENT:
            return specs.environment(int(number))
        return specs.trainer() if name == "trainer" else specs.stage(found.stage_of[name])

    if ENVIRONMENT in specs.names:  # generators call them
        names = [name for name in starter.places if name.startswith(f"{ENVIRONMENT}-")]
        found.by_name |= await starter.start_all({name: spec_of(name) for name in names}, report)
    names = [*generators, *found.stage_of, *(["trainer"] if has_trainer else [])]
    found.by_name |= await starter.start_all({name: spec_of(name) for name in names}, report, kept)
    num_collectors = config.generator.num_collectors if has_trainer else 0
    names = [f"collector-{number}" for number in range(num_collectors)]
    found.by_name |= await starter.start_all({name: spec_of(name) for name in names}, report)
    return found


def _sign(executor: Executor, spec: Spec) -> None:
    """Note the writer's name with which these processes sign what they write."""
    storage = getattr(spec, "storage", None)
    if isinstance(storage, Store):
        executor.writer = storage.writer


def _store(units: dict[str, Executor], specs: dict[str, StorageSpec], is_far: bool) -> Store:
    """Return the client of all units; with `is_far`, the one for executors at other sites."""

    def client(name: str, calls: Storage) -> Storage:
        socket = specs[name].socket
        return calls if socket is None else Unit(name, calls, socket, is_far=is_far)

    return Store([client(name, unit.one(Storage)) for name, unit in units.items()])
