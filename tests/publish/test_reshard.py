"""The reshard plan against plain gather-and-slice, on random layouts of both sides; its copies cut
into messages.

A replica that passes on what it holds is a source like any other.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.publish import reshard
from llamarl.publish.layout import Box, Copy, ParameterLayout, RankLayout
from llamarl.publish.reshard import (
    MIN_SPLIT_ELEMENTS,
    MIN_SPREAD_ELEMENTS,
    num_bytes,
    plan,
    split,
)
from llamarl.publish.transports.messages import Message, cut, in_turns, messages

GAP = -1.0  # no weight has this value


class Memory:
    """One rank's flat buffer, into which boxes are packed with gaps."""

    def __init__(self, name):
        self.name = name
        self.size = 0

    def place(self, start, stop, order, gap):
        """A box whose dimensions lie in memory in this `order`, outermost first."""
        extents = [b - a for a, b in zip(start, stop, strict=True)]
        strides, step = [0] * len(order), 1
        for dim in reversed(order):
            strides[dim], step = step, step * extents[dim]
        offset = self.size + gap
        self.size = offset + math.prod(extents)
        return Box(start=start, stop=stop, buffer=self.name, offset=offset, strides=tuple(strides))


def slabs(draw, region, num_buckets):
    """`region` in `num_parts` uneven slabs, some perhaps empty."""
    start, stop = region
    if not start or num_buckets == 1:
        return [region]
    dim = draw(st.integers(0, len(start) - 1))
    inner = draw(
        st.lists(
            st.integers(start[dim], stop[dim]), min_size=num_buckets - 1, max_size=num_buckets - 1
        )
    )
    cuts = [start[dim], *sorted(inner), stop[dim]]
    return [
        ((*start[:dim], a, *start[dim + 1 :]), (*stop[:dim], b, *stop[dim + 1 :]))
        for a, b in itertools.pairwise(cuts)
    ]


@st.composite
def sides(draw):
    """Shapes of parameters in alike layers, and for each side its rank layouts and buffer sizes."""
    kinds = {
        f"p{i}": tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        for i in range(draw(st.integers(1, 3)))
    }
    layers = draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))
    shapes = {f"layers.{i}.{kind}": shape for i in layers for kind, shape in kinds.items()}
    return shapes, draw(side(kinds, layers)), draw(side(kinds, layers))


@st.composite
def side(draw, kinds, layers):
    """Layers are held alike, but may lie a little further in one rank's memory; or each as it
    comes."""
    num_ranks = draw(st.integers(1, 4))
    memories = [Memory("flat") for _ in range(num_ranks)]
    is_alike = draw(st.booleans())
    places = {}
    boxes, shapes = {}, {}
    odd_layer, odd_rank = draw(st.integers(0, 20)), draw(st.integers(0, num_ranks - 1))
    for layer in layers:
        for kind, shape in kinds.items():
            name = f"layers.{layer}.{kind}"
            boxes[name], shapes[name] = [[] for _ in range(num_ranks)], shape
            if not is_alike or kind not in places:
                places[kind] = draw(held(shape, num_ranks))
            for rank, region, order, gap in places[kind]:
                is_odd = (rank, layer) == (odd_rank, odd_layer)
                boxes[name][rank].append(memories[rank].place(*region, order, gap + is_odd))
    layouts = [
        RankLayout(
            rank=rank,
            host="h",
            parameters={
                name: ParameterLayout(shape=shape, dtype="float32", boxes=tuple(boxes[name][rank]))
                for name, shape in shapes.items()
            },
        )
        for rank in range(num_ranks)
    ]
    return layouts, [memory.size for memory in memories]


@st.composite
def held(draw, shape, num_ranks):
    """(rank, region, order of dimensions in memory, gap before it) of each box of a parameter."""
    regions = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 2))):  # one cut is a shard, two make a grid or blocks
        num_buckets = draw(st.integers(1, 3))
        regions = [bucket for region in regions for bucket in slabs(draw, region, num_buckets)]
    return [
        (rank, region, draw(st.permutations(range(len(shape)))), draw(st.integers(0, 3)))
        for region in regions
        for rank in sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))
    ]


def view(flat, shape, strides, offset):
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, [4 * step for step in strides])


def box_view(flat, box):
    extents = [b - a for a, b in zip(box.start, box.stop, strict=True)]
    return view(flat, extents, box.strides, box.offset)


def box_slice(weights, box):
    return weights[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def filled(layouts, sizes, weights):
    """What the ranks' buffers hold when every box has its slice of `weights`."""
    buffers = [np.full(size, GAP, dtype=np.float32) for size in sizes]
    for layout, buffer in zip(layouts, buffers, strict=True):
        for name, parameter in layout.parameters.items():
            for box in parameter.boxes:
                if 0 not in (b - a for a, b in zip(box.start, box.stop, strict=True)):
                    box_view(buffer, box)[...] = box_slice(weights[name], box)
    return buffers


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(sides(), st.integers(0, 10**6), st.sampled_from([2, MIN_SPREAD_ELEMENTS]))
def test_copies_equal_gather_and_slice_and_write_every_element_once(sides, seed, spread) -> None:
    shapes, (source, source_sizes), (target, target_sizes) = sides
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "MIN_SPREAD_ELEMENTS", spread)
        check(shapes, source, source_sizes, target, target_sizes)
        copies = plan(source, target)
        assert plan(rng.sample(source, len(source)), rng.sample(target, len(target))) == copies


RANKS = range(12)  # more than any side here has


def parts(route):
    """Rank -> its copies of single layers, as they arrive there."""
    assert not set(route.for_ranks(RANKS[1:]).packed) & {0}
    return {
        rank: [single for copy in route.for_rank(rank).copies for single in copy.each()]
        for rank in RANKS
    }


def check_parts(copies):
    """Each rank gets its own copies and no others, those of a pair in one order at both ends."""
    singles = [single for copy in copies for single in copy.each()]
    sending, receiving = map(
        parts, split(copies, source="trainer", replica=0, transport="collective")
    )
    assert sorted(itertools.chain(*sending.values())) == sorted(singles)
    assert sorted(itertools.chain(*receiving.values())) == sorted(singles)
    for here, there in itertools.product(RANKS, RANKS):
        sent = [copy for copy in sending[here] if copy.target_rank == there]
        assert sent == [copy for copy in receiving[there] if copy.source_rank == here]
        assert all(copy.source_rank == here for copy in sent)


def layered(rank, num_layers, shape, *, step=None, odd=None, buffers="{name}"):
    """A rank that holds all of a parameter in every layer, in `buffers`, or `step` elements apart
    in one; `odd` is a layer where it lies one further."""
    parameters = {}
    for layer in range(num_layers):
        name = f"model.layers.{layer}.w"
        offset = (step or 0) * layer + (layer == odd)
        buffer = "weights"
        if step is None:
            buffer = buffers.format(name=name, half=layer // 6)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        box = Box(
            start=(0,) * len(shape), stop=shape, buffer=buffer, offset=offset, strides=strides
        )
        parameters[name] = ParameterLayout(shape=shape, dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters=parameters)


@pytest.mark.parametrize(
    ("num_holders", "shape", "odd", "records"),
    [
        (1, (8, 4), None, [(0, 1, 12)]),  # first layer, step, layers
        (4, (8, 4), None, [(0, 1, 12)]),
        (4, (1 << 9, 1 << 8), None, [(0, 1, 12)] * 4),  # a slab from each
        (3, (1 << 9, 1 << 8), None, [(first, 3, 4) for first in range(3)]),  # by turns
        (4, (1 << 4, 1 << 10), 11,  # too few to take turns: a slab from each
         [(0, 1, 11)] * 4 + [(11, 0, 1)] * 4),
        (1, (8, 4), 5, [(0, 1, 5), (5, 1, 2), (7, 1, 5)]),
    ],
)  # fmt: skip
def test_alike_layers_are_one_record(num_holders, shape, odd, records) -> None:
    sources = [layered(rank, 12, shape) for rank in range(num_holders)]
    copies = plan(sources, [layered(0, 12, shape, step=math.prod(shape) + 7, odd=odd)])
    found = [(int(copy.name.split(".")[2]), copy.layer_step, copy.num_layers) for copy in copies]
    assert sorted(found) == sorted(records)
    assert all(single.source_buffer == single.name for copy in copies for single in copy.each())
    check_parts(copies)


def test_layers_in_other_buffers_are_other_records() -> None:
    source = layered(0, 12, (8, 4), buffers="half-{half}")
    copies = plan([source], [layered(0, 12, (8, 4), step=40)])
    assert [copy.num_layers for copy in copies] == [6, 6]
    found = {single.name: single.source_buffer for copy in copies for single in copy.each()}
    assert found == {name: p.boxes[0].buffer for name, p in source.parameters.items()}


def test_holders_of_much_that_is_small_take_turns_from_layer_to_layer() -> None:
    shape, num_layers = (MIN_SPLIT_ELEMENTS - 1,), 90
    sources = [layered(rank, num_layers, shape) for rank in range(4)]
    copies = plan(sources, [layered(0, num_layers, shape, step=1 << 20)])
    assert [copy.num_layers for copy in copies] == [23, 23, 22, 22]
    assert {copy.layer_step for copy in copies} == {4}
    check_parts(copies)


def check(shapes, source, source_sizes, target, target_sizes):
    """The planned copies on real buffers, against slices of the whole parameters."""
    first = 0
    weights = {}
    for name, shape in shapes.items():
        numbers = np.arange(first, first + math.prod(shape), dtype=np.float32)
        weights[name] = numbers.reshape(shape)
        first += math.prod(shape)
    sent = filled(source, source_sizes, weights)
    expected = filled(target, target_sizes, weights)
    arrived = [np.full(size, GAP, dtype=np.float32) for size in target_sizes]
    num_writes = [np.zeros(size, dtype=np.int32) for size in target_sizes]
    copies = plan(source, target)
    check_parts(copies)
    singles = [single for copy in copies for single in copy.each()]
    for copy in singles:
        values = view(sent[copy.source_rank], copy.shape, copy.source_strides, copy.source_offset)
        place = copy.shape, copy.target_strides, copy.target_offset
        view(arrived[copy.target_rank], *place)[...] = values
        view(num_writes[copy.target_rank], *place)[...] += 1
        box = tuple(
            slice(start, start + extent)
            for start, extent in zip(copy.start, copy.shape, strict=True)
        )
        assert np.array_equal(values, weights[copy.name][box])
    for found, wanted, writes in zip(arrived, expected, num_writes, strict=True):
        assert np.array_equal(found, wanted)
        assert np.array_equal(writes, wanted != GAP)
    assert num_bytes(copies) == num_bytes(singles) == 4 * sum(map(np.sum, num_writes))


def whole(rank, shapes, dtype="float32"):
    """A rank that holds everything, one parameter after the other."""
    memory = Memory("weights")
    parameters = {
        name: ParameterLayout(
            shape=shape,
            dtype=dtype,
            boxes=(memory.place((0,) * len(shape), shape, range(len(shape)), 0),),
        )
        for name, shape in shapes.items()
    }
    return RankLayout(rank=rank, host="h", parameters=parameters)


def rows(rank, start, stop, shape, offset=0):
    box = Box(
        start=(start, 0), stop=(stop, shape[1]), buffer="w", offset=offset, strides=(shape[1], 1)
    )
    parameter = ParameterLayout(shape=shape, dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters={"w": parameter})


@pytest.mark.parametrize("num_sources", [2, 3, 8])
def test_replicated_sources_send_equal_shares(num_sources) -> None:
    shapes = {f"p{i}": (31 + i, 17) for i in range(40)} | {"embedding": (6400, 128)}
    copies = plan([whole(rank, shapes) for rank in range(num_sources)], [whole(0, shapes)])
    shares = [
        num_bytes(copy for copy in copies if copy.source_rank == rank)
        for rank in range(num_sources)
    ]
    assert sum(shares) == 4 * sum(map(math.prod, shapes.values()))
    assert max(shares) - min(shares) <= 4 * 72 * 17, "no more than one small parameter apart"


def test_large_boxes_are_shared_out_before_small_ones() -> None:
    shapes = {f"p{i}": (100,) for i in range(160)} | {"z": (MIN_SPLIT_ELEMENTS - 384,)}
    copies = plan([whole(rank, shapes) for rank in range(2)], [whole(0, shapes)])
    assert num_bytes(copy for copy in copies if copy.source_rank == 0) == 4 * 16000


def test_small_replicated_boxes_are_not_cut() -> None:
    shapes = {"w": (MIN_SPLIT_ELEMENTS - 1,)}
    assert len(plan([whole(rank, shapes) for rank in range(4)], [whole(0, shapes)])) == 1


def test_boxes_that_continue_each_other_become_one_copy() -> None:
    boxes = [
        Box(start=(a, 0), stop=(a + 2, 4), buffer="w", offset=4 * a, strides=(4, 1))
        for a in (4, 0, 2)
    ]
    parameter = ParameterLayout(shape=(6, 4), dtype="float32", boxes=tuple(boxes))
    source = RankLayout(rank=0, host="h", parameters={"w": parameter})
    (copy,) = plan([source], [whole(0, {"w": (6, 4)})])
    assert (copy.start, copy.shape) == ((0, 0), (6, 4))


def test_a_whole_source_beats_overlapping_shards_without_writing_twice() -> None:
    shape = (8, 4)
    copies = plan([whole(0, {"w": shape}), rows(1, 4, 8, shape)], [whole(0, {"w": shape})])
    assert num_bytes(copies) == 4 * 32


def test_bytes_are_counted_in_the_target_dtype() -> None:
    shapes = {"w": (8, 4)}
    copies = plan([whole(0, shapes)], [whole(0, shapes, "bfloat16")])
    assert num_bytes(copies) == 2 * 32


SHAPE = (8, 4)
ONE, TWO = {"w": SHAPE}, {"w": SHAPE, "a.b": (2,)}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([rows(0, 0, 5, SHAPE), rows(1, 6, 8, SHAPE)], [whole(0, ONE)], r"trainer.*\[5:6, 0:4\]"),
        ([rows(0, 0, 8, SHAPE)], [rows(0, 0, 3, SHAPE), rows(1, 2, 7, SHAPE)], r"generator.*\[7:8"),
        ([rows(0, 0, 8, SHAPE)], [rows(0, 0, 8, (8, 5))], r"w .*\(8, 4\) and \(8, 5\)"),
        ([whole(0, TWO)], [whole(0, ONE)], r"a\.b .*generator does not"),
        ([whole(0, ONE)], [whole(0, TWO)], r"a\.b .*trainer does not"),
        ([rows(0, 0, 8, SHAPE)] * 2, [rows(0, 0, 8, SHAPE)], r"ranks must be distinct.*\[0, 0\]"),
        ([rows(0, 0, 8, SHAPE)], [], r"generator ranks must be distinct and at least one"),
        ([whole(0, {"w": SHAPE}, "int4")], [whole(0, ONE)], r"dtype of parameter w.*int4"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_by_name(source, target, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(source, target)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(2, 200),
    st.booleans(),
)
def test_messages_carry_every_element_once_and_keep_their_size(shapes, max_bytes, turned) -> None:
    dtype = "bfloat16"
    copies, offset = [], 0
    for shape in shapes:
        strides = torch.empty(shape, device="meta").stride()
        if turned:
            strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
        copies.append(
            Copy(
                name="w", start=(0,) * len(shape), shape=shape, source_rank=0, source_buffer="w",
                source_offset=offset, source_strides=strides, target_rank=0,
                target_offset=offset, target_strides=strides,
                target_dtype=dtype,
            )
        )  # fmt: skip
        offset += math.prod(shape)
    source = torch.arange(offset)
    target = torch.full((offset,), -1)
    for message in messages(copies, max_bytes):
        assert message.num_bytes <= max_bytes
        ends = [0]
        for copy, values in message.each(torch.empty(message.num_bytes, dtype=torch.uint8)):
            long = [dim for dim, extent in enumerate(copy.shape) if extent > 1]
            order = sorted(long, key=copy.target_strides.__getitem__)
            assert order == sorted(long, key=values.stride().__getitem__)
        for copy, begin in message.pieces:
            assert begin >= ends[-1]
            ends.append(begin + 2 * math.prod(copy.shape))
            piece = source.as_strided(copy.shape, copy.source_strides, copy.source_offset)
            place = target.as_strided(copy.shape, copy.target_strides, copy.target_offset)
            assert (place == -1).all()
            place.copy_(piece)
        assert ends[-1] == message.num_bytes
    assert torch.equal(source, target)


def test_a_piece_knows_its_global_index() -> None:
    whole = Copy(
        name="w", start=(3, 5), shape=(4, 6), source_rank=0, source_buffer="w", source_offset=7,
        source_strides=(6, 1), target_rank=1, target_offset=2,
        target_strides=(1, 4), target_dtype="float32",
    )  # fmt: skip
    pieces = list(cut(whole, 4))
    assert [piece.start for piece in pieces[:3]] == [(3, 5), (3, 9), (4, 5)]
    assert pieces[1] == whole._replace(
        start=(3, 9), shape=(1, 2), source_offset=11, target_offset=18
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_messages_that_go_one_by_one_at_either_end_all_arrive(data) -> None:
    """Each end begins its next message only when the one before has arrived, as over one
    communicator; a source may end early, in place of the next message to each target."""
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)
    )
    message = Message((), 0)
    sent, received = {}, {}
    for source, row in enumerate(counts):
        to_all = {target: [message] * count for target, count in enumerate(row)}
        turns = [(index, source, target) for target, index, _ in in_turns(to_all)]
        done = turns[: data.draw(st.integers(0, len(turns)))]
        num_sent = Counter(target for _, _, target in done)
        sent[source] = done + [turn for turn in turns if turn[0] == num_sent[turn[2]]]
    for target in range(3):
        from_all = {source: [message] * row[target] for source, row in enumerate(counts)}
        turns = [(index, source, target) for source, index, _ in in_turns(from_all)]
        received[target] = [turn for turn in turns if turn in sent[turn[1]]]
    while left := [queue[0] for queue in sent.values() if queue]:
        ready = [turn for turn in left if received[turn[2]][0] == turn]
        assert ready, f"all wait for each other: {counts}, {sent}"
        for turn in ready:
            sent[turn[1]].pop(0)
            received[turn[2]].pop(0)
    assert not any(received.values())
