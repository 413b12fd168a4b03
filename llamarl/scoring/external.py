"""A stage whose work is done outside the run: consumers lease its rollouts through a socket.

A rollout is leased to one consumer at a time, and has one result; results that arrive after the
lease has ended are refused. A lease ends after its time limit, or with its consumer. The processes
of a consumer with ranks begin together: when one ends, all begin again."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llamarl.cluster.sockets import Answer, Channel, LocalServer, Packet
from llamarl.core.errors import RepeatedWarnings
from llamarl.core.faces import ColumnStore, Processor, Worker
from llamarl.core.records import (
    PROMPT_IDS,
    RESPONSE_IDS,
    Columns,
    Prompt,
    StageItem,
    StageResult,
    StageStatus,
    WireList,
    as_json,
)
from llamarl.metrics.span import Spans
from llamarl.scoring.samplers import RankAware, Ranks, ReadyItem, make_sampler
from llamarl.scoring.stage_worker import FailureRate, WorkSpans
from llamarl.scoring.stages import External, Stage, as_data
from llamarl.storage.client import RecordingStore
from llamarl.storage.columns import NUMBER
from llamarl.storage.wire import read_columns

log = logging.getLogger(__name__)

MAX_LEASES = 3  # a rollout that so many consumers took and did not finish counts as hung
PATIENCE_S = 30.0  # without a consumer, until the log says what the run waits for


@dataclass(frozen=True, kw_only=True)
class ExternalSpec:
    """The executor of a stage that runs External, at `socket`. `units` are the names and socket
    paths of the storage units, from which consumers read; `tokenizer` is a folder with tokenizer
    files."""

    executor: ClassVar[str] = "llamarl.scoring.external:ExternalWorker"

    stage: Stage
    socket: str
    units: tuple[tuple[str, str], ...]
    tokenizer: str
    storage: ColumnStore


@dataclass(slots=True)
class Work:
    """A rollout, or a group, for a consumer to process; `results` is set once it is finished."""

    row_ids: tuple[int, ...]
    prompt: Prompt | None
    ready: ReadyItem
    results: asyncio.Future[list[StageResult]]
    num_leases: int = 0


@dataclass(slots=True)
class Lease:
    """The items that the consumer at `channel` has taken, until `timer` fires or the consumer is
    gone."""

    works: list[Work]
    channel: Channel = field(repr=False)
    timer: asyncio.TimerHandle = field(repr=False)


class ExternalWorker(Worker, Processor):
    """The processor of an External stage; calls of `process` may overlap."""

    def __init__(self, spec: ExternalSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        stage, external = spec.stage, spec.stage.run
        assert isinstance(external, External)
        self._spec, self._stage = spec, stage
        self._storage = RecordingStore(spec.storage, spans)
        self._ranks = Ranks(num_data_ranks=external.num_data_ranks, num_peers=external.num_peers)
        self._sampler = make_sampler(external.sampler, {}, self._ranks)
        self._draw = RankAware(self._sampler, self._ranks)
        self._members: set[Channel] = set()  # processes with ranks that draw together
        self._outdated: set[Channel] = set()  # those of earlier draws
        self._has_ranks = external.num_data_ranks * external.num_peers > 1
        self._num_batches = 0  # each consumer without ranks takes the next one
        self._needs_lengths = external.sampler == "token_balanced"
        self._numbers_written = [each.name for each in stage.writes if each.length == NUMBER]
        self._waiting: dict[int, Work] = {}  # by first row id, oldest first
        self._drawn: dict[int, Work] = {}  # and not finished
        self._batches: dict[int, dict[int, Work]] = {}  # by index, until all processes have theirs
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._server: LocalServer | None = None
        self._warning: asyncio.TimerHandle | None = None
        self._work = WorkSpans(spans, stage.name)
        self._failures = FailureRate(stage.max_failure_rate, f"stage {stage.name}", "its ")
        self._warnings = RepeatedWarnings(log)

    async def start(self) -> None:
        """Listen at the socket. Raises OSError if the run's folder cannot hold one."""
        self._server = LocalServer(Path(self._spec.socket), self._answer, self._end_leases)
        self._work.start()

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        """Return one result per rollout, in order, once consumers have finished them all. Raises
        UserCodeError if too many failed, see `FailureRate`."""
        loop, name = asyncio.get_running_loop(), self._stage.name
        if self._warning is None:
            hint = "stage %s waits for a consumer: StageLoader(RUN, %r) in another process"
            self._warning = loop.call_later(PATIENCE_S, log.warning, hint, name, name)
        works = []
        for (row_ids, prompt), num_tokens in zip(items, await self._lengths(items), strict=True):
            item = ReadyItem(
                item_id=row_ids[0],
                group_id=row_ids[0],
                group_size=len(row_ids),
                num_rollouts=len(row_ids),
                num_prompt_tokens=0,
                num_tokens=num_tokens,
            )
            works.append(Work(row_ids, prompt, item, loop.create_future()))
            self._waiting[item.item_id] = works[-1]
        self._changed.set()
        with self._work.working(sum(len(row_ids) for row_ids, _ in items)):
            found = await asyncio.gather(*(work.results for work in works))
        results = WireList(result for of_work in found for result in of_work)
        self._failures.add(results)
        return results

    async def close(self) -> None:
        """Close the socket."""
        if self._server is not None:
            self._server.close()

    async def _lengths(self, items: Sequence[StageItem]) -> list[int]:
        """Return the number of tokens of each item, or 0 where the sampler does not need them."""
        if not self._needs_lengths:
            return [0] * len(items)
        row_ids = [row_id for rows, _ in items for row_id in rows]
        columns = await self._storage.read(row_ids, [PROMPT_IDS, RESPONSE_IDS])
        both = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        each = iter([len(prompt) + len(response) for prompt, response in both])
        return [sum(itertools.islice(each, len(rows))) for rows, _ in items]

    def _answer(self, packet: Packet) -> Answer | Awaitable[Answer]:
        """Answer a consumer's request."""
        header = packet.header
        if header["ask"] == "stage":
            stage = as_data(self._stage, "external")
            about = {"stage": stage, "units": self._spec.units, "tokenizer": self._spec.tokenizer}
            return about | {"has_ranks": self._has_ranks}, (), ()
        return (
            self._take(header, packet.channel) if header["ask"] == "take" else self._finish(packet)
        )

    async def _take(self, header: dict[str, Any], channel: Channel) -> Answer:
        """Return the next batch of this rank, once there is one."""
        if self._warning is not None:
            self._warning.cancel()
        while True:
            if channel in self._outdated:  # its loader passes the error on
                must = "a process of its consumer is gone, start all again"
                raise RuntimeError(f"stage {self._stage.name}: {must}")
            if self._has_ranks:
                self._members.add(channel)
            batch_index = header["batch"] if self._has_ranks else self._num_batches
            ready = [work.ready for work in self._waiting.values()]
            share, consumed = self._draw.sample(
                ready,
                header["count"],
                data_rank=header["data_rank"],
                peer=header["peer"],
                batch_index=batch_index,
            )
            if consumed:
                drawn = {item_id: self._waiting.pop(item_id) for item_id in consumed}
                self._batches[batch_index] = drawn
                self._drawn |= drawn
                if self._has_ranks:
                    asyncio.get_running_loop().call_later(
                        self._stage.timeout_s, self._check_asked, self._draw, batch_index
                    )
            if share is not None:
                self._num_batches += 1
                # They are taken from the batch, as a late peer's rollouts may be finished by now.
                works = [self._batches[batch_index][item_id] for item_id in share]
                if not self._draw.is_missed(batch_index):
                    del self._batches[batch_index]
                return self._lease(works, channel if header["peer"] == 0 else None)
            self._changed.clear()
            await self._changed.wait()

    def _lease(self, works: list[Work], channel: Channel | None) -> Answer:
        """Lease these items to a rank. Its first peer, at `channel`, finishes them; for other peers
        `channel` is None, and they only read."""
        number = next(self._numbers)
        if channel is not None:
            for work in works:
                work.num_leases += 1
            limit_s = self._stage.timeout_s
            timer = asyncio.get_running_loop().call_later(limit_s, self._end_lease, number)
            self._leases[number] = Lease(works, channel, timer)
        prompts = [as_json(work.prompt) for work in works if work.prompt is not None]
        return {"lease": number, "items": [w.row_ids for w in works], "prompts": prompts}, (), ()

    def _end_leases(self, channel: Channel) -> None:
        """End the leases of a consumer that is gone."""
        for number, lease in [*self._leases.items()]:
            if lease.channel is channel:
                lease.timer.cancel()
                self._end_lease(number, "before their consumer was gone")
        self._outdated.discard(channel)
        if channel in self._members:
            self._members.discard(channel)
            self._start_over()

    def _check_asked(self, draw: RankAware, batch_index: int) -> None:
        if draw is self._draw and draw.is_missed(batch_index):
            must = "waits for a process of its consumer that has not asked for batch"
            self._warnings.warn("stage %s %s %d", self._stage.name, must, batch_index)

    def _start_over(self) -> None:
        """Offer items that were drawn and are not leased to the processes that begin now; those
        that drew them have to begin again."""
        self._warnings.warn("stage %s: a process of its consumer has ended", self._stage.name)
        self._outdated |= self._members
        self._members.clear()
        self._batches.clear()
        self._draw = RankAware(self._sampler, self._ranks)
        leased = {work.row_ids[0] for lease in self._leases.values() for work in lease.works}
        back = {item_id: work for item_id, work in self._drawn.items() if item_id not in leased}
        self._drawn = {item_id: self._drawn[item_id] for item_id in self._drawn.keys() & leased}
        self._queue_first(back)

    def _end_lease(self, number: int, when: str = "") -> None:
        """End a lease, and offer its items to the next consumer that asks."""
        works = self._leases.pop(number).works
        when = when or f"in {self._stage.timeout_s:g} s"
        words = "stage %s: %d rollouts not finished %s"
        self._warnings.warn(words, self._stage.name, len(works), when, about=when)
        self._give_back(works)

    def _give_back(self, works: list[Work]) -> None:
        name, limit_s = self._stage.name, self._stage.timeout_s
        again: dict[int, Work] = {}
        for work in works:
            self._drawn.pop(work.row_ids[0], None)
            if work.num_leases < MAX_LEASES:
                again[work.row_ids[0]] = work
                continue
            why = f"must be finished within {limit_s:g} s (timeout_s), was not {MAX_LEASES} times"
            error = f"a rollout of stage {name} {why}"
            failed = [
                StageResult(row_id=row_id, status=StageStatus.HUNG, error=error)
                for row_id in work.row_ids
            ]
            self._deliver([work], failed)
        self._queue_first(again)

    def _queue_first(self, works: dict[int, Work]) -> None:
        self._waiting = works | self._waiting
        self._changed.set()

    def _finish(self, packet: Packet) -> Answer | Awaitable[Answer]:
        """Accept the results of a lease, and store the columns that came with them. Raises
        ValueError if the lease has ended, or their number is wrong."""
        number, dropped = packet.header["lease"], dict(packet.header["drop"])
        lease = self._leases.get(number)
        if lease is None:
            limit_s = self._stage.timeout_s
            raise ValueError(
                f"a batch must be finished once, within {limit_s:g} s (timeout_s of stage "
                f"{self._stage.name}): others may have its rollouts by now"
            )
        row_ids = [row_id for work in lease.works for row_id in work.row_ids]
        columns = read_columns(packet, len(row_ids))
        results = [
            StageResult(
                row_id=row_id,
                numbers={name: float(columns[name][place][0]) for name in self._numbers_written},
                reason=dropped.get(row_id, ""),
            )
            for place, row_id in enumerate(row_ids)
        ]
        lease.timer.cancel()
        del self._leases[number]
        if columns:
            return asyncio.shield(self._store(lease.works, results, columns))
        self._deliver(lease.works, results)
        return {}, (), ()

    async def _store(
        self, works: list[Work], results: list[StageResult], columns: Columns
    ) -> Answer:
        kept = [place for place, result in enumerate(results) if not result.reason]
        cells = {name: [each[place] for place in kept] for name, each in columns.items()}
        try:
            if kept:
                await self._storage.write([results[place].row_id for place in kept], cells)
        except BaseException:
            self._give_back(works)
            raise
        # The consumer gets its answer first: with the last results the run may end.
        asyncio.get_running_loop().call_soon(self._deliver, works, results)
        return {}, (), ()

    def _deliver(self, works: list[Work], results: list[StageResult]) -> None:
        """Hand over the results of these items, in the order of the items."""
        each = iter(results)
        for work in works:
            self._drawn.pop(work.row_ids[0], None)
            found = list(itertools.islice(each, len(work.row_ids)))
            if not work.results.done():  # else the run has ended
                work.results.set_result(found)
