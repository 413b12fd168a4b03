"""The words of the project: records that travel between executors, and the glossary.

Owns: every record that crosses a process boundary. Does not own: tensors (they live in storage
units, trainer ranks and generator weight buffers) or behaviour. Invariant: nothing here imports
torch, so a process that only moves metadata never loads it.

Glossary
    source      where prompts come from: files of rows, or the recipe's own task.py.
    Prompt      one question of a source, tokenized.
    Rollout     one completion of a prompt: token ids, generator log-probs, weight versions as
                spans, sampling parameters, finish reason. `row_id` names it everywhere, for its
                arrays are one row of storage. It is asked for by a Request; in a generator it is
                a QueuedRequest, a PartialOutput, a RequestOutput; its arrays travel and are stored
                as Columns; the controller has its RolloutInfo (lengths, spans), a Batch its
                BatchRollout (with the advantage), a trainer rank its part of a MicroBatch.
    outcome     what became of a rollout: trained, dropped, evaluated, lost, ...
    recorded, kept
                of a rollout that can be read after the run: recorded are all of evaluations, with
                their texts; kept are those of `experience.keep_rollouts` of the prompts, with every
                token.
    row         a rollout's place in storage and its number, `row_id`.
    span        tokens in a row that one version wrote: a rollout's versions are a list of spans. In
                metrics: what a process did from one moment to another (metrics/span.py).
    segment     the tokens that a replica adds to a rollout until the rollout is interrupted and may
                continue on another replica (`sampling.segment_tokens`).
    full marks  a reward of `reward.full_marks` (1) or more from the first reward function. Accuracy
                is the share of rollouts with full marks.
    Group       the n rollouts of one prompt, scored together.
    admitted, settled, consumed
                the states of a group: its rollouts were requested; they are scored and worth
                training on (else the group is dropped); it was handed to the trainer.
    sampler     chooses which of the groups that are settled the trainer takes next.
    slot        the place of one open group: a group is open from its admission until it is dropped
                or the last step that trains it is complete. With one step per batch there are
                (S + 1) P slots.
    gate        a part of the controller: it admits groups and hands them to the trainer in order.
    mini-batch  the P groups that one optimizer step learns from. `trainer.num_mini_batches` of them
                make a batch, which is trained on in `trainer.num_passes` passes.
    Batch       the rollouts of an optimizer step, or of a part of it, and their place on ranks and
                micro-batches. Metadata only.
    part        whole groups of a step that are trained before the others have arrived.
    held-out set
                prompts for evaluations alone, with a name; accuracy, pass@k and maj@k are of each
                set and of all together.
    version     one state of the weights, numbered by the optimizer steps completed.
    advance     after an optimizer step: the slots of the groups that it was the last one for become
                free for others.
    staleness   of a token: trainer version when it is used minus the version that wrote it; of a
                rollout: of its oldest trained token.
    mu, pi      the generator's distribution and the trainer's: `generator_logprobs` and
                `trainer_logprobs`; the frozen model's are `ref_logprobs`.
    prox, proximal
                the trainer's distribution before the first step of a batch: `proximal_logprobs`.
    column      one kind of array in storage, such as the token ids: one array per row.
    stage       a node of the dataflow graph that rollouts pass between generation and training: it
                reads columns and writes columns, or drops rollouts.
    storage unit
                a process that holds the arrays of some rows.
    executor    the processes of one role: generator, trainer, scorer, reference, storage,
                collector.
    replica     one generator engine, with one or more ranks.
    collector   a process that asks many replicas which rollouts stopped.
    device      the host and the GPU of one rank.
    layout      which rank holds which box of which parameter.
    reshard plan
                the copies that turn one layout into another.
    route       a reshard plan and the transport that carries it.
    bucket      parameters that are published together.
    fingerprint
                a sum over a parameter's bytes, keyed by place, that shows wrong bits and places.
    active, staging
                the weights that a generator decodes with, and those that a publish writes.
    prepare, write, verify, commit, abort
                the steps of a publish to one replica: staging memory is opened; the source writes
                it; both sides' fingerprints are compared; between two decode steps it becomes
                active. An abort before that leaves the active weights as they were.
    log-prob check
                after a commit: the generator's log-probs of a short rollout against the trainer's.
    episode     a rollout that takes turns with an environment. Its response is what the model wrote
                and the observations between.
    turn        what the model writes in an episode until it stops, and the environment answers.
    observation
                the environment's answer, as tokens of the response. No version wrote them, they
                have no generator log-prob, and no loss, metric or length counts them.
    tool        a function that the model may call in a turn.
    phase       with `placement=colocated`: the time in which one side, the generators or the
                trainer, has the device that both share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from llamarl.data_row import find_value
from llamarl.wire_form import light

Columns = dict[str, list[np.ndarray]]
"""Column name -> one array per row, in the order of the row ids beside it."""

Outcome = dict[str, str | int | float]
"""What became of a rollout: "outcome" is trained, dropped, evaluated, logprob_check, lost or
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
LOSS_WEIGHTS = "loss_weights"  # uint8 [T], 1 for a trained token, of rollouts that are kept
CLIPPED = "clipped"  # uint8 [T], 1 for a trained token that the loss clipped, likewise
TURNS = "turns"  # uint8, JSON: `episode.turns_of`, perhaps after an OPENING, of recorded rollouts
RECORD = "record"  # uint8, JSON: what the controller knows of a rollout (data/kept_rollouts.py)


class Purpose(StrEnum):
    """Why a rollout exists, in the order in which they start. Only TRAIN rows are trained on."""

    CHECK = "logprob_check"  # whether trainer and generator agree on log-probs after a publish
    EVALUATE = "evaluate"
    TRAIN = "train"


PLACES = {purpose: place for place, purpose in enumerate(Purpose)}


class FinishReason(StrEnum):
    """Why the generator stopped writing a rollout."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens, the context window, or the most turns
    SEGMENT = "segment"  # cut at segment_tokens: partial, may be resumed
    ABORTED = "aborted"  # the controller gave it up


FINISH_CODES: dict[FinishReason, int] = {reason: code for code, reason in enumerate(FinishReason)}


def finish_reason(sampling: np.ndarray | Sequence[float]) -> FinishReason:
    """Why the rollout with this SAMPLING cell stopped; the last entry is its finish code."""
    return [*FINISH_CODES][int(sampling[-1])]


SOURCE_ROWS = 2**32  # that a source may have; the ids of the next one's prompts begin there


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One tokenized question.

    `prompt_id` is its line in its source, from 1, plus SOURCE_ROWS for each source before that one;
    `epoch` how often the source was walked before. `fields` is the whole data row, which reward
    functions read. `held_out` names its held-out set, "" for training; `is_kept`: its rollouts are
    kept whole in the archive (experience.keep_rollouts).
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
        """Its line in its source."""
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
        """The question as this field of the row has it, of a chat the last message; else the whole
        prompt, which begins with the same words of the template in every row."""
        question = find_value(self.fields, field)
        if isinstance(question, list) and question:
            question = question[-1].get("content")
        return question if isinstance(question, str) else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout asked of a generator.

    `min_version`: a replica below it may not start the rollout. `segment_tokens` 0 means never
    cut; `resume` says that the store holds the tokens written so far under `row_id`. Rollouts of
    one prompt carry equal `prompt_ids`, which replicas prefill once. `step` is its group's;
    `expected_tokens` is its probable length, 0 if not known. Of a step, the highest `precedence`
    starts first. With a `replica` no other may write it. Only the engine looks at `replay_tokens`,
    how long it has to become. With a `prompt` the rollout is an episode, which may begin again: the
    `attempt` counts up. A resumed one goes on with the `environment` that has played it.
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
        """Whether a turn of an episode ends where the rollout stops by itself."""
        return self.prompt is not None

    @property
    def urgency(self) -> tuple[int, int, int]:
        """The lowest starts first: log-prob checks before evaluation before training, an earlier
        step before a later one, and within a step the highest precedence."""
        return PLACES[self.purpose], self.step, -self.precedence

    @property
    def prefix_group(self) -> tuple[tuple[int, ...], int]:
        """Equal for rollouts of one prompt that may start together: none of them can hold up the
        others by waiting for a version that these must first be trained for."""
        ids = self.prompt_ids if self.prompt is None else self.prompt.token_ids
        return ids, self.min_version


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`num_tokens` consecutive response tokens written by weight version `version`."""

    version: int
    num_tokens: int


class StageStatus(StrEnum):
    """How a stage's call ended for a rollout; a reward that failed is no zero, unless the recipe
    makes it one."""

    OK = "ok"
    RAISED = "raised"
    HUNG = "hung"
    INVALID = "invalid"  # it returned what it must not, such as NaN


class EpisodeState(StrEnum):
    """How an episode goes on."""

    GOES_ON = "goes_on"  # it has begun, or its turn was answered: the model writes
    DONE = "done"  # the environment, or the model, has ended it
    LIMIT = "limit"  # a limit has: of turns, or of the length of the response
    LOST = "lost"  # with the process of its environment, or its replica: it begins again


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnItem:
    """What an environment is asked about a rollout: with a `prompt` to begin its episode, else to
    answer the turn of these `ids`, which the model ended itself unless it `is_cut` by a limit. An
    observation may have up to `room` tokens."""

    row_id: int
    attempt: int
    prompt: Prompt | None = None
    ids: tuple[int, ...] = ()
    is_cut: bool = False
    room: int = 0


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What became of a turn. With a `status` that is not OK the episode has failed, as `error`
    says; if `ends_run`, as too many have.

    `prompt_ids` replace the prompt's for this rollout if its environment has added to it.
    `observation` are the tokens to go on from, `reward` what the environment gives at the end,
    and `rewards` what the functions give that `reward.functions` names as environment.NAME.
    `numbers` are the episode's so far, such as "turns" and "calls/search"; `environment` plays it.
    """

    row_id: int
    attempt: int
    state: EpisodeState
    status: StageStatus = StageStatus.OK
    error: str = ""
    ends_run: bool = False
    prompt_ids: tuple[int, ...] | None = None
    observation: tuple[int, ...] = ()
    reward: float | None = None
    rewards: tuple[float, ...] = ()
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
    """What the controller learns when a rollout stops: `num_tokens` is the length of its response,
    `spans` are of what the model wrote of it, whose log-probs when it was drawn add up to
    `logprob`. `episode` is that of a rollout with turns."""

    row_id: int
    num_prompt_tokens: int
    num_tokens: int
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica: int = 0
    logprob: float = 0.0
    episode: TurnResult | None = None

    @property
    def num_generated(self) -> int:
        """Response tokens that the model wrote: all but observations."""
        return sum([span.num_tokens for span in self.spans])  # as a generator, twice as slow


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage found for one rollout; `error` says why its `status` is not OK.

    `numbers` holds the columns it wrote that are one number, by name; a rollout with a `reason`, or
    on which a stage of the recipe's own failed, is dropped. The stage `score` writes REWARD, the
    weighted sum of the `parts` by function; if it failed there is none, or 0 with
    `reward.on_failure: zero`. `correct`: the first function gave full marks, which accuracy counts.
    `answer` of a held-out rollout is equal where answers are; None: it has none. `extra` are
    further numbers that reward functions returned.
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
        """NaN if there is none."""
        return self.numbers.get(REWARD, math.nan)

    @property
    def has_reward(self) -> bool:
        """True if advantages can be computed from it."""
        return not math.isnan(self.reward)


StageItem = tuple[tuple[int, ...], Prompt | None]
"""What one call of a stage is about: a rollout, or all of a group that are left; and their prompt
if the stage reads it."""
