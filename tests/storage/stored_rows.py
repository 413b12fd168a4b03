"""Rollouts to store, and storage units with a client that reaches them in one of several ways."""

from __future__ import annotations

import gc
import os
import pickle
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llamarl.cluster.executor import Call, Handle, attempt
from llamarl.cluster.inline import InlineExecutor
from llamarl.core.faces import Storage
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
)
from llamarl.metrics.span import Spans
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec, StorageWorker

NAMES = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]


WAYS = ("inline", "near", "far", "slow link")
"""To a unit: a call in the same process, its socket, a call from another host, and such a call with
what is written compressed."""


def rows(
    row_ids: list[int], num_tokens: int = 6, finish: FinishReason = FinishReason.STOP
) -> Columns:
    """Rollouts of different lengths, each of whose arrays has the row id in it."""
    lengths = [num_tokens + row_id % 3 for row_id in row_ids]
    return {
        PROMPT_IDS: [np.arange(row_id % 5, dtype=np.int32) for row_id in row_ids],
        RESPONSE_IDS: [
            np.full(n, row_id, np.int32) for n, row_id in zip(lengths, row_ids, strict=True)
        ],
        GENERATOR_LOGPROBS: [
            np.full(n, -row_id, np.float32) for n, row_id in zip(lengths, row_ids, strict=True)
        ],
        TOKEN_VERSIONS: [np.arange(n, dtype=np.int32) for n in lengths],
        SAMPLING: [np.array([1.0, 0, 1.0, 64, row_id, FINISH_CODES[finish]]) for row_id in row_ids],
    }


def numbers(name: str, *values: float) -> Columns:
    """A column with one number for each row."""
    return {name: [np.array([float(value)]) for value in values]}


def assert_same(found: Columns, wanted: Columns) -> None:
    assert found.keys() == wanted.keys()
    for name, cells in wanted.items():
        for cell, other in zip(found[name], cells, strict=True):
            assert (cell.dtype, cell.shape) == (other.dtype, other.shape)
            if cell.tobytes() != other.tobytes():  # which says the same much faster
                np.testing.assert_array_equal(cell, other)


def new_unit(folder: Path, number: int = 0, **spec: Any) -> StorageWorker:
    spec = {"archive_folder": None} | spec
    full = StorageSpec(unit=number, socket=str(folder / "s" / str(number)), **spec)
    return StorageWorker(full, rank=0, num_ranks=1, spans=Spans(f"storage-{number}", None))


def calls_elsewhere(unit: StorageWorker, sizes: list[int] | None = None) -> Any:
    """A unit in another process: calls, results and errors travel as bytes. Adds the size of each
    call's larger message to `sizes`."""

    async def run(call: Call, is_first: bool) -> list[Any]:
        message = pickle.dumps(call)
        result = await attempt(unit, unit._spans.process, 0, pickle.loads(message))
        answer = pickle.dumps(result)
        if sizes is not None:
            sizes.append(max(len(message), len(answer)))
        return [pickle.loads(answer).result()]

    return Handle(run, Storage)


def client(way: str, unit: StorageWorker) -> Any:
    """What reaches the unit in this way only."""
    name = unit._spans.process
    if way == "inline":
        return InlineExecutor(name, [unit], [unit._spans]).one(Storage)
    if way == "near":  # these go by calls all the same
        names = ("find", "retire", "erase", "fence", "usage")
        calls = {each: getattr(unit, each) for each in names}
        return Unit(name, SimpleNamespace(**calls), unit._spec.socket)
    return Unit(name, calls_elsewhere(unit), "/nowhere/0", is_far=way == "slow link")


@asynccontextmanager
async def opened(
    way: str, folder: Path, num_units: int = 1, **spec: Any
) -> AsyncIterator[tuple[list[StorageWorker], Store]]:
    """Units, and a client that reaches them in this way."""
    units = [new_unit(folder, number, **spec) for number in range(num_units)]
    clients = [client(way, unit) for unit in units]
    for unit in units:
        await unit.start()
    try:
        yield units, Store(clients)
    finally:
        for each in clients:
            if isinstance(each, Unit):
                each.close()
        for unit in units:
            await unit.close()


@asynccontextmanager
async def serving(folder: Path, **spec: Any) -> AsyncIterator[tuple[StorageWorker, Store]]:
    """A unit, and a client that reaches it through its socket."""
    async with opened("near", folder, **spec) as ((unit,), store):
        yield unit, store


def held_bytes() -> int:
    """Python's memory since tracemalloc began, and this process's files in memory."""
    gc.collect()
    paths = Path("/proc/self/fd").iterdir()
    files = [path.stat() for path in paths if "memfd:llamarl" in os.path.realpath(path)]
    blocks = {file.st_ino: file.st_blocks for file in files}
    return tracemalloc.get_traced_memory()[0] + 512 * sum(blocks.values())
