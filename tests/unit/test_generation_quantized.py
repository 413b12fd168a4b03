"""An engine with fewer bits: bfloat16 and int8 weights against the plain ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.generator.engine import decoder
from llamarl.generator.engine.decoder import float32_product
from llamarl.generator.engine.engine import EmbeddedEngine
from tests.tiny_checkpoints import LLAMA, make_model
from tests.unit.engine_models import (
    VARIANTS,
    finish,
    flat_weights,
    make_engine,
    make_request,
    model_logprobs,
    quantize_model,
    quantized,
    random_prompts,
)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied", "int8"])
def test_a_bfloat16_engine_rounds_its_weights_but_not_its_logits(
    kind: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs against float64 ones of the very hidden states and head that the engine has."""
    architecture = replace(LLAMA, tie_embeddings=kind == "tied")
    quantization = "int8" if kind == "int8" else "none"
    config = EmbeddedConfig(
        max_num_seqs=4, max_model_len=160, dtype="bfloat16", quantization=quantization
    )
    engine = EmbeddedEngine(architecture, config, is_padded=is_padded)
    engine.commit(flat_weights(engine, make_model(architecture, 1)), 0)
    for row, prompt in enumerate(random_prompts(4)):
        engine.submit(make_request(row, prompt))
    seen = []

    def record(hidden, head):
        seen.append((hidden.clone(), head, float32_product(hidden, head)))
        return seen[-1][2].clone()  # sampling overwrites them

    monkeypatch.setattr(decoder, "float32_product", record)
    engine.step()
    hidden, head, logits = seen[-1]
    head = head.dequantized() if kind == "int8" else head
    exact = (hidden.double() @ head.double()).log_softmax(-1)
    assert logits.dtype == torch.float32
    assert exact.std() > 1  # bfloat16 rounds numbers of this size by up to 0.01
    assert (logits.double().log_softmax(-1) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_int8_logprobs_are_those_of_the_dequantised_model(name: str, recomputes: bool) -> None:
    models = [make_model(VARIANTS[name], seed) for seed in (1, 2)]
    config = {"quantization": "int8"} | ({"kv_after_commit": "recompute"} if recomputes else {})
    engine = make_engine(models[0], config=config)
    assert not engine.memory.is_staged
    requests = [make_request(r, p, 25) for r, p in enumerate(random_prompts(4))]
    flat = flat_weights(engine, models[1])
    processed = engine.process_weights(flat)
    for request in requests:
        engine.submit(request)
    for _ in range(9):
        engine.step()
    engine.commit(processed, 1)
    for item in finish(engine).values():
        plain, quantised = (
            [model_logprobs(m, item) for m in choice]
            for choice in (models, [quantize_model(m, "int8") for m in models])
        )
        logprobs = item.written.logprobs
        np.testing.assert_allclose(logprobs[:9], quantised[0][:9], atol=1e-4)
        if recomputes:
            np.testing.assert_allclose(logprobs[9:], quantised[1][9:], atol=1e-4)
        assert np.abs(logprobs[:9] - plain[0][:9]).max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("fp8", 32)])
def test_a_quantised_matrix_is_near_the_plain_one_and_multiplies_as_it_says(
    kind: str, steps: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(700, 1500).mul_(torch.logspace(-3, 3, 1500)).to(dtype)
    matrix[:, 7] = 0
    quantised = quantized(matrix, kind)
    wide = quantised.dequantized()
    span = 2 * matrix.float().abs().amax(dim=0)
    assert ((wide - matrix.float()).abs() <= span / steps * 1.02).all()
    assert not wide[:, 7].any()
    for num_rows in (1, 5, 40):
        x = torch.randn(num_rows, 700).to(dtype)
        exact = x.double() @ wide.double()
        error = (quantised.product(x) - exact).abs()
        sizes = x.double().abs() @ wide.double().abs()  # of the terms that were added up
        assert (error <= (1e-6 if dtype is torch.float32 else 1e-2) * sizes).all()
