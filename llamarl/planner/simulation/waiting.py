"""Rollouts that wait for a slot of a simulated replica.

Owns: their order, and when they start. Does not own: slots and the KV cache (`slots.py`).
Invariant: the queue is the engine's own; what left the cache for lack of room starts before all
others."""

from collections import deque

from llamarl.core.config import GeneratorConfig, VllmConfig
from llamarl.generator.engine.scheduler import Queue, QueuedRequest, fewest_free

GRAIN = 64
"""vLLM fills every slot as soon as it is free; here a 64th of them together, so that a simulation
has fewer events."""


class WaitingRollouts:
    """In order. With `is_static` a replica starts a batch only when the one before has ended."""

    def __init__(self, generator: GeneratorConfig, is_static: bool) -> None:
        self._max_num_seqs = generator.max_num_seqs
        self._starts_any = isinstance(generator, VllmConfig)
        self._is_static = is_static
        self._queue = Queue()
        self._held_back: deque[QueuedRequest] = deque()

    def add(self, waiting: QueuedRequest) -> None:
        """Behind those of its urgency."""
        self._queue.add(waiting)

    def hold_back(self, waiting: QueuedRequest) -> None:
        """Before all others."""
        self._held_back.appendleft(waiting)

    def take(self, version: int) -> QueuedRequest:
        """The next that may start under `version`; there is one."""
        if self._held_back:
            return self._held_back.popleft()
        return self._queue.take(version, 1)[0]

    def abort(self, row_ids: set[int]) -> list[QueuedRequest]:
        """Take these out."""
        held = [each for each in self._held_back if each.request.row_id in row_ids]
        for each in held:
            self._held_back.remove(each)
        gone = self._queue.abort(row_ids)
        return held + [QueuedRequest(request=each.request, written=each.written) for each in gone]

    def num_startable(self, version: int) -> int:
        """How many may start under `version`."""
        return len(self._held_back) + self._queue.num_startable(version)

    def fewest_free(self, version: int) -> int:
        """Slots that must be free before any of them starts."""
        if self._is_static:
            return self._max_num_seqs
        if self._starts_any:
            return max(1, min(self._max_num_seqs // GRAIN, self.num_startable(version)))
        return fewest_free(self._max_num_seqs, self.num_startable(version))
