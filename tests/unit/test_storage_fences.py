"""What storage takes of executors that were lost, and of those that take their place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from llamarl.metrics.span import Spans
from llamarl.storage.store import RecordingStore, Store
from llamarl.storage.unit import Unit
from llamarl.types import RESPONSE_IDS, REWARD, Columns, FinishReason
from tests.unit.stored_rows import NAMES, assert_same, rows, serving
from tests.unit.test_storage import join, rollout, unit


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_fenced_writer_gets_nothing_into_storage_and_all_others_do(num_units: int) -> None:
    store = Store([unit(number) for number in range(num_units)])
    lost, other, next_one = (store.signed(f"generator-{name}") for name in ("0/a", "1/b", "0/c"))

    async def scenario() -> None:
        await lost.write([1, 3], join([rollout(3, FinishReason.SEGMENT), rollout(4)]))
        await store.fence("generator-0/a")
        await store.retire([1, 2], {"outcome": "lost", "replica": 0})
        # The replica that was given up wakes: no row is its own, whether others write it or not.
        await lost.write([1, 2, 4], join([rollout(5), rollout(6), rollout(7)]))
        for row_id in (1, 2, 4):
            with pytest.raises(KeyError):
                await store.read([row_id], [RESPONSE_IDS])
        await next_one.write([1], rollout(8))
        await other.write([2], rollout(9))
        await lost.write([2, 1], join([rollout(6), rollout(6)]))
        columns = await store.read([1, 2, 3], [RESPONSE_IDS])
        assert [len(cell) for cell in columns[RESPONSE_IDS]] == [8, 9, 4], "row 3 was there before"
        with pytest.raises(RuntimeError, match="row 1 already has column"):
            await other.write([1], rollout(8))

    asyncio.run(scenario())


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_stage_that_begins_again_writes_what_was_erased_and_earlier_ones_write_no_more(
    num_units: int,
) -> None:
    store = Store([unit(number) for number in range(num_units)])
    spans = Spans("scorer", None)
    lost, first, second = (RecordingStore(store.signed(f"score/{i}"), spans) for i in range(3))

    def rewards(*values: float) -> Columns:
        return {REWARD: [np.array([value]) for value in values]}

    async def scenario() -> None:
        await store.write([1, 2, 3, 4], join([rollout(i) for i in (3, 4, 5, 6)]))
        await lost.write([1, 4], rewards(0.1, 0.4))
        await store.fence("score/0")
        await store.erase([1, 2], [REWARD])
        await lost.write([2], rewards(0.2))
        for row_id in (1, 2):
            with pytest.raises(KeyError):
                await store.read([row_id], [REWARD])
        await first.write([1, 2], rewards(1.1, 1.2))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await first.write([1], rewards(1.1))
        await store.fence("score/1")
        await store.erase([2], [REWARD])
        await first.write([2, 3], rewards(1.2, 1.3))
        await second.write([2, 3], rewards(2.2, 2.3))
        found = await store.read([1, 2, 3, 4], [REWARD, RESPONSE_IDS])
        assert [cell.item() for cell in found[REWARD]] == [1.1, 2.2, 2.3, 0.4]
        assert [len(cell) for cell in found[RESPONSE_IDS]] == [3, 4, 5, 6]
        await store.erase([1, 9], ["quality"])  # no call has written such a column

    asyncio.run(scenario())


def test_only_a_writer_with_a_name_can_be_fenced() -> None:
    store = Store([unit()])
    with pytest.raises(ValueError, match="writer must have a name to be fenced, got none"):
        asyncio.run(store.fence(""))


@pytest.mark.parametrize("num_tokens", [4, 30_000])
def test_memory_that_a_writer_holds_when_it_is_fenced_never_comes_into_a_row(
    tmp_path: Path, num_tokens: int
) -> None:
    """Small rows travel in a packet; large ones in a file, which storage may have lent: the memory
    of rows that were retired. The writer fills it and is fenced before it has sent it."""

    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            lost = Unit("storage-0", None, str(tmp_path / "s" / "0"))
            await lost.write([1, 2], rows([1, 2], num_tokens), "generator-0/a")
            await store.retire([1, 2], {"outcome": "trained"})
            await lost.write([3, 4], rows([3, 4], num_tokens), "generator-0/a")
            is_lent = lost._connection._spare is not None
            assert is_lent == (num_tokens > 4)
            await unit.fence("generator-0/a")
            await store.write([5, 6], rows([5, 6], num_tokens), "generator-1/b")
            await lost.write([1, 5, 7], rows([1, 5, 7], num_tokens), "generator-0/a")
            assert (await store.usage())["num_rows"] == 4
            assert_same(await store.read([3, 4, 5, 6], NAMES), rows([3, 4, 5, 6], num_tokens))
            lost.close()

    asyncio.run(scenario())
