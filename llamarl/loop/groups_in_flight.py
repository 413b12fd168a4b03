"""Groups that are written and scored on demand, for a loop that is not the controller's.

Owns: which groups are being written or scored, and who waits for them. Does not own: what is known
of a rollout (`ledger.py`), or what becomes of a group that is scored (the caller). Invariant: an
error of the tasks here reaches all that wait, now or later, and none waits after `close`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llamarl.errors import unwrap
from llamarl.experience.graph import GENERATE, SETTLE, Graph, Stage
from llamarl.loop.ledger import Ledger
from llamarl.loop.serving import serve_stage
from llamarl.protocols import Generator, Processor, Storage
from llamarl.types import FinishReason, Group, Outcome, Purpose, Request

Work = Callable[[], Coroutine[Any, Any, None]]
Waiting = dict[int, asyncio.Future[Group]]
"""By group id."""


class GroupsInFlight:
    """Groups from their requests until they are retired. `stages` are those that `score` passes, by
    the executor that runs each: all of `graph`, or some of it. Belongs to one event loop."""

    def __init__(
        self,
        generator: Generator,
        stages: Mapping[Stage, Processor],
        graph: Graph,
        storage: Storage,
    ) -> None:
        missing = {stage.name for stage in graph.between if stage not in stages}
        names = [name for name in graph.stages if name not in missing]
        served = {name: graph.stages[name] for name in names}
        self._ledger = Ledger(Graph(served, {name: graph.needs[name] - missing for name in names}))
        self._generator, self._stages, self._storage = generator, stages, storage
        self._written: Waiting = {}
        self._scored: Waiting = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None
        """Why nothing goes on."""

    def start(self) -> None:
        """Start what runs in the background."""
        self._start(self._collect)
        self._start(self._report_scored)
        for stage, executor in self._stages.items():
            self._start(partial(serve_stage, stage, executor, self._ledger))

    async def close(self, error: BaseException) -> None:
        """Raise `error` wherever something is awaited, and end the tasks."""
        self._end(error)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(
        self, groups: Sequence[Group], requests: Sequence[Request]
    ) -> list[asyncio.Future[Group]]:
        """Have the groups written; each future is done once its group is. Cancelling one stops its
        rollouts, which are retired."""
        by_row = {row_id: group for group in groups for row_id in group.row_ids}
        for request in requests:
            group = by_row[request.row_id]
            self._ledger.add(request, group.prompt, group)
        futures = [_wait_in(self._written, group) for group in groups]
        for group, future in zip(groups, futures, strict=True):
            future.add_done_callback(partial(self._stop_if_cancelled, group))
        await self._generator.submit(list(requests))
        return futures

    async def score(self, groups: Sequence[Group]) -> None:
        """Pass the groups' rollouts through the stages. RuntimeError if one has been passed."""
        entries = [self._ledger.entries[row_id] for row_id in self.rows(groups)]
        if any(GENERATE in entry.done for entry in entries):
            raise RuntimeError("score must get each group once, got one again")
        futures = [_wait_in(self._scored, group) for group in groups]
        self._ledger.learn_rollouts([each for group in groups for each in group.rollouts.values()])
        await asyncio.gather(*futures)

    def rows(self, groups: Sequence[Group]) -> list[int]:
        """Their row ids. RuntimeError unless they are all written and not retired."""
        for group in groups:
            is_open = all(row_id in self._ledger.entries for row_id in group.row_ids)
            if not is_open or group.group_id in self._written:
                now = "being written" if is_open else "retired"
                raise RuntimeError(f"groups must be written and open, got {group.group_id}, {now}")
        return [row_id for group in groups for row_id in group.row_ids]

    def request(self, row_id: int) -> Request:
        """What was asked for."""
        return self._ledger.entries[row_id].request

    async def leave_out(self, group: Group) -> None:
        """Retire the rollouts that stages dropped from a group that is trained on."""
        for reason, row_ids in self._ledger.leave_out(group).items():
            dropped: Outcome = {"outcome": "dropped", "reason": reason, "left_out": 1}
            await self._storage.retire(row_ids, dropped | {"group_id": group.group_id})

    async def retire(self, groups: Sequence[Group], outcome: Outcome) -> None:
        """Archive and free the groups' rollouts."""
        row_ids = self.rows(groups)
        await self._storage.retire(row_ids, outcome)
        self._ledger.forget(row_ids)

    async def retire_rest(self) -> None:
        """Archive and free all that was never retired, as unused."""
        await self._storage.retire(self._ledger.rows(*Purpose), {"outcome": "unused"})

    async def _collect(self) -> None:
        """Complete groups; rollouts that were cut go on."""
        while True:
            cut = []
            for row in await self._generator.collect():
                entry = self._ledger.entries[row.row_id]
                assert entry.group is not None
                group, future = entry.group, self._written[entry.group.group_id]
                if row.finish_reason is FinishReason.SEGMENT and not future.cancelled():
                    cut.append(replace(entry.request, resume=True))
                    continue
                group.rollouts[row.row_id] = row
                if len(group.rollouts) < len(group.row_ids):
                    continue
                del self._written[group.group_id]
                if future.cancelled():
                    await self.retire([group], {"outcome": "dropped", "reason": "cancelled"})
                else:
                    future.set_result(group)
            await self._generator.submit(cut)

    async def _report_scored(self) -> None:
        while True:
            for row_ids in await self._ledger.take(SETTLE):
                group = self._ledger.entries[row_ids[0]].group
                assert group is not None
                future = self._scored.pop(group.group_id)
                if not future.done():
                    future.set_result(group)

    def _stop_if_cancelled(self, group: Group, future: asyncio.Future[Group]) -> None:
        if future.cancelled() and self.error is None:
            self._start(partial(self._generator.abort_requests, list(group.row_ids)))

    def _start(self, work: Work) -> None:
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Work) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised by all that waits, and by later calls
            self._end(unwrap(error))

    def _end(self, error: BaseException) -> None:
        self.error = self.error or error
        for future in (*self._written.values(), *self._scored.values()):
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # else asyncio warns of those that are not awaited
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


def _wait_in(waiting: Waiting, group: Group) -> asyncio.Future[Group]:
    future = waiting[group.group_id] = asyncio.get_running_loop().create_future()
    return future
