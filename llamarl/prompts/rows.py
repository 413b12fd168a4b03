"""The prompts of a run: rows of a file each, or made by a recipe's own task.py."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from llamarl.core.extensions import FILE, TaskSource, find, load_module, where
from llamarl.core.memory import memory_file, read_all
from llamarl.core.records import SOURCE_ROWS, Prompt
from llamarl.scoring.user_code.calls import shown
from llamarl.scoring.user_code.pool import Call, UserCode, run_once

INDEX = np.dtype([("number", "<i8"), ("start", "<i8"), ("num_bytes", "<i4"), ("num_tokens", "<i4")])
IDS = np.dtype("<i4")
BLOCK_BYTES = 2**20
INDEX_FILE, ROWS_FILE = "index.npy", "rows"


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompts of one source: an open file, its index, and the digest of the numbers and token
    ids in it."""

    file: int
    index: np.ndarray
    digest: str


def write_rows(file: BinaryIO, prompts: Iterable[Prompt]) -> tuple[np.ndarray, str]:
    """Write prompts into an empty file; return its index, and the digest of their numbers and token
    ids. OSError if the disk is full."""
    entries, digest, at = array("q"), hashlib.sha256(), 0
    for prompt in prompts:
        ids = np.array(prompt.token_ids, IDS).tobytes()
        record = json.dumps([prompt.text, prompt.fields], ensure_ascii=False, default=str)
        row = ids + record.encode(errors="replace")
        file.write(row)
        entries.extend((prompt.prompt_id, at, len(row), len(prompt.token_ids)))
        digest.update(np.array([prompt.prompt_id, len(prompt.token_ids)], "<i8").tobytes() + ids)
        at += len(row)
    columns = np.array(entries).reshape(-1, len(INDEX.names or ())).T
    index = np.empty(columns.shape[1], INDEX)
    for name, column in zip(INDEX.names or (), columns, strict=True):
        index[name] = column
    return index, digest.hexdigest()


def rows_in_memory(prompts: Iterable[Prompt]) -> PromptRows:
    """Return prompts in a file in memory."""
    file = memory_file("prompts")
    with open(file, "wb", BLOCK_BYTES, closefd=False) as stream:
        return PromptRows(file, *write_rows(stream, prompts))


def rows_in_folder(folder: Path, digest: str) -> PromptRows:
    """Return the prompts of a folder; the index is mapped. ValueError unless its files are
    whole."""
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
        """The tokens of all prompts."""
        return sum(int(each.index["num_tokens"].sum()) for each in self._sources)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        found = (each.index["num_tokens"].max(initial=0) for each in self._sources)
        return int(max(found, default=0))

    @property
    def digest(self) -> str:
        """The digest of all numbers and token ids, in order."""
        digests = "".join(each.digest for each in self._sources)
        return hashlib.sha256(digests.encode()).hexdigest()


NAME = "prompts"
KEY = "data.options"
LIMIT_S = 3600.0
MAX_BYTES = 2**34  # of all rows, as JSON


def make_rows(
    source: TaskSource, options: Mapping[str, Any], *, held_out: bool
) -> list[dict[str, Any]]:
    """Return the rows that `prompts` in this task.py makes of these options.

    ValueError, in one line, if the text does not load, the options are not what the function takes,
    it raises (of a ValueError the text alone is shown, for it is about the options), or a row is no
    dictionary of what JSON can hold.
    """
    setup = {"task_source": source}
    code = UserCode(service=__name__, setup=setup, timeout_s=LIMIT_S, label=FILE, keys="a fixed ")
    answer = run_once(code, Call(None, (held_out, dict(options)), MAX_BYTES))
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def load(setup: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the service of the worker: (held_out, options) -> {"rows": [row, ...]} or {"mistake":
    one line}."""
    function = find(load_module(setup["task_source"]), NAME)

    def make(_: None, held_out: bool, options: dict[str, Any]) -> dict[str, Any]:
        try:
            inspect.signature(function).bind(held_out, **options)
        except TypeError as error:
            takes = f"{KEY} must be what {NAME}{inspect.signature(function)} takes"
            return {"mistake": f"{FILE}: {takes}, got {options}: {error}"}
        try:
            rows = [*function(held_out, **options)]
        except ValueError as error:
            return {"mistake": f"{FILE}: {' '.join(str(error).split())}"}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            return {"mistake": f"{NAME} of {FILE} must not raise, got {where(error)}"}
        for number, row in enumerate(rows, start=1):
            must = f"{FILE}: {NAME}:{number}: the row must"
            if not isinstance(row, dict):
                return {"mistake": f"{must} be a dictionary, got {shown(row)}"}
            try:
                json.dumps(row, allow_nan=False)
            except (TypeError, ValueError) as error:
                return {"mistake": f"{must} hold what JSON can, got {shown(row)}: {error}"}
        return {"rows": rows}

    return make
