"""What storage takes of executors that were lost, and of those that begin again with their work."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from llamarl.experience.store import RecordingStore, Store
from llamarl.metrics.span import Spans
from llamarl.types import RESPONSE_IDS, REWARD, Columns, FinishReason
from tests.unit.test_storage import join, rollout, unit


@pytest.mark.parametrize("num_units", [1, 2])
def test_of_a_lost_rollout_nothing_is_taken_from_an_earlier_attempt(num_units: int) -> None:
    store = Store([unit(number) for number in range(num_units)])

    async def scenario() -> None:
        await store.write([1], rollout(3, FinishReason.SEGMENT), [0])
        await store.retire([1, 2], {"outcome": "lost", "replica": 0})
        # The replica that was given up wakes: of these rollouts only 4 is still its own.
        await store.write([1, 2, 4], join([rollout(5), rollout(6), rollout(7)]), [0, 0, 0])
        with pytest.raises(KeyError):
            await store.read([1], [RESPONSE_IDS])
        await store.write([1, 2], join([rollout(8), rollout(9)]), [1, 1])
        await store.write([2], rollout(6), [0])
        columns = await store.read([1, 2, 4], [RESPONSE_IDS])
        assert [len(cell) for cell in columns[RESPONSE_IDS]] == [8, 9, 7]
        with pytest.raises(RuntimeError, match="row 1 already has column"):
            await store.write([1], rollout(8), [1])

    asyncio.run(scenario())


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_stage_that_begins_again_writes_what_was_erased_and_earlier_ones_write_no_more(
    num_units: int,
) -> None:
    store = Store([unit(number) for number in range(num_units)])
    lost, first, second = (RecordingStore(store, Spans("scorer", None), i) for i in range(3))

    def rewards(*values: float) -> Columns:
        return {REWARD: [np.array([value]) for value in values]}

    async def scenario() -> None:
        await store.write([1, 2, 3, 4], join([rollout(i) for i in (3, 4, 5, 6)]), [0] * 4)
        await lost.write([1, 4], rewards(0.1, 0.4))
        await store.erase([1, 2], [REWARD], 1)
        await lost.write([2, 3], rewards(0.2, 0.3))  # it was asked for 3 before
        with pytest.raises(KeyError):
            await store.read([1], [REWARD])
        await first.write([1], rewards(1.1))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await first.write([1], rewards(1.1))
        await store.erase([2], [REWARD], 2)
        await first.write([2], rewards(1.2))
        await second.write([2], rewards(2.2))
        found = await store.read([1, 2, 3, 4], [REWARD, RESPONSE_IDS])
        assert [cell.item() for cell in found[REWARD]] == [1.1, 2.2, 0.3, 0.4]
        assert [len(cell) for cell in found[RESPONSE_IDS]] == [3, 4, 5, 6]
        await store.erase([1, 9], ["quality"], 3)  # no call has written such a column

    asyncio.run(scenario())
