"""The rows that both sides move, and what is reported of a measurement.

Owns: columns, lengths, the digest that shows that every row arrived whole, the times. Does not own:
how rows travel. Invariant: imports neither llamarl nor torch, for both sides' environments use it,
and the same work makes the same rows in every process.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    `batch_rows` rows; every process has `depth` of them under way. `form` is how a rival is given
    the cells.
    """

    tokens: int
    rows: int
    consumers: int
    batch_rows: int
    depth: int = 1
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one consumer did: when it began and ended, how long its calls took, what it got."""

    start_s: float
    end_s: float
    take_s: float
    get_s: float
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


def taken_of(
    span_s: tuple[float, float], take_s: float, get_s: float, found: Sequence[Flat]
) -> Taken:
    """What one consumer did between these times; `found` are the batches it got, if kept."""
    return Taken(
        start_s=span_s[0],
        end_s=span_s[1],
        take_s=take_s,
        get_s=get_s,
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


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of all threads of these processes so far."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def times(
    put: tuple[float, float],
    notify_s: float,
    taken: Sequence[Taken],
    units_s: float,
    clear_s: float,
) -> dict[str, float]:
    """Of all rows. `flow_s` is from the first put to the last row in a consumer's memory; `take_s`
    and `get_s` are of a consumer, on average; `put_s` holds `notify_s`; `units_s` is CPU time of
    all units."""
    start_s, end_s = put
    return {
        "flow_s": max(each.end_s for each in taken) - start_s,
        "put_s": end_s - start_s,
        "notify_s": notify_s,
        "take_s": sum(each.take_s for each in taken) / len(taken),
        "get_s": sum(each.get_s for each in taken) / len(taken),
        "units_s": units_s,
        "clear_s": clear_s,
    }


def calm_gc() -> None:
    """Keep the garbage collector from walking what lives for long, as often as each 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
