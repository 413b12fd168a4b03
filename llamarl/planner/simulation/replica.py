"""A generator replica without a model.

Owns: continuous batching over slots, version spans, commits between steps, all in modelled time.
Does not own: who runs (`slots.py`), durations (`costs.py`) or lengths (`workload.py`). Invariant:
its queue and its rules of starting are the embedded engine's, and it advances from event to event
(a prompt's last rollout stops, slots become free for what waits, a request or a commit arrives),
never token by token.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from llamarl.config import Config
from llamarl.executors.generator import GATHER_S
from llamarl.generation.engine import START_SHARE
from llamarl.generation.scheduler import Queue, QueuedRequest, nothing_written
from llamarl.planner.simulation.cores import Cores, Job
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import ModelledStorage
from llamarl.planner.simulation.receiving import Receiving, travel
from llamarl.planner.simulation.slots import Piece, Slot, Slots
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload
from llamarl.types import FinishReason, Request, RolloutInfo, VersionSpan

TAGS = ("weights", "kv")
NOTHING = nothing_written()
Partials = dict[int, tuple[VersionSpan, ...]]
"""Row id -> what a cut rollout has written: any replica may resume it, as from storage."""


class ModelledReplica(Receiving):
    """protocols.Generator, Receiver, Sender and Offloadable for replica `index` on `hosts`.

    Its KV cache is taken to hold `generator.max_num_seqs` rollouts, whatever their length.
    """

    def __init__(
        self,
        index: int,
        config: Config,
        costs: Costs,
        workload: Workload,
        *,
        hosts: tuple[str, ...],
        cores: Cores,
        timeline: SimulatedTimeline,
        partials: Partials,
        storage: ModelledStorage,
    ) -> None:
        super().__init__(index, config, costs, hosts=hosts, cores=cores, timeline=timeline)
        self._workload, self._partials, self._storage = workload, partials, storage
        self._max_running = config.generator.max_num_seqs
        self._max_context = config.generator.max_model_len
        self._recomputes = config.generator.kv_after_commit == "recompute"
        self._queue = Queue()
        self._slots = Slots(costs)
        self._stretch: tuple[Job, list[Piece]] | None = None  # decode steps under way
        self._num_pieces = 0  # of the stretch, counted as done
        self._commits: list[tuple[int, int]] = []  # (decode steps done then, version)
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()  # prompt -> version
        self._must_recompute = False
        self._stopped: list[RolloutInfo] = []
        self._open: Counter[object] = Counter()  # prefix group -> rollouts that have not stopped
        self._has_news = asyncio.Event()
        self._idle: tuple[str, float] | None = None

    # Generator

    @property
    def num_running(self) -> int:
        """Rollouts in slots."""
        return len(self._slots)

    async def submit(self, requests: list[Request]) -> None:
        await travel(self._costs)
        self._open.update(request.prefix_group for request in requests)
        for request in requests:
            self._queue.add(QueuedRequest(request=request, written=NOTHING))
        self._interrupt()

    async def collect(self) -> list[RolloutInfo]:
        """As the real one, but it does not answer without rows: heartbeats take no time."""
        await travel(self._costs)
        await self._has_news.wait()
        await asyncio.sleep(GATHER_S)
        self._catch_up()
        stopped, self._stopped = self._stopped, []
        self._has_news.clear()
        await self._cores.work(self._costs.store_row_s * len(stopped))
        if stopped and self._costs.row_s:  # in other processes: nobody here waits for it
            self._cores.start(self._costs.row_s * len(stopped), lambda: None)
        return stopped

    async def abort_requests(self, row_ids: list[int]) -> None:
        wanted = set(row_ids)
        for waiting in self._queue.remove(wanted):
            self._stop(waiting.request, (), FinishReason.ABORTED)
        self._interrupt()
        for slot in self._slots.remove(wanted):
            self._stop(slot.request, self._spans(slot), FinishReason.ABORTED)

    # Between two steps

    def _interrupt(self) -> None:
        """Something waits for the next moment between two steps."""
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
        """Commands first, then the next prefill and decode steps."""
        self._is_busy = True
        if self._commands:
            seconds, then, name = self._commands.popleft()
            self.end_idle()
            self._busy(seconds, then, name)
            return
        reason = "phase" if self._away else "buckets" if self._is_mixed else "requests"
        if reason != "requests" or self.version < 0:
            return self._wait_for(reason)
        starting = self._starting()
        prefilled = self._slots.contexts() if self._must_recompute else []
        self._must_recompute = False
        prefilled += [self._start(waiting.request) for waiting in starting]
        if not self._slots:
            return self._wait_for("requests")
        self.end_idle()
        self._busy(self._costs.prefill_s(prefilled), self._decode, "prefill")

    def _starting(self) -> list[QueuedRequest]:
        free = self._max_running - len(self._slots)
        if free < self._fewest_free():
            return []
        return self._queue.take(self.version, free)

    def _fewest_free(self) -> int:
        """Slots that must be free for rollouts to start."""
        return max(1, min(self._max_running // START_SHARE, len(self._queue)))

    def _start(self, request: Request) -> int:
        """Give the rollout a slot; returns the tokens to be prefilled for it."""
        before = sum(span.num_tokens for span in self._partials.get(request.row_id, ()))
        prompt = len(request.prompt_ids)
        slot = Slot(request, self._slots.steps, prompt + before - 1, before)
        length = min(self._workload.length(request.seed), request.sampling.max_tokens)
        slot.total = max(min(length, self._max_context - prompt), before + 1)
        if request.segment_tokens and slot.total > before + request.segment_tokens:
            slot.total, slot.is_cut = before + request.segment_tokens, True
        self._slots.add(slot)
        is_known = not before and self._prefixes.get(request.prompt_ids) == self.version
        self._prefixes[request.prompt_ids] = self.version
        self._prefixes.move_to_end(request.prompt_ids)
        if len(self._prefixes) > self._max_running:
            self._prefixes.popitem(last=False)
        return 0 if is_known else slot.context

    def _decode(self) -> None:
        """Steps in one piece, up to an end that somebody waits for: a prompt's last rollout, a cut
        one, or the one that makes room for those that wait."""
        if self._commands or not self._slots:
            return self._go_on()
        most_left = -1
        if self._queue.has_startable(self.version):
            most_left = self._max_running - self._fewest_free()
        num_ended: Counter[object] = Counter()

        def is_last(slot: Slot, num_left: int) -> bool:
            num_ended[slot.prefix_group] += 1
            is_whole = num_ended[slot.prefix_group] == self._open[slot.prefix_group]
            return is_whole or slot.is_cut or num_left <= most_left

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
            self._stop(slot.request, self._spans(slot), reason)

    def _spans(self, slot: Slot) -> tuple[VersionSpan, ...]:
        """What the rollout has written: the commits since its start cut it into versions."""
        written = list(self._partials.pop(slot.request.row_id, ()))
        end = self._slots.steps
        newest: list[VersionSpan] = []
        for step, version in reversed(self._commits):
            first = max(step, slot.start)
            if first < end:
                newest.append(VersionSpan(version=version, num_tokens=end - first))
                end = first
            if step <= slot.start:
                break
        for span in reversed(newest):
            if written and written[-1].version == span.version:
                joint = written.pop().num_tokens + span.num_tokens
                span = VersionSpan(version=span.version, num_tokens=joint)
            written.append(span)
        return tuple(written)

    def _stop(self, request: Request, spans: tuple[VersionSpan, ...], reason: FinishReason) -> None:
        if reason is FinishReason.SEGMENT:
            self._partials[request.row_id] = spans
        row = RolloutInfo(
            row_id=request.row_id,
            num_prompt_tokens=len(request.prompt_ids),
            num_tokens=sum(span.num_tokens for span in spans),
            spans=spans,
            finish_reason=reason,
            replica=self.index,
        )
        self._stopped.append(row)
        self._storage.rows[row.row_id] = row
        self._open[request.prefix_group] -= 1
        if not self._open[request.prefix_group] or reason is FinishReason.SEGMENT:
            self._has_news.set()

    def _committed(self, version: int) -> int:
        self._commits.append((self._slots.steps, version))
        self._must_recompute = self._recomputes
        return len(self._slots)

    def _forget(self, tag: str) -> None:
        self._catch_up()
        if tag == "kv" and not self._slots:
            self._prefixes.clear()

    # Time

    def _busy(self, seconds: float, then: Callable[[], None], name: str) -> None:
        """Occupy the compute thread."""
        start_s = self._cores.time()

        def end() -> None:
            now_s = self._cores.time()
            self._timeline.record(self.name, name, start_s, now_s)
            then()

        if seconds > 0:
            self._cores.start(seconds, end, self._weight)
        else:
            then()

    def _wait_for(self, reason: str) -> None:
        now_s = self._cores.time()
        if self._idle is None or self._idle[0] != reason:
            self.end_idle()
            self._idle = reason, now_s
        self._is_busy = False

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        if self._idle is not None:
            now_s = self._cores.time()
            self._timeline.record(self.name, self._idle[0], self._idle[1], now_s, "wait")
            self._idle = None
