"""Whose writes storage takes, and what it records of rows that are retired, in each way to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llamarl.core.records import (
    FINISH_CODES,
    PROMPT_ID,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
)
from llamarl.metrics.span import Spans
from llamarl.storage.client import RecordingStore
from tests.unit.stored_rows import NAMES, assert_same, numbers, rows


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_fenced_writer_gets_nothing_into_storage_and_all_others_do(
    drive_storage, num_units: int
) -> None:
    async def scenario(store, units) -> None:
        lost, other, next_one = (store.signed(f"generator-{i}") for i in ("0/a", "1/b", "0/c"))
        await lost.write([1], rows([1], 3, FinishReason.SEGMENT))
        await lost.write([3], rows([3], 4))
        await store.fence("generator-0/a")
        await store.retire([1, 2], {"outcome": "lost", "replica": 0})
        # The replica that was given up wakes: no row is its own, whether others write it or not.
        await lost.write([1, 2, 4], rows([1, 2, 4], 5))
        for row_id in (1, 2, 4):
            with pytest.raises(KeyError):
                await store.read([row_id], [RESPONSE_IDS])
        await next_one.write([1], rows([1], 8))
        await other.write([2], rows([2], 9))
        await lost.write([2, 1], rows([2, 1], 6))
        for row_id, num_tokens in ((1, 8), (2, 9), (3, 4)):  # row 3 was there before
            assert_same(await store.read([row_id], NAMES), rows([row_id], num_tokens))
        with pytest.raises(RuntimeError, match="row 1 already has column"):
            await other.write([1], rows([1], 8))
        with pytest.raises(ValueError, match="writer must have a name to be fenced, got none"):
            await store.fence("")

    drive_storage(scenario, num_units)


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_stage_that_begins_again_writes_what_was_erased_and_earlier_ones_write_no_more(
    drive_storage, num_units: int
) -> None:
    spans = Spans("scorer", None)

    async def scenario(store, units) -> None:
        lost, first, second = (RecordingStore(store.signed(f"score/{i}"), spans) for i in range(3))
        await store.write([1, 2, 3, 4], rows([1, 2, 3, 4]))
        await lost.write([1, 4], numbers(REWARD, 0.1, 0.4))
        await store.fence("score/0")
        await store.erase([1, 2, 1], [REWARD, REWARD])
        await lost.write([2], numbers(REWARD, 0.2))
        for row_id in (1, 2):
            with pytest.raises(KeyError):
                await store.read([row_id], [REWARD])
        await first.write([1, 2], numbers(REWARD, 1.1, 1.2))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await first.write([1], numbers(REWARD, 1.1))
        await store.fence("score/1")
        await store.erase([2], [REWARD])
        await first.write([2, 3], numbers(REWARD, 1.2, 1.3))
        await second.write([2, 3], numbers(REWARD, 2.2, 2.3))
        found = await store.read([1, 2, 3, 4], [REWARD])
        assert [cell.item() for cell in found[REWARD]] == [1.1, 2.2, 2.3, 0.4]
        assert_same(await store.read([1, 2, 3, 4], NAMES), rows([1, 2, 3, 4]))
        await store.erase([1, 9], ["quality"])  # no call has written such a column
        await store.retire([1, 2, 3, 4], {"outcome": "trained"})
        slabs = [slab for unit in units for slab in unit._slabs.by_number.values()]
        assert all(slab.num_cells == slab.live_bytes == 0 for slab in slabs)

    drive_storage(scenario, num_units)


def test_retired_rows_leave_a_line_each(drive_storage, tmp_path: Path) -> None:
    outcome = {"outcome": "trained", "version": 5, "oldest_version": 2, "group_id": 8}

    async def scenario(store, units) -> None:
        sampling = np.array([1.0, 0, 1.0, 512, 2**52 + 1, FINISH_CODES[FinishReason.STOP]])
        mixed = rows([1], 4) | {TOKEN_VERSIONS: [np.array([2, 2, 4, 4, 4], np.int32)]}
        mixed[SAMPLING] = [sampling]
        await store.write([1], mixed | numbers(REWARD, 1.5) | numbers(PROMPT_ID, 7))
        await store.write([3], rows([3], 2, FinishReason.LENGTH) | numbers(REWARD, float("nan")))
        await store.write([5], numbers(REWARD, 0))
        await store.retire([1, 3], outcome)
        await store.retire([5], {"outcome": "dropped", "reason": "failed"})

    drive_storage(scenario, 2, archive_folder=str(tmp_path))
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 512, "seed": 2**52 + 1}
    lines = (tmp_path / "rollouts-1.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert first == {
        "row_id": 1,
        **outcome,
        "prompt_id": 7,
        "num_prompt_tokens": 1,
        "num_tokens": 5,
        "spans": [[2, 2], [4, 3]],
        "finish": "stop",
        "reward": 1.5,
        "sampling": sampling,
    }
    assert (second["finish"], second["reward"], second["num_tokens"]) == ("length", None, 2)
    assert (third["outcome"], third["reason"], third["num_tokens"]) == ("dropped", "failed", 0)
    assert second["spans"] == [[0, 1], [1, 1]]
    assert (third["spans"], third["finish"], third["sampling"]) == ([], None, None)


def test_a_full_disk_is_one_clear_error(drive_storage, tmp_path: Path) -> None:
    async def scenario(store, units) -> None:
        full = Path("/dev/full").open("a")  # noqa: SIM115 - the unit closes it
        units[0]._archive._files[0] = full
        await store.write([1], rows([1], 2))
        match = "cannot write the archive of rollouts: No space left"
        with pytest.raises(OSError, match=match) as raised:
            await store.retire([1], {"outcome": "trained"})
        assert raised.value.filename == str(tmp_path / "rollouts-0.jsonl")
        with pytest.raises(OSError, match="No space left"):  # of what it still had to write
            await units[0].close()
        assert not spilled.exists()
        assert not units[0]._slabs.by_number
        await units[0].close()

    spilled = tmp_path / "spilled"
    spilled.mkdir()
    drive_storage(scenario, archive_folder=str(tmp_path), spill_folder=str(spilled))
