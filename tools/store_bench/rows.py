"""The rows that both sides move, and whether every row arrived whole.

The same work makes the same rows in every process. Both sides' environments use this module, so it
imports neither llamarl nor torch.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

PROMPT_TOKENS = 64
DTYPES: dict[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "generator_logprobs": np.float32,
    "token_versions": np.int32,
    "reward": np.float64,
}
NAMES = list(DTYPES)
Columns = dict[str, list[np.ndarray]]  # name -> one 1-D array per row
Flat = dict[str, np.ndarray]  # name -> the rows' values, one after the other


@dataclass(frozen=True, kw_only=True)
class Work:
    """`rows` rollouts go through a store, from one producer to `consumers` processes.

    A response has `tokens` tokens on average, 0.5 to 1.5 times that. A put, a take and a get have
    `batch_rows` rows; every process has `depth` of them under way.
    """

    tokens: int
    rows: int
    consumers: int
    batch_rows: int
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Taken:
    """When one consumer was done, and what it got."""

    end_s: float
    row_numbers: list[int]
    digest: int


def make_rows(work: Work) -> Columns:
    """All rows of `work`; the reward is the row's number, by which it is known again."""
    random = np.random.default_rng(work.tokens)
    lengths = random.integers(work.tokens // 2, work.tokens * 3 // 2, work.rows, endpoint=True)
    columns: Columns = {name: [] for name in DTYPES}
    for row, length in enumerate(lengths.tolist()):
        columns["prompt_ids"].append(random.integers(0, 1000, PROMPT_TOKENS, dtype=np.int32))
        columns["response_ids"].append(random.integers(0, 1000, length, dtype=np.int32))
        columns["generator_logprobs"].append(-random.random(length, dtype=np.float32))
        columns["token_versions"].append(np.full(length, row % 7, dtype=np.int32))
        columns["reward"].append(np.array([float(row)]))
    return columns


def join(columns: Columns) -> Flat:
    """One array per column: what a consumer must have at the end, in its own memory."""
    return {name: np.concatenate(cells) for name, cells in columns.items()}


def num_bytes(columns: Columns) -> int:
    """Of all cells."""
    return sum(cell.nbytes for cells in columns.values() for cell in cells)


def digest(flat: Flat) -> int:
    """The digest of several rows is the sum of theirs; zeros at a row's end do not count."""
    return sum(
        place * int(np.ascontiguousarray(flat[name]).view(np.uint32).sum(dtype=np.uint64))
        for place, name in enumerate(DTYPES, start=1)
    )


async def at_once(each: Callable[[], Awaitable[None]], work: Work) -> tuple[float, float]:
    """Do this `work.depth` times at once; when it began and ended."""
    start_s = time.monotonic()
    await asyncio.gather(*(each() for _ in range(work.depth)))
    return start_s, time.monotonic()


def taken_of(end_s: float, found: Sequence[Flat]) -> Taken:
    """What one consumer did until then; `found` are the batches it got, if kept."""
    return Taken(
        end_s=end_s,
        row_numbers=[int(row) for flat in found for row in flat["reward"].tolist()],
        digest=sum(map(digest, found)),
    )


def check(work: Work, expected_digest: int, taken: Sequence[Taken]) -> None:
    """RuntimeError unless the consumers got each row exactly once, and whole."""
    row_numbers = sorted(row for each in taken for row in each.row_numbers)
    if row_numbers != list(range(work.rows)):
        found = f"{len(row_numbers)} rows, {len(set(row_numbers))} different ones"
        raise RuntimeError(f"consumers must get each of {work.rows} rows once, got {found}")
    if sum(each.digest for each in taken) != expected_digest:
        raise RuntimeError("the rows that consumers got are not those that were put")


def flow_s(start_s: float, taken: Sequence[Taken]) -> float:
    """From the first put to the last row in a consumer's memory."""
    return max(each.end_s for each in taken) - start_s


def calm_gc() -> None:
    """Keep the garbage collector from walking what lives for long, as often as each 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
