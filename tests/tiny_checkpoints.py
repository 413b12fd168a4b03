"""Small models with random weights, and checkpoints of them.

Weights are large enough that logits spread and differ clearly, and biases and norms are not at
their neutral start, which would hide that they are missing. torch and transformers are loaded by
what needs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.model.architecture import Architecture, read_architecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from llamarl.model.transformer import Transformer

LLAMA = Architecture(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
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
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 62,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
"""The config.json of `write_checkpoint`."""
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "num_key_value_heads": 6},
    "llama31": {"model_type": "llama", "head_dim": 14, "rope_parameters": STRETCHED},
    "llama32": {"model_type": "llama", "rope_parameters": STRETCHED, "tie_word_embeddings": True},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen25": {"model_type": "qwen2", "num_key_value_heads": 1},
    "qwen25_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
    "qwen3_tied": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 20,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe_tied": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "intermediate_size": 56},
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "intermediate_size": 36,
        "pad_token_id": None,
    },
}
"""For `write_reference`: one per feature mix."""
LENGTHS = (120, 7, 1, 33, 60)  # of `token_ids`; the longest pass the original positions above
NUM_TOKENS = sum(LENGTHS)


def make_model(architecture: Architecture, seed: int, std: float = 0.25) -> Transformer:
    """Our model."""
    import torch

    from llamarl.model.transformer import Transformer

    torch.manual_seed(seed)
    model = Transformer(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std)
    return model


def write_checkpoint(folder: Path, **changes: Any) -> str:
    """A checkpoint of our model, made without transformers; `changes` are of its CONFIG."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = make_model(read_architecture(folder), 0, 0.15).state_dict()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def write_reference(
    folder: Path, model_type: str, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Let transformers write a checkpoint of this family into `folder`; returns its model. Sizes
    are odd, `changes` are of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
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
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return model


def token_ids() -> torch.Tensor:
    """Of rollouts with these LENGTHS."""
    import torch

    return torch.randint(0, 97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    """[N, vocab_size] of `token_ids`, from one right-padded batch, padding cut away again."""
    import torch

    rows = token_ids().split(list(LENGTHS))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask).logits
    return torch.cat([logits[i, :length] for i, length in enumerate(LENGTHS)])


def load(folder: str | Path) -> Transformer:
    """Our model of the checkpoint in `folder`."""
    import torch

    from llamarl.model import hf, inventory
    from llamarl.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(inventory.check_checkpoint(folder))
    model.to_empty(device="cpu")
    hf.load_into(dict(model.named_parameters()), folder)
    return model


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all entries together."""
    return ((got - expected).norm() / expected.norm()).item()
