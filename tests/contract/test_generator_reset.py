"""A generator that outlives a session of its run keeps nothing of it."""

from __future__ import annotations

import asyncio

import pytest

from llamarl.core.config import EmbeddedConfig
from tests.contract.generator_replica import (
    EngineCase,
    Replica,
    assert_same,
    collect,
    connect,
    drive,
    gather,
    make_source,
    publish,
    request,
)
from tests.contract.test_generator_executor import INT8, checkpoint, run_dir  # noqa: F401
from tests.fakes import WatchedStorage


@pytest.mark.parametrize("staging", ["double_buffer", "host"])
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int8", pytest.param("2 ranks", marks=pytest.mark.slow)])
def test_after_a_reset_a_generator_is_like_a_new_one_with_another_storage(
    kind: str,
    is_offloaded: bool,
    staging: str,
    checkpoint: str,  # noqa: F811
    run_dir: str,  # noqa: F811
) -> None:
    case = EngineCase(
        config=EmbeddedConfig,
        checkpoint=checkpoint,
        fields=INT8 if kind == "int8" else {},
        num_ranks=2 if kind == "2 ranks" else 1,
    )
    kept = WatchedStorage()

    async def train_on(generator: Replica, storage: WatchedStorage) -> None:
        """A session that begins at version 1, with weights of its own."""
        source = make_source(case, 0.5)
        await generator.submit([request(i, max_tokens=20) for i in range(6)])
        assert await collect(generator) == [], "nothing starts before the first commit"
        await connect(source, generator)
        await publish(source, generator, 1)
        rows = await gather(generator, 6)
        assert {span.version for row in rows for span in row.spans} == {1}
        await publish(source, generator, 2)

    async def reset(generator: Replica, storage: WatchedStorage) -> None:
        source = make_source(case, 0.1)
        await connect(source, generator)
        await publish(source, generator, 1)
        await generator.submit([request(i, max_tokens=100) for i in range(6)])
        await asyncio.sleep(0.02)
        collecting = asyncio.create_task(collect(generator))
        source.tensors.label(7)
        if is_offloaded:
            await generator.offload(["weights", "kv"])
        else:
            await generator.prepare(7)
        await generator.reset()
        await generator.use(kept, None)
        generator.received = 0
        before = list(storage.writes)
        await train_on(generator, kept)
        await collecting
        assert storage.writes == before

    async def begin(generator: Replica, storage: WatchedStorage) -> None:
        await train_on(generator, storage)

    weights = {"staging": staging}
    drive(case, run_dir, reset, load_weights=False, weights=weights)
    fresh = drive(case, run_dir, begin, load_weights=False, weights=weights)
    assert [*fresh.rows] == [*range(6)]
    assert_same(case, kept, fresh, 6)
