"""Records of groups, batches and steps, and the turns of an episode within its response."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from llamarl.core.records import NO_VERSION, Prompt, RolloutInfo, StageResult, VersionSpan, light

REASON = re.compile("[a-z0-9_]{1,40}")  # why a group is dropped; part of a metric's name


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one admitted prompt.

    `group_id` counts admissions, so it is also the order of consumption. `step` is the trainer's
    version at which the group is used at the latest, as counted at its admission; it never falls
    from one group to the next. No rollout may start on a version below `min_version`. `advantages`
    has one entry per row once the group is settled, `own_advantages` one for each row of a
    conversation with a reward of its own. `numbers` holds what the recipe's own stages
    found for a row, by column, and `episodes` the numbers of its episode. A row in `dropped` is not
    trained on, for the reason there, and leaves `row_ids` when the group is settled; `errors` has
    the error of the stage that dropped it.
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
    own_advantages: dict[int, float] = field(default_factory=dict)

    @property
    def sequences(self) -> list[RolloutInfo]:
        """The rows that hold its rollouts, as far as these are written: one for each conversation
        of an episode."""
        return [row for rollout in self.rollouts.values() for row in rollout.sequences]


@dataclass(frozen=True, slots=True)
class Kept:
    """The group is trained on, with one advantage per rollout, and those of conversations with a
    reward of their own by row id."""

    advantages: tuple[float, ...]
    own_advantages: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """The group is not trained on; `reason` names the reason that it is counted under."""

    reason: str


Verdict = Kept | Dropped
"""The result of a group filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group whose rollouts all have a reward; its fields have one entry per rollout, in one
    order.

    `rewards` are those that functions and stages gave, without the overlong penalty, and
    `advantages` are computed from these.
    """

    prompt: Prompt
    rollouts: tuple[RolloutInfo, ...]
    scores: tuple[StageResult, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRollout:
    """One rollout, or conversation of an episode, as the trainer needs it: tokens older than
    `oldest_version` get zero weight.

    `advantage` is the group-relative advantage, equal for all tokens of the row; `num_generated`
    counts the response tokens that the model wrote, `num_in_rollout` those of all rows of its
    rollout; 0 if there are no others. `is_kept` is its prompt's.
    """

    row_id: int
    group_id: int
    num_prompt_tokens: int
    num_tokens: int
    num_generated: int
    advantage: float
    oldest_version: int
    is_kept: bool = False
    num_in_rollout: int = 0


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
    """The metrics of the step that made `version`, reduced over trainer ranks: `scalars` by metric
    name. `expert_loads` has, of each layer with experts, the tokens of each expert over those that
    it would have if all had as many."""

    version: int
    scalars: dict[str, float]
    expert_loads: tuple[float, ...] = ()


class Share(NamedTuple):
    """A share of samples, and its 95 % interval (`metrics/estimates.py`)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """The results of one held-out prompt, with one entry per rollout.

    A reward that failed is None, and its rollout not correct. Entries of `answers` are equal where
    the answers are, and None where there is none. `shares` has the prompt's own accuracy, pass_at_k
    and maj_at_k, `extra` what rewards returned besides (see `StageResult`).
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
    """The held-out results of one version: of all prompts and, if the recipe names several sets, of
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
    sets: dict[str, Evaluation] = field(default_factory=dict)
    results: tuple[HeldOutResult, ...] = field(default=(), repr=False)
    """The results of each prompt; left out of the text of an evaluation, which people print."""

    @property
    def accuracy(self) -> float:
        """The share of rollouts that the first reward function counts as correct."""
        return self.shares["accuracy"].value


ASSISTANT, OBSERVATION = "assistant", "observation"
"""The speakers of turns: the model, or its environment."""
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""The marks between which a model thinks, in a turn."""
OPENING = "opening"
"""The role of the entry before the turns of a record, if the environment made it: everything that
the model saw first."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of an episode that the model sees in place of the prompt of its row: these
    messages, and tools of these schemas. The environment answers calls by its `step`, where the
    last message then has `tool_calls`, as chat templates take them."""

    messages: list[dict[str, Any]]
    schemas: Sequence[dict[str, Any]] = ()


def wrong_opening(messages: object, schemas: object) -> str:
    """Return what is wrong with the fields of an Opening, in words; empty if chat templates take
    them."""
    if not isinstance(messages, list) or not messages:
        return f"have a list of messages, got {messages!r:.80}"
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if _is_object(message) else [None]
        if not all(isinstance(text, str) for text in texts):
            return f"have a role and a text as content in each message, got {message!r:.80}"
    return wrong_schemas(schemas)


def wrong_schemas(schemas: object) -> str:
    """Return what is wrong with these schemas of tools, in words; empty if chat templates and the
    parser of calls can take them."""
    if not isinstance(schemas, Sequence) or isinstance(schemas, str | bytes):
        return f"have a list of tools, got {schemas!r:.80}"
    for tool in schemas:
        form = "be {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        if not _is_object(tool) or tool.get("type", "function") != "function":
            return f"{form} for each tool, got {tool!r:.80}"
        function = tool.get("function")
        if (
            not _is_object(function)
            or not isinstance(name := function.get("name"), str)
            or not name
        ):
            return f"{form} for each tool, got {tool!r:.80}"
        parameters = function.get("parameters", {})
        properties = parameters.get("properties", {}) if _is_object(parameters) else None
        if not _is_object(properties) or not all(map(_is_object, properties.values())):
            got = f"got {parameters!r:.80} for {name:.40}"
            return f"have a JSON schema of an object as parameters of each tool, {got}"
    return ""


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return the runs of equal versions in `versions` int [T], as if no observation stood between
    them."""
    versions = versions[versions != NO_VERSION]
    if not len(versions):
        return ()
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(version=int(versions[start]), num_tokens=end - start)
        for start, end in zip(starts, ends, strict=True)
    )


def turn_start(versions: np.ndarray) -> int:
    """Return the position where the last turn begins in a response with these token versions [T]:
    after its last observation."""
    observed = np.flatnonzero(versions == NO_VERSION)
    return int(observed[-1]) + 1 if len(observed) else 0


def last_turn(ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Return the ids of the last turn that the model wrote in a response `ids` [T]."""
    return ids[turn_start(versions) :]


def turns_of(
    ids: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str]
) -> list[dict[str, str]]:
    """Return a response [T] as messages, {"role": "assistant" or "observation", "content": its
    text}; a rollout that takes no turns is one message."""
    is_observed = versions == NO_VERSION
    starts = np.flatnonzero(is_observed[1:] != is_observed[:-1]) + 1
    runs = zip(np.split(ids, starts), np.split(is_observed, starts), strict=True)
    return [
        {"role": OBSERVATION if observed[:1].any() else ASSISTANT, "content": decode(run)}
        for run, observed in runs
    ]


def conversation(turns: Sequence[Mapping[str, str]]) -> str:
    """Return turns as people read them: a line for each, and observations in brackets."""
    texts = [(turn["content"], turn["role"] == OBSERVATION) for turn in turns]
    return "\n".join(f"[{text.strip()}]" if is_observed else text for text, is_observed in texts)
