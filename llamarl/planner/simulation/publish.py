"""What one publish moves, and how long that takes.

Owns: bytes per rank and per network card, and seconds from them. Does not own: which copies there
are (`weights/layout/reshard.py`) or constants of hardware (`hardware.py`). Invariant: bytes come
from real plans; seconds come from bytes and named constants alone.

As in `weights/layout/kinds.py` the trainer feeds the first replica of each host of its site, the
first of each other site, and each replica that spans hosts of its site; these, once they have the
version, the others. A link between sites counts as any other. Replicas of a pool look alike, so one
plan serves them all; it is made for one layer, and for what is outside the layers, and the first is
counted once per layer: copies never join across parameters. (What several ranks
hold, as the norms of tensor-parallel ranks and everything with trainer.replicate above 1, a full
plan evens out over all layers, so that its busiest rank may send a little less.)

Every GPU has a network card and links to the other GPUs of its host; ranks without a GPU share
their host's. Copies between two hosts need a card at both ends; those within a host the links,
those within a GPU its memory. A staging in host memory is reached over PCIe.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llamarl.config import Config
from llamarl.config.pools import Pool, alone, pools_of
from llamarl.config.rank_assignment import Device, assign, far_sites
from llamarl.device.names import CPU
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import PublishForecast
from llamarl.planner.hardware import EFFICIENCY, GPUS, Gpu, gpu
from llamarl.planner.memory.shardings import (
    generator_layouts,
    rank_layout,
    trainer_layouts,
    weight_buffer,
)
from llamarl.planner.memory.trainer_memory import LAYER
from llamarl.weights.layout import buckets
from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.layout.kinds import assign_sources, weight_kind
from llamarl.weights.layout.reshard import num_bytes, plan
from llamarl.weights.transports.registry import TRANSPORTS

MESSAGE_S = 20e-6
"""To start one message or copy: a kernel, a rendezvous and a round trip. Our estimate, as no data
sheet says it; it matters only where messages are small."""

PHASE_S = 10e-3
"""One of prepare, write, verify and commit: a call from the controller to all ranks and back.
Our estimate for a busy event loop."""

NUM_PHASES = 4

NUM_READINGS = 2
"""How often a version is read where it waits: for fingerprints, and to be taken over."""

CORE_FINGERPRINT_BYTES_PER_S = 1.5e10
"""One CPU core taking fingerprints of megabytes: measured with
`weights/integrity/fingerprint.py`."""


@dataclass(frozen=True)
class Traffic:
    """One plan from source rank (row) to target rank (column): `num_bytes` and `num_copies`."""

    num_bytes: np.ndarray
    num_copies: np.ndarray


RATES: dict[str, Callable[[Gpu], float]] = {
    "card": lambda device: device.card_bytes_per_s,
    "link": lambda device: device.link_bytes_per_s,
    "memory": lambda device: device.memory_bytes_per_s / 2,  # read and written
}


class Ways:
    """Bytes over network cards, over links and within a device's memory: by way (out, in), each by
    device."""

    def __init__(self) -> None:
        self.loads: dict[str, tuple[Counter[Device], Counter[Device]]]
        self.loads = {way: (Counter(), Counter()) for way in RATES}

    def add(self, source: list[Device], target: list[Device], matrix: np.ndarray) -> None:
        """Bytes from each source rank (row) to each target rank (column)."""
        for row, column in np.argwhere(matrix):
            here, there = source[row], target[column]
            way = "link" if here.host == there.host else "card"
            out, into = self.loads["memory" if here == there and here.gpu is not None else way]
            out[here] += int(matrix[row, column])
            into[there] += int(matrix[row, column])


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one pool has to do with a publish: `config` is the recipe with it alone, `first` the way
    to one of the replicas that the trainer feeds (`heads`), `siblings` are (replica that passes on,
    replica of this pool that it feeds)."""

    pool: Pool
    config: Config
    first: Traffic
    heads: list[int]
    siblings: list[tuple[int, int]]

    def messages(self) -> np.ndarray:
        """To one replica: from each trainer rank (row) to each of its ranks (column)."""
        if TRANSPORTS[self.config.weights.transport].is_mapped:
            return self.first.num_copies
        messages: np.ndarray = np.ceil(self.first.num_bytes / self.config.weights.bucket_bytes)
        return messages


def forecast_publish(config: Config, architecture: Architecture) -> PublishForecast:
    """One version from the trainer to all replicas. ValueError if the hosts have too few GPUs."""
    devices, parts = assign(config), _parts(config, architecture)
    out: Counter[tuple[str, int]] = Counter()
    direct, relayed = Ways(), Ways()
    for part in parts:
        for head in part.heads:
            direct.add(devices["trainer"], devices[f"generator-{head}"], part.first.num_bytes)
        for rank, sent in enumerate(part.first.num_bytes.sum(1)):
            out["trainer", rank] += len(part.heads) * int(sent)
        received = part.first.num_bytes.sum(0)
        for head, sibling in part.siblings:
            here, there = devices[f"generator-{head}"], devices[f"generator-{sibling}"]
            relayed.add(here, there, np.diag(received))
            for rank, sent in enumerate(received):
                out[f"generator-{head}", rank] += int(sent)
    card_out, card_in = direct.loads["card"]
    into = [part.first.num_bytes.sum(0) for part in parts]
    pairs = zip(parts, into, strict=True)
    num_messages = sum(len(part.heads) * part.messages().sum(1) for part in parts)
    seconds = {
        part.pool.key: _seconds(config, architecture, part, num_messages.max(), direct, relayed)
        for part in parts
    }
    return PublishForecast(
        total_bytes=sum(int(bytes_.sum()) * len(part.pool.replicas) for part, bytes_ in pairs),
        max_bytes_out=max(out.values()),
        max_bytes_in=max(int(bytes_.max()) for bytes_ in into),
        max_card_bytes_out=max(card_out.values(), default=0),
        max_card_bytes_in=max(card_in.values(), default=0),
        num_copies=sum(_num_copies(part, architecture) for part in parts),
        num_groups=_num_groups(config, devices, parts),
        # The slower of both stages, for a stage may begin before the other has ended.
        lower_bound_s=max(_transfer_s(config, direct), _transfer_s(config, relayed)),
        seconds=max(seconds.values()),
        pool_s=seconds,
    )


def _parts(config: Config, architecture: Architecture) -> list[Part]:
    """One for each pool."""
    heads, siblings = relays(config)
    return [
        Part(
            pool=pool,
            config=alone(config, pool),
            first=traffic(config, architecture, pool.replicas.start),
            heads=[head for head in heads if head in pool.replicas],
            siblings=[(head, replica) for head, replica in siblings if replica in pool.replicas],
        )
        for pool in pools_of(config.generator)
    ]


def traffic(config: Config, architecture: Architecture, replica: int = 0) -> Traffic:
    """From the trainer to one replica."""
    small = replace(architecture, num_layers=1)
    source, target = trainer_layouts(config, small), generator_layouts(config, small, replica)
    found = Traffic(*(np.zeros((len(source), len(target)), np.int64) for _ in range(2)))
    for is_layer, times in ((True, architecture.num_layers), (False, 1)):
        for copy in plan(_only(source, is_layer), _only(target, is_layer)):
            found.num_bytes[copy.source_rank, copy.target_rank] += times * num_bytes([copy])
            found.num_copies[copy.source_rank, copy.target_rank] += times
    return found


def relays(config: Config) -> tuple[list[int], list[tuple[int, int]]]:
    """(replicas that the trainer feeds, (replica that passes on, replica that it feeds) each)."""
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


def _num_groups(config: Config, devices: dict[str, list[Device]], parts: list[Part]) -> int:
    """Of ranks that meet: one for each replica that is fed over the transport."""
    if not TRANSPORTS[config.weights.transport].meets:
        return 0
    hosts = {name: {device.host for device in places} for name, places in devices.items()}
    ends = (
        (hosts[f"generator-{head}"], hosts[f"generator-{replica}"])
        for part in parts
        for head, replica in part.siblings
    )
    num_between = sum(here != there or len(here) > 1 for here, there in ends)
    return sum(len(part.heads) for part in parts) + num_between


def _num_copies(part: Part, architecture: Architecture) -> int:
    """To all replicas of a pool."""
    num_direct = len(part.heads) * int(part.first.num_copies.sum())
    return num_direct + len(part.siblings) * _num_relayed(part.config, architecture)


def _only(layouts: Iterable[RankLayout], is_layer: bool) -> list[RankLayout]:
    """With the parameters inside, or outside, the first layer alone."""
    found = []
    for layout in layouts:
        names = [name for name in layout.parameters if name.startswith(LAYER) == is_layer]
        found.append(replace(layout, parameters={name: layout.parameters[name] for name in names}))
    return found


def _num_relayed(config: Config, architecture: Architecture) -> int:
    """Copies from a replica to one like it: every box as it is."""
    return sum(
        len(layout.boxes)
        for rank in range(config.generator.num_ranks)
        for layout in weight_buffer(config, architecture, rank)[0].values()
    )


def _transfer_s(config: Config, ways: Ways, among: Container[Device] | None = None) -> float:
    """The busiest card, link or memory, of these devices or of all, at full speed; all work at
    once."""
    found = [0.0]

    def add(load: Counter[Device], rate: Callable[[Gpu], float]) -> None:
        for device, number in load.items():
            if among is None or device in among:
                kind = device.gpu_kind or config.cluster.planned_gpu
                found.append(number / rate(GPUS[CPU] if device.gpu is None else gpu(kind)))

    over_host: Counter[Device] = Counter()
    for way, ends in ways.loads.items():
        for end in ends:
            add(end, RATES[way])
        over_host.update({device: n for device, n in ends[1].items() if device.gpu is not None})
    if config.weights.staging == "host":
        add(over_host, lambda device: device.host_link_bytes_per_s)
    return max(found)


def _seconds(
    config: Config,
    architecture: Architecture,
    part: Part,
    most_sent: float,
    direct: Ways,
    relayed: Ways,
) -> float:
    """Until a pool has a version: both stages one after the other, each with its messages, phases
    and readings. The busiest trainer rank sends `most_sent` messages, to all pools."""
    own, generator = part.config, part.config.generator
    num_buckets = 1
    if config.weights.staging == "bucket":
        parameters, _ = weight_buffer(own, architecture, 0)
        bucket_bytes = config.weights.bucket_bytes
        num_buckets = len(buckets.cut_buckets(parameters, bucket_bytes))
    num_messages = max(most_sent, part.messages().sum(0).max())
    device = gpu(own.cluster.planned_gpu, generator.device)
    received = int(part.first.num_bytes.sum(0).max())
    waiting_s = NUM_READINGS * received / (device.memory_bytes_per_s * EFFICIENCY)
    if generator.device == "cpu":
        waiting_s = received / CORE_FINGERPRINT_BYTES_PER_S
    elif config.weights.staging == "host":
        waiting_s = NUM_READINGS * received / (device.host_link_bytes_per_s * EFFICIENCY)
    stage_s = num_buckets * NUM_PHASES * PHASE_S + waiting_s
    devices = assign(config)
    here = {device for i in part.pool.replicas for device in devices[f"generator-{i}"]}
    among = here | {*devices["trainer"]}
    seconds = _transfer_s(config, direct, among) / EFFICIENCY + num_messages * MESSAGE_S + stage_s
    if part.siblings:
        among = here | {device for i, _ in part.siblings for device in devices[f"generator-{i}"]}
        seconds += _transfer_s(config, relayed, among) / EFFICIENCY + stage_s
        seconds += _num_relayed(own, architecture) * MESSAGE_S
    return float(seconds)
