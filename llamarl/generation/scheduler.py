"""Which waiting rollout starts next, and in which slot.

Owns: the queue, the slot choice, and what every engine checks of a request. Does not own: tensors
or running rollouts. Invariant: rollouts start in the order of `Request.urgency` (log-prob checks
before evaluation before training, step by step, in a step by precedence), those of equal
urgency first in, first out; except that a rollout whose `min_version` is not reached waits without
holding up those behind it.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamarl.generation.protocol import PartialOutput, RequestOutput
from llamarl.types import FinishReason, Request, Sampling

START_SHARE = 16  # rollouts start when 1/16 of the slots is free: short prompts prefill together

EDGE_TOKENS = 8  # more than a character's bytes, so characters are whole where a window begins


@dataclass(slots=True, kw_only=True)
class QueuedRequest:
    """A request in the queue; `written` is empty unless it is resumed."""

    request: Request
    written: PartialOutput = field(default_factory=PartialOutput)


def fewest_free(max_num_seqs: int, num_waiting: int) -> int:
    """Slots that must be free before `num_waiting` rollouts, all of which may start, do so."""
    return max(1, min(max_num_seqs // START_SHARE, num_waiting))


def check_request(request: Request, *, context: int, vocab_size: int, reads_text: bool) -> None:
    """ValueError if the prompt is empty, leaves no room for a token in `context` or has ids outside
    the vocabulary, or if it has stop strings and the engine has no tokenizer to read them with."""
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


def completes_stop_string(
    sampling: Sampling,
    ids: np.ndarray | list[int],
    decode_text: Callable[[Sequence[int]], str] | None,
) -> bool:
    """True if the last token of a response, or a turn, of these `ids` completed a stop string."""
    if not sampling.stop_strings:
        return False
    assert decode_text is not None  # else `check_request` has refused the request
    # A token that has text is at least one byte: so many of them hold the longest string.
    missing = max(len(text.encode()) for text in sampling.stop_strings) + EDGE_TOKENS
    start = len(ids)
    while start and missing:
        start -= 1
        missing -= _has_text(int(ids[start]), decode_text)
    text = decode_text(list(ids[start:]))
    return any(stop in text for stop in sampling.stop_strings)


@functools.lru_cache(1 << 18)
def _has_text(token: int, decode_text: Callable[[Sequence[int]], str]) -> bool:
    """False for special tokens, which decoders leave out."""
    return bool(decode_text([token]))


Place = tuple[tuple[int, int, int], int]
"""Where a rollout stands in the queue: its urgency, and how many came before it."""


class Queue:
    """Waiting rollouts. Adding and taking one costs the logarithm of how many wait."""

    def __init__(self) -> None:
        self._num_added = 0
        # min_version, of which there are few -> a heap of (place, rollout); places differ.
        self._lines: dict[int, list[tuple[Place, QueuedRequest]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, waiting: QueuedRequest) -> None:
        """Put one rollout behind those of its urgency."""
        place = waiting.request.urgency, self._num_added
        heapq.heappush(self._lines.setdefault(waiting.request.min_version, []), (place, waiting))
        self._num_added += 1

    def take(self, version: int, most: int) -> list[QueuedRequest]:
        """Remove up to `most` rollouts that may start under `version`, in starting order."""
        taken: list[QueuedRequest] = []
        while len(taken) < most and self.num_startable(version):
            first = min(
                (min_version for min_version in self._lines if min_version <= version),
                key=lambda min_version: self._lines[min_version][0][0],
            )
            taken.append(heapq.heappop(self._lines[first])[1])
            if not self._lines[first]:
                del self._lines[first]
        return taken

    def num_startable(self, version: int) -> int:
        """How many rollouts may start under `version`."""
        return sum(len(line) for min_version, line in self._lines.items() if min_version <= version)

    def abort(self, row_ids: set[int]) -> list[RequestOutput]:
        """Remove the rollouts with these row ids; returns them, marked ABORTED, as they came."""
        removed: list[tuple[Place, QueuedRequest]] = []
        for min_version, line in list(self._lines.items()):
            removed += [item for item in line if item[1].request.row_id in row_ids]
            kept = [item for item in line if item[1].request.row_id not in row_ids]
            heapq.heapify(kept)
            if kept:
                self._lines[min_version] = kept
            else:
                del self._lines[min_version]
        return [
            RequestOutput(
                request=waiting.request, written=waiting.written, reason=FinishReason.ABORTED
            )
            for _, waiting in sorted(removed, key=lambda item: item[0][1])
        ]


class OpenGroups:
    """How many rollouts of each prefix group have not stopped."""

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def __getitem__(self, group: object) -> int:
        return self._counts[group]

    def add(self, requests: Iterable[Request]) -> None:
        """Count these as running."""
        self._counts.update(request.prefix_group for request in requests)

    def stop(self, request: Request, reason: FinishReason) -> bool:
        """Count one that stopped; True if it should be reported now: it was its group's last, or
        it is to go on."""
        self._counts[request.prefix_group] -= 1
        is_last = not self._counts[request.prefix_group]
        if is_last:
            del self._counts[request.prefix_group]
        return is_last or reason is FinishReason.SEGMENT


class PrefixIndex:
    """What the caches of slots hold: the keys and values of which prompt, under which version; and
    of which episode that waits for its environment.

    An entry outlives its rollout until the slot is written again.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}  # by slot
        self._slots: dict[tuple[tuple[int, ...], int], set[int]] = {}
        self._episodes: dict[int, KeptEpisode] = {}  # by row, the oldest first
        self._rows: dict[int, int] = {}  # of those, by slot

    def put(self, slot: int, prompt: tuple[int, ...], version: int) -> None:
        """Slot `slot` holds `prompt`, computed under `version`, and nothing else."""
        if (row_id := self._rows.pop(slot, None)) is not None:
            del self._episodes[row_id]
        if (old := self._held.get(slot)) is not None:
            self._slots[old].discard(slot)
            if not self._slots[old]:
                del self._slots[old]
        self._held[slot] = prompt, version
        self._slots.setdefault((prompt, version), set()).add(slot)

    def keep(self, row_id: int, episode: "KeptEpisode") -> None:
        """An episode has stopped in its slot, and will be resumed."""
        self.take(row_id)
        self._episodes[row_id], self._rows[episode.slot] = episode, row_id

    def clear(self) -> None:
        """No slot holds anything any more."""
        self._held.clear()
        self._slots.clear()
        self._episodes.clear()
        self._rows.clear()

    def find(self, prompt: tuple[int, ...], version: int) -> list[int]:
        """Slots that hold `prompt` under exactly `version`, in ascending order."""
        return sorted(self._slots.get((prompt, version), ()))

    def take(self, row_id: int) -> "KeptEpisode | None":
        """Where this episode was, if it is there still; it counts as kept no more."""
        if (episode := self._episodes.pop(row_id, None)) is not None:
            del self._rows[episode.slot]
        return episode

    def least_needed(self, free: set[int]) -> int:
        """The first of these slots that keeps no episode, or the one that keeps the oldest."""
        unused = free - self._rows.keys()
        if unused:
            return min(unused)
        return next(each.slot for each in self._episodes.values() if each.slot in free)


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """All but the last token of the prompt and of a response with these `ids` are in the cache of
    `slot`; `version` was the newest when it stopped."""

    slot: int
    ids: np.ndarray
    version: int

    def is_start_of(self, ids: np.ndarray) -> bool:
        """Whether the response goes on from here. It does not if it has begun again since."""
        return len(self.ids) > 0 and np.array_equal(self.ids, ids[: len(self.ids)])


class SlotAssignment(NamedTuple):
    """Rollout `waiting` starts in `slot`. Of an episode that was kept there, `num_cached` tokens
    are in its cache. Else its prompt's are copied from slot `source`, are in place already (`source
    == slot`), or must be computed (`source` None)."""

    waiting: QueuedRequest
    slot: int
    source: int | None
    num_cached: int = 0


def assign_slots(
    starting: list[QueuedRequest],
    free: set[int],
    prefixes: PrefixIndex,
    version: int,
    *,
    is_kept: bool = False,
) -> list[SlotAssignment]:
    """Give each starting rollout a slot out of `free` (shrinks), sharing prompts where possible.

    An episode goes to the slot that keeps it, if `version` was the newest when it stopped or caches
    of older versions go on (`is_kept`). A free slot that already holds a prompt under `version` is
    taken next, before another rollout overwrites it; other resumed rollouts are always computed.
    """
    kept = {}
    for waiting in starting:
        row_id, ids = waiting.request.row_id, waiting.written.ids
        episode = prefixes.take(row_id)
        if episode is None or episode.slot not in free or not episode.is_start_of(ids):
            continue
        if is_kept or episode.version == version:
            kept[row_id] = episode
            free.remove(episode.slot)
    assignments = []
    for waiting in starting:
        prompt = waiting.request.prompt_ids
        if (episode := kept.get(waiting.request.row_id)) is not None:
            num_cached = len(prompt) + len(episode.ids) - 1
            assignments.append(SlotAssignment(waiting, episode.slot, None, num_cached))
            continue
        holders = [] if len(waiting.written.ids) else prefixes.find(prompt, version)
        reusable = [slot for slot in holders if slot in free]
        slot = reusable[0] if reusable else prefixes.least_needed(free)
        source = slot if reusable else holders[0] if holders else None
        free.remove(slot)
        prefixes.put(slot, prompt, version)
        assignments.append(SlotAssignment(waiting, slot, source))
    return assignments
