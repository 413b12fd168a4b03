"""Recipes for tests of the planner, made without files."""

from __future__ import annotations

from typing import Any

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EmbeddedConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.models.architecture import Architecture

LLAMA = Architecture(
    model_type="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_positions=4096,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tie_embeddings=False,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)


def make_recipe(**sections: Any) -> Config:
    """A recipe with these sections, all others small and on CPUs."""
    made: dict[str, Any] = {
        "model": ModelConfig(checkpoint="x"),
        "data": DataConfig(prompts="x"),
        "reward": RewardConfig(),
        "algorithm": AIPOConfig(),
        "sampling": SamplingConfig(max_tokens=16),
        "generator": EmbeddedConfig(max_num_seqs=4, max_model_len=64),
        "trainer": TrainerConfig(tokens_per_micro_batch=128),
        "weights": WeightsConfig(),
        "placement": PlacementConfig(),
        "cluster": ClusterConfig(),
    }
    return Config(**made | sections)
