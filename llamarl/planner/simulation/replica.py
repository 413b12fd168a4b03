"""A generator replica without a model: continuous batching over slots, version spans, publishes and
commits between steps, all in simulated time.

Its queue and its rules of starting are the engine's, and it advances from event to event (a
prompt's last rollout stops, slots become free for waiting rollouts, a request or a commit arrives),
never token by token. Work that a real generator does on its compute thread waits for a moment
between two decode steps here too; the rest goes on beside decoding. Staging memory is made up:
fingerprints are equal if the version is."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from llamarl.core.config.generator import generator_of
from llamarl.core.errors import StaleVersion
from llamarl.core.faces import Environment, Report
from llamarl.core.records import FinishReason, Request, RolloutInfo, VersionSpan
from llamarl.generator.decoding import GATHER_S, KeptRows, Standstill
from llamarl.generator.engine.scheduler import (
    KeptEpisode,
    OpenGroups,
    PrefixIndex,
    QueuedRequest,
    SlotAssignment,
    assign_slots,
)
from llamarl.generator.episodes import EpisodePart, Rank
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.generator.worker import rollout_info
from llamarl.planner.simulation.clock import Cores, Job
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import PARAMETER, Layouts, Setting, joined
from llamarl.planner.simulation.slots import Piece, Slot, Slots, WaitingRollouts
from llamarl.publish.layout import StagingHandle
from llamarl.publish.reshard import SplitRoute
from llamarl.scoring.environment import Environments

T = TypeVar("T")
Command = tuple[float, Callable[[], None], str]
"""The seconds that a command takes on the compute thread, the call at their end, and its name."""

NOTHING = PartialOutput()


class SimulatedReplica(Layouts):
    """The GeneratorReplica, WeightTarget, WeightSource and Offloadable of replica `index` on
    `hosts`.

    The embedded engine's KV cache holds `generator.max_num_seqs` rollouts, whatever their length.
    That of vLLM holds as many tokens as its memory does: when it is full, the rollout that started
    last leaves, and is prefilled again once there is room.
    """

    def __init__(
        self,
        setting: Setting,
        costs: Costs,
        cores: Cores,
        *,
        index: int,
        hosts: tuple[str, ...],
        environments: Environments | None = None,
    ) -> None:
        super().__init__(setting, costs, cores, hosts=hosts)
        self.index, self.name, self.version = index, f"generator-{index}", -1
        rank = Rank(
            number=0,
            post=lambda call, key: self._add_command(0.0, call, "turn"),
            share=lambda numbers: numbers or (),
            resume=self._resume,
            abort=self._abort,
            put=self._put,
            call_soon=lambda call: asyncio.get_running_loop().call_soon(call),
            fail=self._fail,
        )
        self._episodes = EpisodePart(rank, environments)
        self._error: BaseException | None = None
        generator = generator_of(self._config.generator, index)
        self._weight = generator.num_ranks
        self._max_num_seqs, self._max_model_len = generator.max_num_seqs, generator.max_model_len
        self._recomputes = generator.kv_after_commit == "recompute"
        self._commands: deque[Command] = deque()
        self._standstill = Standstill(
            cores.time,
            lambda name, start, end: self._timeline.record(self.name, name, start, end, "wait"),
        )
        self._is_busy = False
        self._prefixes, plan = PrefixIndex(), self._config.plan
        self._waiting = WaitingRollouts(generator)
        self._slots = Slots(self._max_num_seqs, costs, plan.reserves_kv)
        self._stretch: tuple[Job, list[Piece]] | None = None  # decode steps under way
        self._num_pieces = 0  # of the stretch, counted as done
        self._commits: list[tuple[int, int]] = []  # (decode steps done then, version)
        self._must_recompute = False
        self._held: set[int] = set()  # row ids that have not stopped
        self._stopped: list[tuple[Request, RolloutInfo]] = []
        self._open = OpenGroups()
        self._has_news = asyncio.Event()
        self._kept, self._taking = KeptRows[RolloutInfo](), asyncio.Lock()

    # Generator

    @property
    def num_running(self) -> int:
        """The number of rollouts in slots."""
        return len(self._slots)

    async def submit(self, requests: list[Request]) -> None:
        await self._travel()
        row_ids = {request.row_id for request in requests}
        assert len(row_ids) == len(requests), "a row is asked for twice"
        assert not row_ids & self._held, "a row is asked for that has not stopped"
        self._held |= row_ids
        self._open.add(requests)
        resumed = [request for request in requests if request.resume]
        written = await self._rollouts.written(resumed) if resumed else {}
        for request in requests:
            before = written.get(request.row_id, NOTHING)
            if request.has_turns:
                self._episodes.open(request, before)
            else:
                self._resume(request, before)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        self._episodes.environments.renew(name, calls)

    async def collect(self, received: int) -> Report:
        """Return rows as the real one does, but never without any: heartbeats take no time here."""
        await self._travel()
        self._kept.forget(received)
        async with self._taking:
            while not self._kept:
                self._kept.add(await self._take())
        return self._kept.report()

    async def _take(self) -> list[RolloutInfo]:
        await self._has_news.wait()
        if self._error is not None:
            raise self._error
        if not any(row.finish_reason is FinishReason.SEGMENT for _, row in self._stopped):
            await self._cores.sleep(GATHER_S)
        self._catch_up()
        stopped, self._stopped = self._stopped, []
        self._has_news.clear()
        num_rows = sum(len(row.sequences) for _, row in stopped)
        await self._cores.work(self._costs.store_row_s * num_rows)
        await self._rollouts.put(stopped, self.writer)
        if stopped and self._costs.row_s:  # in other processes, for which no executor waits
            self._cores.start(self._costs.row_s * num_rows, lambda: None)
        return [row for _, row in stopped]

    async def abort_requests(self, row_ids: list[int]) -> None:
        self._episodes.abort(row_ids)
        self._abort(row_ids)
        await self._episodes.forget(row_ids)

    # WeightTarget and WeightSource

    target_layout = Layouts.source_layout

    async def connect_source(self, route: SplitRoute) -> list[None]:
        return [None for _ in self._hosts]

    async def prepare(self, version: int) -> list[StagingHandle]:
        await self._travel()
        assert version > self.version, (version, self.version)
        self._timeline.offered_s.setdefault(version, asyncio.get_running_loop().time())
        handle = partial(StagingHandle, version=version, replica=self.index)
        return [
            handle(rank=rank, host=host, address=None, num_bytes=4)
            for rank, host in enumerate(self._hosts)
        ]

    async def verify(self, version: int) -> list[dict[str, int]]:
        await self._travel()
        await self._cores.work(self._costs.check_s, self._weight)
        return [{PARAMETER: version} for _ in self._hosts]

    async def abort(self, version: int) -> list[None]:
        return [None for _ in self._hosts]

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        await self._cores.work(self._costs.relay_s)
        return [{PARAMETER: version * len(handles)}]

    async def commit(self, version: int) -> list[int]:
        await self._travel()

        def commit() -> int:
            self.version = version
            self._commits.append((self._slots.steps, version))
            self._must_recompute = self._recomputes
            return len(self._slots)

        return [await self._between_steps(self._costs.commit_s, commit, "commit")]

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self._standstill.away:
                self._catch_up()
                if tag == "kv" and not self._slots:
                    self._prefixes.clear()
                await self._move("offload", tag, partial(self._standstill.away.add, tag))

    async def prefetch(self, tags: list[str]) -> None: ...

    async def onload(self, tags: list[str]) -> None:
        for tag in tags:
            if tag in self._standstill.away:
                await self._move("onload", tag, partial(self._standstill.away.discard, tag))

    async def _move(self, name: str, tag: str, then: Callable[[], None]) -> None:
        await self._travel()
        seconds = self._costs.moves_s.get(f"generator {tag}", 0.0)
        await self._between_steps(seconds, then, name)

    # Between two steps

    async def _between_steps(self, seconds: float, call: Callable[[], T], name: str) -> T:
        """Run `call` at the end of `seconds` on the compute thread."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not done.done():
                done.set_result(call())

        self._add_command(seconds, end, name)
        return await done

    def _add_command(self, seconds: float, call: Callable[[], None], name: str) -> None:
        self._commands.append((seconds, call, name))
        self._interrupt()

    def _interrupt(self) -> None:
        """Stop decoding after the step at work, because a command or a request waits."""
        if self._stretch is not None:
            self._catch_up()
            job, pieces = self._stretch
            done = pieces[: self._num_pieces]
            since_s = done[-1].done_s if done else 0.0
            piece = self._slots.cut(since_s, self._cores.done_s(job), pieces[len(done)])
            if piece != pieces[-1]:
                self._stretch = job, [*done, piece]
                self._cores.cut(job, piece.done_s)
        elif not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Run the commands, then the next prefill and decode steps."""
        self._is_busy = True
        while self._commands:
            self._standstill.end()
            seconds, call, name = self._commands.popleft()
            if seconds > 0:
                return self._busy(seconds, partial(self._end_command, call), name)
            call()
        if self._standstill.reason != "requests" or self.version < 0:
            return self._rest()
        while self._slots.is_full:
            slot = self._slots.pop_newest()
            back = QueuedRequest(request=slot.request, written=self._written(slot))
            self._waiting.hold_back(back)
        prefilled = self._recompute() if self._must_recompute else []
        prefilled += self._start_waiting()
        if not self._slots:
            return self._rest()
        self._standstill.end()
        self._busy(self._costs.prefill_s(prefilled), self._decode, "prefill")

    def _end_command(self, call: Callable[[], None]) -> None:
        call()
        self._go_on()

    def _rest(self) -> None:
        self._is_busy = False
        self._standstill.begin()

    def _recompute(self) -> list[int]:
        """Return the tokens to be prefilled for each running rollout after a commit."""
        self._must_recompute = False
        for slot in self._slots:
            self._prefixes.put(slot.number, slot.request.prompt_ids, self.version)
        return [self._slots.cached(slot) for slot in self._slots]

    def _start_waiting(self) -> list[int]:
        """Fill the free slots from the queue, as far as the cache has room; return the tokens to be
        prefilled for each rollout."""
        free, version = self._slots.free, self.version
        num_startable = self._waiting.num_startable(version)
        if not num_startable or len(free) < self._waiting.fewest_free(version):
            return []
        most = min(len(free), num_startable)
        starting, late = self._slots.admit(partial(self._waiting.take, version), most)
        if late is not None:
            self._waiting.hold_back(late)
        is_kept = not self._recomputes
        assigned = assign_slots(starting, free, self._prefixes, self.version, is_kept=is_kept)
        return [self._start(each) for each in assigned]

    def _start(self, assignment: SlotAssignment) -> int:
        slot = Slot(assignment.waiting, assignment.slot, self._slots.steps)
        request, before = slot.request, slot.before
        length = self._workload.length(request)
        if request.has_turns:
            num_generated = slot.before - slot.num_observed
            length = self._workload.turn_end(request, num_generated) + slot.num_observed
        length = min(length, request.sampling.max_tokens)
        slot.total = max(min(length, self._max_model_len - len(request.prompt_ids)), before + 1)
        if request.segment_tokens and slot.total > before + request.segment_tokens:
            slot.total, slot.is_cut = before + request.segment_tokens, True
        self._slots.add(slot)
        return slot.context - assignment.num_cached if assignment.source is None else 0

    def _decode(self) -> None:
        """Start the decode steps until a rollout ends that others wait for: the last one of its
        prompt, one that is cut, or the one that frees enough slots for waiting rollouts."""
        if self._commands or not self._slots:
            return self._go_on()
        most_left = -1
        if self._waiting.num_startable(self.version):
            most_left = self._max_num_seqs - self._waiting.fewest_free(self.version)
        num_ended: Counter[object] = Counter()

        def is_last(slot: Slot, num_left: int) -> bool:
            num_ended[slot.prefix_group] += 1
            is_whole = num_ended[slot.prefix_group] == self._open[slot.prefix_group]
            is_awaited = slot.is_cut or slot.request.has_turns
            return is_whole or is_awaited or num_left <= most_left

        pieces = self._slots.plan(is_last)
        self._began_s = self._cores.time()
        self._stretch = self._cores.start(pieces[-1].done_s, self._decoded, self._weight), pieces
        self._num_pieces = 0

    def _decoded(self) -> None:
        assert self._stretch is not None
        steps, self._stretch = self._stretch[1][-1].steps, None
        self._timeline.record(self.name, "decode", self._began_s, self._cores.time())
        self._advance(steps)
        self._go_on()

    def _catch_up(self) -> None:
        """Count what has been decoded by now."""
        if self._stretch is None:
            return
        job, pieces = self._stretch
        done_s = self._cores.done_s(job)
        while self._num_pieces + 1 < len(pieces) and pieces[self._num_pieces].done_s <= done_s:
            self._num_pieces += 1
        if self._num_pieces:
            self._advance(pieces[self._num_pieces - 1].steps)

    def _advance(self, steps: int) -> None:
        for slot in self._slots.advance(steps):
            at_limit = slot.total >= slot.request.sampling.max_tokens
            reason = FinishReason.LENGTH if at_limit else FinishReason.STOP
            reason = FinishReason.SEGMENT if slot.is_cut else reason
            is_turn = slot.request.has_turns and reason is FinishReason.STOP
            if is_turn or slot.is_cut:
                kept = KeptEpisode(slot.number, np.ones(slot.total, np.int32), self.version)
                self._prefixes.keep(slot.request.row_id, kept)
            self._stop(slot.request, self._written(slot), reason)

    def _written(self, slot: Slot) -> PartialOutput:
        """Return the tokens that the rollout has written: the commits since its start cut it into
        versions."""
        end = self._slots.steps
        newest: list[VersionSpan] = []
        for step, version in reversed(self._commits):
            first = max(step, slot.start)
            if first < end:
                newest.append(VersionSpan(version=version, num_tokens=end - first))
                end = first
            if step <= slot.start:
                break
        return joined(slot.written, newest[::-1])

    def _stop(self, request: Request, written: PartialOutput, reason: FinishReason) -> None:
        item = RequestOutput(request=request, written=written, reason=reason)
        if request.has_turns:
            self._episodes.leave_engine(item)
        else:
            self._put(item)

    def _abort(self, row_ids: Sequence[int]) -> None:
        wanted = set(row_ids)
        for each in self._waiting.abort(wanted):
            self._stop(each.request, each.written, FinishReason.ABORTED)
        self._interrupt()
        for slot in self._slots.remove(wanted):
            self._stop(slot.request, self._written(slot), FinishReason.ABORTED)

    def _resume(self, request: Request, written: PartialOutput) -> None:
        self._waiting.add(QueuedRequest(request=request, written=written))
        self._interrupt()

    def _put(self, item: RequestOutput) -> None:
        self._held.discard(item.request.row_id)
        self._stopped.append((item.request, rollout_info(item, self.index)))
        if self._open.stop(item.request, item.reason):
            self._has_news.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._has_news.set()

    def _busy(self, seconds: float, then: Callable[[], None], name: str) -> None:
        """Occupy the compute thread for `seconds`, then call `then`."""
        start_s = self._cores.time()

        def end() -> None:
            self._timeline.record(self.name, name, start_s, self._cores.time())
            then()

        if seconds > 0:
            self._cores.start(seconds, end, self._weight)
        else:
            then()

    def end_idle(self) -> None:
        """Record the reason for which the replica has waited until now."""
        self._standstill.end()
