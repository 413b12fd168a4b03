"""What `llamarl plan` finds out about a recipe.

Owns: the records that memory, publish and simulation fill and that reports show. Does not own: any
arithmetic. Invariant: plain data; bytes are of one rank unless a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from llamarl.core.config import Config
from llamarl.model.architecture import Architecture
from llamarl.planner.hardware import HOUR_S, Cost

FrozenModels = Mapping[str, Architecture]
"""Those that run stages of the recipe's own, by stage: not the reference of a KL term."""
NO_MODELS: FrozenModels = MappingProxyType({})
STAGE = "stage "  # before its name: the kind of memory that its frozen model takes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The fullest rank of one executor, at the moment it is fullest.

    `bytes_by_kind` is device memory, by kind ("weights", "gradients", "optimizer", "unsharded",
    "activations", "logits", "kv_cache", "staging", "reference", "stage teacher",
    "offloaded", "reserve", ...); `host_bytes_by_kind` is memory of the host that this rank pins or
    maps.
    """

    executor: str
    num_ranks: int
    device_bytes: int
    bytes_by_kind: dict[str, int]
    host_bytes_by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Device memory needed."""
        return sum(self.bytes_by_kind.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.device_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the recipe and what it does to the fullest rank; `is_enough`: all fits then."""

    text: str
    is_enough: bool


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Every executor's fullest rank; `advice` says what to change if one does not fit, the best
    change first."""

    ranks: tuple[RankMemory, ...]
    advice: tuple[Advice, ...] = ()

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class PublishForecast:
    """One version on its way to all replicas.

    Bytes out and in are those of the busiest rank, and of the busiest network card; `lower_bound_s`
    is what the cards or links alone need at full speed, `seconds` what is expected. `pool_s` is
    that until all replicas of a pool have it, by the pool's key.
    """

    total_bytes: int
    max_bytes_out: int
    max_bytes_in: int
    max_card_bytes_out: int
    max_card_bytes_in: int
    num_copies: int
    num_groups: int
    lower_bound_s: float
    seconds: float
    pool_s: dict[str, float] = field(default_factory=dict)
    pool_stages_s: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def stages_s(self) -> dict[str, float]:
        """Of the pool that has it last; {} if it is not known."""
        last = max(self.pool_s, key=lambda key: self.pool_s[key], default="")
        return self.pool_stages_s.get(last, {})


@dataclass(frozen=True, kw_only=True)
class PoolStep:
    """What the replicas of one pool do: the mean of their busy shares, the tokens that they write
    together."""

    busy_share: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """The steady state of a simulated run; shares are of the step time.

    `busy_shares` go by executor ("generator": the mean over replicas), `wait_shares` by executor
    and what it waits for ("generator requests", "trainer batch"). What was simulated is a
    `divisor`-th of the cluster (`fraction.py`); figures are of the whole. `pools` go by their keys;
    without generator.pools there are none.
    """

    step_s: float
    busy_shares: dict[str, float]
    wait_shares: dict[str, float]
    mean_staleness: float
    max_staleness: int
    trained_tokens_per_s: float
    publish_s: float
    divisor: int = 1
    pools: dict[str, PoolStep] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerForecast:
    """One optimizer step of a trainer alone, of `num_tokens` tokens, prompts included.

    `seconds` of a mean rank by what it does; `utilisation` is the share of the published peak that
    a model's arithmetic has, without what checkpointing repeats.
    """

    num_ranks: int
    num_rollouts: int
    num_micro_batches: int
    num_tokens: int
    step_s: float
    seconds: dict[str, float]
    utilisation: float

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.num_tokens / self.step_s


@dataclass(frozen=True, kw_only=True)
class GeneratorForecast:
    """`num_rollouts` written by one replica alone: `num_tokens`, without prompts.

    `seconds` by what it does; `mean_running` rollouts are decoded together, in steps of
    `decode_step_s`. The KV cache holds `kv_tokens`; 0: all that the slots may write.
    """

    num_ranks: int
    num_rollouts: int
    num_tokens: int
    num_prompt_tokens: int
    kv_tokens: int
    seconds: dict[str, float]
    mean_running: float
    decode_step_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A configuration with its step; `words` say what it is."""

    words: str
    config: Config
    step: StepForecast


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The way from the baseline to the recipe, one change at a time, in this order.

    `overlap`: both sides work at once, on GPUs of their own, with the baseline's degree and batch
    sizes. `batch_and_degree`: each side gets the layout and the batch sizes of the recipe.
    `precision`: the generator's weights become as narrow as the recipe's. `factors` are ratios of
    step times; their product is `speedup`.
    """

    baseline: Variant
    stages: dict[str, Variant]

    @property
    def factors(self) -> dict[str, float]:
        """How much faster each stage is than the one before."""
        times = [self.baseline.step.step_s, *(v.step.step_s for v in self.stages.values())]
        return {name: times[i] / times[i + 1] for i, name in enumerate(self.stages)}

    @property
    def speedup(self) -> float:
        """The baseline's step over the recipe's."""
        return self.baseline.step.step_s / list(self.stages.values())[-1].step.step_s


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division of the GPUs, and the step that the simulation gives it."""

    num_trainer_ranks: int
    num_replicas: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class BestSplit:
    """`best_share` is theta* = a / (a + c), from the GPU time that both sides were busy with in a
    simulation of the recipe; `candidates` were simulated, the best one first, whose step is
    `step`."""

    best_share: float
    candidates: tuple[Split, ...]
    step: StepForecast | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything about one recipe.

    `variants` are the same workload on the same GPUs, run otherwise: "sync" (or "async", if the
    recipe is synchronous itself) and "sync, colocated", which is missing where none fits.
    `decomposition` takes the way from the latter to the recipe apart. `num_hosts` and `num_gpus`
    are those that the recipe uses; `split` is there if it was asked for, `measured_step_s` if times
    come from a run: what that took, `cost` if the prices of its GPUs are known. `best_share` is
    theta*, `own_share` the trainer's share of the GPUs in the recipe; both are None where the sides
    share them. `next` is the change that shortens the step most, if one was found. `unstated` are
    baselines that a paper may have run which states none.
    """

    num_hosts: int
    num_gpus: int
    memory: MemoryForecast
    publish: PublishForecast
    step: StepForecast
    variants: dict[str, StepForecast]
    decomposition: Decomposition | None = None
    split: BestSplit | None = None
    measured_step_s: float | None = None
    cost: Cost | None = None
    best_share: float | None = None
    own_share: float | None = None
    next: Variant | None = None
    unstated: tuple[Variant, ...] = ()

    @property
    def gpu_hours(self) -> float:
        """Of one step."""
        return self.num_gpus * self.step.step_s / HOUR_S
