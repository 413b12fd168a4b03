"""Weights into vLLM: the numbers that it computes from them, and the bits that a publish writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.core.records import FinishReason
from llamarl.generator.vllm.limits import CPU_HEAD_SIZES
from tests.uneven_publish import publish
from tests.vllm.checkpoints import check_logprobs, write_versions
from tests.vllm.engines import as_vllm_loads, commit, drain, make_engine, request, step

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["llama", "qwen25", "qwen3"])
def test_logprobs_equal_those_of_transformers_before_and_after_an_update(
    family: str, tmp_path: Path
) -> None:
    (first, old), (second, new) = write_versions(tmp_path, family)
    engine = make_engine(first, kv_after_commit="recompute")
    try:
        commit(engine, first, 0)
        for row in range(6):
            engine.submit(
                request(row, tuple(range(3, 5 + 9 * row)), max_tokens=24, temperature=0.8)
            )
        assert step(engine, 9) == []
        assert commit(engine, second, 1) == 6
        done = drain(engine)
        for item in done.values():
            assert set(item.written.versions) == {0, 1}
            assert (np.diff(item.written.versions) >= 0).all()
            assert item.reason is FinishReason.LENGTH
            check_logprobs(item, [old, new], 0.8)
        assert not engine.memory.is_staged
    finally:
        engine.close()


def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16(tmp_path: Path) -> None:
    ((folder, _), _) = write_versions(tmp_path, "llama")
    engine = make_engine(folder, dtype="bfloat16")
    try:
        commit(engine, folder, 0)
        hidden = 3 * torch.randn(5, engine.architecture.hidden_size).bfloat16()
        with torch.inference_mode():
            logits = engine._model.compute_logits(hidden)
        head = engine._model.lm_head.weight[: engine.architecture.vocab_size]
        exact = hidden.double() @ head.double().t()
        assert exact.std() > 1
        assert (logits - exact).abs().max() < 1e-4
    finally:
        engine.close()


class Fused(torch.nn.Module):
    """Two weights of [4, 6] in one parameter, loaded by what a test hands in."""

    def __init__(self, load) -> None:
        super().__init__()
        self.pair = torch.nn.Parameter(torch.zeros(8, 6))
        self._load = load

    def load_weights(self, weights) -> None:
        for index, (_, tensor) in enumerate(weights):
            self._load(self.pair.data[4 * index : 4 * index + 4], tensor)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda target, source: target.copy_(source * 2), "must only copy weights"),
        (lambda target, source: target[:3].copy_(source[1:].flip(0)), "must only copy weights"),
        (lambda target, source: target[:, :4].copy_(source.t()[:4]), "must only copy weights"),
        (lambda target, source: None, "must take every weight, got none of a"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused(load, words: str) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from llamarl.generator.vllm.recorder import record

    shapes = {"a": (4, 6), "b": (4, 6)}
    for chosen in (load, torch.Tensor.copy_):
        model = Fused(chosen)
        record_metadata_for_reloading(model)
        pair = model.pair
        if chosen is load:
            with pytest.raises(ValueError, match=words):
                record(model, shapes, torch.float32)
        else:
            memory = record(model, shapes, torch.float32).memory
            (box,) = memory.parameters["b"].boxes
            assert (box.start, box.stop, box.offset, box.strides) == ((0, 0), (4, 6), 24, (6, 1))
            assert not memory.is_staged
        assert model.pair is pair  # what computes is back in its place


def test_what_vllm_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    ((folder, _), _) = write_versions(tmp_path, "llama")
    for changes, words in [
        ({"kv_cache_bytes": 1000}, "generator.kv_cache_bytes must be at least"),
        ({"kv_cache_bytes": 1 << 44}, "vLLM cannot run .* Decrease generator.kv_cache_bytes"),
        ({"device": "cuda"}, "generator.device must be cpu"),
        ({"num_ranks": 3}, "generator.num_ranks must divide"),
        ({"max_model_len": 4096, "kv_cache_bytes": 1 << 28}, "vLLM cannot run .*4096"),
    ]:
        if changes.get("device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=words) as raised:
            make_engine(folder, **changes)
        assert "\n" not in str(raised.value)


def test_the_head_sizes_that_are_refused_are_those_of_vllm() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
@pytest.mark.parametrize("family", ["qwen25", "qwen3"])
def test_a_publish_from_uneven_shards_is_what_vllm_would_load(
    family: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamarl")
    (first, _), (_, new) = write_versions(tmp_path, family)
    weights = {name: tensor.detach() for name, tensor in new.named_parameters()}
    engine = make_engine(first, quantization=quantization, dtype="bfloat16")
    formats = () if quantization == "none" else (engine._format,)
    try:
        assert not engine.memory.is_staged
        commit(engine, first, 0)
        assert "as loaded, direct: " in caplog.text
        assert "derived at a commit" not in caplog.text
        engine.submit(request(0, max_tokens=12))
        step(engine, 4)
        (flat,) = publish([engine.memory], weights, formats)
        assert engine.commit(engine.process_weights(flat), 1) == 1
        expected = {n: t.data.clone() for n, t in engine._model.named_parameters()}
        first_tokens = drain(engine)[0].written
        assert first_tokens.versions.tolist() == [0] * 4 + [1] * 8
        found = as_vllm_loads(engine, weights)
        assert expected.keys() == found.keys()
        is_quantised = any(t.dtype == torch.float8_e4m3fn for t in found.values())
        assert is_quantised == (quantization != "none")
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.float(), expected[name].float()), name
    finally:
        engine.close()
