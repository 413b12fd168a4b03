"""A generator replica without a model.

Owns: continuous batching over slots, version spans, commits between steps, all in simulated time.
Does not own: who runs (`slots.py`), durations (`costs.py`) or lengths (`workload.py`). Invariant:
its queue and its rules of starting are the embedded engine's, and it advances from event to event
(a prompt's last rollout stops, slots become free for what waits, a request or a commit arrives),
never token by token.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from llamarl.executors.engine_output import GATHER_S
from llamarl.generation.protocol import PartialOutput
from llamarl.generation.scheduler import (
    OpenGroups,
    PrefixIndex,
    Queue,
    QueuedRequest,
    SlotAssignment,
    assign_slots,
    fewest_free,
)
from llamarl.planner.simulation.cores import Cores, Job
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.receiving import Receiving
from llamarl.planner.simulation.setting import Setting
from llamarl.planner.simulation.slots import Piece, Slot, Slots
from llamarl.types import FinishReason, Request, RolloutInfo, VersionSpan, version_spans

NOTHING = PartialOutput()


class SimulatedReplica(Receiving):
    """Generator, WeightTarget, WeightSource and Offloadable of `protocols.py` for replica `index`
    on `hosts`.

    Its KV cache is taken to hold `generator.max_num_seqs` rollouts, whatever their length.
    """

    def __init__(
        self,
        setting: Setting,
        costs: Costs,
        cores: Cores,
        *,
        index: int,
        hosts: tuple[str, ...],
    ) -> None:
        super().__init__(setting, costs, cores, index=index, hosts=hosts)
        config = self._config
        self._max_num_seqs = config.generator.max_num_seqs
        self._max_model_len = config.generator.max_model_len
        self._recomputes = config.generator.kv_after_commit == "recompute"
        self._queue, self._prefixes = Queue(), PrefixIndex()
        self._slots = Slots(self._max_num_seqs, costs)
        self._stretch: tuple[Job, list[Piece]] | None = None  # decode steps under way
        self._num_pieces = 0  # of the stretch, counted as done
        self._commits: list[tuple[int, int]] = []  # (decode steps done then, version)
        self._must_recompute = False
        self._held: set[int] = set()  # row ids that have not stopped
        self._stopped: list[tuple[Request, RolloutInfo]] = []
        self._open = OpenGroups()
        self._has_news = asyncio.Event()

    # Generator

    @property
    def num_running(self) -> int:
        """Rollouts in slots."""
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
            self._queue.add(QueuedRequest(request=request, written=before))
        self._interrupt()

    async def collect(self) -> list[RolloutInfo]:
        """As the real one, but it does not answer without rows: heartbeats take no time."""
        await self._travel()
        await self._has_news.wait()
        await self._cores.sleep(GATHER_S)
        self._catch_up()
        stopped, self._stopped = self._stopped, []
        self._has_news.clear()
        await self._cores.work(self._costs.store_row_s * len(stopped))
        await self._rollouts.put(stopped)
        if stopped and self._costs.row_s:  # in other processes, for which no executor waits
            self._cores.start(self._costs.row_s * len(stopped), lambda: None)
        return [row for _, row in stopped]

    async def abort_requests(self, row_ids: list[int]) -> None:
        wanted = set(row_ids)
        for waiting in self._queue.abort(wanted):
            spans = version_spans(waiting.written.versions)
            self._stop(waiting.request, spans, FinishReason.ABORTED)
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
            self._standstill.end()
            return self._busy(*self._commands.popleft())
        if self._standstill.reason != "requests" or self.version < 0:
            return self._rest()
        prefilled = self._recompute() if self._must_recompute else []
        prefilled += self._start_waiting()
        if not self._slots:
            return self._rest()
        self._standstill.end()
        self._busy(self._costs.prefill_s(prefilled), self._decode, "prefill")

    def _rest(self) -> None:
        self._is_busy = False
        self._standstill.begin()

    def _recompute(self) -> list[int]:
        """Tokens to be prefilled for each running rollout after a commit."""
        self._must_recompute = False
        for slot in self._slots:
            self._prefixes.put(slot.number, slot.request.prompt_ids, self.version)
        return [self._slots.cached(slot) for slot in self._slots]

    def _start_waiting(self) -> list[int]:
        """Fill the free slots from the queue; the tokens to be prefilled for each rollout."""
        free = self._slots.free
        if len(free) < fewest_free(self._max_num_seqs, len(self._queue)):
            return []
        starting = self._queue.take(self.version, len(free))
        return [
            self._start(each) for each in assign_slots(starting, free, self._prefixes, self.version)
        ]

    def _start(self, assignment: SlotAssignment) -> int:
        slot = Slot(assignment.waiting, assignment.slot, self._slots.steps)
        request, before = slot.request, slot.before
        length = min(self._workload.length(request), request.sampling.max_tokens)
        slot.total = max(min(length, self._max_model_len - len(request.prompt_ids)), before + 1)
        if request.segment_tokens and slot.total > before + request.segment_tokens:
            slot.total, slot.is_cut = before + request.segment_tokens, True
        self._slots.add(slot)
        return slot.context if assignment.source is None else 0

    def _decode(self) -> None:
        """Steps in one piece, up to an end that somebody waits for: a prompt's last rollout, a cut
        one, or the one that makes room for those that wait."""
        if self._commands or not self._slots:
            return self._go_on()
        most_left = -1
        if self._queue.has_startable(self.version):
            most_left = self._max_num_seqs - fewest_free(self._max_num_seqs, len(self._queue))
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
        written = list(version_spans(slot.written.versions))
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
        row = RolloutInfo(
            row_id=request.row_id,
            num_prompt_tokens=len(request.prompt_ids),
            num_tokens=sum(span.num_tokens for span in spans),
            spans=spans,
            finish_reason=reason,
            replica=self.index,
        )
        self._held.discard(request.row_id)
        self._stopped.append((request, row))
        if self._open.stop(request, reason):
            self._has_news.set()

    def _committed(self, version: int) -> int:
        self._commits.append((self._slots.steps, version))
        self._must_recompute = self._recomputes
        return len(self._slots)

    def _forget(self, tag: str) -> None:
        self._catch_up()
        if tag == "kv" and not self._slots:
            self._prefixes.clear()

    def _busy(self, seconds: float, then: Callable[[], None], name: str) -> None:
        """Occupy the compute thread."""
        start_s = self._cores.time()

        def end() -> None:
            self._timeline.record(self.name, name, start_s, self._cores.time())
            then()

        if seconds > 0:
            self._cores.start(seconds, end, self._weight)
        else:
            then()

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        self._standstill.end()
