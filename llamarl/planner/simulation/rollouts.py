"""The rollouts that simulated replicas write and other executors read.

Owns: how they are kept, as rows without arrays. Does not own: when they are written, or what that
costs. Invariant: a rollout is there once `put` has returned, and not before.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llamarl.generation.protocol import PartialOutput
from llamarl.types import Request, RolloutInfo, StageResult, VersionSpan

DIFFERENCE = 1e-6  # between a trainer's log-probs and those of a replica


class Rollout(NamedTuple):
    """What a trainer needs of a rollout: lengths, versions, and the largest difference between its
    own log-probs and the replica's."""

    num_prompt_tokens: int
    num_tokens: int
    spans: tuple[VersionSpan, ...]
    difference: float


class Rollouts:
    """Rollouts by row id."""

    def __init__(self) -> None:
        self._rows: dict[int, RolloutInfo] = {}

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], writer: str) -> None:
        """Keep what these have written."""
        self._rows.update((row.row_id, row) for _, row in stopped)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        """Rollouts in this order; KeyError if one is not there."""
        rows = [self._rows[row_id] for row_id in row_ids]
        return [Rollout(r.num_prompt_tokens, r.num_tokens, r.spans, DIFFERENCE) for r in rows]

    def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        """Those of these that are kept."""
        return [self._rows[row_id] for row_id in row_ids if row_id in self._rows]

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        """What these resumed rollouts have written so far."""
        return {each.row_id: tokens_of(self._rows[each.row_id].spans) for each in requests}

    async def add_rewards(self, scores: list[StageResult], writer: str) -> None:
        """Rewards of scored rollouts, which are not kept here."""

    def forget(self, row_ids: Iterable[int]) -> None:
        """Storage has retired these."""
        for row_id in row_ids:
            self._rows.pop(row_id, None)


def tokens_of(spans: Sequence[VersionSpan]) -> PartialOutput:
    """Tokens of these versions; ids 1, log-probs DIFFERENCE."""
    sizes = np.array([span.num_tokens for span in spans], np.int64)
    versions = np.repeat(np.array([span.version for span in spans], np.int32), sizes)
    num_tokens = len(versions)
    return PartialOutput(
        ids=np.ones(num_tokens, np.int32),
        logprobs=np.full(num_tokens, DIFFERENCE, np.float32),
        versions=versions,
    )
