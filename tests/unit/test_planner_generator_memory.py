"""What a rank of the embedded engine has in memory, against the forecast."""

from __future__ import annotations

import pytest
import torch

from llamarl.config import EmbeddedConfig, WeightsConfig
from llamarl.generation.engine import Engine
from llamarl.generation.parameters import tensors
from llamarl.planner.generator_memory import forecast_generator
from llamarl.weights.arena import Arena
from tests.unit.planner_recipes import LLAMA, make_recipe

FIELDS = {"max_running": 4, "max_context_tokens": 64}


@pytest.mark.parametrize(
    ("quantization", "shadow"),
    [("none", "full"), ("none", "host"), ("none", "bucket"), ("int8", "full"), ("int8", "host")],
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_rank_holds_what_is_forecast_while_the_next_version_is_prepared(
    quantization: str, shadow: str, is_padded: bool
) -> None:
    weights = WeightsConfig(shadow=shadow, bucket_bytes=1 << 13)
    config = EmbeddedConfig(quantization=quantization, **FIELDS)  # type: ignore[arg-type]
    engine = Engine(LLAMA, config, is_padded=is_padded)
    arena = Arena(
        parameters=engine.memory.parameters,
        num_elements=engine.memory.num_elements,
        dtype=engine.memory.dtype,
        is_staged=engine.memory.is_staged,
        replica=0,
        rank=0,
        run_id="memory",
        shadow=shadow,
        bucket_bytes=weights.bucket_bytes,
    )
    try:
        held = [block.flat for block in arena._blocks]
        made = [engine.prepare(arena.live)]
        engine.flip(made[0], 0)
        if shadow != "bucket":  # whose parts are copied into the live memory
            made.append(engine.prepare(arena.shadow))
        held += [tensor for each in made for tensor in tensors(each)]
        forecast = forecast_generator(make_recipe(generator=config, weights=weights), LLAMA)
        expected = sum((forecast.weights | forecast.host).values())
        # Norms in float32 are beside the arena, and few: the forecast leaves them out.
        norms = 4 * (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size * len(made)
        assert expected <= num_bytes(held) <= expected + norms
    finally:
        arena.close()
        engine.close()


def num_bytes(held: list[torch.Tensor]) -> int:
    """Of their memories, each once."""
    memories = [tensor.untyped_storage() for tensor in held]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
