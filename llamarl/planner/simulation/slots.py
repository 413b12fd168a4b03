"""The rollouts that a simulated replica decodes, and those that wait for a slot.

`steps` and `context` count decode steps that are done; planning the next ones changes neither. A
prompt's tokens are read for each of its rollouts, but held once. The queue is the engine's own;
rollouts that left the cache for lack of room start before all others."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from llamarl.core.config import GeneratorConfig, VllmConfig
from llamarl.core.records import NO_VERSION
from llamarl.generator.engine.scheduler import Queue, QueuedRequest, fewest_free
from llamarl.planner.simulation.costs import Costs


class Slot:
    """A running rollout in slot `number`. It began at decode step `start`, with `context` tokens
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
    """A run of decode steps in which the same rollouts run. `steps` counts all decode steps done at
    its end, `done_s` the seconds of work from the start of the stretch until then."""

    done_s: float
    steps: int


class Slots:
    """The running rollouts, each in one of `num_slots` slots; `free` are the numbers of the empty
    ones. `steps` counts the decode steps done, `context` the tokens in the KV caches.

    Where `costs.kv_tokens` is not 0 the cache holds only so many. With `reserves` a rollout counts
    with its longest possible length.
    """

    def __init__(self, num_slots: int, costs: Costs, reserves: bool = False) -> None:
        self._costs, self._reserves = costs, reserves
        self.free = set(range(num_slots))
        self._ends: list[tuple[int, int, Slot]] = []  # sorted: (decode step, row id, rollout)
        self.steps = 0
        self.context = 0
        self._groups: Counter[object] = Counter()
        self._num_shared = 0  # tokens of prompts that `context` counts more than once
        self._num_reserved = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Slot]:
        return (slot for *_, slot in self._ends)

    def cached(self, slot: Slot) -> int:
        """Return the tokens in the rollout's KV cache."""
        return slot.context + self.steps - slot.start

    def add(self, slot: Slot) -> None:
        """Start to decode a rollout."""
        insort(self._ends, (self.steps + slot.total - slot.before, slot.request.row_id, slot))
        self.context += slot.context
        self._count(slot, 1)

    @property
    def is_full(self) -> bool:
        """Whether the cache has no room for the next step, and more than one rollout holds it."""
        return len(self._ends) > 1 and self._room < len(self._ends)

    def admit(
        self, take: Callable[[], QueuedRequest], most: int
    ) -> tuple[list[QueuedRequest], QueuedRequest | None]:
        """Return the rollouts that `take` gives, at most `most`, as far as the cache has room; and
        the first that it has no room for. An empty cache has room for any."""
        starting: list[QueuedRequest] = []
        groups = set[object]()
        room = self._room - len(self._ends)
        if self._reserves and self._costs.kv_tokens:
            room = self._costs.kv_tokens - self._num_reserved
        while len(starting) < most:
            waiting = take()
            room -= self._claim(waiting, groups)
            if room < 0 and (starting or self._ends):
                return starting, waiting
            starting.append(waiting)
            groups.add(waiting.request.prefix_group)
        return starting, None

    def _claim(self, waiting: QueuedRequest, groups: Container[object]) -> int:
        """Return the tokens that a rollout must have room for; those of `groups` start with it."""
        request = waiting.request
        prompt, group = len(request.prompt_ids), request.prefix_group
        if self._reserves:
            return prompt + request.sampling.max_tokens
        is_shared = group in groups or self._groups[group] > 0
        return (0 if is_shared else prompt) + len(waiting.written.versions) + 1

    def pop_newest(self) -> Slot:
        """Remove the rollout that started last, and return it."""
        end = max(self._ends, key=lambda end: (end[2].start, end[1]))
        self._ends.remove(end)
        return self._release(end[2])

    @property
    def _room(self) -> int:
        """The number of tokens that the cache has room for."""
        held = self.context - self._num_shared
        return self._costs.kv_tokens - held if self._costs.kv_tokens else 2**62

    def _count(self, slot: Slot, change: int) -> None:
        group, prompt = slot.prefix_group, len(slot.request.prompt_ids)
        before = self._groups[group]
        self._groups[group] += change
        if min(before, self._groups[group]) >= 1:
            self._num_shared += change * prompt
        if not self._groups[group]:
            del self._groups[group]
        self._num_reserved += change * (prompt + slot.request.sampling.max_tokens)

    def remove(self, row_ids: set[int]) -> list[Slot]:
        """Remove these rollouts before their end."""
        removed = [end for end in self._ends if end[1] in row_ids]
        self._ends = [end for end in self._ends if end[1] not in row_ids]
        return [self._release(slot) for *_, slot in removed]

    def plan(self, is_last: Callable[[Slot, int], bool]) -> list[Piece]:
        """Return the decode steps until a rollout ends for which `is_last(rollout, number of
        rollouts left)` is true, or until the cache is full: one piece for each end on the way."""
        pieces, room = [], self._room
        done_s, steps, context, num_ended = 0.0, self.steps, self.context, 0
        is_over = False
        while not is_over and num_ended < len(self._ends):
            rows = len(self._ends) - num_ended
            num_steps = self._ends[num_ended][0] - steps
            if rows > 1 and num_steps * rows > room:
                num_steps, is_over = max(1, room // rows), True
            room -= num_steps * rows
            done_s += self._costs.decode_s(rows, context, num_steps)
            steps += num_steps
            context += num_steps * rows
            while num_ended < len(self._ends) and self._ends[num_ended][0] <= steps:
                slot = self._ends[num_ended][2]
                context -= slot.context + steps - slot.start
                room += steps - slot.start
                num_ended += 1
                is_over |= is_last(slot, len(self._ends) - num_ended)
            pieces.append(Piece(done_s, steps))
        return pieces

    def cut(self, since_s: float, done_s: float, piece: Piece) -> Piece:
        """Return the steps of `piece` that have begun after `done_s` seconds of the stretch's work;
        `self.steps` steps were done after `since_s` seconds."""
        rows, most = len(self._ends), piece.steps - self.steps
        num_steps = self._costs.steps_within(rows, self.context, done_s - since_s, most)
        seconds = self._costs.decode_s(rows, self.context, num_steps)
        return Piece(since_s + seconds, self.steps + num_steps)

    def advance(self, steps: int) -> Iterator[Slot]:
        """Decode until `steps` steps are done in all; yield each rollout at its end."""
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
        self._count(slot, -1)
        self.free.add(slot.number)
        return slot


GRAIN = 64
"""vLLM fills every slot as soon as it is free; here a 64th of them together, so that a simulation
has fewer events."""


class WaitingRollouts:
    """The rollouts that wait for a slot, in the order in which they start."""

    def __init__(self, generator: GeneratorConfig) -> None:
        self._max_num_seqs = generator.max_num_seqs
        self._starts_any = isinstance(generator, VllmConfig)
        self._queue = Queue()
        self._held_back: deque[QueuedRequest] = deque()

    def add(self, waiting: QueuedRequest) -> None:
        """Queue a rollout behind those of its urgency."""
        self._queue.add(waiting)

    def hold_back(self, waiting: QueuedRequest) -> None:
        """Queue a rollout before all others."""
        self._held_back.appendleft(waiting)

    def take(self, version: int) -> QueuedRequest:
        """Remove and return the next rollout that may start under `version`; there is one."""
        if self._held_back:
            return self._held_back.popleft()
        return self._queue.take(version, 1)[0]

    def abort(self, row_ids: set[int]) -> list[QueuedRequest]:
        """Remove these rollouts and return them."""
        held = [each for each in self._held_back if each.request.row_id in row_ids]
        for each in held:
            self._held_back.remove(each)
        gone = self._queue.abort(row_ids)
        return held + [QueuedRequest(request=each.request, written=each.written) for each in gone]

    def num_startable(self, version: int) -> int:
        """Return how many rollouts may start under `version`."""
        return len(self._held_back) + self._queue.num_startable(version)

    def fewest_free(self, version: int) -> int:
        """Return how many slots must be free before any of them starts."""
        if self._starts_any:
            return max(1, min(self._max_num_seqs // GRAIN, self.num_startable(version)))
        return fewest_free(self._max_num_seqs, self.num_startable(version))
