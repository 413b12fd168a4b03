"""A tiny checkpoint and stored rollouts, for the tests of the trainer."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from llamarl.data.packing import pack
from llamarl.models.architecture import read_architecture
from llamarl.models.inventory import parameter_shapes
from llamarl.types import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Batch,
    BatchRollout,
    FinishReason,
)

VOCAB = 62


TEMPERATURE = 0.8


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
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


def make_checkpoint(folder, **changes):
    """Random weights, large enough that log-probs differ clearly between tokens."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=random) * 0.15 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in parameter_shapes(read_architecture(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def make_rollouts(num_rows=13, seed=0, oldest_version=0):
    """(cells by row id, batch rows): odd lengths, two versions, one advantage of zero."""
    random = np.random.default_rng(seed)
    cells, rows = {}, []
    for row_id in range(num_rows):
        num_prompt = int(random.integers(1, 9))
        num_tokens = int(random.integers(1, 26))
        cells[row_id] = {
            PROMPT_IDS: random.integers(0, VOCAB, num_prompt).astype(np.int32),
            RESPONSE_IDS: random.integers(0, VOCAB, num_tokens).astype(np.int32),
            GENERATOR_LOGPROBS: (-np.log(VOCAB) + random.normal(size=num_tokens)).astype("f4"),
            TOKEN_VERSIONS: np.sort(random.integers(0, 3, num_tokens)).astype(np.int32),
            SAMPLING: np.array(
                [TEMPERATURE, 0, 1, 64, 0, FINISH_CODES[FinishReason.LENGTH] * (row_id % 5 == 2)],
                np.float64,
            ),
        }
        rows.append(
            BatchRollout(
                row_id=row_id,
                group_id=row_id // 4,
                num_prompt_tokens=num_prompt,
                num_tokens=num_tokens,
                advantage=0.0 if row_id == 4 else float(random.normal()),
                oldest_version=oldest_version,
            )
        )
    return cells, tuple(rows)


def add_reference(cells, seed=1):
    """Give every rollout `ref_logprobs`."""
    random = np.random.default_rng(seed)
    for cell in cells.values():
        noise = random.normal(size=len(cell[RESPONSE_IDS]))
        cell[REF_LOGPROBS] = (-np.log(VOCAB) + noise).astype("f4")


def make_batch(rows, num_ranks, budget, version=0):
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    return Batch(version=version, rows=rows, assignment=pack(lengths, num_ranks, budget))
