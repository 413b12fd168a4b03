"""The prompts of a run, one row of a file each.

Owns: how they lie in a file, reading one by its place. Does not own: what makes them
(`prompts.py`) or files that later runs find again (`prompt_cache.py`). Invariant: the process holds
an index of INDEX.itemsize bytes per prompt and no prompt that was not asked for.

A row is the token ids, int32, then text and fields as one JSON list, UTF-8.
"""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from llamarl.memory_file import memory_file, read_all, write_all
from llamarl.types import SOURCE_ROWS, Prompt

INDEX = np.dtype([("number", "<i8"), ("start", "<i8"), ("num_bytes", "<i4"), ("num_tokens", "<i4")])
IDS = np.dtype("<i4")
BLOCK_BYTES = 2**20
INDEX_FILE, ROWS_FILE = "index.npy", "rows"


class PromptWriter:
    """Appends prompts to a file."""

    def __init__(self, file: int) -> None:
        self._file, self._end = file, 0
        self._block: list[bytes] = []
        self._index: list[array[int]] = [array("q") for _ in INDEX.names or ()]
        self._digest = hashlib.sha256()

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Append these. OSError if the disk is full."""
        at, waiting = self._end + sum(map(len, self._block)), 0
        for prompt in prompts:
            ids = np.array(prompt.token_ids, IDS).tobytes()
            record = json.dumps([prompt.text, prompt.fields], ensure_ascii=False, default=str)
            row = ids + record.encode(errors="replace")
            entry = prompt.prompt_id, at, len(row), len(prompt.token_ids)
            for column, value in zip(self._index, entry, strict=True):
                column.append(value)
            head = np.array([prompt.prompt_id, len(prompt.token_ids)], "<i8").tobytes()
            self._digest.update(head + ids)
            self._block.append(row)
            at, waiting = at + len(row), waiting + len(row)
            if waiting >= BLOCK_BYTES:
                self._flush()
                waiting = 0
        self._flush()

    def end(self) -> tuple[np.ndarray, str]:
        """The index of what was added, and the digest of its numbers and token ids."""
        index = np.empty(len(self._index[0]), INDEX)
        for name, column in zip(INDEX.names or (), self._index, strict=True):
            index[name] = column
        return index, self._digest.hexdigest()

    def _flush(self) -> None:
        self._end += write_all(self._file, [memoryview(b"".join(self._block))], self._end)
        self._block = []


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompts of one source: an open file, its index, and the digest of what is in it."""

    file: int
    index: np.ndarray
    digest: str


def rows_in_memory(prompts: Iterable[Prompt]) -> PromptRows:
    """Written into a file in memory."""
    file = memory_file("prompts")
    writer = PromptWriter(file)
    writer.add(prompts)
    return PromptRows(file, *writer.end())


def rows_in_folder(folder: Path, digest: str) -> PromptRows:
    """Those that lie in a folder; the index is mapped. ValueError unless its files are whole."""
    index = np.load(folder / INDEX_FILE, mmap_mode="r", allow_pickle=False)
    end = int(index["start"][-1]) + int(index["num_bytes"][-1]) if len(index) else 0
    file = os.open(folder / ROWS_FILE, os.O_RDONLY | os.O_CLOEXEC)
    if index.dtype != INDEX or os.fstat(file).st_size != end:
        os.close(file)
        raise ValueError(f"{folder} must hold {end} bytes of prompts, got others")
    return PromptRows(file, index, digest)


class PromptTable(Sequence[Prompt]):
    """The prompts of all sources, one source after the other; its files are closed with it."""

    def __init__(self, sources: Sequence[PromptRows]) -> None:
        self._sources = sources
        self._ends = [*accumulate(len(each.index) for each in sources)]
        for each in sources:
            weakref.finalize(self, os.close, each.file)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        source = next(i for i, end in enumerate(self._ends) if place < end)
        rows = self._sources[source]
        number, start, num_bytes, num_tokens = rows.index[
            place - self._ends[source] + len(rows.index)
        ].tolist()
        data = memoryview(bytearray(num_bytes))
        read_all(rows.file, start, data)
        text, fields = json.loads(data[IDS.itemsize * num_tokens :].tobytes())
        return Prompt(
            prompt_id=source * SOURCE_ROWS + number,
            text=text,
            token_ids=tuple(np.frombuffer(data, IDS, num_tokens).tolist()),
            fields=fields,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(int(each.index["num_tokens"].sum()) for each in self._sources)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        found = (each.index["num_tokens"].max(initial=0) for each in self._sources)
        return int(max(found, default=0))

    @property
    def digest(self) -> str:
        """Of all numbers and token ids, in order."""
        digests: Any = "".join(each.digest for each in self._sources)
        return hashlib.sha256(digests.encode()).hexdigest()
