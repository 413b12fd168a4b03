"""What `llamarl plan` assumes of a workload, an engine and prices.

Nothing here changes a run."""

import math
from dataclasses import dataclass, field
from typing import Any

from llamarl.core.fields import DAY_S, Section, choice, number, require, require_choice


@dataclass(kw_only=True)
class PlanConfig(Section):
    """Lengths that `llamarl plan` assumes: log-normal, cut at sampling.max_tokens."""

    prompt_tokens: int = number(0, least=0, most=2**24)
    """Tokens of a prompt. 0: the mean of the first 256 prompts, if they and the tokenizer are
    there; else 200, or what sampling.max_tokens leaves of generator.max_model_len."""
    median_tokens: int = number(0, least=0, most=2**24)
    """Tokens that half of the rollouts stay below. 0: 400, or half of sampling.max_tokens if that
    is less."""
    spread: float = number(0.8, least=0, most=1e6)
    """Standard deviation of the logarithm of a rollout's length; 0 makes all equally long."""
    group_correlation: float = number(0.5, least=0, most=1)
    """How alike the lengths of one group are: the correlation of their logarithms, as a hard prompt
    has long answers; 0: not at all, 1: all equal. An assumption."""
    attention: str = choice("flash2", "flash3")
    """Kernels of the trainer's attention: flash2, which PyTorch has, or flash3, where installed, of
    H100 and H200."""
    kernels: str = choice("auto", "eager", "fused")
    """What the trainer computes between matrix products with: auto (as trainer.compile says) |
    eager | fused, to forecast another trainer."""
    reserves_kv: bool = False
    """Whether an engine starts a rollout only when its KV cache has room for the longest answer, as
    TensorRT-LLM does. false: it starts what fits, and when the cache is full it takes back the
    rollout that started last and computes it again later, as vLLM does."""
    static_batches: bool = False
    """Whether a replica starts rollouts only when all of the batch before have ended, as engines
    without continuous batching do."""
    baseline: list[str] = field(default_factory=list)
    """The synchronous, colocated system that the recipe is compared with, as KEY=VALUE each:
    degree=64 (tensor-parallel ranks, at most 128), batching=static | continuous, max_num_seqs=32,
    graphs=true | false, offload=true | false (one side leaves the GPUs while the other works),
    reference=true | false (a pass of the reference per step). []: the fastest that fits, with
    continuous batching, graphs and no offloading."""
    num_turns: int = number(0, least=0, most=10_000)
    """Turns of every episode, if there are any; a rollout's tokens are spread over them evenly. 0:
    4, or as many as environment.max_turns and sampling.max_tokens leave room for."""
    observation_tokens: int = number(0, least=0, most=2**24)
    """Tokens of an observation. 0: 100, or what fills half of sampling.max_tokens if that is
    less."""
    tool_s: float = number(1.0, least=0, most=DAY_S)
    """Seconds that half of the turns wait for their environment less than."""
    tool_spread: float = number(1.0, least=0, most=10)
    """Standard deviation of the logarithm of those seconds: with 1, one turn in a hundred waits ten
    times as long as half of them, with 2 a hundred times."""
    num_steps: int = number(12, least=3, most=10_000)
    """Steps simulated; the first ones, until the pipeline is full, are left out of the figures."""
    gpu_prices: list[str] = field(default_factory=list)
    """What an hour of each kind of GPU costs, in any currency: ['H100-80GB=2.1', 'H20-96GB=0.8'].
    []: as StreamRL states for H800 and H20, in hours of an H20; nothing is said about others."""

    def check(self) -> None:
        read_prices(self.gpu_prices)
        read_baseline(self.baseline)


def read_prices(gpu_prices: list[str]) -> dict[str, float]:
    """The texts of `plan.gpu_prices`, by kind."""
    found = {}
    for text in gpu_prices:
        kind, _, price = text.partition("=")
        try:
            found[kind] = float(price)
        except ValueError:
            found[kind] = 0.0
        must = "be KIND=PRICE each, with a price above 0"
        require(bool(kind) and 0 < found[kind] < math.inf, "plan.gpu_prices", must, text)
    return found


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`plan.baseline`, read."""

    degree: int = 8
    """Tensor-parallel ranks of a replica, and as far as a host goes of the trainer."""
    is_static: bool = False
    """No rollout starts until all of the batch before have ended."""
    max_num_seqs: int = 64
    """Rollouts of a replica decoded together."""
    graphs: bool = True
    """Decode steps are captured graphs."""
    offloads: bool = False
    """One side leaves the GPUs while the other works."""
    has_reference: bool = False
    """Each step has a pass of the reference."""

    @property
    def words(self) -> str:
        """What it is."""
        batches = "static" if self.is_static else "continuous"
        more = [f"{batches} batches of {self.max_num_seqs} rollouts"]
        more += ["with graphs" if self.graphs else "without graphs"]
        more += ["offloading"] * self.offloads + ["a reference"] * self.has_reference
        return f"synchronous and colocated, degree {self.degree}, {', '.join(more)}"


SWITCH = {"true": True, "false": False}
READERS: dict[str, tuple[str, dict[str, bool]]] = {  # key -> field, what its texts mean
    "degree": ("degree", {}),
    "max_num_seqs": ("max_num_seqs", {}),
    "batching": ("is_static", {"static": True, "continuous": False}),
    "graphs": ("graphs", SWITCH),
    "offload": ("offloads", SWITCH),
    "reference": ("has_reference", SWITCH),
}
MAX_DEGREE = 128


def read_baseline(texts: list[str]) -> Baseline | None:
    """What the texts of `plan.baseline` describe; None of none."""
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        require_choice("plan.baseline", key, READERS)
        name, meanings = READERS[key]
        if meanings:
            require_choice(f"plan.baseline {key}", value, meanings)
            found[name] = meanings[value]
        else:
            most = MAX_DEGREE if key == "degree" else 2**20
            is_number = value.isdecimal() and 1 <= int(value) <= most
            require(is_number, f"plan.baseline {key}", f"be from 1 to {most}", value)
            found[name] = int(value)
    return Baseline(**found) if texts else None
