"""The ledger: what is known about every rollout in flight, without its arrays.

Owns: one entry per row, which of its columns are ready, and who took it. Does not own: arrays
(storage units), order of consumption (`gate.py`). Invariant: a stage gets a row at most once,
and only when every column the stage needs is ready, whatever order columns became ready in.

The ledger lives in the controller process and is used from its event loop only; stages sleep in
`take`, and nowhere else.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llamarl.types import (
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    FinishReason,
    Group,
    Prompt,
    Purpose,
    Request,
    RolloutInfo,
    Score,
    ScoreStatus,
)

SCORE_PAUSE_S = 0.05


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One rollout: the request it came from, and what has been learnt about it so far."""

    request: Request
    prompt: Prompt
    group: Group | None = None
    rollout: RolloutInfo | None = None
    score: Score | None = None
    ready: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A consumer of rows: the columns it needs and the rollouts it is for.

    `pause_s` lies between two `take`s at least, so that what comes from hundreds of replicas comes
    together.
    """

    needs: frozenset[str]
    purposes: frozenset[Purpose] = frozenset(Purpose)
    pause_s: float = 0.0


def loop_stages(has_reference: bool) -> dict[str, Consumer]:
    """The stages of the RL loop. Scoring and the reference are independent of each other; an
    evaluation's rollout may have a (failed) score without having been written."""
    written, scored = frozenset({RESPONSE_IDS}), frozenset({RESPONSE_IDS, REWARD})
    train, evaluate = frozenset({Purpose.TRAIN}), frozenset({Purpose.EVALUATE})
    table = {
        "score": Consumer(needs=written, purposes=train | evaluate, pause_s=SCORE_PAUSE_S),
        "settle": Consumer(needs=scored, purposes=train),
        "evaluate": Consumer(needs=frozenset({REWARD}), purposes=evaluate),
    }
    if has_reference:
        table["infer"] = Consumer(needs=written, purposes=train)
        table["settle"] = Consumer(needs=scored | {REF_LOGPROBS}, purposes=train)
    return table


class Ledger:
    """Entries by row id, and one queue of takeable rows per stage.

    Example: with `stages={"score": Consumer(needs=frozenset({"response_ids"}))}`, a row added and
    then marked "response_ids" comes out of `take("score")` once.
    """

    def __init__(self, stages: dict[str, Consumer]) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self._stages = stages
        self._queues: dict[str, deque[int]] = {name: deque() for name in stages}
        self._changed: dict[str, asyncio.Event] = {name: asyncio.Event() for name in stages}
        self._next_s = dict.fromkeys(stages, 0.0)  # no `take` ends before

    def rows(self, *purposes: Purpose) -> list[int]:
        """Ids of the open rows of these purposes, oldest first."""
        return [r for r, entry in self.entries.items() if entry.request.purpose in purposes]

    def add(self, request: Request, prompt: Prompt, group: Group | None = None) -> None:
        """Open the entry of a row. ValueError if the row id is in use."""
        if request.row_id in self.entries:
            raise ValueError(f"row id must be new, got {request.row_id}")
        self.entries[request.row_id] = LedgerEntry(request=request, prompt=prompt, group=group)

    def learn_rollouts(self, rollouts: Sequence[RolloutInfo]) -> None:
        """These stopped: their RESPONSE_IDS are ready. Of those that were aborted nothing will be;
        an evaluation's count as failed."""
        written, failed = [], []
        for rollout in rollouts:
            entry, row_id = self.entries[rollout.row_id], rollout.row_id
            if rollout.finish_reason is not FinishReason.ABORTED:
                written.append(row_id)
                entry.rollout = rollout
                if entry.group is not None:
                    entry.group.rollouts[row_id] = rollout
            elif entry.request.purpose is Purpose.EVALUATE:
                error = "its generator was lost"
                failed.append(Score(row_id=row_id, status=ScoreStatus.RAISED, error=error))
        self.learn_scores(failed)
        self.mark(written, RESPONSE_IDS)

    def learn_scores(self, scores: Sequence[Score]) -> None:
        """These rollouts are scored; a failed score makes REWARD ready too, though there may be no
        cell of it then."""
        for score in scores:
            entry = self.entries[score.row_id]
            entry.score = score
            if entry.group is not None:
                entry.group.scores[score.row_id] = score
        self.mark([score.row_id for score in scores], REWARD)

    def mark(self, row_ids: Iterable[int], column: str) -> None:
        """Note that `column` of these rows is ready; rows that were forgotten are ignored."""
        for row_id in row_ids:
            entry = self.entries.get(row_id)
            if entry is None or column in entry.ready:
                continue
            entry.ready.add(column)
            self._offer(row_id, entry, column)

    async def take(self, stage: str, limit: int = 256) -> list[int]:
        """Up to `limit` rows ready for `stage`, oldest readiness first; waits for at least one."""
        queue, changed = self._queues[stage], self._changed[stage]
        loop = asyncio.get_running_loop()
        if self._next_s[stage] > loop.time():
            await asyncio.sleep(self._next_s[stage] - loop.time())
        while True:
            rows: list[int] = []
            while queue and len(rows) < limit:
                row_id = queue.popleft()
                if row_id in self.entries:
                    rows.append(row_id)
            if rows:
                if not queue:
                    self._next_s[stage] = loop.time() + self._stages[stage].pause_s
                return rows
            changed.clear()
            await changed.wait()

    def forget(self, row_ids: Iterable[int]) -> None:
        """Close these entries; their arrays are retired by the caller."""
        for row_id in row_ids:
            del self.entries[row_id]

    def _offer(self, row_id: int, entry: LedgerEntry, column: str) -> None:
        for name, stage in self._stages.items():
            if (
                column in stage.needs
                and stage.needs <= entry.ready
                and entry.request.purpose in stage.purposes
            ):
                self._queues[name].append(row_id)
                self._changed[name].set()
