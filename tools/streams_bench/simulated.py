"""A run of StreamRL's size in the planner's simulator: scheduling, streaming, asynchrony.

The paper (arXiv 2504.15930) trains Qwen2.5-72B on 128 GPUs with answers of at most 20,000 tokens.
From a colocated run of the same engines it publishes, one on top of the other, +8 % for scheduling
by length, +15 % for disaggregated streaming and +25 % for asynchrony; over all its models and
lengths streaming and scheduling give 1.06 to 1.41 together. It states neither batch size, nor the
distribution of lengths, nor how many GPUs train: figures here are bands over `CASES`, and the GPUs
are divided by its Algorithm 1 (`balance`). H100s stand for its H800s.

The ranker of these runs knows the order of the prompts with errors: `recall` is the share that it
finds of the longest fifth (the paper's: up to 0.87).

Asynchrony comes in two parts. `overlap` is what generating a step beside training the one before
gives while a step's rollouts wait for the end of the step before, from the seconds that both take
at S = 0: streamed step / max(generation, training). `run_ahead` is what is left: replicas that a
step's last rollouts leave idle start the next step's. `dynamic_vs_batch`: streaming alone, of the
disaggregated run at S = 0.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
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
from llamarl.config.plan_keys import PlanConfig
from llamarl.lengths.ranker import Oracle
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import StepForecast
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.workload import NUM_PROMPTS, Workload, make_workload
from llamarl.types import Request, Sampling

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
NUM_GPUS, REPLICA_GPUS = 128, 4
TRAIN_GPUS = (16, 24, 32, 40, 48, 64)
NUM_STEPS = 6
SAMPLING = Sampling(max_tokens=CAP)


@dataclass(frozen=True)
class Case:
    """What the paper does not state."""

    median_tokens: int
    spread: float
    groups_per_step: int


CASES = [Case(*each) for each in product((2000, 5000), (0.7, 1.1), (64, 256))]


NOISE = 0.4  # of log-lengths, among the rollouts of a prompt
RANK_ERROR = 0.2  # of what the ranker takes the rest of the spread for: recall 0.87


@dataclass(frozen=True, kw_only=True)
class Skewed(Workload):
    """Lengths of which a part of the spread belongs to the prompt, `prompt_id` its first token."""

    case: Case

    def expected(self, prompt_id: int) -> float:
        """Tokens without chance."""
        spread = math.sqrt(self.case.spread**2 - NOISE**2)
        return self.case.median_tokens * math.exp(random.Random(prompt_id).gauss(0, spread))

    def length(self, request: Request) -> int:
        chance = random.Random(request.seed).gauss(0, NOISE)
        return min(CAP, max(1, round(self.expected(request.prompt_ids[0]) * math.exp(chance))))

    def guess(self, request: Request) -> int:
        """What the ranker expects."""
        prompt_id = request.prompt_ids[0]
        error = random.Random(-1 - prompt_id).gauss(0, RANK_ERROR * self.case.spread)
        return min(CAP, max(1, round(self.expected(prompt_id) * math.exp(error))))

    def recall(self) -> float:
        """Share of the prompts with the longest 20 % of the rollouts that the ranker finds."""
        truth, guesses = [], []
        for prompt in self.prompts():
            asked = [
                Request(
                    row_id=i,
                    prompt_ids=prompt.token_ids,
                    sampling=SAMPLING,
                    seed=16 * prompt.prompt_id + i,
                )
                for i in range(16)
            ]
            truth.append(sum(map(self.length, asked)))
            guesses.append(self.guess(asked[0]))
        count = NUM_PROMPTS // 5
        longest = [
            set(sorted(range(NUM_PROMPTS), key=lambda i: -some[i])[:count])
            for some in (truth, guesses)
        ]
        return len(longest[0] & longest[1]) / count


def skewed(config: Config, case: Case) -> Skewed:
    """The workload of this case."""
    base = make_workload(config)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return Skewed(case=case, **fields)


def recipe(case: Case, num_train: int, parts: str = "batch", max_staleness: int = 0) -> Config:
    """The run of this case with so many GPUs for training; with all of them it is colocated."""
    is_colocated = num_train == NUM_GPUS
    num_generate = NUM_GPUS if is_colocated else NUM_GPUS - num_train
    return Config(
        model=ModelConfig(checkpoint="x"),
        data=DataConfig(prompts="x"),
        reward=RewardConfig(num_workers=64),
        algorithm=AIPOConfig(),
        sampling=SamplingConfig(max_tokens=CAP, rollouts_per_prompt=16),
        generator=EmbeddedConfig(
            device="cuda",
            dtype="bfloat16",
            num_replicas=num_generate // REPLICA_GPUS,
            num_ranks=REPLICA_GPUS,
            max_num_seqs=64,
            max_model_len=CAP + 1024,
        ),
        trainer=TrainerConfig(
            device="cuda",
            num_ranks=num_train,
            tensor_parallel=8,
            groups_per_step=case.groups_per_step,
            parts=parts,
            tokens_per_micro_batch=32768,
            activation_checkpointing="full",
            warmup_steps=0,
        ),
        weights=WeightsConfig(transport="collective", timeout_s=300),
        placement=PlacementConfig(
            colocated=is_colocated, offload="pinned" if is_colocated else "file"
        ),
        cluster=ClusterConfig(num_hosts=16, num_gpus_per_host=8, gpu="H100-80GB"),
        staleness=StalenessConfig(max_staleness=max_staleness),
        plan=PlanConfig(median_tokens=case.median_tokens, spread=case.spread, num_steps=NUM_STEPS),
    )


def forecast(config: Config, case: Case, *, is_ranked: bool) -> StepForecast:
    """The steady state of the run with this case's lengths."""
    is_dynamic = config.trainer.parts == "dynamic"
    sampler = replace(config.experience, sampler="group_complete")
    config = replace(config, experience=sampler) if is_dynamic else config
    workload = skewed(config, case)
    return simulate(
        config,
        QWEN_72B,
        hardware_costs(config, QWEN_72B),
        workload=workload,
        ranker=Oracle(workload.guess) if is_ranked else None,
    )


def stage_s(step: StepForecast) -> tuple[float, float]:
    """Seconds of generation, and of training, of a step in which neither runs beside the other."""
    train_s = step.step_s * step.busy_shares["trainer"]
    return step.step_s - train_s - step.publish_s, train_s


def balance(case: Case) -> int:
    """The paper's Algorithm 1: GPUs for training so that the slower stage is as fast as it can."""
    return min(
        TRAIN_GPUS, key=lambda n: max(stage_s(forecast(recipe(case, n), case, is_ranked=False)))
    )


def gains(case: Case) -> dict[str, float]:
    """How many times faster a step is with one thing after another."""
    num_train = balance(case)
    colocated, ranked = (
        forecast(recipe(case, NUM_GPUS), case, is_ranked=is_ranked) for is_ranked in (False, True)
    )
    batch, stream, ahead = (
        forecast(recipe(case, num_train, parts, s), case, is_ranked=True)
        for parts, s in (("batch", 0), ("dynamic", 0), ("dynamic", 1))
    )
    barrier_s = max(stage_s(batch))
    return {
        "scheduling": colocated.step_s / ranked.step_s,
        "streaming": ranked.step_s / stream.step_s,
        "asynchrony": stream.step_s / ahead.step_s,
        "overlap": stream.step_s / barrier_s,
        "run_ahead": barrier_s / ahead.step_s,
        "sync_vs_colocated": colocated.step_s / stream.step_s,
        "async_vs_colocated": colocated.step_s / ahead.step_s,
        "dynamic_vs_batch": batch.step_s / stream.step_s,
        "recall": skewed(recipe(case, num_train), case).recall(),
        "train_gpus": num_train,
        "colocated_step_s": colocated.step_s,
        "colocated_ranked_busy_share": sum(map(ranked.busy_shares.get, ("generator", "trainer"))),
    }


def bands(found: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """(least, most) of each gain over all cases."""
    return {name: (min(f[name] for f in found), max(f[name] for f in found)) for name in found[0]}
