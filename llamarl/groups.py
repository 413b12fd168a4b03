"""Records of groups: the rollouts of one prompt together, and what a step is trained on.

Owns: these records. Does not own: rollouts and their requests (`types.py`). Invariant: that of
`types.py`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from llamarl.types import Prompt, RolloutInfo, StageResult
from llamarl.wire_form import light


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one admitted prompt.

    `group_id` counts admissions, so it is also the order of consumption. `step` is the trainer's
    version at which the group is used at the latest, as counted at its admission; it never falls
    from one group to the next. No rollout may start on a version below `min_version`. `advantages`
    has one entry per row once the group is settled. `numbers` holds what the recipe's own stages
    found for a row, by column, and `episodes` the numbers of its episode; a row in `dropped` is not
    trained on, for the reason there, and leaves `row_ids` when the group is settled; `errors` has
    what the stage said that dropped it.
    """

    group_id: int
    prompt: Prompt
    row_ids: tuple[int, ...]
    min_version: int
    step: int = 0
    rollouts: dict[int, RolloutInfo] = field(default_factory=dict)
    scores: dict[int, StageResult] = field(default_factory=dict)
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    episodes: dict[int, dict[str, float]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """The group is trained on, with one advantage per rollout."""

    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """The group is not trained on; `reason` names what it is counted under."""

    reason: str


Verdict = Kept | Dropped
"""What a group filter says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group whose rollouts all have a reward; one entry per rollout, in one order.

    `rewards` are those that functions and stages gave, without the overlong penalty, and
    `advantages` theirs.
    """

    prompt: Prompt
    rollouts: tuple[RolloutInfo, ...]
    scores: tuple[StageResult, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRollout:
    """One rollout as the trainer needs it: tokens older than `oldest_version` get zero weight.

    `advantage` is the group-relative advantage, equal for all tokens of the rollout;
    `num_generated` counts the response tokens that the model wrote. `is_kept` is its prompt's.
    """

    row_id: int
    group_id: int
    num_prompt_tokens: int
    num_tokens: int
    num_generated: int
    advantage: float
    oldest_version: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Whole groups handed to the trainer, one of possibly several parts of a step.

    `version` is the trainer version at use, `first_version` that before the first step of the
    groups' batch; None if that is the same. `assignment[rank][micro_batch]` lists positions in
    `rows`; every rank has the same number of micro-batches (some may be empty).
    """

    version: int
    rows: tuple[BatchRollout, ...]
    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    first_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What the step that made `version` reports, reduced over trainer ranks: metric name -> value
    in `scalars`."""

    version: int
    scalars: dict[str, float]


class Share(NamedTuple):
    """A share of samples, and its 95 % interval (`metrics/estimates.py`)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """What the rollouts of one held-out prompt reached, one entry per rollout.

    A reward that failed is None, and its rollout not correct. `answers` are equal where the answers
    are; None where there is none. `shares` has the prompt's own accuracy, pass_at_k and maj_at_k,
    `extra` what rewards returned besides (see `StageResult`).
    """

    held_out: str
    prompt_id: int
    correct: tuple[bool, ...]
    rewards: tuple[float | None, ...]
    answers: tuple[int | None, ...]
    num_tokens: tuple[int, ...]
    is_truncated: tuple[bool, ...]
    shares: dict[str, float]
    extra: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out results of one version: of all prompts and, if the recipe names several sets, of
    those of each set.

    `shares` has the accuracy, with several rollouts of a prompt the mean over them (avg@n), and
    pass_at_k and maj_at_k by name. `reward` and the others are means over all rollouts too; the
    `num_failed` rollouts whose reward failed count as wrong, with the reward 0. `extra` has the
    mean of each further number of rewards, over the rollouts that have it.
    """

    version: int
    shares: dict[str, Share]
    reward: float
    mean_tokens: float
    truncated_share: float
    num_prompts: int
    num_rollouts: int
    num_failed: int
    extra: dict[str, float] = field(default_factory=dict)
    sets: "dict[str, Evaluation]" = field(default_factory=dict)
    results: tuple[HeldOutResult, ...] = field(default=(), repr=False)
    """Of each prompt; left out of the text of an evaluation, which people print."""

    @property
    def accuracy(self) -> float:
        """The share of rollouts to which the first reward function gave full marks."""
        return self.shares["accuracy"].value
