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

from llamarl.executors.offload import Offload
from llamarl.generation.protocol import Engine, Finished
from llamarl.generation.scheduler import Written
from llamarl.metrics.span import Spans
from llamarl.types import Request
from llamarl.weights.arena import Arena

KINDS = ("weights", "kv")


class Decoding:
    """Runs an engine; all methods belong on the compute thread. `finish` gets what stopped."""

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        offload: Offload,
        spans: Spans,
        finish: Callable[[list[Finished]], None],
    ) -> None:
        self.engine = engine
        self._arena = arena
        self._offload = offload
        self._spans = spans
        self._finish = finish
        self._away: set[str] = set()
        self.is_torn = False  # some parts of a version are in place, others not yet
        self._idle: tuple[str, int] | None = None  # what is waited for, since when

    def work(self) -> bool:
        """One step; False if there is nothing to do until the next command."""
        reason = "turn" if self._away else "parts" if self.is_torn else "requests"
        if reason != "requests" or not self.engine.has_work:
            if self._idle is None or self._idle[0] != reason:
                self.end_idle()
                self._idle = reason, time.monotonic_ns()
            return False
        self.end_idle()
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

    def submit(self, requests: Sequence[Request], written: dict[int, Written]) -> None:
        """Queue rollouts; ValueError as the engine says."""
        for request in requests:
            self.engine.submit(request, written.get(request.row_id))

    def flip(self, version: int, part: int, prepared: tuple[Tensor, Any] | None) -> int:
        """Take over a part, with the last one the version; returns the number of running rollouts.

        `prepared` is memory and what the engine made of it beside decoding; it is used if that is
        the memory that became live.
        """
        self.end_idle()
        with self._spans.span("flip", version=version):
            flat = self._arena.flip(version, part)
            self.is_torn = True
            if flat is None:
                return self.engine.num_running
            if prepared is not None and prepared[0].data_ptr() == flat.data_ptr():
                weights = prepared[1]
            else:
                weights = self.engine.prepare(flat)
            num_running = self.engine.flip(weights, version)
            self.is_torn = False
            return num_running

    def leave(self, kind: str) -> None:
        """Move one kind off the device; steps stop."""
        if kind in self._away:
            return
        self.end_idle()
        start_ns = time.monotonic_ns()
        tensors = self.engine.movable(kind)
        if kind == "kv":
            is_kept = self.engine.num_running > 0
            if not is_kept:
                self.engine.forget_prompts()
            num_bytes = self._offload.leave("kv", tensors, keep=is_kept)
        else:
            live = self._arena.live.data_ptr()
            movable = self._arena.movable()
            shadow = [flat for flat in movable if flat.data_ptr() != live]
            tensors += [flat for flat in movable if flat.data_ptr() == live]
            num_bytes = self._offload.leave("weights", tensors)
            num_bytes += self._offload.leave("shadow", shadow, keep=False)
        self._away.add(kind)
        self._record_move("offload", kind, start_ns, num_bytes)

    def prefetch(self, kind: str) -> None:
        """Start reading what left."""
        self._offload.prefetch(kind)

    def enter(self, kind: str) -> None:
        """Bring one kind back; with all of them steps go on."""
        if kind not in self._away:
            return
        self.end_idle()
        start_ns = time.monotonic_ns()
        num_bytes = self._offload.enter(kind)
        if kind == "weights":
            num_bytes += self._offload.enter("shadow")
        self._away.discard(kind)
        self._record_move("reload", kind, start_ns, num_bytes)

    def end_idle(self) -> None:
        """Record what was waited for until now."""
        if self._idle is not None:
            name, since_ns = self._idle
            self._spans.record(name, since_ns, time.monotonic_ns(), "wait")
            self._idle = None

    def _record(self, name: str, start_ns: int, num_tokens: int) -> int:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, tokens=num_tokens, version=self.engine.version)
        return end_ns

    def _record_move(self, name: str, kind: str, start_ns: int, num_bytes: int) -> None:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, "mark", kind=kind, bytes=num_bytes)
