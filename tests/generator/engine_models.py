"""Small models and engines, and what the trainer's own model says, for the tests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.decoder import Decoder, PaddedRunner
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.weights import QuantizedMatrix, make_scratch
from llamarl.generator.protocol import RequestOutput
from llamarl.model.architecture import ExpertSizes, RopeScaling
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.transformer import Transformer
from llamarl.publish.layout import FP8, LARGEST, Format, format_of
from llamarl.publish.shards import quantize, row_maxima, scales_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from generate_bench.engines import random_model

from tests.tiny_checkpoints import LLAMA
from tests.uneven_publish import publish

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANTS = {
    "llama": LLAMA,
    "untied, llama3 rope, all biases": replace(
        LLAMA,
        tie_embeddings=False,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
        ),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
    "qwen2": replace(LLAMA, model_type="qwen2", attention_bias=True, num_kv_heads=6),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=24, num_kv_heads=1),
    "experts and a dense layer": replace(
        LLAMA,
        model_type="qwen3_moe",
        num_layers=3,
        qk_norm=True,
        experts=ExpertSizes(
            num_experts=8, num_chosen=3, intermediate_size=28, normalized=True, dense_layers=(1,)
        ),
    ),
    "experts and a norm of all heads": replace(
        LLAMA,
        model_type="olmoe",
        tie_embeddings=False,
        qk_norm=True,
        norms_all_heads=True,
        head_dim=8,
        intermediate_size=20,
        experts=ExpertSizes(num_experts=5, num_chosen=1, intermediate_size=20, normalized=False),
    ),
}


def in_transformers(model: Transformer) -> PreTrainedModel:
    """The same model with the same weights in transformers."""
    found = random_model(model.architecture, torch.float32)
    found.load_state_dict(model.state_dict(), strict=not model.architecture.tie_embeddings)
    return found


def flat_weights(engine: EmbeddedEngine, model: torch.nn.Module) -> torch.Tensor:
    """The memory of an engine after a publish of this model."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    formats = () if engine.layout.format is None else (engine.layout.format,)
    (flat,) = publish([engine.memory], weights, formats)
    return flat


def make_format(kind: str, dtype: torch.dtype = torch.float32) -> Format:
    """The embedded engine's "int8", or "fp8", which a CPU does not offer."""
    config = EmbeddedConfig(quantization="int8", dtype=str(dtype).removeprefix("torch."))
    found = format_of(config, LLAMA)
    assert found is not None
    return found if kind == "int8" else replace(found, dtype=FP8, largest=LARGEST[FP8])


def quantized(matrix: torch.Tensor, kind: str) -> QuantizedMatrix:
    """What eight bits make of `matrix` [in, out]."""
    form = make_format(kind, matrix.dtype)
    scales = scales_of(row_maxima(matrix.t()), form)
    scratch = make_scratch(len(matrix), matrix.dtype, matrix.device)
    return QuantizedMatrix(quantize(matrix.t(), scales, form), scales, scratch)


def make_engine(model: Transformer, *, slots: int = 4, **kwargs) -> EmbeddedEngine:
    config = EmbeddedConfig(max_num_seqs=slots, max_model_len=160, **kwargs.pop("config", {}))
    engine = EmbeddedEngine(model.architecture, config, **kwargs)
    engine.commit(flat_weights(engine, model), 0)
    return engine


def make_request(row_id: int, prompt: tuple[int, ...], max_tokens: int = 20, **kwargs) -> Request:
    names = ("temperature", "top_k", "top_p", "stop_token_ids", "stop_strings")
    sampling = {name: kwargs.pop(name) for name in names if name in kwargs}
    return Request(
        row_id=row_id,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        seed=kwargs.pop("seed", row_id),
        **kwargs,
    )


def random_prompts(num: int, longest: int = 40) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, 96, rng.integers(1, longest)).tolist()) for _ in range(num)]


def finish(engine: EmbeddedEngine) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        for item in engine.step():
            assert item.request.row_id not in done
            done[item.request.row_id] = item
    return done


def model_logprobs(model: Transformer, item: RequestOutput, temperature: float = 1.0) -> np.ndarray:
    """The trainer's log-probs of the response tokens."""
    prompt, ids = item.request.prompt_ids, item.written.ids.tolist()
    tokens = torch.tensor([*prompt, *ids])
    targets = torch.tensor([*prompt[1:], *ids, 0])
    with torch.no_grad():
        inputs = ModelInputs(tokens, make_packing([len(tokens)]), targets)
        stats = model(inputs, temperature)
    return stats.logprobs[len(prompt) - 1 : -1].numpy()


class CountedVersions(int):
    """A version that counts how often it is compared."""

    count = 0

    def __ge__(self, other: int) -> bool:
        self.count += 1
        return int(self) >= other


def quantize_model(model: Transformer, kind: str) -> Transformer:
    """`model` with every linear weight replaced by what eight bits make of it; the tied head, which
    is quantised but not the embedding, gets its own copy."""
    plain = Transformer(replace(model.architecture, tie_embeddings=False))
    state = model.state_dict()
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    for name, weight in state.items():
        if weight.ndim == 2 and "embed" not in name and not name.endswith("mlp.gate.weight"):
            state[name] = quantized(weight.t(), kind).dequantized().t()
        elif weight.ndim == 3:
            state[name] = torch.stack(
                [quantized(each.t(), kind).dequantized().t() for each in weight]
            )
    plain.load_state_dict(state)
    return plain


class FrozenGraphs:
    """Replays with the very tensors that the weights consisted of when a step was recorded."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.num_recorded, self.num_forgotten = decoder, 0, 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        held = self.decoder.weights
        frozen = replace(held, layers=[replace(layer) for layer in held.layers])
        compute()

        def run() -> torch.Tensor:
            now, self.decoder.weights = self.decoder.weights, frozen
            try:
                return compute()
            finally:
                self.decoder.weights = now

        return run

    def forget(self) -> None:
        self.num_forgotten += 1


def record_steps(engine: EmbeddedEngine) -> FrozenGraphs:
    """Let `engine`, whose steps are padded, record and replay them as it does on a GPU."""
    graphs = FrozenGraphs(engine._decoder)
    engine._runner = PaddedRunner(engine._decoder, engine._cache, graphs)
    return graphs
