"""What a rank of the embedded engine has in memory, against the forecast."""

from __future__ import annotations

import pytest
import torch

from llamarl.core.config import EmbeddedConfig, LoraConfig, TrainerConfig, WeightsConfig
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.weights import tensors
from llamarl.planner.memory.generator_memory import forecast_generator
from llamarl.publish.target import WeightBuffer
from tests.unit.planner_recipes import LLAMA, make_recipe

FIELDS = {"max_num_seqs": 4, "max_model_len": 64}


@pytest.mark.parametrize(
    ("quantization", "staging"),
    [
        ("none", "double_buffer"),
        ("none", "host"),
        ("int8", "double_buffer"),
        ("int8", "host"),
    ],
)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_holds_what_is_forecast_while_the_next_version_is_prepared(
    quantization: str, staging: str, is_padded: bool, rank: int
) -> None:
    weights = WeightsConfig(staging=staging)
    config = EmbeddedConfig(quantization=quantization, **FIELDS)  # type: ignore[arg-type]
    trainer = TrainerConfig(lora=LoraConfig(rank=rank))
    engine = EmbeddedEngine(LLAMA, config, is_padded=is_padded, lora=trainer.lora)
    weight_buffer = WeightBuffer(engine.memory, weights, replica=0, rank=0, run_id="memory")
    try:
        held = [block.flat for block in weight_buffer._blocks]
        made = [engine.process_weights(weight_buffer.active)]
        engine.commit(made[0], 0)
        made.append(engine.process_weights(weight_buffer.staging))
        held += [tensor for each in made for tensor in tensors(each)]
        recipe = make_recipe(generator=config, weights=weights, trainer=trainer)
        forecast = forecast_generator(recipe, LLAMA)
        expected = sum((forecast.weights | forecast.host).values())
        # Norms in float32 are beside the weight buffer, and few: the forecast leaves them out.
        norms = 4 * (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size * len(made)
        assert expected <= num_bytes(held) <= expected + norms
    finally:
        weight_buffer.close()
        engine.close()


def num_bytes(held: list[torch.Tensor]) -> int:
    """Of their memories, each once."""
    memories = [tensor.untyped_storage() for tensor in held]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
