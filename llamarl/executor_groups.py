"""The executors of a run: which there are, where they sit, and starting them all at once.

Owns: their start and their places. Does not own: what each is constructed with
(`executor_specs.py`), processes (`cluster/`), or what drives the executors (`build.py`). Invariant:
one executor runs each stage of the graph, but for settle, which the controller runs.
"""

import asyncio
import logging
import shutil
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.cluster import Cluster, ExecutorGroup, make_cluster
from llamarl.config import Config
from llamarl.config.rank_assignment import (
    Device,
    assign,
    companions,
    home_hosts,
    place_generator,
)
from llamarl.environments.rewards.reward_workers import try_loading
from llamarl.errors import GroupLost, unwrap
from llamarl.executor_specs import (
    collector_specs,
    generator_spec,
    make_specs,
    stage_spec,
    storage_specs,
)
from llamarl.executors.specs import GeneratorSpec, Spec, StorageSpec
from llamarl.experience.graph import EXECUTORS, GENERATE, SCORE, TRAIN, Graph, Stage
from llamarl.experience.store import Store
from llamarl.experience.unit import Unit
from llamarl.metrics.startup import ReportState
from llamarl.protocols import Storage
from llamarl.recipe.inputs import Inputs

log = logging.getLogger(__name__)

WARN_SHARE = 0.1  # of the limit of a start


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The executors of a run, started; without one of the `vital` ones it cannot go on.

    `stages` are those between generate and settle, by the stage that each runs. `start_generator`
    starts the generator of an index that has no processes, `start_stage` a stage's executor that
    was lost so many times before.
    """

    vital: list[ExecutorGroup]
    storage: Store
    generators: dict[int, ExecutorGroup]
    stages: dict[Stage, ExecutorGroup]
    trainer: ExecutorGroup | None
    start_generator: Callable[[int], Awaitable[ExecutorGroup]]
    start_stage: Callable[[Stage, int], Awaitable[ExecutorGroup]] | None = None
    """None: what is lost is not started again alone."""
    places: dict[str, list[Device]] = field(default_factory=dict)
    """By executor name, the device of each rank; also of generators that are yet to be started."""
    add_host: Callable[[str], Awaitable[int]] | None = None
    """Attaches the host at an address; its index."""
    collectors: list[ExecutorGroup] = field(default_factory=list)

    @property
    def beside_generators(self) -> list[ExecutorGroup]:
        """All the others, as they are now."""
        groups = dict.fromkeys([*self.vital, *self.stages.values()])
        return [group for group in groups if group not in self.generators.values()]

    def heals(self, stage: Stage) -> bool:
        """Whether the stage's executor is started again alone: not one with consumers outside,
        whose connections end with it."""
        return self.start_stage is not None and not stage.is_external

    def hosts_of(self, name: str) -> list[int]:
        """The host of each rank of an executor."""
        return [device.host for device in self.places.get(name, ())]


@dataclass(frozen=True)
class KeptGenerators:
    """What a session leaves to the next one: the `places` of all replicas that it had, by executor
    name, and those of their `groups` that go on."""

    groups: Mapping[int, ExecutorGroup]
    places: Mapping[str, list[Device]]


def name_parts(graph: Graph) -> set[str]:
    """What a run consists of besides storage: names that `spawn_executors` starts some or all of,
    such as generator, trainer and scorer."""
    return {EXECUTORS[GENERATE], EXECUTORS[TRAIN], *map(name_executor, graph.between)}


@asynccontextmanager
async def running_cluster(config: Config, run_dir: str) -> AsyncIterator[Cluster]:
    """The cluster of a run. At the end its processes are stopped, and the files through which ranks
    met are removed."""
    cluster = make_cluster(
        config.cluster,
        spans_folder=f"{run_dir}/spans",
        logs_folder=f"{run_dir}/logs",
        spans_bytes=config.metrics.spans_bytes,
        num_processes=sum(map(len, assign(config).values())),
    )
    try:
        yield cluster
    finally:
        await cluster.stop()
        for path in Path(run_dir).glob(".rendezvous-*"):  # a killed run's too
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def name_executor(stage: Stage) -> str:
    """The executor that runs a stage: one of the recipe's own has the stage's name."""
    return EXECUTORS.get(stage.name, stage.name)


def place_executors(config: Config, graph: Graph) -> dict[str, list[Device]]:
    """Executor name -> the device of each of its ranks.

    A frozen model sits on the trainer's devices, the recipe's own code on one host of the
    trainer's site after another.
    ValueError, with the numbers, if the hosts have too few GPUs.
    """
    places, hosts = assign(config) | companions(config), home_hosts(config)
    for number, stage in enumerate(stage for stage in graph.between if stage.name != SCORE):
        on_trainer = places["trainer"]
        on_host = [Device(host=hosts[number % len(hosts)], gpu=None)]
        places[name_executor(stage)] = on_trainer if stage.is_model else on_host
    return places


@dataclass(frozen=True)
class Starter:
    """Starts executors in processes of `cluster`, each of their ranks where `places` has it."""

    cluster: Cluster
    places: dict[str, list[Device]]
    timeout_s: float
    started: list[ExecutorGroup] = field(default_factory=list)

    async def spawn(self, name: str, spec: Spec) -> ExecutorGroup:
        """Only the processes."""
        places = self.places[name]
        group = await self.cluster.spawn(name, spec.executor, spec, len(places), places)
        self.started.append(group)
        return group

    async def start(self, name: str, spec: Spec, report: ReportState) -> ExecutorGroup:
        """Spawn the executor and let it load what it needs; if it cannot, its processes end.

        GroupLost if that takes longer than `timeout_s`.
        """
        doing = ["starting its processes"]

        def warn() -> None:
            words = "%s is still %s after %g s; after cluster.start_timeout_s=%g it counts as lost"
            log.warning(words, name, doing[-1], WARN_SHARE * self.timeout_s, self.timeout_s)

        warning = asyncio.get_running_loop().call_later(WARN_SHARE * self.timeout_s, warn)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                report(name, "starting")
                group = await self.spawn(name, spec)
                doing.append("loading")
                report(name, "loading")
                await self._load(group)
        except TimeoutError as error:
            if not limit.expired():  # the executor's own
                raise
            reason = f"still {doing[-1]} after {self.timeout_s:g} s (cluster.start_timeout_s)"
            raise GroupLost(name, None, reason) from error
        finally:
            warning.cancel()
        report(name, "ready")
        return group

    async def _load(self, group: ExecutorGroup) -> None:
        try:
            await group.call_all.start()
        except BaseException:
            await group.stop()
            raise

    async def go_on(
        self, name: str, spec: Spec, report: ReportState, kept: Mapping[int, ExecutorGroup]
    ) -> ExecutorGroup:
        """Give the generator of `spec`, if it was `kept`, its storage; what was not is started."""
        group = kept.get(spec.replica) if isinstance(spec, GeneratorSpec) else None
        if group is not None and isinstance(spec, GeneratorSpec):
            try:
                await group.call_one.use(spec.storage)
                return group
            except Exception as error:  # noqa: BLE001 - whatever it is, a new one does without
                log.warning("%s is started again: %s", name, error)
                await group.stop()
        return await self.start(name, spec, report)


def log_state(name: str, state: str) -> None:
    """Report what becomes of an executor that is started while the run goes on."""
    log.info("%s: %s", name, state)


async def spawn_executors(
    config: Config,
    inputs: Inputs,
    cluster: Cluster,
    run_dir: str,
    *,
    parts: Collection[str],
    report: ReportState,
    kept: KeptGenerators | None = None,
) -> Executors:
    """Start storage and these parts (see `name_parts`), all at once. Without the trainer the
    generators load the checkpoint's weights as version 0.

    Generators of an earlier session that are `kept`, and were reset, go on. A task.py that does not
    load ends this before any other executor starts. If an executor does not start, or is lost
    meanwhile, none that was started here is left.
    """
    if "task" in config.reward.functions and EXECUTORS[SCORE] in parts:
        await try_loading(config.reward, inputs.task_source)
    if kept is None:
        replicas = range(config.generator.num_replicas if EXECUTORS[GENERATE] in parts else 0)
        kept = KeptGenerators({}, {f"generator-{i}": place_generator(config, i) for i in replicas})
    places = {**place_executors(config, inputs.graph), **kept.places}
    starter = Starter(cluster, places, config.cluster.start_timeout_s)
    try:
        return await _spawn(config, inputs, starter, run_dir, parts, report, kept)
    except BaseException:
        await asyncio.gather(*(group.stop() for group in starter.started))
        raise


async def _spawn(
    config: Config,
    inputs: Inputs,
    starter: Starter,
    run_dir: str,
    parts: Collection[str],
    report: ReportState,
    kept: KeptGenerators,
) -> Executors:
    async def start_generator(replica: int) -> ExecutorGroup:
        name = f"generator-{replica}"
        starter.places.setdefault(name, place_generator(config, replica))
        spec = generator_spec(
            config, inputs, storage, far_storage, run_dir, parts, replica, starter.places[name]
        )
        return await starter.start(name, spec, log_state)

    async def start_stage(stage: Stage, num_losses: int) -> ExecutorGroup:
        spec = stage_spec(stage, config, inputs, storage, run_dir, num_losses)
        return await starter.start(name_executor(stage), spec, log_state)

    unit_specs = storage_specs(config, run_dir)
    units = await _all(starter.start(f"storage-{each.unit}", each, report) for each in unit_specs)
    storage, far_storage = (_store(units, unit_specs, is_far) for is_far in (False, True))
    stages = [stage for stage in inputs.graph.between if name_executor(stage) in parts]
    specs = make_specs(config, inputs, storage, far_storage, run_dir, parts, kept.places)
    for stage in stages:
        specs[name_executor(stage)] = stage_spec(stage, config, inputs, storage, run_dir)
    started = await _all(
        starter.go_on(name, spec, report, kept.groups) for name, spec in specs.items()
    )
    groups = dict(zip(specs, started, strict=True))
    generators = {
        spec.replica: groups.pop(name)
        for name, spec in specs.items()
        if isinstance(spec, GeneratorSpec)
    }
    shares = collector_specs(config, generators) if EXECUTORS[TRAIN] in parts else []
    collectors = await _all(starter.spawn(f"collector-{i}", s) for i, s in enumerate(shares))
    has_restarts = EXECUTORS[TRAIN] in parts and config.cluster.max_restarts > 0
    found = Executors(
        vital=[*units, *collectors, *_vital_generators(config, generators)],
        storage=storage,
        generators=generators,
        collectors=collectors,
        stages={stage: groups[name_executor(stage)] for stage in stages},
        trainer=groups.get("trainer"),
        start_generator=start_generator,
        start_stage=start_stage if has_restarts else None,
        places=starter.places,
        add_host=starter.cluster.add_host,
    )
    found.vital.extend(group for stage, group in found.stages.items() if not found.heals(stage))
    found.vital.extend([found.trainer] if found.trainer is not None else [])
    return found


async def _all(starts: Iterable[Coroutine[Any, Any, ExecutorGroup]]) -> list[ExecutorGroup]:
    """What these return; if one fails, the others are cancelled and end before that is raised."""
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(start) for start in starts]
    except BaseExceptionGroup as errors:
        failed = unwrap(errors)
    if failed is not None:
        raise failed
    return [task.result() for task in started]


def _vital_generators(
    config: Config, generators: Mapping[int, ExecutorGroup]
) -> list[ExecutorGroup]:
    """Colocated, a generator that starts needs a device that the trainer may have, so it starts
    with the trainer; disaggregated, it is started again alone."""
    restarts = config.placement.colocated and config.cluster.max_restarts > 0
    return list(generators.values()) if restarts else []


def _store(units: list[ExecutorGroup], specs: list[StorageSpec], is_far: bool) -> Store:
    """The client of all units; `is_far`, for executors at other sites."""

    def client(unit: ExecutorGroup, socket: str | None) -> Storage:
        calls: Storage = unit.call_one
        return calls if socket is None else Unit(unit.name, calls, socket, is_far=is_far)

    return Store([client(unit, spec.socket) for unit, spec in zip(units, specs, strict=True)])
