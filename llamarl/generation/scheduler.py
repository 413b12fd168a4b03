"""Which waiting rollout starts next, and in which slot.

Owns: the queue and the slot choice. Does not own: tensors or running rollouts. Invariant: log-prob
checks before evaluation before training, else first in, first out, except that a rollout whose
`min_version` is not reached waits without holding up those behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llamarl.types import FinishReason, Purpose, Request

START_SHARE = 16  # rollouts start when 1/16 of the slots is free: short prompts prefill together


@dataclass(slots=True, kw_only=True)
class PartialOutput:
    """What a resumed rollout has written so far: ids int32 [t], log-probs float32 [t], versions
    int32 [t]."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def nothing_written() -> PartialOutput:
    """The state of a rollout that has not started."""
    return PartialOutput(
        ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32)
    )


@dataclass(slots=True, kw_only=True)
class QueuedRequest:
    """A request in the queue; `written` is empty unless it is resumed."""

    request: Request
    written: PartialOutput = field(default_factory=nothing_written)


def fewest_free(max_num_seqs: int, num_waiting: int) -> int:
    """Slots that must be free before waiting rollouts start."""
    return max(1, min(max_num_seqs // START_SHARE, num_waiting))


def check_request(request: Request, *, context: int, vocab_size: int, reads_text: bool) -> None:
    """ValueError if the prompt is empty, leaves no room for a token in `context` or has ids outside
    the vocabulary, or if stop strings are asked of an engine that cannot read text."""
    ids = request.prompt_ids
    if not 1 <= len(ids) < context:
        raise ValueError(
            f"prompt of row {request.row_id} must have 1 to {context - 1} tokens "
            f"(generator.max_model_len {context}), got {len(ids)}"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"prompt ids of row {request.row_id} must be below the vocabulary size {vocab_size}, "
            f"got {max(ids)} (does the tokenizer belong to the checkpoint?)"
        )
    if request.sampling.stop_strings and not reads_text:
        raise ValueError(f"row {request.row_id} must not have stop strings without a tokenizer")


class Queue:
    """Waiting rollouts. Adding and asking cost the same however many wait."""

    def __init__(self) -> None:
        self._num_added = 0
        # Of each purpose, by `min_version` (few differ): (number of arrival, rollout).
        self._lanes: dict[Purpose, dict[int, deque[tuple[int, QueuedRequest]]]] = {
            Purpose.CHECK: {},
            Purpose.EVALUATE: {},
            Purpose.TRAIN: {},
        }

    def __len__(self) -> int:
        return sum(len(line) for lane in self._lanes.values() for line in lane.values())

    def add(self, waiting: QueuedRequest) -> None:
        """Put one rollout at the end of its lane."""
        lane = self._lanes[waiting.request.purpose]
        line = lane.setdefault(waiting.request.min_version, deque())
        line.append((self._num_added, waiting))
        self._num_added += 1

    def take(self, version: int, most: int) -> list[QueuedRequest]:
        """Remove up to `most` rollouts that may start under `version`, in starting order."""
        taken: list[QueuedRequest] = []
        for lane in self._lanes.values():
            while len(taken) < most:
                allowed = [v for v in lane if v <= version]
                if not allowed:
                    break
                first = min(allowed, key=lambda v: lane[v][0][0])
                taken.append(lane[first].popleft()[1])
                if not lane[first]:
                    del lane[first]
        return taken

    def has_startable(self, version: int) -> bool:
        """True if some rollout may start under `version`."""
        return any(v <= version for lane in self._lanes.values() for v in lane)

    def remove(self, row_ids: set[int]) -> list[QueuedRequest]:
        """Remove and return the rollouts with these row ids, in the order they came."""
        removed: list[tuple[int, QueuedRequest]] = []
        for lane in self._lanes.values():
            for version, line in list(lane.items()):
                gone = [item for item in line if item[1].request.row_id in row_ids]
                if not gone:
                    continue
                removed += gone
                kept = deque(item for item in line if item[1].request.row_id not in row_ids)
                if kept:
                    lane[version] = kept
                else:
                    del lane[version]
        return [waiting for _, waiting in sorted(removed, key=lambda item: item[0])]


class OpenGroups:
    """How many rollouts of each prefix group have not stopped."""

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def __getitem__(self, group: object) -> int:
        return self._counts[group]

    def add(self, requests: Iterable[Request]) -> None:
        """These have been asked for."""
        self._counts.update(request.prefix_group for request in requests)

    def stop(self, request: Request, reason: FinishReason) -> bool:
        """Count one that stopped; True if its caller should hear of it now: it was its group's
        last, or is to go on elsewhere."""
        self._counts[request.prefix_group] -= 1
        is_last = not self._counts[request.prefix_group]
        if is_last:
            del self._counts[request.prefix_group]
        return is_last or reason is FinishReason.SEGMENT


class PrefixIndex:
    """Which slots' caches hold the keys and values of which prompt, under which version.

    An entry outlives its rollout until the slot is written again.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}  # by slot
        self._slots: dict[tuple[tuple[int, ...], int], set[int]] = {}

    def put(self, slot: int, prompt: tuple[int, ...], version: int) -> None:
        """Slot `slot` holds `prompt`, computed under `version`."""
        if (old := self._held.get(slot)) is not None:
            self._slots[old].discard(slot)
            if not self._slots[old]:
                del self._slots[old]
        self._held[slot] = prompt, version
        self._slots.setdefault((prompt, version), set()).add(slot)

    def clear(self) -> None:
        """No slot holds a prompt any more."""
        self._held.clear()
        self._slots.clear()

    def find(self, prompt: tuple[int, ...], version: int) -> list[int]:
        """Slots that hold `prompt` under exactly `version`, in ascending order."""
        return sorted(self._slots.get((prompt, version), ()))


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """Rollout `waiting` starts in `slot`; its prompt's cache is copied from slot `source`, is in
    place already (`source == slot`), or must be computed (`source` None)."""

    waiting: QueuedRequest
    slot: int
    source: int | None


def place(
    starting: list[QueuedRequest], free: set[int], prefixes: PrefixIndex, version: int
) -> list[SlotAssignment]:
    """Give each starting rollout a slot out of `free` (shrinks), sharing prompts where possible.

    A free slot that already holds the prompt is taken first, so it is never overwritten by
    another rollout while it could serve; resumed rollouts are always computed.
    """
    placements = []
    for waiting in starting:
        prompt = waiting.request.prompt_ids
        holders = [] if len(waiting.written.ids) else prefixes.find(prompt, version)
        reusable = [slot for slot in holders if slot in free]
        slot = reusable[0] if reusable else min(free)
        source = slot if reusable else holders[0] if holders else None
        free.remove(slot)
        prefixes.put(slot, prompt, version)
        placements.append(SlotAssignment(waiting, slot, source))
    return placements
