"""A run of StreamRL's size in the planner's simulator: what streaming and asynchrony are worth.

The paper (arXiv 2504.15930) trains Qwen2.5-72B on 128 GPUs with answers of at most 20,000 tokens
and publishes, one on top of the other, +8 % for scheduling by length, +15 % for streaming and
+25 % for asynchrony. It states neither batch size, nor the distribution of lengths, nor how many
GPUs train: figures here are bands over `CASES` of these. H100s stand for its H800s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

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
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.config.run import PlanConfig
from llamarl.models.architecture import Architecture
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.run import simulate

QWEN_72B = Architecture(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    tie_embeddings=False,
    attention_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
CAP = 20_000
NUM_REPLICAS = 16  # of 4 GPUs; as many GPUs train
NUM_STEPS = 6


@dataclass(frozen=True)
class Case:
    """What the paper does not state."""

    median_tokens: int
    spread: float
    groups_per_step: int


CASES = [Case(*each) for each in product((2000, 5000), (0.7, 1.1), (32, 64))]


def recipe(case: Case, parts: str, max_staleness: int) -> Config:
    """The run of this case; fixed parts are not among those compared."""
    return Config(
        model=ModelConfig(checkpoint="x"),
        data=DataConfig(prompts="x"),
        reward=RewardConfig(num_workers=64),
        algorithm=AIPOConfig(),
        sampling=SamplingConfig(max_tokens=CAP, rollouts_per_prompt=16),
        generator=EmbeddedConfig(
            device="cuda",
            dtype="bfloat16",
            num_replicas=NUM_REPLICAS,
            num_ranks=4,
            max_num_seqs=64,
            max_model_len=CAP + 1024,
        ),
        trainer=TrainerConfig(
            device="cuda",
            num_ranks=64,
            tensor_parallel=8,
            groups_per_step=case.groups_per_step,
            parts=parts,
            tokens_per_micro_batch=32768,
            activation_checkpointing="full",
            warmup_steps=0,
        ),
        weights=WeightsConfig(transport="collective", timeout_s=300),
        placement=PlacementConfig(),
        cluster=ClusterConfig(num_hosts=16, num_gpus_per_host=8, gpu="H100-80GB"),
        staleness=StalenessConfig(max_staleness=max_staleness),
        plan=PlanConfig(median_tokens=case.median_tokens, spread=case.spread, num_steps=NUM_STEPS),
    )


def gains(case: Case) -> dict[str, float]:
    """How many times faster a step is with streaming, and then with asynchrony too."""
    step_s = {}
    for name, parts, s in (
        ("batch", "batch", 0),
        ("stream", "dynamic", 0),
        ("async", "dynamic", 1),
    ):
        config = recipe(case, parts, s)
        sampler = replace(config.experience, sampler="group_complete")
        config = config if parts == "batch" else replace(config, experience=sampler)
        costs = hardware_costs(config, QWEN_72B)
        step_s[name] = simulate(config, QWEN_72B, costs).step_s
    return {
        "streaming": step_s["batch"] / step_s["stream"],
        "asynchrony": step_s["stream"] / step_s["async"],
        "batch_step_s": step_s["batch"],
    }


def bands() -> dict[str, tuple[float, float]]:
    """(least, most) of each gain over all cases."""
    found = [gains(case) for case in CASES]
    return {name: (min(f[name] for f in found), max(f[name] for f in found)) for name in found[0]}
