"""Recipes for tests of the planner, made without files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamarl.core.config import (
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
from llamarl.trainer.losses.aipo import AIPOConfig
from tests import tiny_checkpoints

LLAMA = replace(
    tiny_checkpoints.LLAMA,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_positions=4096,
    tie_embeddings=False,
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
