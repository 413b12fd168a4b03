"""The records that travel between executors, and the glossary of the project."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")


class WireList(list[T]):
    """Records of one `light` class, which arrive as a plain list. They are pickled as one object,
    since calls between processes inspect each object that is not of a builtin type."""

    def __reduce__(self) -> Any:
        if not self:
            return list, ()
        restore: Any = self[0].__reduce__()[0]
        return _restore_all, (restore, [record.__reduce__()[1] for record in self])


def _restore_all(restore: Callable[..., T], states: list[tuple[Any, ...]]) -> list[T]:
    return [restore(*state) for state in states]


def light(cls: type[T]) -> type[T]:
    """Pickle a record as a call with its values: dataclasses' own way looks all fields up for each
    record, and takes more bytes; the controller sends tens of thousands in a step."""
    names: tuple[str, ...] = cls.__slots__  # type: ignore[attr-defined]
    values = attrgetter(*names)

    # A line for each value, as in a dataclass' own `__init__`: a loop takes three times as long.
    scope: dict[str, Any] = {f"put_{name}": getattr(cls, name).__set__ for name in names}
    scope |= {"cls": cls, "new": object.__new__}  # a frozen class itself refuses
    puts = [f"put_{name}(self, {name})" for name in names]
    head = f"def restore({', '.join(names)}):"
    exec("\n    ".join([head, "self = new(cls)", *puts, "return self"]), scope)
    restore = scope["restore"]

    # pickle finds the function by these names.
    restore.__module__, restore.__qualname__ = cls.__module__, f"{cls.__qualname__}.restore"
    cls.restore = staticmethod(restore)  # type: ignore[attr-defined]
    cls.__reduce__ = lambda self: (restore, values(self))  # type: ignore[method-assign]
    return cls


def as_json(record: Any) -> dict[str, Any]:
    """Return a `light` record as JSON has it: its values by name, and likewise those of a record in
    it."""
    found = {name: getattr(record, name) for name in record.__slots__}
    return {name: as_json(each) if is_dataclass(each) else each for name, each in found.items()}


def read_json(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the record that `as_json` made these values from; a value of a data row that JSON
    cannot hold has become text."""
    readers = _readers(cast(Any, cls))
    read = {k: v if v is None or k not in readers else readers[k](v) for k, v in values.items()}
    return cls(**read)


@cache
def _readers(cls: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return, by name, a function that restores the value of a field which JSON writes in another
    type."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, hint in get_type_hints(cls).items():
        kinds: Sequence[Any] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for kind in kinds:
            if get_origin(kind) is tuple:
                found[name] = tuple
            elif isinstance(kind, type) and is_dataclass(kind):
                found[name] = partial(read_json, kind)
            elif isinstance(kind, type) and issubclass(kind, StrEnum):
                found[name] = kind
    return found


FALLBACKS = {"question": "prompt", "answer": "reward_model.ground_truth"}
"""The fields in which TRL's and verl's rows have what the default field names stand for."""


def value_at(row: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field of a data row: `a.b` is `b` of the object in `a`, unless the row
    has a key of that whole name; `question` and `answer` may also stand where `FALLBACKS` say.
    KeyError, with the last name looked for, if the row lacks it."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            if field in FALLBACKS:
                return value_at(row, FALLBACKS[field])
            raise KeyError(field)
        value = value[name]
    return value


class _Template(string.Formatter):
    """Fills {field} with the value of a row's field, as `value_at` finds it."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        return value_at(kwargs, field_name), field_name


def filled(template: str, row: Mapping[str, Any], key: str) -> str:
    """Return the text with the values of fields, which `value_at` finds, in place of {field}.
    Raises ValueError, which names the config key, if the row lacks one."""
    try:
        return _Template().vformat(template, (), row)
    except (KeyError, ValueError, TypeError) as error:
        must = "name fields of the prompt's row in braces, and double other braces"
        raise ValueError(f"{key} must {must}, got {error!r:.80}") from error


def find_value(row: Mapping[str, Any], field: str) -> Any:
    """Return the value that `value_at` returns; None if the row lacks it."""
    try:
        return value_at(row, field)
    except KeyError:
        return None


Columns = dict[str, list[np.ndarray]]
"""One array per row, in the order of the row ids beside it, by column name."""

Outcome = dict[str, str | int | float]
"""The outcome of a rollout: "outcome" is trained, dropped, evaluated, logprob_check, lost or
unused; more keys say at which version, or why."""

# Column names of the store, their dtype and shape per row (T response tokens, P prompt tokens).
PROMPT_IDS = "prompt_ids"  # int32 [P]
RESPONSE_IDS = "response_ids"  # int32 [T]
GENERATOR_LOGPROBS = "generator_logprobs"  # float32 [T], log mu; 0 for an observation
TOKEN_VERSIONS = "token_versions"  # int32 [T], weight version that wrote each response token
NO_VERSION = -1  # that of an observation, which no model wrote
SAMPLING = "sampling"  # float64 [6]: temperature, top_k, top_p, max_tokens, seed, finish code
REWARD = "reward"  # float64 [1]
EXTRA = "reward_extra"  # further numbers that rewards return: JSON in uint8, and their metrics
EPISODE_REWARD = "episode_reward"  # float64 [1], what the environment gave
EPISODE_REWARDS = "episode_rewards"  # float64, of each of task.py's functions that a recipe names
REF_LOGPROBS = "ref_logprobs"  # float32 [T]
TRAINER_LOGPROBS = "trainer_logprobs"  # float32 [T], log pi when the row was trained
PROXIMAL_LOGPROBS = "proximal_logprobs"  # float32 [T], log pi before the first step of the batch
PROMPT_ID = "prompt_id"  # float64 [1]
KEPT_IDS = "kept_ids"  # int32, of each response token those it was drawn among, -1 for none
ROUTED_EXPERTS = "routed_experts"  # uint8, of all tokens but the last (model/experts.py)
LOSS_WEIGHTS = "loss_weights"  # uint8 [T], 1 for a trained token, of rollouts that are kept
CLIPPED = "clipped"  # uint8 [T], 1 for a trained token that the loss clipped, likewise
TURNS = "turns"  # uint8, JSON: `episode.turns_of`, perhaps after an OPENING, of recorded rollouts
RECORD = "record"  # uint8, JSON: what the controller knows of a rollout (storage/archive.py)


EPISODE_ROWS = 2**40
"""Row ids of rollouts are below it. An episode of several conversations has a row for each: the
first has the rollout's id, and conversation k that plus k times this."""


def conversation_row(row_id: int, conversation: int) -> int:
    """Return the row id of this conversation, from 0, of the episode `row_id`."""
    return row_id + conversation * EPISODE_ROWS


def episode_of(row_id: int) -> tuple[int, int]:
    """Return the row id of the rollout that a row belongs to, and the conversation that the row
    holds."""
    conversation, row_id = divmod(row_id, EPISODE_ROWS)
    return row_id, conversation


class Purpose(StrEnum):
    """The purpose of a rollout, in the order in which they start. Only TRAIN rows are trained
    on."""

    CHECK = "logprob_check"  # whether trainer and generator agree on log-probs after a publish
    EVALUATE = "evaluate"
    TRAIN = "train"


PLACES = {purpose: place for place, purpose in enumerate(Purpose)}


class FinishReason(StrEnum):
    """The reason why the generator stopped writing a rollout."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens, the context window, or the most turns
    SEGMENT = "segment"  # cut at segment_tokens: partial, may be resumed
    ABORTED = "aborted"  # the controller gave it up


FINISH_CODES: dict[FinishReason, int] = {reason: code for code, reason in enumerate(FinishReason)}


def finish_reason(sampling: np.ndarray | Sequence[float]) -> FinishReason:
    """Return why the rollout with this SAMPLING cell stopped; the last entry is its finish code."""
    return [*FINISH_CODES][int(sampling[-1])]


TASK = "harbor"  # the field of a row that is a task: its settings and files, as JSON
SOURCE_ROWS = 2**32  # that a source may have; the ids of the next one's prompts begin there

GENERATE, SCORE, INFER, SETTLE, TRAIN = "generate", "score", "infer", "settle", "train"
"""The names of the stages that a recipe need not define."""


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One tokenized question.

    `prompt_id` is its line in its source, from 1, plus SOURCE_ROWS for each source before that one;
    `epoch` says how often the source was walked before. `fields` is the whole data row, which
    reward functions read. `held_out` names its held-out set, "" for training; `is_kept` says that
    its rollouts are kept whole in the archive (experience.keep_rollouts).
    """

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    held_out: str = ""
    is_kept: bool = False

    @property
    def source(self) -> int:
        """The place of its source in data.prompts; below 0 for a question of the caller's own."""
        return self.prompt_id // SOURCE_ROWS

    @property
    def line(self) -> int:
        """The line in its source."""
        return self.prompt_id % SOURCE_ROWS if self.prompt_id > 0 else self.prompt_id

    @property
    def is_held_out(self) -> bool:
        """Whether it is asked in evaluations only."""
        return bool(self.held_out)

    @property
    def is_recorded(self) -> bool:
        """Whether its rollouts can be read after the run: kept ones, and all of evaluations."""
        return self.is_kept or self.is_held_out

    def question(self, field: str) -> str:
        """Return the question as this field of the row has it, of a chat the last message;
        otherwise the whole prompt, which begins with the same words of the template in every row.
        """
        question = find_value(self.fields, field)
        if isinstance(question, list) and question:
            question = question[-1].get("content")
        return question if isinstance(question, str) else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a rollout. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 switch those off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a generator for one rollout.

    A replica below `min_version` may not start the rollout. `segment_tokens` 0 means never cut;
    `resume` says that the store holds the tokens written so far under `row_id`. Rollouts of one
    prompt carry equal `prompt_ids`, which replicas prefill once. `step` is its group's;
    `expected_tokens` is its probable length, 0 if not known. Within a step, the highest
    `precedence` starts first. With a `replica` no other may write it. Only the engine looks at
    `replay_tokens`, the length that the rollout must reach. With a `prompt` the rollout is an
    episode, which may begin again: the `attempt` counts up. A resumed one goes on with the
    `environment` that has played it.
    """

    row_id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    min_version: int = 0
    segment_tokens: int = 0
    resume: bool = False
    purpose: Purpose = Purpose.TRAIN
    step: int = 0
    expected_tokens: int = 0
    precedence: int = 0
    replica: int | None = None
    replay_tokens: int = 0
    prompt: Prompt | None = None
    attempt: int = 0
    environment: int | None = None

    @property
    def has_turns(self) -> bool:
        """Whether the rollout is an episode, in which a turn ends where a plain rollout would stop
        by itself."""
        return self.prompt is not None

    @property
    def urgency(self) -> tuple[int, int, int]:
        """The sort key of starts, lowest first: log-prob checks before evaluation before training,
        an earlier step before a later one, and within a step the highest precedence."""
        return PLACES[self.purpose], self.step, -self.precedence

    @property
    def prefix_group(self) -> tuple[tuple[int, ...], int]:
        """A key that is equal for rollouts of one prompt that may start together: none of them can
        hold up the others by waiting for a version that these must first be trained for."""
        ids = self.prompt_ids if self.prompt is None else self.prompt.token_ids
        return ids, self.min_version


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of `num_tokens` consecutive response tokens written by weight version `version`."""

    version: int
    num_tokens: int


class StageStatus(StrEnum):
    """The status of a stage's call for a rollout; a reward that failed does not count as 0, unless
    the recipe says so."""

    OK = "ok"
    RAISED = "raised"
    HUNG = "hung"
    INVALID = "invalid"  # it returned what it must not, such as NaN


class EpisodeState(StrEnum):
    """The state of an episode after a turn."""

    GOES_ON = "goes_on"  # it has begun, or its turn was answered: the model writes
    CLOSED = "closed"  # it goes on without this conversation
    DONE = "done"  # the environment, or the model, has ended it
    LIMIT = "limit"  # a limit has: of turns, or of the length of the response
    LOST = "lost"  # with the process of its environment, or its replica: it begins again


EPISODE_LIMITS = "turns", "conversations", "tokens"
"""The limits that may end the episode of an agent; its number "limited/turns" counts it."""


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """The options of a single turn: the most tokens of it, 0 if its conversation alone limits it;
    texts that end it; whether the environment is told what is written while it is written
    (`streams`), and the log-probs at its end."""

    max_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    streams: bool = False
    has_logprobs: bool = False


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnItem:
    """A request to an environment about a rollout: with a `prompt` to begin its episode; with `ids`
    to answer this turn of its `conversation`, which the model ended itself unless it `is_cut` by a
    limit; without either to open that conversation, once the environment begins another one. What
    the environment says may have up to `room` tokens. `logprobs` are those of the ids, if they were
    asked for. The ids of a turn that streams are told before as well, in pieces: `start` is the
    place in the response where the ids begin."""

    row_id: int
    attempt: int
    prompt: Prompt | None = None
    ids: tuple[int, ...] = ()
    is_cut: bool = False
    room: int = 0
    conversation: int = 0
    start: int = 0
    logprobs: tuple[float, ...] = ()

    @property
    def opens(self) -> bool:
        """Whether the answer is the prompt of a conversation."""
        return not self.ids


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """An environment's answer to a turn. With a `status` that is not OK the episode has failed, as
    `error` says; with `ends_run` too many have failed, which ends the run.

    `prompt_ids` replace the prompt's for this rollout if its environment has added to it, or begin
    the conversation that was asked for; further conversations may follow if it `has_more`.
    `observation` are the tokens to go on from, and `options` are those of the turn that follows.
    `reward` is what the environment gives at the end, and `rewards` are what the functions give
    that `reward.functions` names as environment.NAME; `own_rewards` has those of single
    conversations, None for those that have none of their own. `numbers` are the episode's so far,
    such as "turns" and "calls/search"; `environment` plays it.
    """

    row_id: int
    attempt: int
    state: EpisodeState
    status: StageStatus = StageStatus.OK
    error: str = ""
    ends_run: bool = False
    prompt_ids: tuple[int, ...] | None = None
    has_more: bool = False
    options: TurnOptions | None = None
    observation: tuple[int, ...] = ()
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    own_rewards: tuple[float | None, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    environment: int | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the episode begins again."""
        return self.state is EpisodeState.LOST

    @property
    def goes_on(self) -> bool:
        """Whether the model is to write another turn."""
        return self.state is EpisodeState.GOES_ON and self.status is StageStatus.OK


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo:
    """The report to the controller of a rollout that stopped. `num_tokens` is the length of its
    response; `spans` cover the tokens of it that the model wrote, whose log-probs when they were
    drawn add up to `logprob`. `episode` is that of a rollout with turns; the rollout itself is its
    first conversation, and `conversations` are the further ones in which the model wrote."""

    row_id: int
    num_prompt_tokens: int
    num_tokens: int
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica: int = 0
    logprob: float = 0.0
    episode: TurnResult | None = None
    conversations: tuple[RolloutInfo, ...] = ()

    @property
    def sequences(self) -> tuple[RolloutInfo, ...]:
        """The rows that hold the rollout: one for each conversation of an episode."""
        return (self, *self.conversations)

    @property
    def num_generated(self) -> int:
        """The number of response tokens that the model wrote: all except observations."""
        return sum([span.num_tokens for span in self.spans])  # as a generator, twice as slow


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A stage's result for one rollout; `error` says why its `status` is not OK.

    `numbers` holds, by name, the columns it wrote that are one number; a rollout with a `reason`,
    or on which a stage of the recipe's own failed, is dropped. The stage `score` writes REWARD, the
    weighted sum of the `parts` by function; if it failed there is none, or 0 with
    `reward.on_failure: zero`. `correct` says that the first function gave `reward.correct_at` or
    more. `answer` of a held-out rollout is equal where answers are; None if it has none. `extra`
    are further numbers that reward functions returned.
    """

    row_id: int
    status: StageStatus = StageStatus.OK
    numbers: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    answer: int | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """The reward; NaN if there is none."""
        return self.numbers.get(REWARD, math.nan)

    @property
    def has_reward(self) -> bool:
        """Whether advantages can be computed from it."""
        return not math.isnan(self.reward)


StageItem = tuple[tuple[int, ...], Prompt | None]
"""The rollouts that one call of a stage is about, one or all that are left of a group, and their
prompt if the stage reads it."""
