"""The reshard plan against plain gather-and-slice, on random layouts of both sides.

A replica that passes on what it holds is a source like any other.
"""

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout
from llamarl.weights.layout.reshard import MIN_SPLIT_ELEMENTS, num_bytes, plan

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


def cut(draw, region, num_buckets):
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
    """Shapes, and for each side its rank layouts and buffer sizes."""
    num_parameters = draw(st.integers(1, 3))
    shapes = {
        f"p{i}": tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        for i in range(num_parameters)
    }
    return shapes, draw(side(shapes)), draw(side(shapes))


@st.composite
def side(draw, shapes):
    num_ranks = draw(st.integers(1, 4))
    memories = [Memory("flat") for _ in range(num_ranks)]
    boxes = {name: [[] for _ in range(num_ranks)] for name in shapes}
    for name, shape in shapes.items():
        regions = [((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 2))):  # one cut is a shard, two make a grid or blocks
            num_buckets = draw(st.integers(1, 3))
            regions = [bucket for region in regions for bucket in cut(draw, region, num_buckets)]
        for region in regions:
            holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
            for rank in sorted(holders):
                order = draw(st.permutations(range(len(shape))))
                box = memories[rank].place(*region, order, draw(st.integers(0, 3)))
                boxes[name][rank].append(box)
    layouts = [
        RankLayout(
            rank=rank,
            host="h",
            parameters={
                name: ParameterLayout(shape=shape, dtype="float32", boxes=tuple(boxes[name][rank]))
                for name, shape in shapes.items()
            },
            buckets=(tuple(shapes),),
        )
        for rank in range(num_ranks)
    ]
    return layouts, [memory.size for memory in memories]


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
@settings(max_examples=300, deadline=None)
@given(sides(), st.integers(0, 10**6))
def test_copies_equal_gather_and_slice_and_write_every_element_once(sides, seed) -> None:
    shapes, (source, source_sizes), (target, target_sizes) = sides
    check(shapes, source, source_sizes, target, target_sizes)
    rng = random.Random(seed)
    copies = plan(source, target)
    assert plan(rng.sample(source, len(source)), rng.sample(target, len(target))) == copies


LAYERS = ("layers.0.w", "layers.1.w", "layers.2.w")


def grid(num_rows, num_columns, num_copies):
    """(6, 8) parameters of alike layers on a grid of ranks, all of it `num_copies` times."""
    layouts, sizes = [], []
    for rank in range(num_rows * num_columns * num_copies):
        row, column = rank // num_columns % num_rows, rank % num_columns
        start = (row * 6 // num_rows, column * 8 // num_columns)
        stop = ((row + 1) * 6 // num_rows, (column + 1) * 8 // num_columns)
        memory = Memory("flat")
        parameters = {}
        for layer, name in enumerate(LAYERS):
            boxes = (memory.place(start, stop, (rank % 2, 1 - rank % 2), rank * layer),)
            parameters[name] = ParameterLayout(shape=(6, 8), dtype="float32", boxes=boxes)
        layouts.append(
            RankLayout(rank=rank, host="h", parameters=parameters, buckets=(tuple(parameters),))
        )
        sizes.append(memory.size)
    return layouts, sizes


GRIDS = [(1, 1, 1), (1, 1, 3), (4, 1, 1), (1, 3, 1), (2, 2, 1), (3, 2, 2)]


@pytest.mark.parametrize("to", GRIDS)
@pytest.mark.parametrize("of", GRIDS)
def test_every_grid_of_ranks_turns_into_every_other(of, to) -> None:
    check(dict.fromkeys(LAYERS, (6, 8)), *grid(*of), *grid(*to))


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
    for copy in copies:
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
    assert num_bytes(copies) == 4 * sum(map(np.sum, num_writes))


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
    return RankLayout(rank=rank, host="h", parameters=parameters, buckets=(tuple(parameters),))


def rows(rank, start, stop, shape, offset=0):
    box = Box(
        start=(start, 0), stop=(stop, shape[1]), buffer="w", offset=offset, strides=(shape[1], 1)
    )
    parameter = ParameterLayout(shape=shape, dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters={"w": parameter}, buckets=(("w",),))


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
    source = RankLayout(rank=0, host="h", parameters={"w": parameter}, buckets=(("w",),))
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
        ([rows(0, 0, 9, SHAPE)], [rows(0, 0, 8, SHAPE)], r"box of parameter w must lie within"),
        ([rows(0, 0, 8, SHAPE)] * 2, [rows(0, 0, 8, SHAPE)], r"ranks must be distinct.*\[0, 0\]"),
        ([rows(0, 0, 8, SHAPE)], [], r"generator ranks must be distinct and at least one"),
        ([whole(0, {"w": SHAPE}, "int4")], [whole(0, ONE)], r"dtype of parameter w.*int4"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_by_name(source, target, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(source, target)


def test_planning_and_publishing_import_no_torch() -> None:
    code = "import sys, llamarl.weights.sync.publisher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
