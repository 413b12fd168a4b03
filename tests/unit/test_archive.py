"""What a storage unit records of the rows that are retired."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamarl.types import GENERATOR_LOGPROBS, PROMPT_IDS, REF_LOGPROBS, RESPONSE_IDS
from tests.json_lines import read_lines
from tests.unit.stored_rows import new_unit, opened, rows

PATH = "rollouts-0.jsonl"


def test_the_archive_keeps_tokens_where_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        archive = {"archive_folder": str(tmp_path), "archive_tokens": True}
        async with opened("inline", tmp_path, **archive) as (_, store):
            await store.write([4], rows([4], 1))
            await store.retire([4], {"outcome": "unused"})

    asyncio.run(scenario())
    (line,) = read_lines(tmp_path / PATH)
    assert line[PROMPT_IDS] == [0, 1, 2, 3]
    assert line[RESPONSE_IDS] == [4, 4]
    assert line[GENERATOR_LOGPROBS] == [-4.0, -4.0]
    assert REF_LOGPROBS not in line


def test_no_row_is_archived_twice_and_a_row_id_may_start_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened("inline", tmp_path, archive_folder=str(tmp_path)) as (_, store):
            await store.retire([1], {"outcome": "unused"})  # never written
            await store.write([1], rows([1], 2))
            await store.retire([1], {"outcome": "lost"})
            await store.retire([1], {"outcome": "lost"})
            await store.write([1], rows([1], 3))
            await store.retire([1, 1], {"outcome": "trained"})

    asyncio.run(scenario())
    lines = read_lines(tmp_path / PATH)
    assert [(line["outcome"], line["num_tokens"]) for line in lines] == [
        ("lost", 3),
        ("trained", 4),
    ]


def test_a_line_mixed_by_a_kill_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / PATH).write_text('{"row_id": 1}\n{"row_id": 2, "fa')

    async def scenario() -> None:
        async with opened("inline", tmp_path, archive_folder=str(tmp_path)) as (_, store):
            await store.write([3], rows([3]))
            await store.retire([3], {"outcome": "trained"})

    asyncio.run(scenario())
    lines = read_lines(tmp_path / PATH)
    assert [line["row_id"] for line in lines] == [1, 3]


def test_a_unit_must_be_started_before_it_archives(tmp_path: Path) -> None:
    unit = new_unit(tmp_path, archive_folder=str(tmp_path))
    asyncio.run(unit.write([1], rows([1])))
    with pytest.raises(RuntimeError, match="must be started"):
        asyncio.run(unit.retire([1], {"outcome": "trained"}))
