"""What a generator does on its compute thread.

Owns: the engine between its steps: what stops it from stepping, what has stopped, its spans. Does
not own: the thread, storage, or the memory that a publish writes. Invariant: the engine steps only
while all its memory is in place and its weights are of one version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from llamarl.executors.offload import Offloader
from llamarl.executors.standstill import Standstill
from llamarl.generation.protocol import Engine, PartialOutput, RequestOutput
from llamarl.metrics.span import Spans
from llamarl.types import Request
from llamarl.weights.sync.weight_buffer import WeightBuffer

TAGS = ("weights", "kv")


class Decoding:
    """Runs an engine; all methods belong on the compute thread. `finish` gets what stopped."""

    def __init__(
        self,
        engine: Engine,
        weight_buffer: WeightBuffer,
        offload: Offloader,
        spans: Spans,
        finish: Callable[[list[RequestOutput]], None],
    ) -> None:
        self.engine = engine
        self._weight_buffer = weight_buffer
        self._offloader = offload
        self._spans = spans
        self._finish = finish
        self._standstill = Standstill(
            time.monotonic_ns, lambda name, start, end: spans.record(name, start, end, "wait")
        )

    @property
    def is_mixed(self) -> bool:
        """Some buckets of a version are in place, others not yet."""
        return self._standstill.is_mixed

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        self._standstill.end()

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
        num_tokens = engine.num_running
        finished = engine.decode()
        if num_tokens:
            self._record("decode", start_ns, num_tokens)
        if finished:
            self._finish(finished)
        return True

    def submit(self, requests: Sequence[Request], written: dict[int, PartialOutput]) -> None:
        """Queue rollouts; ValueError as the engine says."""
        for request in requests:
            self.engine.submit(request, written.get(request.row_id))

    def commit(self, version: int, bucket: int, processed: tuple[Tensor, Any] | None) -> int:
        """Take over a part, with the last one the version; returns the number of running rollouts.

        `prepared` is memory and what the engine made of it beside decoding; it is used if that is
        the memory that became live.
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

    def offload(self, tag: str) -> None:
        """Move one kind off the device; steps stop."""
        if tag in self._standstill.away:
            return
        self._standstill.end()
        start_ns = time.monotonic_ns()
        tensors = self.engine.movable(tag)
        if tag == "kv":
            is_kept = self.engine.num_running > 0
            if not is_kept:
                self.engine.forget_prompts()
            num_bytes = self._offloader.offload("kv", tensors, keep=is_kept)
        else:
            active = self._weight_buffer.active.data_ptr()
            movable = self._weight_buffer.movable()
            staging = [flat for flat in movable if flat.data_ptr() != active]
            tensors += [flat for flat in movable if flat.data_ptr() == active]
            num_bytes = self._offloader.offload("weights", tensors)
            num_bytes += self._offloader.offload("staging", staging, keep=False)
        self._standstill.away.add(tag)
        self._record_move("offload", tag, start_ns, num_bytes)

    def prefetch(self, tag: str) -> None:
        """Start reading what left."""
        self._offloader.prefetch(tag)

    def onload(self, tag: str) -> None:
        """Bring one kind back; with all of them steps go on."""
        if tag not in self._standstill.away:
            return
        self._standstill.end()
        start_ns = time.monotonic_ns()
        num_bytes = self._offloader.onload(tag)
        if tag == "weights":
            num_bytes += self._offloader.onload("staging")
        self._standstill.away.discard(tag)
        self._record_move("onload", tag, start_ns, num_bytes)

    def _record(self, name: str, start_ns: int, num_tokens: int) -> int:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, tokens=num_tokens, version=self.engine.version)
        return end_ns

    def _record_move(self, name: str, tag: str, start_ns: int, num_bytes: int) -> None:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, "mark", tag=tag, bytes=num_bytes)
