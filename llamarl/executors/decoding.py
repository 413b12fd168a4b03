"""What a generator does on its compute thread.

Owns: the engine between its steps: what keeps it from stepping, and its spans. Does not own: the
thread, storage, or the memory that a publish writes. Invariant: the engine steps only while all its
memory is on the device and its weights are of one version.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from llamarl.executors.compute import ComputeThread
from llamarl.executors.engine_output import EngineOutput
from llamarl.executors.environment_link import Environments
from llamarl.executors.episode_part import EpisodePart, Rank
from llamarl.executors.memory_mover import MemoryMover
from llamarl.generation.protocol import Engine, PartialOutput
from llamarl.metrics.span import Spans
from llamarl.types import Request
from llamarl.weights.sync.weight_buffer import WeightBuffer

T = TypeVar("T")
Time = TypeVar("Time", int, float)


class Decoding:
    """Runs an engine; what stops goes to `output`. Only `run`, `check`, `fail` and `prefetch` may
    be called off the compute thread."""

    tags: tuple[str, ...] = ("weights", "kv")

    def __init__(
        self,
        engine: Engine,
        weight_buffer: WeightBuffer,
        mover: MemoryMover,
        spans: Spans,
        output: EngineOutput,
        thread: ComputeThread,
        loop: asyncio.AbstractEventLoop,
        *,
        rank: int = 0,
        environments: Environments | None = None,
    ) -> None:
        self.engine = engine
        self.check, self.fail = output.check, output.fail
        self._weight_buffer, self._mover = weight_buffer, mover
        self._spans, self._output, self._thread = spans, output, thread
        self._rows: set[int] = set()  # that have not stopped
        self._num_written_tokens = 0  # of those in spans
        self._turn_ends_ns: dict[int, int] = {}  # of rollouts whose turn ended here
        self.episodes = EpisodePart(
            Rank(
                number=rank,
                post=thread.post,
                share=thread.share,
                resume=self.resume,
                put=lambda item: output.put([item]),
                call_soon=loop.call_soon_threadsafe,
                fail=output.fail,
            ),
            environments,
        )
        self._standstill = Standstill(
            time.monotonic_ns, lambda name, start, end: spans.record(name, start, end, "wait")
        )

    @property
    def is_mixed(self) -> bool:
        """Some buckets of a version are committed, others not yet."""
        return self._standstill.is_mixed

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        self._standstill.end()

    async def run(self, call: Callable[[], T], key: object) -> T:
        """Run `call` on the thread between two steps, on all ranks between the same two; `key`
        says which call it is, and is the same on all ranks. Raises the engine's error."""
        self.check()
        return await self._thread.run(call, key)

    def work(self) -> bool:
        """One step; False if there is nothing to do until the next command."""
        if self._standstill.reason != "requests" or not self.engine.has_work:
            self._standstill.begin()
            return False
        self._standstill.end()
        engine, start_ns = self.engine, time.monotonic_ns()
        num_prefilled = engine.admit()
        if num_prefilled:
            start_ns = self._record("prefill", start_ns, num_prefilled)
        has_decoded = engine.num_running > 0
        finished = engine.decode()
        if has_decoded:
            num_tokens = engine.num_written_tokens - self._num_written_tokens
            self._num_written_tokens += num_tokens
            self._record("decode", start_ns, num_tokens)
        self._rows.difference_update(item.request.row_id for item in finished)
        whole = [item for item in finished if not item.request.has_turns]
        if whole:
            self._output.put(whole)
        for item in (each for each in finished if each.request.has_turns):
            self._turn_ends_ns[item.request.row_id] = time.monotonic_ns()
            self.episodes.leave_engine(item)
        return True

    def submit(
        self, requests: Sequence[Request], written: dict[int, PartialOutput], session: int
    ) -> None:
        """Queue rollouts, unless their session has ended; ValueError as the engine says."""
        if session != self._output.session:
            return
        for request in requests:
            before = written.get(request.row_id, PartialOutput())
            if request.has_turns:
                self._turn_ends_ns.pop(request.row_id, None)  # that of an earlier stay
                self.episodes.open(request, before)
            else:
                self.resume(request, before)

    def resume(self, request: Request, written: PartialOutput) -> None:
        """Let the engine go on with a rollout; ValueError as it says."""
        self._rows.add(request.row_id)
        if (end_ns := self._turn_ends_ns.pop(request.row_id, None)) is not None:
            self._spans.record("turn", end_ns, time.monotonic_ns(), "mark", rows=1)
        self.engine.submit(request, written)

    def abort(self, row_ids: Sequence[int]) -> None:
        """Stop these rollouts; they come out, marked ABORTED."""
        self.episodes.abort(row_ids)
        self.engine.abort_requests(row_ids)

    def reset(self) -> None:
        """Forget all rollouts, prompts and versions, with all memory on the device: nothing decodes
        before the next commit."""
        for tag in self.tags:
            self.onload(tag)
        self._standstill.end()
        self.engine.abort_requests([*self._rows])
        while self.engine.decode():
            pass
        self.engine.forget_prompts()
        self.engine.version = -1
        self._weight_buffer.reset()
        self._standstill.is_mixed = False
        self._rows.clear()
        self._turn_ends_ns.clear()
        self.episodes.reset()
        self._output.reset()

    def commit(self, version: int, bucket: int, processed: tuple[Tensor, Any] | None) -> int:
        """Take over a bucket, with the last one the version; returns the number of running
        rollouts.

        `processed` is memory and what the engine made of it beside decoding; it is used if that
        memory became the active one.
        """
        self._standstill.end()
        with self._spans.span("commit", version=version):
            flat = self._weight_buffer.commit(version, bucket)
            self._standstill.is_mixed = True
            if flat is None:
                return self.engine.num_running
            if processed is not None and processed[0].data_ptr() == flat.data_ptr():
                weights = processed[1]
            else:
                weights = self.engine.process_weights(flat)
            num_running = self.engine.commit(weights, version)
            self._standstill.is_mixed = False
            return num_running

    def offload(self, tag: str) -> int:
        """Move one tag's memory off the device and stop stepping; returns the bytes."""
        if tag in self._standstill.away:
            return 0
        self._standstill.end()
        num_bytes = self._offload_kv() if tag == "kv" else self._offload_weights()
        self._standstill.away.add(tag)
        return num_bytes

    def _offload_kv(self) -> int:
        is_kept = self.engine.num_running > 0
        if not is_kept:
            self.engine.forget_prompts()
        return self._mover.offload("kv", self.engine.movable("kv"), keep=is_kept)

    def _offload_weights(self) -> int:
        active = self._weight_buffer.active.data_ptr()
        movable = self._weight_buffer.movable()
        staging = [flat for flat in movable if flat.data_ptr() != active]
        tensors = [flat for flat in movable if flat.data_ptr() == active]
        tensors = [*self.engine.movable("weights"), *tensors]
        num_bytes = self._mover.offload("weights", tensors)
        return num_bytes + self._mover.offload("staging", staging, keep=False)

    def prefetch(self, tag: str) -> None:
        """Start reading what was offloaded."""
        self.check()
        self._mover.prefetch(tag)

    def onload(self, tag: str) -> int:
        """Bring one tag's memory back, with all of them step again; returns the bytes."""
        if tag not in self._standstill.away:
            return 0
        self._standstill.end()
        num_bytes = self._mover.onload(tag)
        if tag == "weights":
            num_bytes += self._mover.onload("staging")
        self._standstill.away.discard(tag)
        return num_bytes

    def _record(self, name: str, start_ns: int, num_tokens: int) -> int:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, tokens=num_tokens, version=self.engine.version)
        return end_ns


class Standstill(Generic[Time]):
    """Why a generator does not decode, and since when; the clock is the caller's.

    `away` are the memory tags that are off the device; `is_mixed` says that some buckets of a
    version are committed and others not. `record` gets each wait that ended: (reason, start, end).
    """

    def __init__(self, now: Callable[[], Time], record: Callable[[str, Time, Time], None]) -> None:
        self.away: set[str] = set()
        self.is_mixed = False
        self._now: Callable[[], Time] = now
        self._record: Callable[[str, Time, Time], None] = record
        self._waiting: tuple[str, Time] | None = None

    @property
    def reason(self) -> str:
        """What decoding waits for: "phase" or "buckets" and, if neither, at most "requests"."""
        return "phase" if self.away else "buckets" if self.is_mixed else "requests"

    def begin(self) -> None:
        """Wait for `reason` from now on, if not already."""
        if self._waiting is None or self._waiting[0] != self.reason:
            self.end()
            self._waiting = self.reason, self._now()

    def end(self) -> None:
        """Record what was waited for until now."""
        if self._waiting is not None:
            self._record(*self._waiting, self._now())
            self._waiting = None
