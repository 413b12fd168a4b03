"""The life of a rollout, from its request to its outcome: one coroutine per group, and one per
rollout inside it.

    write: submit -> (cut? submit again) -> stopped;  then the stages of the graph;  then the group

An episode is a rollout like any other here: its replica takes its turns with the environment, and
says at the end what became of it. One that is lost begins again."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from llamarl.controller.dispatch import Dispatch
from llamarl.core.batcher import Batcher
from llamarl.core.errors import UserCodeError, all_at_once, cancel_all, mark_seen, unwrap
from llamarl.core.faces import Processor, Storage
from llamarl.core.groups import Group
from llamarl.core.records import (
    RECORD,
    Columns,
    FinishReason,
    Outcome,
    Purpose,
    Request,
    RolloutInfo,
    StageItem,
    StageResult,
    StageStatus,
    TurnResult,
    episode_of,
)
from llamarl.scoring.stages import GENERATE, GROUP, SCORE, External, Graph, Stage
from llamarl.storage.archive import as_cell
from llamarl.storage.columns import PROMPT_RECORD

PAUSE_S = 0.05  # between two calls of a stage, so that what many replicas send comes together
LIMIT, OUTSIDE_LIMIT = 256, 1024  # rows of a call; outside the run they wait for consumers

T = TypeVar("T")
Asked = tuple[Group, tuple[int, ...]]
"""Rows of a group that one call of a stage gets together."""


class Rollouts:
    """The open rollouts. `stages` are the stages that rollouts pass, with the executor that runs
    each: all between generate and settle of `graph`, or some of them. An episode whose environment
    is lost begins again, at most `max_restarts` times. Belongs to one event loop.

    Example: `await roll_out(group, requests)` returns when every rollout of the group is written
    and has passed the stages; `rollouts`, `scores`, `numbers` and `dropped` of the group say what
    is known.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        stages: Mapping[Stage, Processor],
        graph: Graph,
        storage: Storage,
        max_restarts: int = 0,
    ) -> None:
        self._dispatch, self.storage = dispatch, storage
        self._max_restarts = max_restarts
        started = {stage.name for stage in stages} | {GENERATE}
        self._stages = [stage for stage in graph.between if stage in stages]
        self._needs = {stage.name: graph.needs[stage.name] & started for stage in self._stages}
        self.open: dict[int, Request] = {}
        """The requests of the open rollouts by row id, oldest first."""
        self.error: BaseException | None = None
        """The error that ended everything here, if there was one."""
        self._failed: asyncio.Future[None] | None = None
        self._writing: set[int] = set()
        self._stopped: dict[int, asyncio.Future[RolloutInfo]] = {}  # of those at a replica
        self._aborted: set[int] = set()
        self._meetings: dict[tuple[str, int], list[asyncio.Future[None]]] = {}
        self._submitting = Batcher(dispatch.submit, self.fail)
        self._calls = {
            stage.name: Batcher(
                partial(self._process, stage, executor),
                self.fail,
                limit=OUTSIDE_LIMIT if isinstance(stage.run, External) else LIMIT,
                size=lambda asked: len(asked[1]),
                pause_s=0.0 if stage.is_model else PAUSE_S,
                in_turn=stage.is_model,
            )
            for stage, executor in stages.items()
        }

    async def serve(self) -> None:
        """Collect the rollouts that stopped. It never returns, but raises the first error of any
        work here."""
        collecting = asyncio.create_task(self._collect())
        try:
            await asyncio.shield(self._failure())
        finally:
            await self._submitting.close()
            for each in self._calls.values():
                await each.close()
            await cancel_all([collecting])

    def fail(self, error: BaseException) -> None:
        """Let `serve`, and whatever waits in `until_failed` now or later, raise `error`."""
        if self.error is None:
            self.error = unwrap(error)
            self._failure().set_exception(self.error)
            mark_seen(self._failure())

    async def until_failed(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise the error of any work here at once."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failure()}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return task.result()
        finally:
            task.cancel()

    async def roll_out(self, group: Group, requests: Sequence[Request]) -> None:
        """Have a group written; each rollout passes the stages as soon as it is written."""
        await all_at_once(self._roll_out(group, request) for request in requests)

    async def give(self, requests: Sequence[Request], columns: Columns) -> None:
        """Open rollouts that no generator writes, and write their columns into storage as they
        are."""
        for request in requests:
            self._open(request)
        await self.storage.write([request.row_id for request in requests], columns)

    async def write(self, group: Group, requests: Sequence[Request]) -> None:
        """Have a group written, and no more: rollouts that are aborted count as written."""
        await all_at_once(self._write(group, request) for request in requests)

    def is_written(self, group: Group) -> bool:
        """Return whether all of the group's rollouts are open, and none is being written."""
        rows = group.row_ids
        return self.open.keys() >= {*rows} and self._writing.isdisjoint(rows)

    async def pass_stages(self, group: Group) -> None:
        """Let the rollouts of a group that is written pass the stages."""
        await all_at_once(self._pass_stages(group, row_id) for row_id in group.row_ids)

    async def abort(self, row_ids: Sequence[int]) -> None:
        """Stop writing these rollouts, wherever they are; those that were cut do not go on."""
        self._aborted.update(row_ids)
        await self._dispatch.abort_requests(list(row_ids))

    def rows(self, *purposes: Purpose) -> list[int]:
        """Return the ids of the open rollouts of these purposes, oldest first."""
        return [r for r, request in self.open.items() if request.purpose in purposes]

    async def retire(self, row_ids: Iterable[int], outcome: Outcome) -> None:
        """Archive and free those of these rollouts that are open, which closes them."""
        closed = [row_id for row_id in row_ids if self.open.pop(row_id, None) is not None]
        self._aborted.difference_update(closed)
        if closed:
            await self.storage.retire(closed, outcome)

    async def record(self, records: Mapping[int, object]) -> None:
        """Store the records of those of these rollouts that are open, before they are retired."""
        found = {i: record for i, record in records.items() if episode_of(i)[0] in self.open}
        if found:
            await self.storage.write([*found], {RECORD: [*map(as_cell, found.values())]})

    async def leave_out(self, group: Group) -> None:
        """Retire the rollouts that stages dropped from a group that is trained on."""
        reasons: dict[str, list[int]] = {}
        for row_id in (row_id for row_id in group.row_ids if row_id in group.dropped):
            reasons.setdefault(group.dropped[row_id], []).append(row_id)
            del group.rollouts[row_id]
            group.scores.pop(row_id, None)
        group.row_ids = tuple(row_id for row_id in group.row_ids if row_id not in group.dropped)
        for reason, row_ids in reasons.items():
            dropped: Outcome = {"outcome": "dropped", "reason": reason, "left_out": 1}
            await self.retire(row_ids, dropped | {"group_id": group.group_id})

    async def _roll_out(self, group: Group, request: Request) -> None:
        rollout = await self._write(group, request)
        if rollout.finish_reason is not FinishReason.ABORTED:
            await self._pass_stages(group, request.row_id)

    async def _write(self, group: Group, request: Request) -> RolloutInfo:
        """Have one rollout written, from its request to its last token."""
        row_id = request.row_id
        self._writing.add(row_id)
        try:
            if request.has_turns:
                rollout = await self._take_turns(group, request)
            else:
                rollout = await self._generate(request)
        finally:
            self._writing.discard(row_id)
        group.rollouts[row_id] = rollout
        return rollout

    async def _generate(self, request: Request) -> RolloutInfo:
        """Wait until the rollout stops. A rollout that is cut goes on, on any replica."""
        cut: list[TurnResult] = []
        while True:
            stopped, sent = self._expect(request), self._submitting.ask(request)
            try:
                rollout = await stopped
            finally:
                sent.cancel()
                del self._stopped[request.row_id]
            is_cut = rollout.finish_reason is FinishReason.SEGMENT
            if not is_cut or request.row_id in self._aborted:
                return _summed(cut, rollout) if cut else rollout
            request = replace(request, resume=True)
            if (episode := rollout.episode) is not None:
                cut.append(episode)
                # In the attempt that the dispatcher may have made of it.
                place = episode.environment
                request = replace(request, attempt=episode.attempt, environment=place)

    async def _take_turns(self, group: Group, request: Request) -> RolloutInfo:
        """Have an episode written, again from its beginning if its environment was lost."""
        num_lost = 0
        while True:
            rollout = await self._generate(request)
            episode = rollout.episode
            is_aborted = request.row_id in self._aborted or episode is None
            if is_aborted or rollout.finish_reason is FinishReason.ABORTED:
                return replace(rollout, finish_reason=FinishReason.ABORTED)
            assert episode is not None
            if episode.ends_run:
                raise UserCodeError(episode.error)
            if not episode.is_lost:
                break
            num_lost += 1
            await self.storage.retire([request.row_id], {"outcome": "lost", "environment": 1})
            if num_lost > self._max_restarts:
                many = f"lost more than environment.max_restarts={self._max_restarts} times"
                error = f"{many}: {episode.error}"
                episode = replace(episode, status=StageStatus.RAISED, error=error)
                break
            request = replace(request, attempt=episode.attempt + 1)
        group.episodes[request.row_id] = {"restarts": float(episode.attempt)} | episode.numbers
        if episode.status is not StageStatus.OK:
            _fail_episode(group, request, episode)
        return rollout

    async def _pass_stages(self, group: Group, row_id: int) -> None:
        """Pass every stage once, as soon as the stages that it reads from are done with the
        rollout. Those that write numbers per token get each conversation of an episode, others the
        first."""
        is_evaluated = self.open[row_id].purpose is Purpose.EVALUATE
        left = [stage for stage in self._stages if not is_evaluated or stage.name == SCORE]
        asked: dict[asyncio.Future[None], str] = {}
        done = {GENERATE}
        while left or asked:
            if len(left) == 1 and not asked:  # the usual case, much cheaper than `wait` below
                return await self._ask(left[0], group, row_id)
            is_dropped = row_id in group.dropped  # then `_process` leaves it out everywhere
            for stage in [each for each in left if is_dropped or self._needs[each.name] <= done]:
                left.remove(stage)
                asked[self._ask(stage, group, row_id)] = stage.name
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for future in [each for each in asked if each.done()]:
                future.result()
                done.add(asked.pop(future))

    def _ask(self, stage: Stage, group: Group, row_id: int) -> asyncio.Future[None]:
        """Return a future that is done once `stage` is done with the rollout. At a stage that works
        per group, the rollouts of a group wait for each other."""
        if stage.per != GROUP:
            return self._calls[stage.name].ask((group, _rows(stage, group, row_id)))
        key = stage.name, group.row_ids[0]
        meeting = self._meetings.setdefault(key, [])
        meeting.append(meeting[0] if meeting else asyncio.get_running_loop().create_future())
        if len(meeting) == len(group.row_ids):
            del self._meetings[key]
            rows = [i for each in group.row_ids for i in _rows(stage, group, each)]
            self._calls[stage.name].ask((group, tuple(rows)), meeting[0])
        return meeting[0]

    async def _process(self, stage: Stage, executor: Processor, asked: list[Asked]) -> None:
        items: list[StageItem] = []
        for group, row_ids in asked:
            left = tuple(i for i in row_ids if episode_of(i)[0] not in group.dropped)
            prompt = group.prompt if PROMPT_RECORD in stage.reads else None
            items += (
                [(left, prompt)] * bool(left)
                if stage.per == GROUP
                else [((row_id,), prompt) for row_id in left]
            )
        results = await executor.process(items) if items else []
        groups = {row_id: group for group, row_ids in asked for row_id in row_ids}
        for result in results:
            _learn(stage, groups[result.row_id], result)

    async def _collect(self) -> None:
        try:
            while True:
                for rollout in await self._dispatch.collect():
                    stopped = self._stopped.get(rollout.row_id)
                    if stopped is not None and not stopped.done():
                        stopped.set_result(rollout)
        except Exception as error:  # noqa: BLE001 - raised by `serve`
            self.fail(error)

    def _failure(self) -> asyncio.Future[None]:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        return self._failed

    def _open(self, request: Request) -> None:
        """Open the rollout; raises at once the error that ended everything, if there was one."""
        if self.error is not None:
            raise self.error
        self.open[request.row_id] = request

    def _expect(self, request: Request) -> asyncio.Future[RolloutInfo]:
        """Return a future that is done when the rollout stops."""
        self._open(request)
        stopped = self._stopped[request.row_id] = asyncio.get_running_loop().create_future()
        return stopped


def _rows(stage: Stage, group: Group, row_id: int) -> tuple[int, ...]:
    """Return the rows of a rollout that a stage gets: all conversations of an episode, or the
    first. Of those that can be read after the run, the stage `score` stores the turns of each."""
    rollout = group.rollouts.get(row_id)
    is_shown = stage.name == SCORE and group.prompt.is_recorded
    if rollout is None or not (is_shown or stage.is_per_token):
        return (row_id,)
    return tuple(each.row_id for each in rollout.sequences)


def _learn(stage: Stage, group: Group, result: StageResult) -> None:
    """Add a stage's result to the group. A failed score drops nothing here: the group's filter
    handles it."""
    row_id, conversation = episode_of(result.row_id)
    if stage.name == SCORE:
        if not conversation:
            group.scores[row_id] = result
        return
    if not conversation:
        group.numbers.setdefault(row_id, {}).update(result.numbers)
    if result.reason or result.status is not StageStatus.OK:
        group.dropped.setdefault(row_id, result.reason or f"{stage.name}_failed")
        group.errors.setdefault(row_id, result.error)


def _summed(cut: Sequence[TurnResult], rollout: RolloutInfo) -> RolloutInfo:
    """Return the rollout with the numbers of its episode summed over all its stays at replicas."""
    if (last := rollout.episode) is None:
        return rollout
    numbers: Counter[str] = Counter()
    for episode in (*cut, last):
        numbers.update(episode.numbers)
    return replace(rollout, episode=replace(last, numbers=dict(numbers)))


def _fail_episode(group: Group, request: Request, episode: TurnResult) -> None:
    """Drop a failed episode, which is no wrong answer: it is not trained on, and has no score."""
    row_id = request.row_id
    group.dropped[row_id] = f"environment_{episode.status}"
    group.scores[row_id] = StageResult(row_id=row_id, status=episode.status, error=episode.error)
