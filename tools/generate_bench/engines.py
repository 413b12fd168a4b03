"""What is compared: our engine and transformers; and their model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.model.architecture import FAMILIES, Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURE = Architecture(
    model_type="llama",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_positions=1024,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_embeddings=True,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)


LARGE = replace(
    ARCHITECTURE,
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    head_dim=64,
)


PROMPT_TOKENS = 16


NEW_TOKENS = 128


def random_model(
    a: Architecture, dtype: torch.dtype, attention: str = "sdpa", *, seed: int = 0, **more: float
) -> PreTrainedModel:
    """transformers' model of this architecture, random weights from a fixed seed; `more` of its
    config."""
    import transformers

    torch.manual_seed(seed)
    rope: dict[str, float | str] = {"rope_type": "default", "rope_theta": a.rope_theta}
    if a.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": a.rope_scaling.factor,
            "low_freq_factor": a.rope_scaling.low_freq_factor,
            "high_freq_factor": a.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": a.rope_scaling.original_max_positions,
        }
    if a.experts is not None:
        inner = FAMILIES[a.model_type].experts.size_key
        more |= {
            "num_experts": a.experts.num_experts,
            "num_experts_per_tok": a.experts.num_chosen,
            inner: a.experts.intermediate_size,
            "norm_topk_prob": a.experts.normalized,
            "mlp_only_layers": [*a.experts.dense_layers],
            "pad_token_id": None,
        }
    config = transformers.AutoConfig.for_model(
        a.model_type,
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        **{"intermediate_size": a.intermediate_size} | more,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=a.max_positions,
        rms_norm_eps=a.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=a.tie_embeddings,
        attention_bias=a.attention_bias,
        mlp_bias=a.mlp_bias,
        attn_implementation=attention,
    )
    return getattr(transformers, a.model_class)(config).to(dtype).eval()


def make_engine(
    architecture: Architecture, model: torch.nn.Module, dtype: str, slots: int, context: int
) -> EmbeddedEngine:
    """The engine with the weights of `model`."""
    engine = EmbeddedEngine(
        architecture,
        EmbeddedConfig(max_num_seqs=slots, max_model_len=context, dtype=dtype),
    )
    flat = torch.zeros(engine.memory.num_elements, dtype=engine.memory.dtype)
    parameters = dict(model.named_parameters())
    for name in engine.layout.parameters:
        engine.layout.parameter(flat, name).copy_(parameters[name].detach())
    engine.commit(flat, 0)
    return engine


def random_prompts(num: int, vocab_size: int = ARCHITECTURE.vocab_size) -> Tensor:
    """int64 [num, PROMPT_TOKENS]."""
    generator = torch.Generator().manual_seed(1)
    shape = (num, PROMPT_TOKENS)
    return torch.randint(0, vocab_size, shape, generator=generator)


def run_engine(engine: EmbeddedEngine, prompts: Tensor, lengths: list[int]) -> int:
    """Write one rollout of the given length per prompt; returns the tokens written."""
    for row, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True)):
        sampling = Sampling(max_tokens=length)
        engine.submit(Request(row_id=row, prompt_ids=tuple(prompt), sampling=sampling, seed=row))
    # A new version label keeps one repeat from using the prompts' cache of the one before.
    engine.version += 1
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(f.written.ids) for f in engine.step())
    return num_tokens


def run_transformers(model: torch.nn.Module, prompts: Tensor, length: int, cache: str) -> None:
    """Sample `length` tokens for every prompt in one batch."""
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length,
            min_new_tokens=None,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            disable_compile=True,
            **options,
        )
    assert out.shape[1] == prompts.shape[1] + length
