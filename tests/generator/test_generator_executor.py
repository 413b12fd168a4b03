"""The generator's contract, asked of the embedded engine: plain, in eight bits, over two ranks."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.worker import GeneratorWorker
from llamarl.model.inventory import parameter_shapes
from tests.fakes import WatchedStorage
from tests.generator import generator_contract
from tests.generator.generator_contract import *  # noqa: F403 - the questions
from tests.generator.generator_replica import (
    EngineCase,
    Replica,
    assert_same,
    collect,
    connect,
    drive,
    gather,
    make,
    make_source,
    publish,
    request,
    send,
)
from tests.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


INT8 = {"quantization": "int8", "kv_after_commit": "recompute"}


@pytest.fixture(
    params=[
        "plain",
        "int8",
        pytest.param("2 ranks", marks=pytest.mark.slow),
        pytest.param("int8, 2 ranks", marks=pytest.mark.slow),
    ]
)
def engine_case(request: pytest.FixtureRequest, checkpoint: str) -> EngineCase:
    return EngineCase(
        config=EmbeddedConfig,
        checkpoint=checkpoint,
        fields=INT8 if "int8" in request.param else {},
        num_ranks=2 if "2 ranks" in request.param else 1,
    )


@pytest.mark.full
def test_two_ranks_answer_what_is_hardest_for_them(checkpoint: str, run_dir: str) -> None:
    """The other questions, which take long, are for the longer set."""
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint, num_ranks=2)
    questions = generator_contract
    questions.test_columns_of_a_row_are_stored_when_collect_returns_it(case, run_dir)
    questions.test_a_replica_without_weights_starts_at_its_first_commit(case, run_dir)
    questions.test_versions_are_published_while_decoding_and_a_discarded_one_is_not(
        case, run_dir, "host"
    )
    questions.test_a_replica_passes_on_what_it_received(case, run_dir)


def engine_of(rank: GeneratorWorker) -> EmbeddedEngine:
    """The engine of a started rank."""
    return rank._decoding.engine


def test_a_version_lies_bit_by_bit_in_the_boxes_of_two_ranks(checkpoint: str, run_dir: str) -> None:
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint, num_ranks=2)

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        source = make_source(case)
        await connect(source, generator)
        await publish(source, generator, 1)
        held = []
        for rank in generator.ranks:
            engine, active = engine_of(rank), rank._buffer.active
            expected = torch.zeros(engine.memory.num_elements)
            engine.load(expected, checkpoint)
            assert torch.equal(active, expected)
            held.append(expected.numel())
        whole = sum(math.prod(shape) for shape in parameter_shapes(engine.architecture).values())
        assert max(held) < 0.55 * whole

    drive(case, run_dir, scenario, load_weights=False)


def test_a_replica_whose_engine_did_not_follow_a_commit_is_dead(
    checkpoint: str, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is of the new version; the engine may still read what was made of the old one."""
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint)

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        source = make_source(case)
        await connect(source, generator)
        source.tensors.label(1)
        await generator.submit([request(i, max_tokens=110) for i in range(4)])
        engine = engine_of(generator.ranks[0])

        def commit(weights: object, version: int) -> int:
            raise MemoryError("no room")

        monkeypatch.setattr(engine, "commit", commit)
        await send(source, generator, 1)
        with pytest.raises(MemoryError):
            await generator.commit(1)
        num_tokens = engine.num_written_tokens
        for call in (collect(generator), generator.submit([request(9)]), generator.prepare(2)):
            with pytest.raises(MemoryError):
                await call
        assert engine.num_written_tokens == num_tokens, "nothing is decoded any more"

    drive(case, run_dir, scenario)


def test_an_engine_error_comes_out_of_collect_with_its_traceback(
    checkpoint: str, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        engine_of(generator.ranks[0])._decoder.weights.layers[1].down = torch.zeros(3, 3)
        await generator.submit([request(0)])
        with pytest.raises(RuntimeError) as caught:
            await gather(generator, 1)
        assert "_finish_layer" in [entry.name for entry in caught.traceback]
        with pytest.raises(RuntimeError):
            await generator.submit([request(1)])

    drive(EngineCase(config=EmbeddedConfig, checkpoint=checkpoint), run_dir, scenario)


def test_weights_prepared_for_a_version_that_was_given_up_are_not_used(
    checkpoint: str, run_dir: str
) -> None:
    """They were made of memory that the next version overwrote meanwhile."""
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint, fields=INT8)

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        engine, may_end = engine_of(generator.ranks[0]), threading.Event()
        process_weights, commit = engine.process_weights, engine.commit
        made: list[object] = []
        used: list[object] = []

        def slow_at_first(flat: torch.Tensor) -> object:
            weights = process_weights(flat)
            made.append(weights)
            if len(made) == 1:
                may_end.wait()
            return weights

        def seen(weights: object, version: int) -> int:
            used.append(weights)
            return commit(weights, version)

        engine.process_weights, engine.commit = slow_at_first, seen
        source = make_source(case)
        await connect(source, generator)
        source.tensors.label(1)
        source.write(1, await generator.prepare(1))
        late = asyncio.create_task(generator.verify(1))
        while not made:
            await asyncio.sleep(0.001)
        await generator.abort(1)
        source.tensors.label(2)
        await send(source, generator, 2)
        may_end.set()
        await late
        await generator.commit(2)
        assert used[0] is made[1]

    drive(case, run_dir, scenario)


def test_ranks_that_the_config_does_not_know_are_refused(checkpoint: str, run_dir: str) -> None:
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"generator\.num_ranks must be 2, got 1"):
        make(case, WatchedStorage(), run_dir, num_ranks=2)


@pytest.mark.parametrize("staging", ["double_buffer", "host"])
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int8", pytest.param("2 ranks", marks=pytest.mark.slow)])
def test_after_a_reset_a_generator_is_like_a_new_one_with_another_storage(
    kind: str,
    is_offloaded: bool,
    staging: str,
    checkpoint: str,
    run_dir: str,
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
