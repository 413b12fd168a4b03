"""The generator's contract, asked of the embedded engine, plain and in eight bits."""

from __future__ import annotations

import pytest
import torch

from llamarl.config import EmbeddedConfig
from llamarl.executors.generator import GeneratorExecutor
from tests.contract.generator_contract import *  # noqa: F403 - the questions, and `run_dir`
from tests.contract.generator_contract import (
    EngineCase,
    MemoryStorage,
    drive,
    gather,
    make,
    request,
)


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


@pytest.fixture(params=["plain", "int8"])
def engine_case(request: pytest.FixtureRequest, checkpoint: str) -> EngineCase:
    is_staged = request.param == "int8"
    fields = {"quantization": "int8", "kv_after_flip": "recompute"} if is_staged else {}
    return EngineCase(
        config=EmbeddedConfig, checkpoint=checkpoint, fields=fields, is_staged=is_staged
    )


def test_an_engine_error_comes_out_of_collect_with_its_traceback(
    checkpoint: str, run_dir: str
) -> None:
    async def scenario(generator: GeneratorExecutor, storage: MemoryStorage) -> None:
        generator._decoding.engine._decoder.weights.layers[1].down = torch.zeros(3, 3)
        await generator.submit([request(0)])
        with pytest.raises(RuntimeError) as caught:
            await gather(generator, 1)
        assert "_finish_layer" in [entry.name for entry in caught.traceback]
        with pytest.raises(RuntimeError):
            await generator.submit([request(1)])

    drive(EngineCase(config=EmbeddedConfig, checkpoint=checkpoint), run_dir, scenario)


def test_ranks_that_the_config_does_not_know_are_refused(checkpoint: str, run_dir: str) -> None:
    case = EngineCase(config=EmbeddedConfig, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"generator\.num_ranks must be 2, got 1"):
        make(case, MemoryStorage(), run_dir, num_ranks=2)
