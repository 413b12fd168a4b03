"""Consumers outside the run that have data ranks and peers, some of which end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.core.errors import NotStored
from llamarl.scoring.loader import StageBatch, StageLoader
from llamarl.scoring.stages import External
from tests.distributed.external import Run, alone, consume, lengths_of, make


async def test_data_ranks_share_each_batch_and_peers_of_a_rank_see_the_same(tmp_path: Path) -> None:
    external = External(sampler="token_balanced", num_data_ranks=2, num_peers=2)
    seen: dict[tuple[int, int], list[list[int]]] = {}

    async with Run(tmp_path, make(external)) as running:
        for rank in range(2):
            for peer in range(2):
                seen[rank, peer] = []
                finish: Callable[[StageBatch], None] = (
                    (lambda batch: None)
                    if peer
                    else (lambda batch: batch.finish(quality=lengths_of(batch)))
                )
                where = {"data_rank": rank, "peer": peer, "batch_size": 5, "prefetch": 1}
                consume(tmp_path, seen[rank, peer], finish, **where)
        await running.stage.process(alone(0, 39))
        while len({len(batches) for batches in seen.values()}) > 1:
            await asyncio.sleep(0.01)  # a peer that only looks may be behind
    assert seen[0, 0] == seen[0, 1]
    assert seen[1, 0] == seen[1, 1]
    assert sorted(i for batch in seen[0, 0] + seen[1, 0] for i in batch) == list(range(39))
    tokens = [sum(1 + 7 * i % 40 for i in batch) for batch in (seen[0, 0][0], seen[1, 0][0])]
    assert abs(tokens[0] - tokens[1]) <= 6, "nearly the same cost"
    assert [len(batch) for batch in seen[0, 0]] == [5, 5, 5, 4, 0]
    assert [len(batch) for batch in seen[1, 0]] == [5, 5, 5, 4, 1]


async def test_a_rank_without_rollouts_in_a_batch_finishes_it_too(tmp_path: Path) -> None:
    where = {"batch_size": 4, "prefetch": 1}

    async with Run(tmp_path, make(External(num_data_ranks=2))) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 1)))
        loaders, shares = [], []
        for data_rank in range(2):
            loaders.append(
                await asyncio.to_thread(
                    StageLoader, tmp_path, "judge", data_rank=data_rank, **where
                )
            )
            shares.append(await asyncio.to_thread(next, iter(loaders[-1])))
        for batch in sorted(shares, key=lambda batch: len(batch.row_ids)):
            await asyncio.to_thread(batch.finish, {"quality": lengths_of(batch)})
        assert sorted(len(batch.row_ids) for batch in shares) == [0, 1]
        assert [each.numbers["quality"] for each in await asyncio.wait_for(working, 10)] == [1.0]
        for loader in loaders:
            await asyncio.to_thread(loader.close)


async def test_a_peer_that_comes_when_all_is_finished_sees_what_the_others_saw(
    tmp_path: Path,
) -> None:
    seen: list[list[list[int]]] = [[], []]

    async with Run(tmp_path, make(External(num_peers=2))) as running:
        finish = lambda batch: batch.finish(quality=lengths_of(batch))  # noqa: E731
        consume(tmp_path, seen[0], finish, batch_size=5, prefetch=1)
        await running.stage.process(alone(0, 20))
        consume(tmp_path, seen[1], lambda batch: None, batch_size=5, prefetch=1, peer=1)
        while len(seen[1]) < 4:
            await asyncio.sleep(0.01)
    assert sorted(row_id for batch in seen[0] for row_id in batch) == list(range(20))
    assert seen[1] == seen[0]


async def test_a_peer_that_missed_a_batch_raises_instead_of_going_on_with_the_next(
    tmp_path: Path,
) -> None:
    seen: list[list[int]] = []

    async with Run(tmp_path, make(External(num_peers=2))) as running:
        finish = lambda batch: batch.finish(quality=lengths_of(batch))  # noqa: E731
        consume(tmp_path, seen, finish, batch_size=5, prefetch=1)
        await running.stage.process(alone(0, 5))
        await running.store.retire([*range(5)], {"outcome": "trained"})
        await running.stage.process(alone(5, 10))
        late = await asyncio.to_thread(StageLoader, tmp_path, "judge", batch_size=5, peer=1)
        with pytest.raises(NotStored, match="row 0 is not stored"):
            await asyncio.to_thread(next, iter(late))
        await asyncio.to_thread(late.close)
    assert seen == [[*range(5)], [*range(5, 10)]]


async def test_when_a_data_rank_ends_all_begin_again_and_no_rollout_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = {"batch_size": 4, "prefetch": 1}

    async def start(data_rank: int) -> StageLoader:
        return await asyncio.to_thread(StageLoader, tmp_path, "judge", data_rank=data_rank, **where)

    async with Run(tmp_path, make(External(num_data_ranks=2), timeout_s=600.0)) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 24)))
        first, second = await start(0), await start(1)
        batch = await asyncio.to_thread(next, iter(first))
        await asyncio.to_thread(batch.finish, {"quality": lengths_of(batch)})
        await asyncio.to_thread(second.close)  # with what it had
        with pytest.raises(RuntimeError, match="stage judge: a process of its consumer is gone"):
            await asyncio.to_thread(drain, first)
        await asyncio.to_thread(first.close)
        seen: list[list[int]] = []
        for data_rank in range(2):
            finish = lambda batch: batch.finish(quality=lengths_of(batch))  # noqa: E731
            consume(tmp_path, seen, finish, data_rank=data_rank, **where)
        results = await asyncio.wait_for(working, 30)
        assert [result.numbers["quality"] for result in results] == [
            1.0 + 7 * i % 40 for i in range(24)
        ]
        again = sorted(row_id for row_ids in seen for row_id in row_ids)
        assert again == sorted({*range(24)} - {*batch.row_ids})
    assert "a process of its consumer has ended" in caplog.text


def drain(loader: StageLoader) -> None:
    for _ in loader:
        pass


async def test_a_data_rank_that_never_comes_is_waited_for_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Run(tmp_path, make(External(num_data_ranks=2), timeout_s=0.5)) as running:
        finish = lambda batch: batch.finish(quality=lengths_of(batch))  # noqa: E731
        consume(tmp_path, [], finish, batch_size=4, prefetch=1)
        working = asyncio.create_task(running.stage.process(alone(0, 8)))
        while "has not asked for batch 0" not in caplog.text:
            await asyncio.sleep(0.01)
        consume(tmp_path, [], finish, batch_size=4, prefetch=1, data_rank=1)
        assert len(await asyncio.wait_for(working, 30)) == 8
