"""Small random checkpoints written by transformers, one per feature mix, and their logits.

Weights are large enough that logits spread (standard deviation at least 1), biases and norms are
not at their neutral start, sizes are odd, and positions pass `original_max_position_embeddings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llamarl.models import hf, inventory
from llamarl.models.transformer import Transformer

LENGTHS = (120, 7, 1, 33, 60)
NUM_TOKENS = sum(LENGTHS)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 5],
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama3": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama31": (LlamaConfig, LlamaForCausalLM, {"head_dim": 14, "rope_parameters": STRETCHED}),
    "llama32": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": STRETCHED, "tie_word_embeddings": True},
    ),
    "llama_biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen25": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "qwen25_tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 20}),
    "qwen3_tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def write_reference(folder: Path, case: str) -> PreTrainedModel:
    """Let transformers write the checkpoint of `case` into `folder`; returns its model."""
    config_class, model_class, changes = CASES[case]
    torch.manual_seed(sorted(CASES).index(case))
    model = model_class(config_class(**(SIZES | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # neutral biases and norms would hide that they are missing
                centre = 1.0 if "norm" in name else 0.0
                parameter.normal_(centre, 0.4)
    model.save_pretrained(folder)
    return model


def token_ids() -> torch.Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)
    )


def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    """[N, vocab_size] from one right-padded batch, padding cut away again."""
    rows = token_ids().split(list(LENGTHS))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask).logits
    return torch.cat([logits[i, :length] for i, length in enumerate(LENGTHS)])


def load(folder: Path) -> Transformer:
    """Our model of the checkpoint in `folder`."""
    with torch.device("meta"):
        model = Transformer(inventory.check_checkpoint(folder))
    model.to_empty(device="cpu")
    hf.load_into(dict(model.named_parameters()), folder)
    return model


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()
