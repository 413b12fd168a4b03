"""The bytes that one publish moves, and the time that this takes.

Bytes come from the plans that a run makes. Seconds follow from them: from what the busiest network
card, link or memory carries, from what each rank casts, sums and copies of its own, and from the
calls between both sides.

As in `publish/reshard.py` the trainer feeds the first replica of each host of its site, the first
of each other site, and each replica that spans hosts of its site; once these have the version, they
feed the others. Messages are packed once for all replicas of a kind, and sent to each. Replicas of
a pool look alike, so one plan serves them all; it is made for one layer, and for what is outside
the layers, and the first is counted once per layer. (What several ranks hold, a full plan evens out
over all layers, so that its busiest rank may send a little less.)"""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import Pool, alone, pools_of
from llamarl.core.config.rank_assignment import Device, assign, far_sites
from llamarl.core.device.hardware import gpu
from llamarl.core.device.names import CPU, GPU, is_gpu
from llamarl.generator.memory import generator_layouts
from llamarl.model.architecture import Architecture
from llamarl.planner.efficiency import (
    BOX_S,
    CORE_SUM_BYTES_PER_S,
    LAUNCH_S,
    LAW,
    LOOPBACK_BYTES_PER_S,
    MESSAGE_S,
    NUM_PHASES,
    PHASE_S,
    PLACE_S,
    QUANTISING_BYTES,
)
from llamarl.planner.forecast import PublishForecast
from llamarl.publish.layout import MESSAGE_BYTES, ROWS_SCALE, TENSOR_SCALE, RankLayout
from llamarl.publish.reshard import DTYPE_BYTES, assign_sources, num_bytes, plan, weight_kind
from llamarl.publish.shards import rank_layout
from llamarl.publish.transports.routes import TRANSPORTS
from llamarl.trainer.memory import trainer_layouts

STAGES = {
    "maxima": "the trainer reads its shards, for the scales of 8-bit weights",
    "transfer": "the trainer packs, cards and links carry, replicas unpack, all at once",
    "relay": "replicas pass the version on to others",
    "verify": "replicas sum what arrived",
    "commit": "replicas take it over",
    "phases": "calls to all ranks and back",
}
"""The stages of a publish, in their order; they add up to the whole."""
WAYS = ("card", "link", "memory")
LAYER = "model.layers.0."  # all layers are taken to be as the first

Load = Counter[Device]
Seconds = dict[int, float]
"""The seconds by rank."""


def forecast_publish(config: Config, architecture: Architecture) -> PublishForecast:
    """Forecast the publish of one version from the trainer to all replicas. ValueError if the hosts
    have too few GPUs."""
    devices, (heads, siblings) = assign(config), relays(config)
    parts = [
        Part(
            pool=pool,
            config=alone(config, pool),
            traffic=traffic(config, architecture, pool),
            heads=[head for head in heads if head in pool.replicas],
            siblings=[pair for pair in siblings if pair[1] in pool.replicas],
        )
        for pool in pools_of(config.generator)
    ]
    out: Counter[tuple[str, int]] = Counter()
    direct, relayed = Ways(config), Ways(config)
    for part in parts:
        for head in part.heads:
            direct.add(devices["trainer"], devices[f"generator-{head}"], part.traffic.num_bytes)
        for rank, sent in enumerate(part.traffic.num_bytes.sum(1)):
            out["trainer", rank] += len(part.heads) * int(sent)
        received = part.traffic.num_bytes.sum(0)
        for head, sibling in part.siblings:
            here, there = devices[f"generator-{head}"], devices[f"generator-{sibling}"]
            relayed.add(here, there, np.diag(received))
            for rank, sent in enumerate(received):
                out[f"generator-{head}", rank] += int(sent)
    card_out, card_in = direct.loads["card"]
    into = [part.traffic.num_bytes.sum(0) for part in parts]
    stages = {
        part.pool.key: _stages(config, architecture, part, parts, direct, relayed) for part in parts
    }
    return PublishForecast(
        total_bytes=sum(
            int(received.sum()) * len(part.pool.replicas)
            for part, received in zip(parts, into, strict=True)
        ),
        max_bytes_out=max(out.values()),
        max_bytes_in=max(int(received.max()) for received in into),
        max_card_bytes_out=max(card_out.values(), default=0),
        max_card_bytes_in=max(card_in.values(), default=0),
        # The slower of both steps, for one may begin before the other has ended.
        lower_bound_s=max(direct.bound_s(), relayed.bound_s()),
        seconds=max(sum(each.values()) for each in stages.values()),
        pool_stages_s=stages,
    )


@dataclass(frozen=True, kw_only=True)
class Side:
    """The speed of a rank at one end of a publish: the bytes per second of its memory, and of
    copies to or from where versions wait, which may be the host's memory; the least seconds for a
    box that it casts, sums and copies, and for one that it only copies."""

    bytes_per_s: float
    placed_bytes_per_s: float
    box_s: float = 0.0
    place_s: float = 0.0


def _side(config: Config, device: str, *, is_target: bool) -> Side:
    card = gpu(config.cluster.planned_gpu, device)
    memory = card.memory_bytes_per_s * LAW.elementwise
    if not is_gpu(device):
        return Side(bytes_per_s=CORE_SUM_BYTES_PER_S, placed_bytes_per_s=memory / 2)
    in_host = is_target and config.weights.staging == "host"
    placed = card.host_link_bytes_per_s * LAW.link if in_host else memory / 2
    return Side(bytes_per_s=memory, placed_bytes_per_s=placed, box_s=BOX_S, place_s=PLACE_S)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of one plan: bytes from source rank (row) to target rank (column), seconds of
    packing by source rank, and in `most_s` the seconds of the slowest rank by kind of work: reading
    for scales ("maxima") at the source; "unpacking", "verify", "commit" and "passing" on to one
    more replica at the target."""

    num_bytes: np.ndarray
    packing_s: Seconds
    most_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one pool in a publish. `config` is the recipe with this pool alone, `heads` are
    the replicas that the trainer feeds, `siblings` the pairs (replica that passes on, replica of
    this pool that it feeds)."""

    pool: Pool
    config: Config
    traffic: Traffic
    heads: list[int]
    siblings: list[tuple[int, int]]


def traffic(config: Config, architecture: Architecture, pool: Pool) -> Traffic:
    """Return the traffic from the trainer to one replica of the pool."""
    own, small = alone(config, pool), replace(architecture, num_layers=1)
    source = trainer_layouts(config, small)
    target = generator_layouts(config, small, pool.replicas.start)
    here = _side(own, config.trainer.device, is_target=False)
    there = _side(own, pool.generator.device, is_target=True)
    is_staged = isinstance(pool.generator, VllmConfig) and not pool.generator.enforce_eager
    is_swapped = pool.generator.device == CPU and config.weights.staging == "double_buffer"
    matrix = np.zeros((len(source), len(target)), np.int64)
    spent: dict[str, Seconds] = defaultdict(lambda: defaultdict(float))  # by what is done

    def spend(name: str, rank: int, least_s: float, seconds: float) -> None:
        spent[name][rank] += times * max(least_s, seconds)

    for is_layer, times in ((True, architecture.num_layers), (False, 1)):
        sources, targets = _only(source, is_layer), _only(target, is_layer)
        for copy in plan(sources, targets):
            size, elements = num_bytes([copy]), math.prod(copy.shape)
            matrix[copy.source_rank, copy.target_rank] += times * size
            # Read, written, and summed; cast, it is written and read once more on the way.
            layout = sources[copy.source_rank].parameters.get(copy.name)
            is_cast = layout is None or layout.dtype != copy.target_dtype
            touched = 3 * size + is_cast * (size + elements * DTYPE_BYTES["float32"])
            is_scale = copy.name.endswith((ROWS_SCALE, TENSOR_SCALE))
            touched += (layout is None and not is_scale) * QUANTISING_BYTES * elements
            spend("packing", copy.source_rank, here.box_s, touched / here.bytes_per_s)
            if not TRANSPORTS[config.weights.transport].is_mapped:
                placed_s = size / there.placed_bytes_per_s
                spend("unpacking", copy.target_rank, there.place_s, placed_s)
        for rank, size, is_matrix in _boxes(sources):
            if pool.generator.quantization != "none" and is_matrix:
                spend("maxima", rank, here.place_s, size / here.bytes_per_s)
        for rank, size, _ in _boxes(targets):
            spend("verify", rank, there.box_s, size / there.bytes_per_s)
            spend("passing", rank, there.box_s, 3 * size / there.bytes_per_s)
            if is_staged or not is_swapped:
                spend("commit", rank, is_staged * LAUNCH_S, size / there.placed_bytes_per_s)
    most_s = {name: max(found.values()) for name, found in spent.items()}
    return Traffic(num_bytes=matrix, packing_s=spent["packing"], most_s=most_s)


def _only(layouts: Iterable[RankLayout], is_layer: bool) -> list[RankLayout]:
    """Return the layouts with only the parameters inside, or outside, the first layer."""
    found = []
    for layout in layouts:
        names = [name for name in layout.parameters if name.startswith(LAYER) == is_layer]
        found.append(replace(layout, parameters={name: layout.parameters[name] for name in names}))
    return found


def _boxes(layouts: Iterable[RankLayout]) -> Iterator[tuple[int, int, bool]]:
    """Yield (rank, bytes, whether it belongs to a matrix) of each box."""
    for layout in layouts:
        for parameter in layout.parameters.values():
            for box in parameter.boxes:
                size = math.prod(box.shape) * DTYPE_BYTES[parameter.dtype]
                yield layout.rank, size, len(parameter.shape) > 1


def relays(config: Config) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the replicas that the trainer feeds, and the pairs (replica that passes on, replica
    that it feeds)."""
    devices = assign(config)
    layouts = {
        replica: [
            rank_layout(i, each, {}) for i, each in enumerate(devices[f"generator-{replica}"])
        ]
        for replica in range(config.generator.num_replicas)
    }
    far = {f"host-{host}": site for host, site in far_sites(config).items()}
    sources = assign_sources(layouts, far, partial(weight_kind, config.generator))
    heads = [replica for replica, head in sources.items() if head is None]
    return heads, [(head, replica) for replica, head in sources.items() if head is not None]


def _stages(
    config: Config,
    architecture: Architecture,
    part: Part,
    parts: list[Part],
    direct: "Ways",
    relayed: "Ways",
) -> dict[str, float]:
    """Return the seconds by stage until a pool has a version, while the trainer sends it to all
    `parts`.

    With messages, sums are taken while others come, so they do not count for the replicas that the
    trainer feeds.
    """
    devices, most_s, num_rounds, relay_s = assign(config), part.traffic.most_s, 1, 0.0
    is_mapped = TRANSPORTS[config.weights.transport].is_mapped
    if part.siblings:
        num_rounds, feeders = 2, Counter(head for head, _ in part.siblings)
        among = {device for i in {*sum(part.siblings, ())} for device in devices[f"generator-{i}"]}
        passing_s = max(feeders.values()) * most_s["passing"]
        relay_s = max(passing_s, *relayed.busiest_s(among))
    stages = {
        "maxima": most_s.get("maxima", 0.0),
        "transfer": _transfer_s(config, part, parts, direct),
        "relay": relay_s,
        "verify": (num_rounds - (not is_mapped)) * most_s["verify"],
        "commit": num_rounds * most_s.get("commit", 0.0),
        "phases": num_rounds * NUM_PHASES * PHASE_S,
    }
    return {name: stages[name] for name in STAGES}


def _transfer_s(config: Config, part: Part, parts: list[Part], direct: "Ways") -> float:
    """Return the seconds until the replicas of a pool that the trainer feeds have all bytes: the
    longest of the activities that overlap, for a rank packs a message while it sends another one.
    """
    devices, found = assign(config), part.traffic
    pool = {device for i in part.pool.replicas for device in devices[f"generator-{i}"]}
    sending_s, receiving_s = direct.busiest_s(pool | {*devices["trainer"]})
    if TRANSPORTS[config.weights.transport].is_mapped:
        packings = [each.traffic.packing_s for each in parts for _ in each.heads]
        return max(_slowest_s(packings), sending_s, receiving_s)
    by_kind = {weight_kind(each.config.generator, 0): each.traffic.packing_s for each in parts}
    # All sources begin with the same target and go on in turns, so the last one begins later.
    num_turns = int((found.num_bytes > 0).sum(1).max()) - 1
    message_bytes = min(MESSAGE_BYTES, int(found.num_bytes.max()))
    late = num_turns * message_bytes / max(1, int(found.num_bytes.sum(0).max()))
    num_received = int(np.ceil(found.num_bytes / MESSAGE_BYTES).sum(0).max())
    receiving_s = (1 + late) * (receiving_s + num_received * MESSAGE_S)
    return max(_slowest_s(by_kind.values()), sending_s, receiving_s, found.most_s["unpacking"])


def _slowest_s(each: Iterable[Seconds]) -> float:
    """Return the seconds of the rank that takes longest for all of these."""
    total: Seconds = defaultdict(float)
    for seconds in each:
        for rank, rank_s in seconds.items():
            total[rank] += rank_s
    return max(total.values())


@dataclass
class Ways:
    """The bytes between devices, by way (card, link or memory), as (out, in) by device.

    Every GPU has a network card and links to the other GPUs of its host; ranks without a GPU share
    their host's. Copies between two hosts need a card at both ends; those within a host the links,
    those within a GPU its memory. A staging in host memory is reached over PCIe.
    """

    config: Config
    loads: dict[str, tuple[Load, Load]] = field(
        default_factory=lambda: {way: (Counter(), Counter()) for way in WAYS}
    )

    def add(self, source: list[Device], target: list[Device], matrix: np.ndarray) -> None:
        """Add bytes from each source rank (row) to each target rank (column)."""
        for row, column in np.argwhere(matrix):
            here, there = source[row], target[column]
            way = "link" if here.host == there.host else "card"
            out, into = self.loads["memory" if here == there and here.gpu is not None else way]
            out[here] += int(matrix[row, column])
            into[there] += int(matrix[row, column])

    def bound_s(self) -> float:
        """Return the seconds if every card, link and memory ran at its published speed, all at
        once."""
        ends = [(way, load) for way, both in self.loads.items() for load in both]
        if self.config.weights.staging == "host":
            waiting: Load = Counter()
            for _, into in self.loads.values():
                waiting.update({each: n for each, n in into.items() if each.gpu is not None})
            ends.append(("host", waiting))
        found = [n / self._peaks(each)[way] for way, load in ends for each, n in load.items()]
        return max(found, default=0.0)

    def busiest_s(self, among: Container[Device]) -> tuple[float, float]:
        """Return the seconds of the busiest sender and receiver of these, at the speed that the law
        expects."""
        sending_s, receiving_s = (
            max(
                (
                    number / self._rate(way, device)
                    for way, both in self.loads.items()
                    for device, number in both[end].items()
                    if device in among
                ),
                default=0.0,
            )
            for end in (0, 1)
        )
        return sending_s, receiving_s

    def _rate(self, way: str, device: Device) -> float:
        shares = {"card": LAW.card, "link": LAW.link, "memory": LAW.elementwise}
        rate = shares[way] * self._peaks(device)[way]
        is_message = not TRANSPORTS[self.config.weights.transport].is_mapped
        if device.gpu is None and way == "link" and is_message:
            return min(rate, LOOPBACK_BYTES_PER_S)
        return rate

    def _peaks(self, device: Device) -> Mapping[str, float]:
        kind = device.gpu_kind or self.config.cluster.planned_gpu
        card = gpu(kind, CPU if device.gpu is None else GPU)
        return {
            "card": card.card_bytes_per_s,
            "link": card.link_bytes_per_s,
            "memory": card.memory_bytes_per_s / 2,  # read and written
            "host": card.host_link_bytes_per_s,
        }
