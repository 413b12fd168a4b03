"""What a vLLM rank has in memory, byte for byte as forecast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llamarl.core.config import VllmConfig, WeightsConfig
from llamarl.generator.memory import forecast_generator
from llamarl.publish.target import WeightBuffer
from tests.planner.planner_recipes import make_recipe
from tests.vllm.checkpoints import check_logprobs, write_versions
from tests.vllm.engines import DEFAULTS, drain, make_engine, request, step

pytestmark = pytest.mark.vllm

EAGER: dict[str, object] = {}
GRAPHS = {"device": "cuda", "enforce_eager": False, "dtype": "float32"}
QUANTISED = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}


def make_weight_buffer(engine, staging: str) -> WeightBuffer:
    config = WeightsConfig(staging=staging)
    return WeightBuffer(engine.memory, config, replica=0, rank=0, run_id="memory")


def held_bytes(engine, weight_buffer: WeightBuffer) -> int:
    """Of all weights: vLLM's parameters and the weight buffer's memories, each once."""
    held = [tensor.data for tensor in engine._model.parameters()]
    held += [block.flat for block in weight_buffer._blocks]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()
    )


@pytest.mark.parametrize(
    ("changes", "staging"),
    [
        (EAGER, "double_buffer"),
        (EAGER, "host"),
        (GRAPHS, "double_buffer"),
        (QUANTISED, "double_buffer"),
        pytest.param(GRAPHS, "host", marks=pytest.mark.slow),
        pytest.param(QUANTISED, "host", marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_what_the_planner_counts_before_and_after_its_first_commit(
    changes: dict[str, object], staging: str, tmp_path: Path
) -> None:
    # Sizes that neither vLLM nor the weight buffer rounds up.
    ((folder, _), _) = write_versions(tmp_path, "llama", vocab_size=128, hidden_size=128)
    # Of graphs only where the weights lie can be had on a CPU.
    graphs = {"keeps_addresses": True}
    engine = make_engine(folder, **(graphs if changes is GRAPHS else changes))
    weight_buffer = make_weight_buffer(engine, staging)
    try:
        config = make_recipe(
            generator=VllmConfig(**(DEFAULTS | changes)),  # type: ignore[arg-type]
            weights=WeightsConfig(transport="collective", staging=staging),
        )
        memory = forecast_generator(config, engine.architecture)
        forecast = memory.weights | memory.host
        expected = sum(forecast.values())
        assert held_bytes(engine, weight_buffer) == expected
        engine.load(weight_buffer.active, folder)
        engine.commit(engine.process_weights(weight_buffer.active), 0)
        assert held_bytes(engine, weight_buffer) == expected
    finally:
        weight_buffer.close()
        engine.close()


def test_new_weights_come_to_the_addresses_that_captured_graphs_read(tmp_path: Path) -> None:
    (first, old), (second, new) = write_versions(tmp_path, "llama")
    engine = make_engine(first, keeps_addresses=True, kv_after_commit="recompute")
    try:
        assert engine.memory.is_staged
        flat = torch.zeros(engine.memory.num_elements)
        engine.load(flat, first)
        addresses = [tensor.data_ptr() for tensor in engine.movable("weights")]
        engine.commit(engine.process_weights(flat), 0)
        engine.submit(request(0, max_tokens=12))
        step(engine, 5)
        engine.load(flat, second)
        engine.commit(engine.process_weights(flat), 1)
        flat.zero_()  # the engine keeps nothing of it
        item = drain(engine)[0]
        assert set(item.written.versions.tolist()) == {0, 1}
        check_logprobs(item, [old, new])
        assert [tensor.data_ptr() for tensor in engine.movable("weights")] == addresses
    finally:
        engine.close()
