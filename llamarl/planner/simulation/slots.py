"""The rollouts that one simulated replica decodes together, and how far each has come.

Owns: the running rollouts in the order in which they end, and the tokens in their KV caches. Does
not own: the clock, or what happens when a rollout ends (`replica.py`). Invariant: `steps` and
`context` count decode steps that are done; planning the next ones changes neither.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llamarl.generation.scheduler import QueuedRequest
from llamarl.planner.simulation.costs import Costs
from llamarl.types import NO_VERSION


class Slot:
    """A running rollout in slot `number`: it began at decode step `start`, with `context` tokens
    cached and `before` tokens written; it stops at `total` response tokens, or is cut there."""

    def __init__(self, waiting: QueuedRequest, number: int, start: int) -> None:
        self.request, self.written = waiting.request, waiting.written
        self.number, self.start = number, start
        self.prefix_group = self.request.prefix_group
        self.before = len(self.written.versions)
        self.num_observed = int((self.written.versions == NO_VERSION).sum())
        self.context = len(self.request.prompt_ids) + self.before - 1
        self.total = 0
        self.is_cut = False


class Piece(NamedTuple):
    """Decode steps in which the same rollouts run. `steps` counts all decode steps done at its end,
    `done_s` the seconds of work from the start of the stretch until then."""

    done_s: float
    steps: int


class Slots:
    """The running rollouts, each in one of `num_slots` slots; `free` are the numbers of the empty
    ones. `steps` counts the decode steps done, `context` the tokens in the KV caches."""

    def __init__(self, num_slots: int, costs: Costs) -> None:
        self._costs = costs
        self.free = set(range(num_slots))
        self._ends: list[tuple[int, int, Slot]] = []  # sorted: (decode step, row id, rollout)
        self.steps = 0
        self.context = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Slot]:
        return (slot for *_, slot in self._ends)

    def cached(self, slot: Slot) -> int:
        """Tokens in its KV cache."""
        return slot.context + self.steps - slot.start

    def add(self, slot: Slot) -> None:
        """Start to decode a rollout."""
        insort(self._ends, (self.steps + slot.total - slot.before, slot.request.row_id, slot))
        self.context += slot.context

    def remove(self, row_ids: set[int]) -> list[Slot]:
        """Take these out before their end."""
        removed = [end for end in self._ends if end[1] in row_ids]
        self._ends = [end for end in self._ends if end[1] not in row_ids]
        return [self._release(slot) for *_, slot in removed]

    def plan(self, is_last: Callable[[Slot, int], bool]) -> list[Piece]:
        """The decode steps until a rollout ends for which `is_last(rollout, number of rollouts
        left)` is true: one piece for each end on the way."""
        pieces = []
        done_s, steps, context, num_ended = 0.0, self.steps, self.context, 0
        is_over = False
        while not is_over and num_ended < len(self._ends):
            rows = len(self._ends) - num_ended
            num_steps = self._ends[num_ended][0] - steps
            done_s += self._costs.decode_s(rows, context, num_steps)
            steps += num_steps
            context += num_steps * rows
            while num_ended < len(self._ends) and self._ends[num_ended][0] <= steps:
                slot = self._ends[num_ended][2]
                context -= slot.context + steps - slot.start
                num_ended += 1
                is_over |= is_last(slot, len(self._ends) - num_ended)
            pieces.append(Piece(done_s, steps))
        return pieces

    def cut(self, since_s: float, done_s: float, piece: Piece) -> Piece:
        """The steps of `piece` that have begun after `done_s` seconds of the stretch's work;
        `self.steps` steps were done after `since_s` seconds."""
        rows, most = len(self._ends), piece.steps - self.steps
        num_steps = self._costs.steps_within(rows, self.context, done_s - since_s, most)
        seconds = self._costs.decode_s(rows, self.context, num_steps)
        return Piece(since_s + seconds, self.steps + num_steps)

    def advance(self, steps: int) -> Iterator[Slot]:
        """Decode until `steps` are done in all; yields each rollout at its end."""
        while self.steps < steps:
            until = min(self._ends[0][0], steps) if self._ends else steps
            self.context += (until - self.steps) * len(self._ends)
            self.steps = until
            num_ended = 0
            while num_ended < len(self._ends) and self._ends[num_ended][0] <= until:
                num_ended += 1
            ended = self._ends[:num_ended]
            del self._ends[:num_ended]
            for *_, slot in ended:
                yield self._release(slot)

    def _release(self, slot: Slot) -> Slot:
        self.context -= self.cached(slot)
        self.free.add(slot.number)
        return slot
