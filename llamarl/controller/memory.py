"""The memory that every rank of a run will need, by kind, added up from the forecasts of both sides
(`trainer/memory.py`, `generator/memory.py`).

Disaggregated, each rank has its device. Colocated with offloading there are three phases, each of
which must fit: train, generate, and the sync phase in between, when both sides' weights are there.
Without offloading everything is there at once. Frozen models always share the trainer's device.
Without GPUs all processes of a host share its memory: the fullest host is an entry of its own,
compared with what the machine at hand has left. With GPUs a host is an entry only if what is pinned
there does not fit. Advice comes from forecasts of changed recipes, never from a rule of thumb."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import alone, named, pool_at, pools_of
from llamarl.core.config.rank_assignment import assign, needs_gpu
from llamarl.core.device.hardware import GPUS, gpu
from llamarl.core.device.names import CPU, is_gpu
from llamarl.core.memory import available_bytes
from llamarl.generator.memory import GeneratorMemory, forecast_generator
from llamarl.generator.vllm.limits import check_limits
from llamarl.model.architecture import NO_MODELS, Architecture, FrozenModels
from llamarl.model.inventory import check_parallel
from llamarl.publish.transports.routes import check_transport
from llamarl.trainer.memory import Kinds, TrainerMemory, forecast_trainer

PROCESS_BYTES = 2**30
"""The bytes that each further process on a GPU keeps: context, kernels, communicators. Our own
allowance."""

HOST = "host"
GIB = 2**30
MAX_ADVICE = 3
MOST_HALVINGS = 8
HALF, DOUBLE = object(), object()
CHANGES: tuple[tuple[str, object], ...] = (
    ("trainer.activation_checkpointing", "selective"),
    ("trainer.activation_checkpointing", "full"),
    ("trainer.reshard_after", "forward"),
    ("trainer.replicate", 1),
    ("trainer.compute_dtype", "bfloat16"),
    ("trainer.tokens_per_micro_batch", HALF),
    ("trainer.tensor_parallel", DOUBLE),
    ("trainer.num_ranks", DOUBLE),
    ("trainer.num_ranks", HALF),
    ("generator.max_num_seqs", HALF),
    ("generator.kv_cache_bytes", HALF),
    ("generator.num_ranks", DOUBLE),
    ("generator.num_replicas", HALF),
    ("generator.quantization", "fp8"),
    ("weights.staging", "host"),
    ("placement.offload", "pinned"),
)
"""Fields that may help if there is too little memory, and what becomes of their value."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the fullest rank of one executor, at the moment when it is fullest.

    `bytes_by_kind` is device memory, by kind ("weights", "gradients", "optimizer", "unsharded",
    "activations", "logits", "kv_cache", "staging", "reference", "stage teacher", "offloaded",
    "reserve", ...); `host_bytes_by_kind` is memory of the host that this rank pins or maps.
    """

    executor: str
    num_ranks: int
    device_bytes: int
    bytes_by_kind: dict[str, int]
    host_bytes_by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The device memory needed."""
        return sum(self.bytes_by_kind.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.device_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the recipe and what it does to the fullest rank; with `is_enough` all fits after
    it."""

    text: str
    is_enough: bool


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """The fullest rank of every executor; `advice` says what to change if one does not fit, the
    best change first."""

    ranks: tuple[RankMemory, ...]
    advice: tuple[Advice, ...] = ()

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks)


def forecast_memory(
    config: Config, architecture: Architecture, frozen: FrozenModels = NO_MODELS
) -> MemoryForecast:
    """Forecast the fullest rank of every executor, and what to change if one does not fit.

    ValueError if `cluster.gpu` is unknown or the ranks do not fit onto the hosts.
    """
    ranks = tuple(_ranks(config, architecture, frozen))
    forecast = MemoryForecast(ranks=ranks)
    if forecast.fits:
        return forecast
    return replace(forecast, advice=tuple(_advice(config, architecture, frozen, ranks)))


def fits(config: Config, architecture: Architecture, frozen: FrozenModels) -> bool:
    """Return only whether all fits, for a search over many recipes. ValueError like
    `forecast_memory`."""
    return all(rank.fits for rank in _ranks(config, architecture, frozen))


def forecast_trainer_rank(config: Config, architecture: Architecture) -> RankMemory:
    """Forecast the fullest trainer rank while it trains, with a device to itself."""
    found, device = forecast_trainer(config, architecture), config.trainer.device
    card = gpu(config.cluster.planned_gpu, device)
    room = card.memory_bytes if is_gpu(device) else available_bytes()
    reserve = card.reserve_bytes + len(found.frozen) * PROCESS_BYTES * is_gpu(device)
    kinds = found.fullest | found.frozen | {"reserve": reserve}
    return _rank("trainer", config.trainer.num_ranks, room, kinds)


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """Return the rank with the least room in proportion."""
    return max(ranks, key=lambda rank: rank.total_bytes / rank.device_bytes)


def refusal(config: Config, rank: RankMemory) -> str:
    """Return the line that says by how much a rank does not fit, and what takes most of its
    memory."""
    largest = sorted(rank.bytes_by_kind.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{kind} {num_bytes / GIB:.1f}" for kind, num_bytes in largest)
    who = "all processes of a host" if rank.executor == "host" else f"the fullest {rank.executor}"
    where = "this machine has left"
    if needs_gpu(config):
        pools = {pool.key: pool for pool in pools_of(config.generator)}
        pool = pools.get(rank.executor)
        kind = (pool.gpu if pool else "") or config.cluster.planned_gpu
        who += f" at {pool.site}" if pool and pool.site else ""
        where = "a host has" if rank.executor == "host" else f"one {kind} has"
    return (
        f"{who} must fit into the {rank.device_bytes / GIB:.1f} GiB that {where}, got "
        f"{rank.total_bytes / GIB:.1f} GiB ({shown})"
    )


def _ranks(
    config: Config, architecture: Architecture, frozen: FrozenModels
) -> Iterator[RankMemory]:
    if config.generator.pools:
        yield from _pool_ranks(config, architecture, frozen)
        return
    check_parallel(architecture, config.trainer, config.generator)
    if isinstance(config.generator, VllmConfig):
        check_limits(config.generator, architecture, config.trainer.lora)
    trainer = forecast_trainer(config, architecture, frozen)
    generator = forecast_generator(config, architecture)
    phases = _phases(config, trainer, generator)
    if needs_gpu(config):
        yield from _gpu_ranks(config, trainer, generator, phases)
    else:
        yield from _cpu_ranks(config, phases, len(trainer.frozen))


def _pool_ranks(
    config: Config, architecture: Architecture, frozen: FrozenModels
) -> Iterator[RankMemory]:
    """Yield the trainer, on a `cluster.gpu`, and the pools, each as if it were the only one; then
    the fullest host, which may have ranks of several."""
    parts: dict[str, RankMemory] = {}
    for pool in pools_of(config.generator):
        part = alone(config, pool)
        with named(pool):
            for rank in _ranks(_with_room(part), architecture, frozen):
                name = pool.key if rank.executor == "generator" else rank.executor
                if name == "trainer" and is_gpu(config.trainer.device):
                    rank = replace(rank, device_bytes=gpu(config.cluster.planned_gpu).memory_bytes)
                parts[name] = fullest([rank, parts.get(name, rank)])
    hosts, host = _hosts(config), parts.pop(HOST, None)
    for name, rank in parts.items():
        yield replace(rank, executor=name, num_ranks=sum(counts[name] for counts in hosts))
    if needs_gpu(config) or host is None:
        return
    counts = max(hosts, key=lambda counts: counts.total())
    kinds: Counter[str] = Counter()
    for name, rank in parts.items():
        kinds.update({kind: counts[name] * each for kind, each in rank.bytes_by_kind.items()})
    num_others = counts["trainer"] * len(frozen) + 2 + config.experience.units_per_host
    kinds["reserve"] += num_others * GPUS[CPU].reserve_bytes
    yield _rank(HOST, counts.total() + num_others, host.device_bytes, dict(kinds))


class MemoryPhase(NamedTuple):
    """The memory of one rank of each side during a phase, by kind."""

    name: str
    trainer: Kinds
    generator: Kinds


def _phases(
    config: Config, trainer: TrainerMemory, generator: GeneratorMemory
) -> list[MemoryPhase]:
    train = trainer.fullest | trainer.frozen
    generate = generator.weights | {"kv_cache": generator.kv_cache} | generator.working
    if config.algorithm.is_sft:
        generate = {}  # no generator is started
    if not config.placement.colocated or config.placement.offload == "none":
        return [MemoryPhase("trainer", train, generate)]
    weights = {"weights": trainer.weights} | trainer.frozen
    return [
        MemoryPhase("trainer", train, {}),
        MemoryPhase("generator", trainer.frozen, generate),
        MemoryPhase("sync", weights, generator.weights),
    ]


def _gpu_ranks(
    config: Config, trainer: TrainerMemory, generator: GeneratorMemory, phases: list[MemoryPhase]
) -> Iterator[RankMemory]:
    device, num_ranks = gpu(config.cluster.planned_gpu), sum(_hosts(config), Counter())
    host: dict[str, Kinds] = {"trainer": {}, "generator": dict(generator.host)}
    if config.placement.colocated and config.placement.offload == "pinned":
        host["trainer"]["offloaded"] = trainer.weights + trainer.state.get("optimizer", 0)
        host["generator"]["offloaded"] = generator.kept + generator.kv_cache
    num_extra = len(trainer.frozen) + int(config.placement.colocated)

    def rank(executor: str, num_ranks: int, kinds: Kinds, num_extra: int) -> RankMemory:
        kinds = kinds | {"reserve": device.reserve_bytes + num_extra * PROCESS_BYTES}
        return _rank(executor, num_ranks, device.memory_bytes, kinds, host.get(executor, {}))

    if not config.placement.colocated:
        if is_gpu(config.trainer.device):
            yield rank("trainer", num_ranks["trainer"], phases[0].trainer, num_extra)
        if is_gpu(config.generator.device):
            yield rank("generator", num_ranks["generator"], phases[0].generator, 0)
    else:
        for phase in phases:
            yield rank(phase.name, max(num_ranks.values()), _together(phase), num_extra)
    yield from _pinned(config, host, device.host_memory_bytes)


def _pinned(config: Config, host: dict[str, Kinds], bytes_per_gpu: int) -> Iterator[RankMemory]:
    """Yield the host where most memory is pinned, if that does not fit."""
    room, found = bytes_per_gpu * config.cluster.num_gpus_per_host, []
    for counts in _hosts(config):
        kinds = {
            f"{side} {kind}": counts[side] * num_bytes
            for side in host
            for kind, num_bytes in host[side].items()
        }
        found.append(_rank(HOST, counts.total(), room, kinds))
    most = fullest(found)
    if not most.fits:
        yield most


def _cpu_ranks(config: Config, phases: list[MemoryPhase], num_frozen: int) -> Iterator[RankMemory]:
    """Yield each side by itself, then the fullest host with all its processes."""
    room, reserve, hosts = available_bytes(), GPUS[CPU].reserve_bytes, _hosts(config)
    num_ranks: Counter[str] = sum(hosts, Counter())
    for side in ("trainer", "generator"):
        kinds = max((getattr(phase, side) for phase in phases), key=lambda each: sum(each.values()))
        yield _rank(side, num_ranks[side], room, kinds | {"reserve": reserve})
    counts = max(hosts, key=lambda counts: counts.total())
    # Frozen models sit beside the trainer; then scorer, storage and controller.
    num_processes = counts.total() + counts["trainer"] * num_frozen
    num_processes += 2 + config.experience.units_per_host
    sums: list[Counter[str]] = [Counter() for _ in phases]
    for phase, sides in zip(phases, sums, strict=True):
        for side in ("trainer", "generator"):
            sides.update({kind: counts[side] * n for kind, n in getattr(phase, side).items()})
    most = max(sums, key=lambda each: each.total())
    yield _rank(HOST, num_processes, room, dict(most) | {"reserve": num_processes * reserve})


def _rank(
    executor: str, num_ranks: int, device_bytes: int, kinds: Kinds, host_kinds: Kinds | None = None
) -> RankMemory:
    """Return the memory of a rank, without kinds that have no bytes."""
    return RankMemory(
        executor=executor,
        num_ranks=num_ranks,
        device_bytes=device_bytes,
        bytes_by_kind={kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes},
        host_bytes_by_kind=host_kinds or {},
    )


def _hosts(config: Config) -> list[Counter[str]]:
    """Return, for each host, how many ranks of each side it has."""
    hosts: dict[int, Counter[str]] = {}
    for name, devices in assign(config).items():
        if name != "reference":
            for device in devices:
                hosts.setdefault(device.host, Counter())[_side(config, name)] += 1
    return list(hosts.values())


def _side(config: Config, name: str) -> str:
    """Return "trainer", or the key of the pool that a generator belongs to."""
    kind, _, index = name.partition("-")
    return pool_at(config.generator, int(index)).key if kind == "generator" else kind


def _with_room(config: Config) -> Config:
    """Return the recipe on as many hosts as it has ranks, wherever they are."""
    generator = config.generator
    num_ranks = config.trainer.num_ranks + generator.num_replicas * generator.num_ranks
    roomy = replace(config.cluster, backend="monarch", sites=[], hosts=[], num_hosts=num_ranks)
    return replace(config, cluster=roomy)


def _together(phase: MemoryPhase) -> Kinds:
    """Return the memory of both sides on one device; a kind that only one side has keeps its
    name."""
    kinds = dict(phase.trainer)
    for kind, num_bytes in phase.generator.items():
        kinds[f"generator {kind}" if kind in phase.trainer else kind] = num_bytes
    return kinds


def _advice(
    config: Config,
    architecture: Architecture,
    frozen: FrozenModels,
    ranks: tuple[RankMemory, ...],
) -> Iterator[Advice]:
    """Yield the changes that lower the fullest rank's memory most, each forecast by itself; those
    after which all fits come first."""
    before = fullest(ranks)
    found: list[tuple[bool, float, str]] = []
    for name, change in CHANGES:
        is_own = name.startswith("trainer.") == (before.executor == "trainer")
        if not (is_own or config.placement.colocated or before.executor == HOST):
            continue  # on devices of its own an executor needs no less when another's fields change
        try:
            after_config, after_all = _change(config, architecture, frozen, name, change, before)
        except (ValueError, TypeError, AttributeError):  # no recipe, or a field of another engine
            continue
        text = f"{name}={attrgetter(name)(after_config)}"
        if after_config.cluster != config.cluster:
            text += f" cluster.num_hosts={after_config.cluster.num_hosts}"
        is_short = not all(rank.fits for rank in after_all)
        after = [rank for rank in after_all if rank.executor == before.executor]
        if not after:  # what was pinned fits now
            found.append((is_short, 0.0, f"{text}: the {before.executor} fits"))
        elif after[0].total_bytes < before.total_bytes * 0.99:
            gib = f"{before.total_bytes / 2**30:.1f} to {after[0].total_bytes / 2**30:.1f} GiB"
            fits = "fits" if after[0].fits else "does not fit yet"
            share = after[0].total_bytes / after[0].device_bytes
            line = f"{text}: {gib} on the fullest {before.executor}, {fits}"
            found.append((is_short, share, line))
    for is_short, _, line in sorted(found)[:MAX_ADVICE]:
        yield Advice(line, is_enough=not is_short)


def _change(
    config: Config,
    architecture: Architecture,
    frozen: FrozenModels,
    name: str,
    change: object,
    before: RankMemory,
) -> tuple[Config, list[RankMemory]]:
    """Return the recipe with the field `name` changed, and its ranks. A value that is halved is
    halved again until the executor of `before` fits. Where the hosts have no GPUs for more ranks,
    there are more hosts. ValueError if the result is no valid recipe."""
    for _ in range(MOST_HALVINGS if change is HALF else 1):
        config = changed(config, name, change)
        try:
            assign(config)
        except ValueError:
            config.cluster.require(not config.cluster.hosts, "hosts", "have devices for all ranks")
            cluster = replace(config.cluster, num_hosts=2 * config.cluster.size)
            config = replace(config, cluster=cluster)
        for pool in pools_of(config.generator):
            check_transport(alone(config, pool))
        ranks = list(_ranks(config, architecture, frozen))
        if all(rank.fits for rank in ranks if rank.executor == before.executor):
            break
    return config, ranks


def changed(config: Config, name: str, change: object) -> Config:
    """Return the recipe with the field `name`, such as "trainer.num_ranks", halved, doubled or set.
    ValueError if the result is no valid recipe, AttributeError for a field of another engine."""
    section, field = name.split(".")
    part = getattr(config, section)
    old = getattr(part, field)
    new = old // 2 if change is HALF else 2 * old if change is DOUBLE else change
    return replace(config, **{section: replace(part, **{field: new})})
