"""A checkpoint of a recipe's family that is small enough to be computed on any machine.

Owns: its sizes and its random weights. Does not own: files (`models/hf.py`). Invariant: all that
chooses code in an engine or the trainer is the recipe's: family, head size, grouping of heads, tied
embeddings, biases, rope, vocabulary; and the ranks of the recipe split it evenly.
"""

import json
import math
from pathlib import Path

import torch

from llamarl.config import Config
from llamarl.config.pools import pools_of
from llamarl.models import hf
from llamarl.models.architecture import read_architecture
from llamarl.models.transformer import Transformer
from llamarl.recipe.inputs import Inputs

NUM_LAYERS = 2
HIDDEN_SIZE = 128
SCALE = 0.08  # of random weights: logits of about 1, so that a wrong product shows in log-probs


def write_tiny_checkpoint(config: Config, inputs: Inputs, folder: Path) -> str:
    """Write it, with the recipe's tokenizer, below `folder`; returns its path."""
    description = json.loads((Path(inputs.checkpoint) / "config.json").read_text())
    ranks = {config.trainer.tensor_parallel}
    ranks |= {pool.generator.num_ranks for pool in pools_of(config.generator)}
    unit = math.lcm(*ranks)
    num_heads = description["num_attention_heads"]
    num_kv_heads = description.get("num_key_value_heads") or num_heads
    head_dim = description.get("head_dim") or description["hidden_size"] // num_heads
    group = 1 if num_heads == num_kv_heads else 2
    kv_heads = max(2, unit)
    description |= {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN_SIZE * unit,
        "intermediate_size": 2 * HIDDEN_SIZE * unit,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    for key in ("layer_types", "max_window_layers"):  # one entry per layer, and all are alike
        description.pop(key, None)
    source = folder / "sizes"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(description))
    architecture = read_architecture(source)
    generator = torch.Generator().manual_seed(0)
    model = Transformer(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator) * SCALE
            parameter.copy_(spread + 1.0 if name.endswith("norm.weight") else spread)
    target = folder / "checkpoint"
    hf.save(
        target,
        model.named_parameters(),
        source_folder=source,
        tokenizer_folder=inputs.tokenizer_folder,
        dtype=torch.float32,
    )
    return str(target)
