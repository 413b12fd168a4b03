"""A generator replica without a model.

Owns: continuous batching over slots, version spans, flips between steps, all in modelled time. Does
not own: durations (`costs.py`) or lengths (`workload.py`). Invariant: its queue and its rules of
starting are the embedded engine's, and it advances from event to event (a rollout stops, a request
or a flip arrives), never token by token.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable

from llamarl.config import Config
from llamarl.executors.generator import GATHER_S
from llamarl.generation.engine import START_SHARE
from llamarl.generation.scheduler import Queue, Waiting, nothing_written
from llamarl.planner.cores import Cores, Job
from llamarl.planner.costs import Costs
from llamarl.planner.executors import ModelledStorage
from llamarl.planner.receiving import Receiving, travel
from llamarl.planner.timeline import Timeline
from llamarl.planner.workload import Workload
from llamarl.types import FinishReason, Request, Row, VersionSpan

KINDS = ("weights", "kv")
NOTHING = nothing_written()
Partials = dict[int, tuple[VersionSpan, ...]]
"""Row id -> what a cut rollout has written: any replica may resume it, as from storage."""


class _Slot:
    """A running rollout: it began at decode step `start`, with `context` tokens cached."""

    def __init__(self, request: Request, start: int, context: int, before: int) -> None:
        self.request, self.start, self.context, self.before = request, start, context, before
        self.total = 0  # response tokens at which it stops
        self.is_cut = False


class ModelledReplica(Receiving):
    """protocols.Generator, Receiver, Sender and Tenant for replica `index` on `hosts`.

    Its KV cache is taken to hold `generator.max_running` rollouts, whatever their length.
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
        timeline: Timeline,
        partials: Partials,
        storage: ModelledStorage,
    ) -> None:
        super().__init__(index, config, costs, hosts=hosts, cores=cores, timeline=timeline)
        self._workload, self._partials, self._storage = workload, partials, storage
        self._max_running = config.generator.max_running
        self._max_context = config.generator.max_context_tokens
        self._recomputes = config.generator.kv_after_flip == "recompute"
        self._queue = Queue()
        self._ends: list[tuple[int, int, _Slot]] = []  # a heap: (decode step, row id, rollout)
        self._steps = 0  # decode steps done
        self._context = 0  # tokens in the KV caches of what runs
        self._chunk: tuple[Job, int] | None = None  # decode steps under way, and how many
        self._flips: list[tuple[int, int]] = []  # (decode steps done then, version)
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()  # prompt -> version
        self._must_recompute = False
        self._stopped: list[Row] = []
        self._open: Counter[object] = Counter()  # cohort -> rollouts that have not stopped
        self._has_news = asyncio.Event()
        self._idle: tuple[str, float] | None = None

    # Generator

    async def submit(self, requests: list[Request]) -> None:
        await travel(self._costs)
        self._open.update(request.cohort for request in requests)
        for request in requests:
            self._queue.add(Waiting(request=request, written=NOTHING))
        if len(self._ends) < self._max_running:
            self._interrupt()

    async def collect(self) -> list[Row]:
        """As the real one, but it does not answer without rows: heartbeats take no time."""
        await travel(self._costs)
        await self._has_news.wait()
        await asyncio.sleep(GATHER_S)
        stopped, self._stopped = self._stopped, []
        self._has_news.clear()
        await self._cores.work(self._costs.store_row_s * len(stopped))
        if stopped and self._costs.row_s:  # in other processes: nobody here waits for it
            self._cores.start(self._costs.row_s * len(stopped), lambda: None)
        return stopped

    async def abort(self, row_ids: list[int]) -> None:
        wanted = set(row_ids)
        for waiting in self._queue.remove(wanted):
            self._stop(waiting.request, (), FinishReason.ABORTED)
        for end in [end for end in self._ends if end[1] in wanted]:
            self._ends.remove(end)
            self._context -= end[2].context + self._steps - end[2].start
            self._stop(end[2].request, self._spans(end[2]), FinishReason.ABORTED)
        heapq.heapify(self._ends)

    # Between two steps

    def _interrupt(self) -> None:
        """Something waits for the next moment between two steps."""
        if self._chunk is not None:
            job, num_steps = self._chunk
            rows, done_s = len(self._ends), self._cores.done_s(job)
            fewer = self._costs.steps_within(rows, self._context, done_s, num_steps)
            if fewer < num_steps:
                self._chunk = job, fewer
                self._cores.cut(job, self._costs.decode_s(rows, self._context, fewer))
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
        reason = "turn" if self._away else "parts" if self._is_torn else "requests"
        if reason != "requests" or self.version < 0:
            return self._wait_for(reason)
        starting = self._starting()
        num_prefilled = self._context if self._must_recompute else 0
        self._must_recompute = False
        num_prefilled += sum(self._start(waiting.request) for waiting in starting)
        if not self._ends:
            return self._wait_for("requests")
        self.end_idle()
        self._busy(self._costs.prefill_s(num_prefilled), self._decode, "prefill")

    def _starting(self) -> list[Waiting]:
        free = self._max_running - len(self._ends)
        if not free or free < min(self._max_running // START_SHARE, len(self._queue)):
            return []
        return self._queue.take(self.version, free)

    def _start(self, request: Request) -> int:
        """Give the rollout a slot; returns the tokens to be prefilled for it."""
        before = sum(span.num_tokens for span in self._partials.get(request.row_id, ()))
        prompt = len(request.prompt_ids)
        slot = _Slot(request, self._steps, prompt + before - 1, before)
        length = min(self._workload.length(request.seed), request.sampling.max_tokens)
        slot.total = max(min(length, self._max_context - prompt), before + 1)
        if request.segment_tokens and slot.total > before + request.segment_tokens:
            slot.total, slot.is_cut = before + request.segment_tokens, True
        heapq.heappush(self._ends, (self._steps + slot.total - before, request.row_id, slot))
        self._context += slot.context
        is_known = not before and self._prefixes.get(request.prompt_ids) == self.version
        self._prefixes[request.prompt_ids] = self.version
        self._prefixes.move_to_end(request.prompt_ids)
        if len(self._prefixes) > self._max_running:
            self._prefixes.popitem(last=False)
        return 0 if is_known else slot.context

    def _decode(self) -> None:
        """Steps up to the next rollout's end, in one piece."""
        if self._commands or not self._ends:
            return self._go_on()
        num_steps = self._ends[0][0] - self._steps
        seconds = self._costs.decode_s(len(self._ends), self._context, num_steps)
        self._chunk_began_s = asyncio.get_running_loop().time()
        job = self._cores.start(seconds, self._decoded, self._weight)
        self._chunk = job, num_steps

    def _decoded(self) -> None:
        assert self._chunk is not None
        num_steps, self._chunk = self._chunk[1], None
        now_s = asyncio.get_running_loop().time()
        self._timeline.record(self.name, "decode", self._chunk_began_s, now_s)
        self._steps += num_steps
        self._context += num_steps * len(self._ends)
        while self._ends and self._ends[0][0] <= self._steps:
            slot = heapq.heappop(self._ends)[2]
            self._context -= slot.context + self._steps - slot.start
            at_limit = slot.total >= slot.request.sampling.max_tokens
            reason = FinishReason.LENGTH if at_limit else FinishReason.STOP
            self._stop(
                slot.request, self._spans(slot), FinishReason.SEGMENT if slot.is_cut else reason
            )
        self._go_on()

    def _spans(self, slot: _Slot) -> tuple[VersionSpan, ...]:
        """What the rollout has written: the flips since its start cut it into versions."""
        written = list(self._partials.pop(slot.request.row_id, ()))
        end = self._steps
        newest: list[VersionSpan] = []
        for step, version in reversed(self._flips):
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
        row = Row(
            row_id=request.row_id,
            num_prompt_tokens=len(request.prompt_ids),
            num_tokens=sum(span.num_tokens for span in spans),
            spans=spans,
            finish_reason=reason,
            replica=self.index,
        )
        self._stopped.append(row)
        self._storage.rows[row.row_id] = row
        self._open[request.cohort] -= 1
        if not self._open[request.cohort] or reason is FinishReason.SEGMENT:
            self._has_news.set()

    def _flipped(self, version: int) -> int:
        self._flips.append((self._steps, version))
        self._must_recompute = self._recomputes
        return len(self._ends)

    def _forget(self, kind: str) -> None:
        if kind == "kv" and not self._ends:
            self._prefixes.clear()

    # Time

    def _busy(self, seconds: float, then: Callable[[], None], name: str) -> None:
        """Occupy the compute thread."""
        start_s = asyncio.get_running_loop().time()

        def end() -> None:
            now_s = asyncio.get_running_loop().time()
            self._timeline.record(self.name, name, start_s, now_s)
            then()

        if seconds > 0:
            self._cores.start(seconds, end, self._weight)
        else:
            then()

    def _wait_for(self, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._idle is None or self._idle[0] != reason:
            self.end_idle()
            self._idle = reason, now_s
        self._is_busy = False

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        if self._idle is not None:
            now_s = asyncio.get_running_loop().time()
            self._timeline.record(self.name, self._idle[0], self._idle[1], now_s, "wait")
            self._idle = None
