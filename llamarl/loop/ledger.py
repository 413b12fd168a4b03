"""The ledger: what is known about every rollout in flight, without its arrays.

Owns: one entry per row, which stages are done with it, and who took it. Does not own: arrays
(storage units), the graph (`experience/graph.py`), order of consumption (`gate.py`). Invariant: a
stage gets a row at most once, and only when every stage it reads from is done with the row,
whatever order they ended in; a group stage gets the rows of a group together. What was taken comes
back only by `put_back`.

The ledger lives in the controller process and is used from its event loop only; stages sleep in
`take`, and nowhere else.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llamarl.experience.graph import GENERATE, GROUP, SCORE, SETTLE, Graph
from llamarl.types import (
    FinishReason,
    Group,
    Prompt,
    Purpose,
    Request,
    RolloutInfo,
    StageResult,
    StageStatus,
)

EVALUATE = "evaluate"  # takes the scored rollouts of an evaluation
PAUSE_S = 0.05  # between two `take`s of a stage, so that what many replicas send comes together
LIMIT = 256  # rows of a `take`

Taken = list[tuple[int, ...]]
"""Row ids, one rollout's or a whole group's each."""


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One rollout: the request it came from, and what has been learnt about it so far."""

    request: Request
    prompt: Prompt
    group: Group | None = None
    rollout: RolloutInfo | None = None
    score: StageResult | None = None
    done: set[str] = field(default_factory=set)
    """Stages that have ended for it."""
    taken: set[str] = field(default_factory=set)
    """Stages that took it."""


@dataclass(slots=True, kw_only=True)
class Consumer:
    """What a stage takes: rows of these purposes for which the stages `needs` are done."""

    name: str
    needs: frozenset[str]
    purposes: frozenset[Purpose]
    takes_groups: bool = False
    pause_s: float = 0.0
    queue: deque[tuple[int, ...]] = field(default_factory=deque)
    num_ready: Counter[int] = field(default_factory=Counter)  # rows, by group that is not whole yet
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    next_s: float = 0.0  # no `take` ends before


class Ledger:
    """Entries by row id, and one queue of takeable rows per stage of `graph`.

    Example: a training row that was added and then collected comes out of `take("score")` once;
    once `finish("score", ...)` was called for all rows of its group, the group comes out of
    `take("settle")`. `pause_s` lies between two `take`s of a stage whose calls may overlap.
    """

    def __init__(self, graph: Graph, pause_s: float = PAUSE_S) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self._between = [stage.name for stage in graph.between]
        self._consumers = {
            stage.name: Consumer(
                name=stage.name,
                needs=graph.needs[stage.name],
                purposes=frozenset({Purpose.TRAIN, Purpose.EVALUATE})
                if stage.name == SCORE
                else frozenset({Purpose.TRAIN}),
                takes_groups=stage.per == GROUP,
                pause_s=0.0 if stage.is_model or stage.name == SETTLE else pause_s,
            )
            for stage in (*graph.between, graph.stages[SETTLE])
        }
        evaluated = frozenset({Purpose.EVALUATE})
        self._consumers[EVALUATE] = Consumer(
            name=EVALUATE, needs=frozenset({SCORE}), purposes=evaluated
        )
        self._after: dict[str, list[Consumer]] = {}  # by stage, those that need it
        for consumer in self._consumers.values():
            for name in consumer.needs:
                self._after.setdefault(name, []).append(consumer)

    def rows(self, *purposes: Purpose) -> list[int]:
        """Ids of the open rows of these purposes, oldest first."""
        return [r for r, entry in self.entries.items() if entry.request.purpose in purposes]

    def add(self, request: Request, prompt: Prompt, group: Group | None = None) -> None:
        """Open the entry of a row. ValueError if the row id is in use."""
        if request.row_id in self.entries:
            raise ValueError(f"row id must be new, got {request.row_id}")
        self.entries[request.row_id] = LedgerEntry(request=request, prompt=prompt, group=group)

    def learn_rollouts(self, rollouts: Sequence[RolloutInfo]) -> None:
        """These stopped, and are written. Of those that were aborted nothing will be; an
        evaluation's count as failed."""
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
                failed.append(StageResult(row_id=row_id, status=StageStatus.RAISED, error=error))
        self.finish(SCORE, [score.row_id for score in failed], failed)
        self.finish(GENERATE, written)

    def finish(
        self,
        stage: str,
        row_ids: Iterable[int],
        results: Sequence[StageResult] = (),
    ) -> None:
        """`stage` is done with these rows, and found `results`. Rows that were forgotten are
        ignored.

        A rollout that the stage dropped, or failed on, passes no further stage, and its group goes
        on without it. A failed score drops nothing here: the group's filter knows what it means.
        """
        for result in results:
            entry = self.entries.get(result.row_id)
            if entry is None:
                continue
            if stage == SCORE:
                entry.score = result
                if entry.group is not None:
                    entry.group.scores[result.row_id] = result
            elif entry.group is not None:
                entry.group.numbers.setdefault(result.row_id, {}).update(result.numbers)
                if result.reason or result.status is not StageStatus.OK:
                    self._drop(entry, entry.group, result.reason or f"{stage}_failed")
        for row_id in row_ids:
            self._mark(row_id, stage)

    async def take(self, stage: str, limit: int = LIMIT) -> Taken:
        """Rollouts, or whole groups of them, that are ready for `stage`, oldest readiness first:
        about `limit` rows at most. Waits for at least one."""
        consumer = self._consumers[stage]
        loop = asyncio.get_running_loop()
        if consumer.next_s > loop.time():
            await asyncio.sleep(consumer.next_s - loop.time())
        while True:
            if taken := self._take(consumer, limit):
                if not consumer.queue:
                    consumer.next_s = loop.time() + consumer.pause_s
                return taken
            consumer.changed.clear()
            await consumer.changed.wait()

    def put_back(self, stage: str, taken: Taken) -> None:
        """`stage` was not done with these, and never will be: the next `take` gets them again."""
        consumer = self._consumers[stage]
        for row_ids in reversed(taken):
            consumer.queue.appendleft(row_ids)
            for row_id in (row_id for row_id in row_ids if row_id in self.entries):
                entry = self.entries[row_id]
                entry.taken.discard(stage)
                if entry.group is not None and row_id in entry.group.dropped:
                    self._mark(row_id, stage)
        consumer.changed.set()

    def leave_out(self, group: Group) -> dict[str, list[int]]:
        """Remove the rollouts that were dropped from a group that is trained on; their row ids by
        reason. Their arrays are retired by the caller."""
        found: dict[str, list[int]] = {}
        for row_id in (row_id for row_id in group.row_ids if row_id in group.dropped):
            found.setdefault(group.dropped[row_id], []).append(row_id)
            del group.rollouts[row_id], self.entries[row_id]
            group.scores.pop(row_id, None)
        group.row_ids = tuple(row_id for row_id in group.row_ids if row_id not in group.dropped)
        return found

    def forget(self, row_ids: Iterable[int]) -> None:
        """Close these entries; their arrays are retired by the caller."""
        for row_id in row_ids:
            del self.entries[row_id]

    def _take(self, consumer: Consumer, limit: int) -> Taken:
        taken: Taken = []
        num_rows = 0
        while consumer.queue and num_rows < limit:
            row_ids = consumer.queue.popleft()
            if consumer.name != SETTLE:  # which decides about a whole group
                row_ids = tuple(r for r in row_ids if self._is_open(r, consumer.name))
            elif row_ids[0] not in self.entries:
                continue
            if row_ids:
                taken.append(row_ids)
                num_rows += len(row_ids)
        for row_id in (row_id for row_ids in taken for row_id in row_ids):
            self.entries[row_id].taken.add(consumer.name)
        return taken

    def _is_open(self, row_id: int, stage: str) -> bool:
        entry = self.entries.get(row_id)
        return entry is not None and stage not in entry.done

    def _drop(self, entry: LedgerEntry, group: Group, reason: str) -> None:
        """No stage takes the rollout any more; those that have it now end first."""
        row_id = entry.request.row_id
        group.dropped.setdefault(row_id, reason)
        for name in self._between:
            if name not in entry.taken:
                self._mark(row_id, name)

    def _mark(self, row_id: int, stage: str) -> None:
        entry = self.entries.get(row_id)
        if entry is None or stage in entry.done:
            return
        entry.done.add(stage)
        for consumer in self._after.get(stage, ()):
            if consumer.needs <= entry.done and entry.request.purpose in consumer.purposes:
                self._offer(consumer, row_id, entry.group)

    def _offer(self, consumer: Consumer, row_id: int, group: Group | None) -> None:
        """The row is ready for this stage."""
        row_ids: tuple[int, ...] = (row_id,)
        if consumer.takes_groups:
            assert group is not None, "a stage takes groups of training rollouts only"
            consumer.num_ready[group.group_id] += 1
            if consumer.num_ready[group.group_id] < len(group.row_ids):
                return
            del consumer.num_ready[group.group_id]
            row_ids = group.row_ids
        consumer.queue.append(row_ids)
        consumer.changed.set()
