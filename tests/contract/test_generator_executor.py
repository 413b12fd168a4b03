"""What every generator executor promises, asked of the embedded one."""

from __future__ import annotations

import asyncio

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


def test_columns_of_a_row_are_stored_when_collect_returns_it(checkpoint: str) -> None:
    async def scenario() -> None:
        storage = MemoryStorage()
        generator = make(checkpoint, storage)
        await generator.start()
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
        await generator.close()

    asyncio.run(scenario())
