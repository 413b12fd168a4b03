"""The reshard plan: the copies that turn a source's layout into a generator replica's, cut by
rank."""

from __future__ import annotations

import functools
import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from llamarl.core.config import GeneratorConfig
from llamarl.core.config.generator import generator_of
from llamarl.core.faces import PerRank
from llamarl.publish.layout import (
    AlikeLayers,
    Box,
    Copy,
    Held,
    RankLayout,
    Route,
    find_alike,
    offered,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """The kind of a replica's weights: `device`, cpu or cuda, is where they are; `form` has all
    else that replicas of a kind have in common: engine, dtype, quantisation, ranks."""

    device: str
    form: tuple[str, ...] = ()


def weight_kind(generator: GeneratorConfig, replica: int) -> WeightKind:
    """Return the kind of one replica of a run with this `generator`."""
    own = generator_of(generator, replica)
    form = type(own).__name__, own.dtype, own.quantization, str(own.num_ranks)
    return WeightKind(device=own.device, form=form)


def assign_sources(
    layouts: Mapping[int, list[RankLayout]],
    far_sites: Mapping[str, str],
    kind_of: Callable[[int], WeightKind | None] = lambda replica: None,
) -> dict[int, int | None]:
    """Return a dict of replica -> the replica that feeds it, None for the trainer.

    `layouts` has the layouts of each replica's ranks, with the replicas in the order they joined;
    `far_sites` maps host to site, for hosts at other sites than the trainer's. A replica is fed
    only by another of its own kind: a narrower one has fewer bits."""
    sources: dict[int, int | None] = {}
    heads: dict[tuple[str, WeightKind | None], int] = {}  # by host
    site_heads: dict[tuple[str, WeightKind | None], int] = {}
    for replica, ranks in layouts.items():
        hosts, kind = {layout.host for layout in ranks}, kind_of(replica)
        site = far_sites.get(ranks[0].host)
        head = heads.setdefault((hosts.pop(), kind), replica) if len(hosts) == 1 else replica
        if head == replica and site is not None:
            head = site_heads.setdefault((site, kind), replica)
        sources[replica] = None if head == replica else head
    return sources


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1,
}  # fmt: skip
MIN_SPREAD_ELEMENTS = 1 << 20  # less, in all layers together, comes from one source
MIN_TURNS = 4  # layers that each holder sends at least, if they take turns: some send one more
MIN_SPLIT_ELEMENTS = 16384  # a smaller box is not worth two copies: it goes to one source whole

Region = tuple[tuple[int, ...], tuple[int, ...]]  # global (start, stop) of a rectangle
Holder = tuple[int, Box, int]  # source rank, its box, how far that moves from layer to layer


@dataclass(frozen=True, slots=True)
class _Piece:
    """A `region` of parameters that look alike, in box `target` of a target rank, and the `holders`
    (source rank, its box, its step) that can send it. Steps are from layer to layer."""

    alike: AlikeLayers
    region: Region
    holders: list[Holder]
    target_rank: int
    target: Box
    target_step: int
    target_dtype: str

    @property
    def num_elements(self) -> int:
        """The number of elements in all layers."""
        return _num_elements(self.region) * len(self.alike.names)


def plan(source: list[RankLayout], target: list[RankLayout]) -> list[Copy]:
    """Return the copies that fill every box of `target` (one replica) from the boxes of `source`.

    A target that wants quantised matrices gets these from the shards of the matrices
    (`layout.offered`). Layers that look alike are planned once. Where several source ranks hold the
    same box, the bytes are evened out over them. The result does not depend on the order of the
    ranks. Raises ValueError, naming the parameter, if it is missing on one side, shapes differ,
    the source does not cover a target box, or the target ranks together do not hold all of the
    parameter."""
    source = offered(source, target)
    sources, targets = _by_name(source, "trainer"), _by_name(target, "generator")
    for name in sorted(sources.keys() ^ targets.keys()):
        side = "generator" if name in sources else "trainer"
        raise ValueError(f"parameter {name} must be on both sides, but the {side} does not have it")
    pieces = [piece for alike in find_alike(sources, targets) for piece in _pieces(alike)]
    # Pieces that only one source can send come first; each of the others, largest first, is sent
    # by the holder that sends the fewest bytes so far.
    pieces.sort(key=lambda piece: (len(piece.holders) > 1, -piece.num_elements))
    sent_bytes = Counter[int]()
    copies: dict[tuple[str, ...], list[Copy]] = {}
    for piece in pieces:
        for copy in _shared_out(piece, sent_bytes):
            sent_bytes[copy.source_rank] += num_bytes([copy])
            copies.setdefault(piece.alike.names, []).append(copy)
    joined = itertools.chain.from_iterable(map(_coalesce, copies.values()))
    return sorted(joined, key=functools.partial(_order, 0))


def num_bytes(copies: Iterable[Copy]) -> int:
    """Return the number of bytes that these copies write into target memory."""
    return sum(
        copy.num_layers * math.prod(copy.shape) * DTYPE_BYTES[copy.target_dtype] for copy in copies
    )


def _by_name(layouts: list[RankLayout], side: str) -> dict[str, Held]:
    """Return parameter name -> rank -> layout, after checking every layout on its own."""
    ranks = [layout.rank for layout in layouts]
    if len(set(ranks)) != len(ranks) or not ranks:
        raise ValueError(f"{side} ranks must be distinct and at least one, got {ranks}")
    by_name: dict[str, Held] = {}
    for layout in sorted(layouts, key=lambda layout: layout.rank):
        for name, parameter in layout.parameters.items():
            if parameter.dtype not in DTYPE_BYTES:
                known = ", ".join(DTYPE_BYTES)
                raise ValueError(
                    f"dtype of parameter {name} must be one of {known}, got {parameter.dtype}"
                )
            by_name.setdefault(name, {})[layout.rank] = parameter
    return by_name


def _pieces(alike: AlikeLayers) -> Iterator[_Piece]:
    """Cut all target boxes of parameters that look alike along the borders of the source boxes.

    If several sources hold a large box, each sends a slab of it; or they take turns from layer to
    layer, if there are enough."""
    name, sources, targets = alike.names[0], alike.sources, alike.targets
    shapes = {layout.shape for layout in (*sources.values(), *targets.values())}
    if len(shapes) > 1:
        raise ValueError(
            f"shape of parameter {name} must be equal on trainer and generator ranks, "
            f"got {' and '.join(map(str, sorted(shapes)))}"
        )
    held: dict[Region, list[Holder]] = {}
    for rank, layout in sources.items():
        for box, step in zip(layout.boxes, alike.source_steps[rank], strict=True):
            held.setdefault((box.start, box.stop), []).append((rank, box, step))
    shape, regions = shapes.pop(), tuple(held)
    missing: list[Region] = [((0,) * len(shape), shape)]
    for rank, layout in targets.items():
        for box, step in zip(layout.boxes, alike.target_steps[rank], strict=True):
            missing = _subtract(missing, (box.start, box.stop))
            parts, rest = _cut((box.start, box.stop), regions)
            for part, region in parts:
                holders = held[region]
                whole = _Piece(alike, part, holders, rank, box, step, layout.dtype)
                are_even = len(alike.names) >= MIN_TURNS * len(holders)
                if are_even and whole.num_elements >= MIN_SPREAD_ELEMENTS:
                    yield whole
                    continue
                slabs = _split(part, len(holders))
                for i, slab in enumerate(slabs):
                    senders = [holders[i]] if len(slabs) == len(holders) else holders
                    yield replace(whole, region=slab, holders=senders)
            _require_none(rest, f"parameter {name}: the trainer ranks must hold all of")
    _require_none(missing, f"parameter {name}: the generator ranks must hold all of")


@functools.lru_cache(maxsize=4096)  # several parameters are cut alike
def _cut(
    box: Region, regions: tuple[Region, ...]
) -> tuple[list[tuple[Region, Region]], list[Region]]:
    """Return the parts of `box`, each with the region that it lies in, and what lies in none."""
    parts: list[tuple[Region, Region]] = []
    rest = [box]
    for region in regions:
        if overlaps := [
            each for each in (_overlap(a, region) for a in rest) if _num_elements(each)
        ]:
            parts += [(overlap, region) for overlap in overlaps]
            rest = _subtract(rest, region)
    return parts, rest


def _require_none(regions: list[Region], sentence: str) -> None:
    left = [region for region in regions if _num_elements(region)]
    if left:
        start, stop = left[0]
        box = ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
        raise ValueError(f"{sentence} it, but none holds [{box}]")


def _num_elements(region: Region) -> int:
    return math.prod(b - a for a, b in zip(*region, strict=True))


def _overlap(a: Region, b: Region) -> Region:
    """Return the region that both contain; its stop is nowhere below its start, so an empty one has
    0 elements."""
    start = tuple(map(max, a[0], b[0]))
    return start, tuple(max(x, min(y, z)) for x, y, z in zip(start, a[1], b[1], strict=True))


def _subtract(regions: list[Region], hole: Region) -> list[Region]:
    """Return what is left of `regions` outside `hole`: up to two slabs per dimension and region."""
    left: list[Region] = []
    for region in regions:
        start, stop = _overlap(region, hole)
        if not _num_elements((start, stop)):
            left.append(region)
            continue
        low, high = list(region[0]), list(region[1])
        for dim in range(len(low)):
            for a, b in ((low[dim], start[dim]), (stop[dim], high[dim])):
                if a < b:
                    cut = (*low[:dim], a, *low[dim + 1 :]), (*high[:dim], b, *high[dim + 1 :])
                    left.append(cut)
            low[dim], high[dim] = start[dim], stop[dim]
    return left


def _split(region: Region, num_slabs: int) -> list[Region]:
    """Cut into `num_slabs` nearly equal slabs along the first dimension that is long enough."""
    start, stop = region
    if num_slabs == 1 or _num_elements(region) < max(MIN_SPLIT_ELEMENTS, 2):
        return [region]
    extents = [b - a for a, b in zip(start, stop, strict=True)]
    long = [dim for dim, extent in enumerate(extents) if extent >= num_slabs]
    dim = long[0] if long else extents.index(max(extents))
    num_slabs = min(num_slabs, extents[dim])
    cuts = [start[dim] + extents[dim] * slab // num_slabs for slab in range(num_slabs + 1)]
    return [
        ((*start[:dim], a, *start[dim + 1 :]), (*stop[:dim], b, *stop[dim + 1 :]))
        for a, b in itertools.pairwise(cuts)
    ]


def _shared_out(piece: _Piece, sent_bytes: Counter[int]) -> list[Copy]:
    """Return the copies of a piece: one; or, if all its layers together are large, one for each
    holder, which then take turns from layer to layer."""
    holders = sorted(piece.holders, key=lambda holder: sent_bytes[holder[0]])
    num_layers = len(piece.alike.names)
    num_senders = min(len(holders), num_layers) if piece.num_elements >= MIN_SPREAD_ELEMENTS else 1
    return [
        _copy(piece, holder).layers(turn, num_senders)
        for turn, holder in enumerate(holders[:num_senders])
    ]


def _copy(piece: _Piece, holder: Holder) -> Copy:
    """Return the copy of all layers of a piece from one holder."""
    (start, stop), (rank, source, source_step) = piece.region, holder
    return Copy(
        name=piece.alike.names[0],
        start=start,
        shape=tuple(b - a for a, b in zip(start, stop, strict=True)),
        source_rank=rank,
        source_buffer=source.buffer,
        source_offset=source.offset_of(start),
        source_strides=source.strides,
        target_rank=piece.target_rank,
        target_offset=piece.target.offset_of(start),
        target_strides=piece.target.strides,
        target_dtype=piece.target_dtype,
        num_layers=len(piece.alike.names),
        layer_step=piece.alike.layer_step,
        source_layer_step=source_step,
        target_layer_step=piece.target_step,
    )


def _coalesce(copies: list[Copy]) -> list[Copy]:
    """Join copies of one parameter that continue each other in both memories."""
    for dim in range(len(copies[0].shape) if copies else 0):
        joined: list[Copy] = []
        for copy in sorted(copies, key=functools.partial(_order, dim)):
            last = joined[-1] if joined else None
            if last is not None and _continues(last, copy, dim):
                joined[-1] = last.slab(dim, 0, last.shape[dim] + copy.shape[dim])
            else:
                joined.append(copy)
        copies = joined
    return copies


def _order(dim: int, copy: Copy) -> tuple[int, int, str, tuple[int, ...], tuple[int, ...]]:
    others = (*copy.start[:dim], *copy.start[dim + 1 :])
    return copy.source_rank, copy.target_rank, copy.name, others, copy.start[dim : dim + 1]


def _continues(first: Copy, second: Copy, dim: int) -> bool:
    """Return whether `second` begins in both memories and globally where `first` ends along
    `dim`."""
    if first.start[dim] + first.shape[dim] != second.start[dim]:
        return False  # as mostly; what follows takes longer
    return first.slab(dim, first.shape[dim], second.shape[dim]) == second


@dataclass(frozen=True, slots=True)
class SplitRoute(PerRank[Route]):
    """A route for the ranks of one executor."""

    route: Route  # without copies
    packed: dict[int, bytes]

    def for_rank(self, rank: int) -> Route:
        """Return the route for this rank; without copies if none begins or ends there."""
        return replace(self.route, copies=_unpacked(self.packed[rank]) if self.has(rank) else ())

    def for_ranks(self, ranks: range) -> Self:
        """Return the route for some of the ranks."""
        return replace(self, packed={rank: self.packed[rank] for rank in ranks if self.has(rank)})

    def along(self, **fields: Any) -> Self:
        """Return the same copies over a route with these other fields."""
        return replace(self, route=replace(self.route, **fields))

    def has(self, rank: int) -> bool:
        """Return whether this rank sends or receives anything."""
        return rank in self.packed


def split(copies: Iterable[Copy], **fields: Any) -> tuple[SplitRoute, SplitRoute]:
    """Return the routes of the source's ranks and of the target's ranks, with the copies that begin
    or end there; the copies of a pair of ranks keep their order at both ends. `fields` are Route's
    others."""
    by_source: dict[int, list[Copy]] = {}
    by_target: dict[int, list[Copy]] = {}
    for copy in copies:
        by_source.setdefault(copy.source_rank, []).append(copy)
        by_target.setdefault(copy.target_rank, []).append(copy)
    sources, targets = tuple(sorted(by_source)), tuple(sorted(by_target))
    route = Route(copies=(), sources=sources, targets=targets, **fields)
    sending, receiving = (
        SplitRoute(route, {rank: _packed(found) for rank, found in sorted(by_rank.items())})
        for by_rank in (by_source, by_target)
    )
    return sending, receiving


def _packed(copies: list[Copy]) -> bytes:
    return zlib.compress(json.dumps(copies, separators=(",", ":")).encode(), level=1)


def _unpacked(packed: bytes) -> tuple[Copy, ...]:
    made = json.loads(zlib.decompress(packed))
    return tuple(
        Copy._make(tuple(field) if isinstance(field, list) else field for field in fields)
        for fields in made
    )
