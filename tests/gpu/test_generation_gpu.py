"""The embedded engine on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.executors.offload import Offload
from llamarl.generation.engine import Engine
from tests.unit.test_generation_engine import (
    LLAMA,
    EmbeddedConfig,
    finish,
    flat_weights,
    make_model,
    make_request,
    model_logprobs,
    quantize_model,
    random_prompts,
)

pytestmark = pytest.mark.gpu


def make_cuda_engine(seed: int, **config) -> Engine:
    engine = Engine(
        LLAMA, EmbeddedConfig(max_running=4, max_context_tokens=160, device="cuda", **config)
    )
    flat = flat_weights(engine, make_model(LLAMA, seed)).to(engine.memory.dtype)
    engine.flip(flat.cuda(), 0)
    for row, prompt in enumerate(random_prompts(9)):
        engine.submit(make_request(row, prompt, 3 + 12 * row, temperature=0.7 + 0.1 * row))
    return engine


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_logprobs_equal_the_trainers_model(quantization: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(LLAMA, 1)
    if quantization == "fp8":
        model = quantize_model(model, "fp8")
    engine = make_cuda_engine(1, quantization=quantization)
    for item in finish(engine).values():
        expected = model_logprobs(model, item, item.request.sampling.temperature)
        np.testing.assert_allclose(item.written.logprobs, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_logprobs_are_near_the_trainers_model() -> None:
    model = make_model(LLAMA, 1)
    for item in finish(make_cuda_engine(1, dtype="bfloat16")).values():
        expected = model_logprobs(model, item, item.request.sampling.temperature)
        assert np.median(np.abs(item.written.logprobs - expected)) < 0.1


def test_weights_and_cache_leave_the_device_and_come_back(tmp_path: Path) -> None:
    stayed, left = make_cuda_engine(1, quantization="fp8"), make_cuda_engine(1, quantization="fp8")
    offload = Offload("pinned", str(tmp_path), "generator-0")
    done = {}
    for _ in range(5):
        done |= {item.request.row_id: item for item in left.step()}
    for kind in ("kv", "weights"):
        assert offload.leave(kind, left.movable(kind)) > 0
    for kind in ("weights", "kv"):
        offload.enter(kind)
    done |= finish(left)
    for row, item in finish(stayed).items():
        assert done[row].written.ids.tolist() == item.written.ids.tolist()
        np.testing.assert_allclose(done[row].written.logprobs, item.written.logprobs, atol=1e-5)
