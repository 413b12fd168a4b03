"""The rollouts that simulated replicas write and other executors read.

Owns: how they are kept: as rows without arrays, or as columns in real storage. Does not own: when
they are written, or what that costs. Invariant: a rollout is there once `put` has returned, and not
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from llamarl.executors.rollout_columns import read_written, write_finished
from llamarl.generation.protocol import PartialOutput, RequestOutput
from llamarl.protocols import Storage
from llamarl.types import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    TOKEN_VERSIONS,
    Request,
    RolloutInfo,
    Score,
    VersionSpan,
    version_spans,
)

DIFFERENCE = 1e-6  # between a trainer's log-probs and those of a replica that works
WRONG = 3.0  # log-prob of a replica that computes something else; the trainer's are 0


class Rollout(NamedTuple):
    """What a trainer needs of a rollout: lengths, versions, and the largest difference between its
    own log-probs and the replica's."""

    num_prompt_tokens: int
    num_tokens: int
    spans: tuple[VersionSpan, ...]
    difference: float


class Rollouts(Protocol):
    """Rollouts by row id."""

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], wrong_from: float) -> None:
        """Keep what these have written; tokens of versions from `wrong_from` on are wrong."""

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        """Rollouts in this order; KeyError if one is not there."""

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        """What these resumed rollouts have written so far."""

    async def add_rewards(self, scores: list[Score]) -> None:
        """Keep the rewards of scored rollouts."""

    def forget(self, row_ids: Iterable[int]) -> None:
        """Storage has retired these."""


class RolloutRows:
    """Without arrays: for large simulations."""

    def __init__(self) -> None:
        self._rows: dict[int, RolloutInfo] = {}

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], wrong_from: float) -> None:
        """See `Rollouts`; log-probs are never wrong."""
        self._rows.update((row.row_id, row) for _, row in stopped)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        """See `Rollouts`."""
        rows = [self._rows[row_id] for row_id in row_ids]
        return [Rollout(r.num_prompt_tokens, r.num_tokens, r.spans, DIFFERENCE) for r in rows]

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        """See `Rollouts`."""
        return {each.row_id: tokens_of(self._rows[each.row_id].spans) for each in requests}

    async def add_rewards(self, scores: list[Score]) -> None:
        """Rewards are not kept."""

    def forget(self, row_ids: Iterable[int]) -> None:
        """See `Rollouts`."""
        for row_id in row_ids:
            self._rows.pop(row_id, None)


class StoredRollouts:
    """As columns in `storage`, with all that it refuses."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], wrong_from: float) -> None:
        """See `Rollouts`."""
        finished = []
        for request, row in stopped:
            written = tokens_of(row.spans)
            written.logprobs[written.versions >= wrong_from] = WRONG
            finished.append(
                RequestOutput(request=request, written=written, reason=row.finish_reason)
            )
        if finished:
            await write_finished(self._storage, finished)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        """See `Rollouts`."""
        names = [PROMPT_IDS, TOKEN_VERSIONS, GENERATOR_LOGPROBS]
        columns = await self._storage.read(row_ids, names)
        return [
            Rollout(len(prompt), len(versions), version_spans(versions), max(logprobs, default=0.0))
            for prompt, versions, logprobs in zip(*(columns[n] for n in names), strict=True)
        ]

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        """See `Rollouts`."""
        return await read_written(self._storage, requests)

    async def add_rewards(self, scores: list[Score]) -> None:
        """See `Rollouts`; the completions are read, as by reward code."""
        await self._storage.read([score.row_id for score in scores], [RESPONSE_IDS])
        good = {score.row_id: np.array([score.reward]) for score in scores if not score.error}
        await self._storage.write(list(good), {REWARD: list(good.values())})

    def forget(self, row_ids: Iterable[int]) -> None:
        """Storage does."""


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
