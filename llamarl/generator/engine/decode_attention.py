"""Attention of a decode step as Triton kernels: one query token per slot over its own length.

A row's positions are cut into splits, each attended to by a program of its own ("flash decoding"):

    m_s = log sum_{j in s} exp(q k_j / sqrt(d))
    o_s = sum_{j in s} exp(q k_j / sqrt(d) - m_s) v_j
    m = log sum_s exp(m_s)
    o = sum_s exp(m_s - m) o_s

The number of splits is fixed by the cache, so that a graph can be captured; a program whose split
begins behind its row's end returns at once. Sums are float32; logarithms are of base 2.

This module needs Triton: import it only where `Platform.has_triton`.

The output of a row depends on that row alone, not on how many others there are or how long they
are, and nothing is read on the host."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256  # positions of a split, at least: as many as are worth a program
MOST_SPLITS = 32  # of a row: then splits grow with its length
NUM_WARPS = 4
SMALLEST_TILE, LARGEST_TILE = 16, 64  # rows or columns of a matrix product
TILE_ELEMENTS = {2: 8192, 4: 1024}  # of keys, by bytes of an element: what registers hold


@triton.jit
def split_positions(
    length: tl.tensor, most: tl.constexpr, shortest: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Return the number of positions of each split of a row, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, most), tile) * tile, shortest)


@triton.jit
def attend_splits(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    logsums: tl.tensor,
    query_row: tl.tensor,
    head_size: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    heads_tile: tl.constexpr,
    dims_tile: tl.constexpr,
    tile: tl.constexpr,
    shortest: tl.constexpr,
    num_splits: tl.constexpr,
) -> None:
    """Compute o_s and m_s of one split, for the query heads that share a key-value head of one row.

    The grid is [splits, kv_heads, rows]. `query_row`: elements from one row of queries to the next;
    `head_size`: of keys, and of values, from one key-value head to the next."""
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    size = split_positions(length, num_splits, shortest, tile)
    start = split * size
    if start >= length:
        return
    end = tl.minimum(start + size, length)
    head, dim = tl.arange(0, heads_tile), tl.arange(0, dims_tile)
    is_dim = dim < head_dim
    is_query = (head < group)[:, None] & is_dim[None, :]
    asked = row * query_row + (kv_head * group + head)[:, None] * head_dim + dim[None, :]
    query = tl.load(queries + asked, mask=is_query, other=0.0)
    # A cache has more elements than 32 bits can count.
    first = (row * tl.num_programs(1) + kv_head).to(tl.int64) * head_size
    most = tl.full([heads_tile], float("-inf"), tl.float32)
    total = tl.zeros([heads_tile], tl.float32)
    out = tl.zeros([heads_tile, dims_tile], tl.float32)
    for begin in range(start, end, tile):
        position = begin + tl.arange(0, tile)
        # Positions behind the end are never read: they may hold another rollout's values, or NaN.
        is_seen = position < end
        place = first + position[:, None] * head_dim + dim[None, :]
        is_read = is_seen[:, None] & is_dim[None, :]
        key = tl.load(keys + place, mask=is_read, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(is_seen[None, :], score, float("-inf"))
        above = tl.maximum(most, tl.max(score, 1))
        weight, shrunk = tl.exp2(score - above[:, None]), tl.exp2(most - above)
        total = total * shrunk + tl.sum(weight, 1)
        value = tl.load(values + place, mask=is_read, other=0.0)
        out *= shrunk[:, None]
        out += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = above
    part = ((row * tl.num_programs(1) + kv_head) * group + head) * num_splits + split
    tl.store(logsums + part, most + tl.log2(total), mask=head < group)
    written = part.to(tl.int64)[:, None] * head_dim + dim[None, :]
    tl.store(partial + written, out / total[:, None], mask=is_query)


@triton.jit
def combine_splits(
    partial: tl.tensor,
    logsums: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    head_dim: tl.constexpr,
    dims_tile: tl.constexpr,
    tile: tl.constexpr,
    shortest: tl.constexpr,
    num_splits: tl.constexpr,
    splits_tile: tl.constexpr,
) -> None:
    """Compute the output of one query head of one row; the grid is [heads, rows]."""
    row = tl.program_id(1)
    head = row * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    num_used = tl.cdiv(length, split_positions(length, num_splits, shortest, tile))
    split, dim = tl.arange(0, splits_tile), tl.arange(0, dims_tile)
    part = head * num_splits + split
    is_used, is_dim = split < num_used, dim < head_dim
    logsum = tl.load(logsums + part, mask=is_used, other=float("-inf"))
    weight = tl.exp2(logsum - tl.max(logsum, 0))
    place = part.to(tl.int64)[:, None] * head_dim + dim[None, :]
    parts = tl.load(partial + place, mask=is_used[:, None] & is_dim[None, :], other=0.0)
    found = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * head_dim + dim, found, mask=is_dim)


def splits_options(
    dtype: torch.dtype, group: int, head_dim: int, num_positions: int
) -> dict[str, int]:
    """Return the constants by which `attend_splits` is compiled, for caches of this dtype, this
    many query heads per key-value head, this head_dim and this many positions."""
    dims = max(triton.next_power_of_2(head_dim), SMALLEST_TILE)
    tile = min(TILE_ELEMENTS[dtype.itemsize] // dims, LARGEST_TILE)
    return {
        "group": group,
        "head_dim": head_dim,
        "heads_tile": max(triton.next_power_of_2(group), SMALLEST_TILE),
        "dims_tile": dims,
        "tile": max(tile, SMALLEST_TILE),
        "shortest": SPLIT,
        "num_splits": min(triton.cdiv(num_positions, SPLIT), MOST_SPLITS),
    }


def combine_options(splits: dict[str, int]) -> dict[str, int]:
    """Return the constants of `combine_splits`, given those of `attend_splits`."""
    shared = ("head_dim", "dims_tile", "tile", "shortest", "num_splits")
    tile = triton.next_power_of_2(splits["num_splits"])
    return {name: splits[name] for name in shared} | {"splits_tile": tile}


def attend(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Return the attention output [n, heads * head_dim] of `queries` [n, heads, head_dim] over the
    first `lengths` positions, int64 [n] and at least 1, of the first n slots.

    `keys` and `values` [slots, kv_heads, num_positions, head_dim] are contiguous, and so is each
    row of queries. Beside a bfloat16 cache of whole splits, the partial outputs take heads /
    kv_heads / 256 of one layer's keys and values."""
    num_rows, num_heads, head_dim = queries.shape
    assert queries.stride()[1:] == (head_dim, 1)
    num_kv_heads, num_positions = keys.shape[1:3]
    options = splits_options(keys.dtype, num_heads // num_kv_heads, head_dim, num_positions)
    num_splits = options["num_splits"]
    logsums = queries.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
    partial = queries.new_empty((*logsums.shape, head_dim), dtype=torch.float32)
    out = queries.new_empty((num_rows, num_heads * head_dim))
    attend_splits[num_splits, num_kv_heads, num_rows](
        queries,
        keys,
        values,
        lengths,
        partial,
        logsums,
        queries.stride(0),
        num_positions * head_dim,
        math.log2(math.e) / math.sqrt(head_dim),
        **options,
        num_warps=NUM_WARPS,
    )
    combine_splits[num_heads, num_rows](
        partial, logsums, lengths, out, **combine_options(options), num_warps=NUM_WARPS
    )
    return out
