"""Records of episodes: what an environment is asked, and what it answers.

Owns: these records. Does not own: rollouts (`types.py`), or how ids and text of a turn belong
together (`environments/`). Invariant: that of `types.py`.

Glossary
    episode     a rollout that takes turns with an environment. Its response is what the model wrote
                and the observations between.
    turn        what the model writes in an episode until it stops, and the environment answers.
    observation
                the environment's answer, as tokens of the response. No version wrote them, they
                have no generator log-prob, and no loss, metric or length counts them.
    tool        a function that the model may call in a turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from llamarl.types import NO_VERSION, Prompt, StageStatus
from llamarl.wire_form import light

TurnItem = tuple[int, int, Prompt | None]
"""What an environment is asked: (row id, a number that its result repeats, the prompt of a rollout
that is to begin an episode; None for one whose turn has ended)."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What the model sees first in an episode, in place of the prompt of its row: these messages,
    and tools of these schemas. The environment answers calls by its `step`, where the last message
    then has `tool_calls`, as chat templates take them."""

    messages: list[dict[str, Any]]
    schemas: Sequence[dict[str, Any]] = ()


class EpisodeState(StrEnum):
    """How an episode goes on."""

    GOES_ON = "goes_on"  # it has begun, or its turn was answered: the model writes
    DONE = "done"  # the environment, or the model, has ended it
    LIMIT = "limit"  # a limit has: of turns, or of the length of the response
    LOST = "lost"  # with the process of its environment: it begins again


@light
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What became of a turn; `number` is its TurnItem's. With a `status` that is not OK the episode
    has failed, as `error` says.

    `prompt_ids` replace the prompt's for this rollout if its environment has added to it.
    `numbers` are the episode's so far, such as "turns" and "calls/search".
    """

    row_id: int
    number: int
    state: EpisodeState
    status: StageStatus = StageStatus.OK
    error: str = ""
    prompt_ids: tuple[int, ...] | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the model is to write another turn."""
        return self.state is EpisodeState.GOES_ON and self.status is StageStatus.OK


def turn_start(versions: np.ndarray) -> int:
    """Where the last turn begins in a response of these token versions [T]: after its last
    observation."""
    observed = np.flatnonzero(versions == NO_VERSION)
    return int(observed[-1]) + 1 if len(observed) else 0


def last_turn(ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """What the model wrote last of a response `ids` [T]."""
    return ids[turn_start(versions) :]


def conversation(ids: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str]) -> str:
    """A response [T] as people read it: a line for each turn, and observations in brackets."""
    is_observed = versions == NO_VERSION
    starts = np.flatnonzero(is_observed[1:] != is_observed[:-1]) + 1
    lines = []
    for run, observed in zip(np.split(ids, starts), np.split(is_observed, starts), strict=True):
        text = decode(run)
        lines.append(f"[{text.strip()}]" if observed[:1].any() else text)
    return "\n".join(lines)
