"""Small random checkpoints that vLLM can run, two versions of each, and transformers' log-probs.

Heads have 32 channels, the smallest that vLLM's CPU attention takes. Logits spread (standard
deviation at least 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llamarl.generator.protocol import RequestOutput
from tests.tiny_checkpoints import write_reference

TOLERANCE = 1e-5
VOCAB = 99  # odd: vLLM pads it to a multiple of 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.13,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen25": {"model_type": "qwen2", "hidden_size": 128, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 128,
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "pad_token_id": None,
    },
}


def write_versions(folder: Path, family: str, **sizes: int) -> list[tuple[str, PreTrainedModel]]:
    """Two checkpoints of one architecture: (folder, transformers' model) of versions 0 and 1."""
    values = SIZES | FAMILIES[family] | sizes
    paths = [folder / f"{family}-{version}" for version in range(2)]
    return [(str(p), write_reference(p, seed=seed, **values)) for seed, p in enumerate(paths)]


def token_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """log p of each of `ids` after `prompt`: float32 [len(ids)]."""
    sequence = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(sequence).logits[0, len(prompt) - 1 : -1].float()
    assert logits.std() >= 1, "flat logits would hide wrong weights"
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def check_logprobs(
    item: RequestOutput, models: list[PreTrainedModel], temperature: float = 1.0
) -> None:
    """Every token's log-prob is that of the version that it is labelled with, on the whole text."""
    written = item.written
    ids = written.ids.tolist()
    for version in np.unique(written.versions):
        mine = written.versions == version
        expected = token_logprobs(models[version], item.request.prompt_ids, ids, temperature)
        np.testing.assert_allclose(written.logprobs[mine], expected[mine], atol=TOLERANCE, rtol=0)
