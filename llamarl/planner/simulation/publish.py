"""What one publish moves, and how long that takes.

Owns: bytes per rank and per network card, and what each pool's replicas and the trainer have to do
with a version. Does not own: which copies there are (`publish/reshard.py`), what a rank does
for them (`delivery.py`), the ways between devices (`ways.py`), what goes on at once (`stages.py`)
or constants of hardware (`hardware.py`). Invariant: bytes come from real plans; seconds come from
bytes, counts and named constants alone.

As in `publish/reshard.py` the trainer feeds the first replica of each host of its site, the
first of each other site, and each replica that spans hosts of its site; these, once they have the
version, the others. A link between sites counts as any other. Messages are packed once for all
replicas of a kind, and sent to each. Replicas of a pool look alike, so one plan serves them all; it
is made for one layer, and for what is outside the layers, and the first is counted once per layer:
copies never join across parameters. (What several ranks hold, as the norms of tensor-parallel ranks
and everything with trainer.replicate above 1, a full plan evens out over all layers, so that its
busiest rank may send a little less.)
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import Pool, alone, pools_of
from llamarl.core.config.rank_assignment import Device, assign, far_sites
from llamarl.core.device.names import CPU
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import PublishForecast
from llamarl.planner.hardware import gpu
from llamarl.planner.memory.shardings import generator_layouts, rank_layout, trainer_layouts
from llamarl.planner.memory.trainer_memory import LAYER
from llamarl.planner.simulation.delivery import (
    Delivery,
    SideRates,
    commit_s,
    delivery,
    maxima_s,
    relay_s,
)
from llamarl.planner.simulation.publish_rates import publish_rates
from llamarl.planner.simulation.stages import Stream, hidden_s, mapped_stages, publish_stages
from llamarl.planner.simulation.ways import Ways
from llamarl.publish.layout import MESSAGE_BYTES, Copy, RankLayout
from llamarl.publish.reshard import WeightKind, assign_sources, num_bytes, plan, weight_kind
from llamarl.publish.transports.routes import TRANSPORTS

Counted = list[tuple[RankLayout, int]]
"""Parts of ranks' layouts, and how often each is there."""


@dataclass(frozen=True)
class Traffic:
    """One plan from source rank (row) to target rank (column): `num_bytes` and `num_copies`.
    `copies` are those of one layer and of what is outside, with how many layers have each;
    `source` and `target` the layouts, by layer and rest."""

    num_bytes: np.ndarray
    num_copies: np.ndarray
    copies: list[tuple[Copy, int]]
    source: Counted
    target: Counted


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one pool has to do with a publish: `config` is the recipe with it alone, `first` the way
    to one of the replicas that the trainer feeds (`heads`) and `delivery` what ranks do for it,
    `siblings` are (replica that passes on, replica of this pool that it feeds). `ends` are the
    trainer and the replicas."""

    pool: Pool
    config: Config
    first: Traffic
    delivery: Delivery
    heads: list[int]
    siblings: list[tuple[int, int]]
    ends: tuple[SideRates, SideRates]

    @property
    def kind(self) -> WeightKind:
        """Replicas of a kind get equal messages."""
        return weight_kind(self.config.generator, 0)


def forecast_publish(config: Config, architecture: Architecture) -> PublishForecast:
    """One version from the trainer to all replicas. ValueError if the hosts have too few GPUs."""
    devices, parts = assign(config), _parts(config, architecture)
    out: Counter[tuple[str, int]] = Counter()
    direct, relayed = Ways(config), Ways(config)
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
    stages = {
        part.pool.key: _stages(config, architecture, part, parts, direct, relayed) for part in parts
    }
    pool_s = {key: sum(each.values()) for key, each in stages.items()}
    return PublishForecast(
        total_bytes=sum(int(bytes_.sum()) * len(part.pool.replicas) for part, bytes_ in pairs),
        max_bytes_out=max(out.values()),
        max_bytes_in=max(int(bytes_.max()) for bytes_ in into),
        max_card_bytes_out=max(card_out.values(), default=0),
        max_card_bytes_in=max(card_in.values(), default=0),
        num_copies=sum(_num_copies(part) for part in parts),
        num_groups=_num_groups(config, devices, parts),
        # The slower of both steps, for one may begin before the other has ended.
        lower_bound_s=max(direct.bound_s(), relayed.bound_s()),
        seconds=max(pool_s.values()),
        pool_s=pool_s,
        pool_stages_s=stages,
    )


def _parts(config: Config, architecture: Architecture) -> list[Part]:
    """One for each pool."""
    heads, siblings = relays(config)
    parts = []
    for pool in pools_of(config.generator):
        own = alone(config, pool)
        first, ends = traffic(config, architecture, pool.replicas.start), _ends(own)
        parts.append(
            Part(
                pool=pool,
                config=own,
                first=first,
                delivery=delivery(
                    first.copies,
                    first.source,
                    first.target,
                    ends=ends,
                    transport=config.weights.transport,
                ),
                heads=[head for head in heads if head in pool.replicas],
                siblings=[pair for pair in siblings if pair[1] in pool.replicas],
                ends=ends,
            )
        )
    return parts


def _ends(config: Config) -> tuple[SideRates, SideRates]:
    """What the ranks of the trainer and of the replicas reach."""
    kind, is_host = config.cluster.planned_gpu, config.weights.staging == "host"
    trainer, generator = config.trainer.device, config.generator.device
    return (
        SideRates(device=trainer, rates=publish_rates(gpu(kind, trainer), trainer)),
        SideRates(
            device=generator, rates=publish_rates(gpu(kind, generator), generator), is_host=is_host
        ),
    )


def traffic(config: Config, architecture: Architecture, replica: int = 0) -> Traffic:
    """From the trainer to one replica."""
    small = replace(architecture, num_layers=1)
    source, target = trainer_layouts(config, small), generator_layouts(config, small, replica)
    numbers, counts = (np.zeros((len(source), len(target)), np.int64) for _ in range(2))
    found = Traffic(numbers, counts, [], [], [])
    for is_layer, times in ((True, architecture.num_layers), (False, 1)):
        here, there = _only(source, is_layer), _only(target, is_layer)
        found.source.extend((layout, times) for layout in here)
        found.target.extend((layout, times) for layout in there)
        for copy in plan(here, there):
            found.copies.append((copy, times))
            numbers[copy.source_rank, copy.target_rank] += times * num_bytes([copy])
            counts[copy.source_rank, copy.target_rank] += times
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
    num_between = sum(_leaves_host(devices, pair) for part in parts for pair in part.siblings)
    return sum(len(part.heads) for part in parts) + num_between


def _leaves_host(devices: dict[str, list[Device]], pair: tuple[int, int]) -> bool:
    """Whether a version passes from one host to another between these replicas."""
    return len({device.host for i in pair for device in devices[f"generator-{i}"]}) > 1


def _num_copies(part: Part) -> int:
    """To all replicas of a pool; from a replica to one like it, every box as it is."""
    num_boxes = sum(
        times * len(parameter.boxes)
        for layout, times in part.first.target
        for parameter in layout.parameters.values()
    )
    return len(part.heads) * int(part.first.num_copies.sum()) + len(part.siblings) * num_boxes


def _only(layouts: Iterable[RankLayout], is_layer: bool) -> list[RankLayout]:
    """With the parameters inside, or outside, the first layer alone."""
    found = []
    for layout in layouts:
        names = [name for name in layout.parameters if name.startswith(LAYER) == is_layer]
        found.append(replace(layout, parameters={name: layout.parameters[name] for name in names}))
    return found


def _stages(
    config: Config,
    architecture: Architecture,
    part: Part,
    parts: list[Part],
    direct: Ways,
    relayed: Ways,
) -> dict[str, float]:
    """Seconds by stage until a pool has a version, while the trainer sends it to all `parts`."""
    own, (here, there) = part.config, part.ends
    generator, devices = own.generator, assign(config)
    verify_s = float(part.delivery.verify_s.max())
    moved, early_s = _moved(config, part, parts, direct), 0.0
    if isinstance(moved, Stream):
        early_s = hidden_s(verify_s, moved)
        moved = moved.stages()
    is_staged = isinstance(generator, VllmConfig) and not generator.enforce_eager
    passed_s = 0.0
    if part.siblings:
        feeders = Counter(head for head, _ in part.siblings)
        among = {device for i in {*sum(part.siblings, ())} for device in devices[f"generator-{i}"]}
        busiest = relayed.busiest(among)
        way_s = max(busiest.sending_s, busiest.receiving_s)
        passed_s = max(way_s, relay_s(part.first.target, there, max(feeders.values())))
        if any(_leaves_host(devices, pair) for pair in part.siblings):
            passed_s += float(part.delivery.unpacking_s.max())
    return publish_stages(
        moved,
        maxima_s=maxima_s(part.first.source, here) if generator.quantization != "none" else 0.0,
        relay_s=passed_s,
        verify_s=verify_s,
        hidden_s=early_s,
        commit_s=commit_s(
            part.first.target,
            there,
            is_staged=is_staged,
            is_swapped=generator.device == CPU and own.weights.staging == "double_buffer",
        ),
        phase_s=there.rates.phase_s,
    )


def _moved(
    config: Config, part: Part, parts: list[Part], direct: Ways
) -> dict[str, float] | Stream:
    """Until the replicas of a pool that the trainer feeds have all bytes."""
    devices, rates = assign(config), part.ends[1].rates
    transport = TRANSPORTS[config.weights.transport]
    pool = {device for i in part.pool.replicas for device in devices[f"generator-{i}"]}
    busiest = direct.busiest(pool | {*devices["trainer"]})
    if transport.is_mapped:
        writing = sum(len(each.heads) * each.delivery.packing_s for each in parts)
        way_s = max(busiest.sending_s, busiest.receiving_s)
        return mapped_stages(float(np.max(writing)), way_s)
    by_kind = {each.kind: each.delivery.packing_s for each in parts}
    num_sent = sum(len(each.heads) * each.delivery.num_messages.sum(1) for each in parts)
    num_received = part.delivery.num_messages.sum(0).max()
    seen_s = rates.late_s * transport.meets
    late = 1 + transport.meets * part.delivery.late()
    return Stream(
        packing_s=float(np.max(sum(by_kind.values()))),
        sending_s=busiest.sending_s + float(np.max(num_sent)) * rates.message_s,
        receiving_s=late * (busiest.receiving_s + float(num_received) * (rates.message_s + seen_s)),
        unpacking_s=float(part.delivery.unpacking_s.max()),
        first=_share(part.first.num_bytes.sum(1).max()),
        last=_share(part.first.num_bytes.sum(0).max()),
        num_rounds=max(1.0, float(part.delivery.num_messages.max())),
        overlaps=transport.meets,  # others wait for each message to be there
    )


def _share(rank_bytes: int) -> float:
    """One message, of a rank's bytes."""
    return min(1.0, MESSAGE_BYTES / max(1, int(rank_bytes)))
