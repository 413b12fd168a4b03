"""The results of `llamarl plan` for a recipe, as plain data.

Bytes are those of one rank unless a name says otherwise."""

from dataclasses import dataclass, field

from llamarl.controller.memory import MemoryForecast
from llamarl.core.fields import HOUR_S

PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class PublishForecast:
    """The publish of one version to all replicas.

    Bytes out and in are those of the busiest rank, and of the busiest network card; `lower_bound_s`
    is the time that the cards or links alone need at full speed, `seconds` the time that is
    expected. `pool_stages_s` are the seconds by stage until all replicas of a pool have it, by the
    pool's key.
    """

    total_bytes: int
    max_bytes_out: int
    max_bytes_in: int
    max_card_bytes_out: int
    max_card_bytes_in: int
    lower_bound_s: float
    seconds: float
    pool_stages_s: dict[str, dict[str, float]]

    @property
    def pool_s(self) -> dict[str, float]:
        """The seconds until all replicas of a pool have the version, by the pool's key."""
        return {key: sum(stages.values()) for key, stages in self.pool_stages_s.items()}

    @property
    def stages_s(self) -> dict[str, float]:
        """The seconds by stage of the pool that has the version last."""
        return max(self.pool_stages_s.values(), key=lambda stages: sum(stages.values()))


@dataclass(frozen=True, kw_only=True)
class PoolStep:
    """The work of one pool's replicas: the mean of their busy shares, and the tokens that they
    write together."""

    busy_share: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """The steady state of a simulated run; shares are of the step time.

    `busy_shares` go by executor ("generator": the mean over replicas), `wait_shares` by executor
    and what it waits for ("generator requests", "trainer batch"). `pools` go by their keys; without
    generator.pools there are none.
    """

    step_s: float
    busy_shares: dict[str, float]
    wait_shares: dict[str, float]
    mean_staleness: float
    max_staleness: int
    trained_tokens_per_s: float
    publish_s: float
    pools: dict[str, PoolStep] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerForecast:
    """One optimizer step of a trainer alone, over `num_tokens` tokens, prompts included.

    `seconds` are those of a mean rank by kind of work; `utilisation` is the share of the published
    peak that a model's arithmetic has, without what checkpointing repeats.
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
        """The tokens per second of all ranks."""
        return self.num_tokens / self.step_s


@dataclass(frozen=True, kw_only=True)
class GeneratorForecast:
    """The time in which one replica alone writes `num_rollouts` rollouts of `num_tokens` tokens,
    without prompts.

    `seconds` are by kind of work; `mean_running` rollouts are decoded together, in steps of
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
class NextChange:
    """A change of the recipe, in words, and the step of the changed recipe."""

    words: str
    step: StepForecast


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division of the GPUs, and the step that the simulation gives it."""

    num_trainer_ranks: int
    num_replicas: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of one recipe.

    `steps` has the recipe's own step as "planned", and beside it that of the recipe with
    max_staleness 0 as "sync" (or as "async", if the recipe is synchronous itself). `num_hosts` and
    `num_gpus` are those that the recipe uses. `splits` are there if they were asked for, the best
    first; `measured_step_s` is the step time of the run that times come from. `next` is the change
    that shortens the step most, if one was found.
    """

    num_hosts: int
    num_gpus: int
    memory: MemoryForecast
    publish: PublishForecast
    steps: dict[str, StepForecast]
    splits: tuple[Split, ...] | None = None
    measured_step_s: float | None = None
    next: NextChange | None = None

    @property
    def step(self) -> StepForecast:
        """The recipe's own step."""
        return self.steps[PLANNED]

    @property
    def gpu_hours(self) -> float:
        """The GPU hours of one step."""
        return self.num_gpus * self.step.step_s / HOUR_S
