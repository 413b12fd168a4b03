"""The embedded engine on a CUDA device: fused attention, captured graphs, and what moves."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.device.devices import platform_of
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.sampling import SamplingRows, sample
from llamarl.publish.offload import MemoryMover
from tests.generator.engine_models import (
    finish,
    flat_weights,
    make_request,
    model_logprobs,
    quantize_model,
    random_prompts,
)
from tests.generator.test_generation_engine import write
from tests.random_search import case
from tests.tiny_checkpoints import LLAMA, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_cuda_engine(seed: int, **config) -> EmbeddedEngine:
    fields = {"max_num_seqs": 4, "max_model_len": 160, "device": "cuda", "dtype": "float32"}
    engine = EmbeddedEngine(LLAMA, EmbeddedConfig(**(fields | config)))
    engine.commit(flat_weights(engine, make_model(LLAMA, seed)).cuda(), 0)
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


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_graphs_write_what_single_calls_write_through_commits_and_moves(quantization: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    done = []
    for enforce_eager in (True, False):
        config = EmbeddedConfig(
            max_num_seqs=7,
            max_model_len=160,
            device="cuda",
            dtype="float32",
            quantization=quantization,
            enforce_eager=enforce_eager,
        )
        engine = EmbeddedEngine(LLAMA, config)
        flats = [flat_weights(engine, make_model(LLAMA, seed)).cuda() for seed in (1, 2)]
        done.append(write(engine, flats, torch.empty_like(flats[0])))
        assert bool(engine._runner._replays) != enforce_eager
    for row, item in done[0].items():
        other = done[1][row].written
        assert other.ids.tolist() == item.written.ids.tolist()
        assert other.versions.tolist() == item.written.versions.tolist()
        np.testing.assert_allclose(other.logprobs, item.written.logprobs, rtol=1e-5, atol=1e-5)


def test_no_random_number_leads_to_an_impossible_token() -> None:
    """All 2^23 that there are: a GPU's running sums are not monotonic."""
    logits = torch.full((1, 3000), -torch.inf, device="cuda")
    logits[0, ::149] = torch.linspace(-2, 2, 21, device="cuda")
    kinds = SamplingRows(temperature=None, greedy=None, top_k=None, top_p=None)
    for first in range(0, 1 << 23, 1 << 16):
        uniform = torch.arange(first, first + (1 << 16), device="cuda").unsqueeze(1) * 2.0**-23
        ids, logprobs, _ = sample(logits.expand(1 << 16, -1).clone(), kinds, uniform)
        assert (ids % 149 == 0).all()
        assert logprobs.isfinite().all()


def test_graphs_decode_faster_than_single_calls() -> None:
    """A model so small that starting its kernels is all that a step costs."""
    seconds = []
    for enforce_eager in (True, False):
        engine = make_cuda_engine(1, enforce_eager=enforce_eager)
        finish(engine)
        for first_row in (10, 20):  # the first time captures
            start_s = time.perf_counter()
            for row in range(first_row, first_row + 4):
                engine.submit(make_request(row, (1, 2, row), 120))
            finish(engine)
        seconds.append(time.perf_counter() - start_s)
    assert seconds[1] < seconds[0]


def test_the_cache_leaves_the_device_and_comes_back(tmp_path: Path) -> None:
    stayed, left = make_cuda_engine(1, quantization="fp8"), make_cuda_engine(1, quantization="fp8")
    offload = MemoryMover("pinned", str(tmp_path), "generator-0")
    done = {}
    for _ in range(5):
        done |= {item.request.row_id: item for item in left.step()}
    assert offload.offload("kv", left.movable("kv")) > 0
    offload.onload("kv")
    done |= finish(left)
    for row, item in finish(stayed).items():
        assert done[row].written.ids.tolist() == item.written.ids.tolist()
        np.testing.assert_allclose(done[row].written.logprobs, item.written.logprobs, atol=1e-5)


def test_the_kernels_of_decode_attention_write_what_torchs_attention_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert platform_of(device).has_triton(device)
    from llamarl.generator.engine import decode_attention  # where Triton is
    from tests.generator.decode_attention_cases import check

    for name in ("SPLIT", "MOST_SPLITS"):  # of which the cases choose others
        monkeypatch.setattr(decode_attention, name, getattr(decode_attention, name))
    for seed in range(20):
        with case(seed):
            check(seed, "cuda")
