"""Rollouts to store, and a storage unit with clients at its socket."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.executors.specs import StorageSpec
from llamarl.executors.storage import StorageExecutor
from llamarl.metrics.span import Spans
from llamarl.storage.store import Store
from llamarl.storage.unit import Unit
from llamarl.types import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
)

NAMES = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]


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


def assert_same(found: Columns, wanted: Columns) -> None:
    assert found.keys() == wanted.keys()
    for name, cells in wanted.items():
        for cell, other in zip(found[name], cells, strict=True):
            assert cell.dtype == other.dtype
            np.testing.assert_array_equal(cell, other)


def new_unit(folder: Path, **spec: Any) -> StorageExecutor:
    full = StorageSpec(
        unit=0, archive_folder=None, archive_tokens=False, socket=str(folder / "s" / "0"), **spec
    )
    return StorageExecutor(full, rank=0, num_ranks=1, spans=Spans("storage-0", None))


@asynccontextmanager
async def serving(folder: Path, **spec: Any) -> AsyncIterator[tuple[StorageExecutor, Store]]:
    """A unit, and a client that reaches it only through its socket."""
    unit = new_unit(folder, **spec)
    await unit.start()
    try:
        yield unit, Store([Unit("storage-0", None, str(folder / "s" / "0"))])
    finally:
        await unit.close()


def held_bytes() -> int:
    """Python's memory since tracemalloc began, and this process's files in memory."""
    gc.collect()
    paths = Path("/proc/self/fd").iterdir()
    files = [path.stat() for path in paths if "memfd:llamarl" in os.path.realpath(path)]
    blocks = {file.st_ino: file.st_blocks for file in files}
    return tracemalloc.get_traced_memory()[0] + 512 * sum(blocks.values())
