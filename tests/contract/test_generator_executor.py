"""What every generator executor promises, asked of the embedded one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.config import GeneratorConfig
from llamarl.executors.generator import GeneratorExecutor
from llamarl.metrics.span import Spans
from llamarl.types import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
    Request,
    Row,
    Sampling,
)

COLUMNS = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]


class MemoryStorage:
    """Cells in a dictionary."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, str], np.ndarray] = {}
        self.num_writes = 0

    async def write(self, row_ids: list[int], columns: Columns) -> None:
        self.num_writes += 1
        for name, arrays in columns.items():
            for row_id, array in zip(row_ids, arrays, strict=True):
                self.cells[row_id, name] = array

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        return {name: [self.cells[row_id, name] for row_id in row_ids] for name in names}

    async def retire(self, row_ids: list[int], fate: dict[str, str | int | float]) -> None:
        for key in [key for key in self.cells if key[0] in row_ids]:
            del self.cells[key]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make(checkpoint: str, storage: MemoryStorage, spans: Spans | None = None, **kwargs):
    config = GeneratorConfig(
        max_running=4, max_context_tokens=128, heartbeat_s=0.2, **kwargs.pop("config", {})
    )
    return GeneratorExecutor(
        rank=0,
        num_ranks=1,
        spans=spans or Spans("generator-0", None),
        replica=3,
        checkpoint=checkpoint,
        load_weights=kwargs.pop("load_weights", True),
        config=config,
        storage=storage,
        tokenizer=checkpoint,
        run_id="test",
    )


def request(row_id: int, **kwargs) -> Request:
    sampling = Sampling(max_tokens=kwargs.pop("max_tokens", 10), temperature=1.0)
    return Request(
        **{"row_id": row_id, "prompt_ids": (5, 6, 7), "sampling": sampling, "seed": row_id} | kwargs
    )


async def gather(generator: GeneratorExecutor, num_rows: int) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < num_rows:
        rows += await asyncio.wait_for(generator.collect(), 20)
    return rows


def drive(
    checkpoint: str,
    scenario: Callable[[GeneratorExecutor, MemoryStorage], Coroutine[None, None, None]],
    **kwargs,
) -> None:
    """Run `scenario` on a started executor, and close it."""

    async def main() -> None:
        storage = MemoryStorage()
        generator = make(checkpoint, storage, **kwargs)
        await generator.start()
        try:
            await scenario(generator, storage)
        finally:
            await generator.close()

    asyncio.run(main())


def publish(source: GeneratorExecutor, segment: str) -> None:
    """What a trainer would write: here the weights of another generator."""
    target = np.memmap(segment, dtype=np.float32, mode="r+")
    live = source._arena.live.numpy()
    target[: len(live)] = live


def test_columns_of_a_row_are_stored_when_collect_returns_it(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        await generator.submit([request(i, max_tokens=5 + i) for i in range(9)])
        rows: list[Row] = []
        while len(rows) < 9:
            for row in await generator.collect():
                rows.append(row)
                assert all((row.row_id, name) in storage.cells for name in COLUMNS)
        for row in rows:
            assert row.num_tokens == 5 + row.row_id
            assert row.finish_reason is FinishReason.LENGTH
            assert row.replica == 3
            assert [(s.version, s.num_tokens) for s in row.spans] == [(0, row.num_tokens)]
            cell = {name: storage.cells[row.row_id, name] for name in COLUMNS}
            assert cell[PROMPT_IDS].tolist() == [5, 6, 7]
            assert cell[PROMPT_IDS].dtype == cell[RESPONSE_IDS].dtype == np.int32
            assert cell[GENERATOR_LOGPROBS].dtype == np.float32
            assert cell[TOKEN_VERSIONS].dtype == np.int32
            assert len(cell[RESPONSE_IDS]) == len(cell[GENERATOR_LOGPROBS]) == row.num_tokens
            assert cell[SAMPLING].tolist() == [1.0, 0, 1.0, 5 + row.row_id, row.row_id, 1]

    drive(checkpoint, scenario)


def test_collect_returns_nothing_within_the_heartbeat_when_idle(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        assert await asyncio.wait_for(generator.collect(), 5) == []
        assert storage.num_writes == 0

    drive(checkpoint, scenario)


def test_rows_that_finished_together_are_written_together(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        await generator.submit([request(i) for i in range(4)])
        assert len(await gather(generator, 4)) == 4
        assert storage.num_writes == 1

    drive(checkpoint, scenario)


def test_aborted_rows_come_out_marked_whether_running_or_queued(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        await generator.submit([request(i, max_tokens=120) for i in range(4)])
        await generator.submit([request(9, min_version=5)])
        await generator.abort([2, 9])
        rows = {row.row_id: row for row in await gather(generator, 5)}
        assert rows[2].finish_reason is rows[9].finish_reason is FinishReason.ABORTED
        assert rows[9].num_tokens == 0
        assert rows[9].spans == ()
        assert storage.cells[9, RESPONSE_IDS].shape == (0,)
        assert {rows[i].finish_reason for i in (0, 1, 3)} == {FinishReason.LENGTH}

    drive(checkpoint, scenario)


def test_a_partial_row_is_resumed_from_storage_on_another_replica(checkpoint: str) -> None:
    storage = MemoryStorage()

    async def uncut(generator: GeneratorExecutor, other: MemoryStorage) -> None:
        await generator.submit([request(0, max_tokens=12)])
        await gather(generator, 1)
        storage.cells.update({(100, name): other.cells[0, name] for name in COLUMNS})

    drive(checkpoint, uncut)

    async def part(resume: bool) -> Row:
        generator = make(checkpoint, storage)
        await generator.start()
        await generator.submit([request(0, max_tokens=12, segment_tokens=5, resume=resume)])
        (row,) = await gather(generator, 1)
        await generator.close()
        return row

    rows = [asyncio.run(part(resume)) for resume in (False, True, True)]
    assert [row.num_tokens for row in rows] == [5, 10, 12]
    assert [row.finish_reason for row in rows] == [
        FinishReason.SEGMENT,
        FinishReason.SEGMENT,
        FinishReason.LENGTH,
    ]
    ids = storage.cells[0, RESPONSE_IDS]
    assert ids.tolist() == storage.cells[100, RESPONSE_IDS].tolist()
    np.testing.assert_allclose(
        storage.cells[0, GENERATOR_LOGPROBS], storage.cells[100, GENERATOR_LOGPROBS], atol=1e-5
    )


def test_a_replica_without_weights_starts_at_its_first_flip(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        other = make(checkpoint, storage)
        await other.start()
        await generator.submit([request(0)])
        assert await generator.collect() == []
        layout = await generator.target_layout()
        assert layout.parameters.keys() == other._engine.layout.parameters.keys()
        offer = await generator.offer(4)
        assert (offer.version, offer.replica) == (4, 3)
        publish(other, offer.segment)
        prints = await generator.fingerprint(4)
        assert prints.keys() == layout.parameters.keys()
        assert all(prints.values())
        assert await generator.flip(4) == 0
        (row,) = await gather(generator, 1)
        assert [(s.version, s.num_tokens) for s in row.spans] == [(4, 10)]
        await other.submit([request(0)])
        await gather(other, 1)
        await other.close()

    drive(checkpoint, scenario, load_weights=False)


def test_a_flip_while_decoding_splits_the_spans_and_a_discard_does_not(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        await generator.submit([request(i, max_tokens=120) for i in range(4)])
        await generator.offer(1)
        await generator.discard(1)
        offer = await generator.offer(1)
        publish(generator, offer.segment)
        running = await generator.flip(1)
        rows = await gather(generator, 4)
        for row in rows:
            assert sum(span.num_tokens for span in row.spans) == 120
            versions = storage.cells[row.row_id, TOKEN_VERSIONS]
            assert [span.version for span in row.spans] == sorted(set(versions.tolist()))
        if running:
            assert {row.spans[-1].version for row in rows} == {1}

    drive(checkpoint, scenario)


def test_an_engine_error_comes_out_of_collect_with_its_traceback(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        generator._engine._decoder.weights.layers[1].down = torch.zeros(3, 3)
        await generator.submit([request(0)])
        with pytest.raises(RuntimeError) as caught:
            await gather(generator, 1)
        assert "_finish_layer" in [entry.name for entry in caught.traceback]

    drive(checkpoint, scenario)


def test_a_prompt_that_does_not_fit_is_refused_at_submit(checkpoint: str) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        with pytest.raises(ValueError, match=r"generator\.max_context_tokens 128"):
            await generator.submit([request(0, prompt_ids=(1,) * 128)])

    drive(checkpoint, scenario)


def test_spans_tell_prefill_decode_and_waiting_apart(checkpoint: str, tmp_path: Path) -> None:
    spans = Spans("generator-0", tmp_path)

    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        await generator.submit([request(i, max_tokens=7) for i in range(3)])
        await gather(generator, 3)
        await generator.collect()

    drive(checkpoint, scenario, spans=spans)
    spans.close()
    lines = [
        json.loads(line) for line in (tmp_path / "generator-0.jsonl").read_text().split("\n")[1:-1]
    ]
    decoded = [line["tokens"] for line in lines if line["name"] == "decode"]
    assert sum(decoded) == 21
    assert sum(line["tokens"] for line in lines if line["name"] == "prefill") == 2
    assert {line["cat"] for line in lines if line["name"] in ("decode", "prefill")} == {"busy"}
    waits = [line for line in lines if line["name"] == "requests"]
    assert waits
    assert {line["cat"] for line in waits} == {"wait"}
    ordered = sorted((line["start_ns"], line["end_ns"]) for line in lines)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
