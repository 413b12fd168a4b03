"""The scheduler: it chooses the rollouts of the next step, and holds the engine's state of each."""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from llamarl.core.device.devices import platform_of
from llamarl.core.groups import turn_start
from llamarl.core.records import FinishReason, Request, Sampling
from llamarl.generator.engine.sampling import NONE, SamplingRows, uniforms
from llamarl.generator.protocol import PartialOutput, RequestOutput

_NO_ID = -1
UNUSED = {
    "temperature": np.float32(1.0), "greedy": np.bool_(False), "top_k": np.int64(0),
    "top_p": np.float32(1.0), "min_p": np.float32(0.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A launched step, which computes one token for each of `slots` by the weights of `version`.

    `num_released` is `RunningBatch.num_released` of these slots at the launch. `read` waits for ids
    int [n], log-probs float32 [n], and the tokens among which they were drawn int [n, kept]."""

    slots: np.ndarray
    num_released: np.ndarray
    version: int
    read: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]


class RunningBatch:
    """The running rollouts by slot; `occupied` bool [slots] marks the slots that hold one.

    `sequence` int32 [slots, context] is prompt and response; `cached` int64 [slots] counts the
    tokens whose keys and values are stored: all but the last one. `in_flight` counts the tokens
    that a launched step computes, and `num_released` the rollouts that have left a slot: tokens
    that a step computes for a rollout that has left are dropped. Of each token `num_kept_ids`
    are recorded among which it was drawn."""

    def __init__(
        self, num_slots: int, num_positions: int, device: torch.device, num_kept_ids: int = 0
    ) -> None:
        self._device = device
        wide = (num_slots, num_positions)
        self.requests: dict[int, Request] = {}
        self.num_written = 0  # tokens, since the start
        self.num_kept: dict[int, int] = {}
        self.sequence = np.zeros(wide, np.int32)
        self.logprobs = np.zeros(wide, np.float32)
        self.versions = np.zeros(wide, np.int32)
        self.uniform = np.zeros(wide, np.float32)
        self.kept = np.full((*wide, num_kept_ids), NONE, np.int32)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.turn_start = np.zeros(num_slots, np.int64)  # where the present turn begins
        # A step may compute empty slots too (`PaddedRunner`): their keys and values go to a
        # position beyond every cached prompt, and they have no sampling parameters of their own.
        self._spare = num_positions - 2
        self.cached = np.full(num_slots, self._spare, np.int64)
        self.in_flight = np.zeros(num_slots, np.int64)
        self.num_released = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)  # total tokens at which it must stop
        self.segment_end = np.zeros(num_slots, np.int64)  # total tokens at which it is cut
        self.stop_ids = np.full((num_slots, 1), _NO_ID, np.int64)
        self._sampling = {name: np.full(num_slots, value) for name, value in UNUSED.items()}
        self.watches_text = np.zeros(num_slots, bool)
        self.occupied = np.zeros(num_slots, bool)

    def by_length(self) -> np.ndarray:
        """Return the occupied slots, the longest rollout first: int64 [n]."""
        occupied = np.flatnonzero(self.occupied)
        return occupied[np.argsort(-self.cached[occupied], kind="stable")]

    def start(self, slot: int, waiting: QueuedRequest, num_kept: int = 0) -> None:
        """Put a rollout into `slot`, whose cache holds the first `num_kept` of its tokens."""
        request, written = waiting.request, waiting.written
        sampling = request.sampling
        num_prompt, num_written = len(request.prompt_ids), len(written.ids)
        total = num_prompt + num_written
        self.requests[slot], self.num_kept[slot] = request, num_kept
        self.sequence[slot, :num_prompt] = request.prompt_ids
        for array, values in (
            (self.sequence, written.ids),
            (self.logprobs, written.logprobs),
            (self.versions, written.versions),
        ):
            array[slot, num_prompt:total] = values
        if self.kept.shape[2]:
            before = written.kept if num_written else NONE
            self.kept[slot, num_prompt:total] = before
        num_positions = self.sequence.shape[1]
        limit = min(num_prompt + (request.replay_tokens or sampling.max_tokens), num_positions)
        self.uniform[slot, num_prompt:limit] = uniforms(request.seed, limit - num_prompt)
        self.prompt_length[slot] = num_prompt
        self.turn_start[slot] = num_prompt + turn_start(written.versions)
        self.cached[slot] = total - 1
        self.limit[slot] = limit
        segment = request.segment_tokens or num_positions
        self.segment_end[slot] = total + segment
        stop = sampling.stop_token_ids
        if len(stop) > self.stop_ids.shape[1]:
            wider = ((0, 0), (0, len(stop) - self.stop_ids.shape[1]))
            self.stop_ids = np.pad(self.stop_ids, wider, constant_values=_NO_ID)
        self.stop_ids[slot] = _NO_ID
        self.stop_ids[slot, : len(stop)] = stop
        self._sampling["greedy"][slot] = sampling.temperature == 0
        self._sampling["temperature"][slot] = sampling.temperature or 1.0
        self._sampling["top_k"][slot] = sampling.top_k
        self._sampling["top_p"][slot] = sampling.top_p
        self._sampling["min_p"][slot] = sampling.min_p
        self.watches_text[slot] = bool(sampling.stop_strings)
        self.occupied[slot] = True

    def release(self, slot: int) -> tuple[Request, PartialOutput]:
        """Empty `slot`. Returns the rollout and all it has written."""
        part = slice(int(self.prompt_length[slot]), int(self.cached[slot]) + 1)
        written = PartialOutput(
            ids=self.sequence[slot, part].copy(),
            logprobs=self.logprobs[slot, part].copy(),
            versions=self.versions[slot, part].copy(),
            kept=self.kept[slot, part].copy(),
            num_kept=self.num_kept.pop(slot),
        )
        self.occupied[slot] = self.watches_text[slot] = False
        self.cached[slot], self.in_flight[slot] = self._spare, 0
        self.num_released[slot] += 1
        for name, array in self._sampling.items():
            array[slot] = UNUSED[name]
        return self.requests.pop(slot), written

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """Return the sampling parameters of `slots`; None for a parameter that no rollout uses."""
        arrays = {name: array[slots] for name, array in self._sampling.items()}
        used = {
            name: torch.from_numpy(array).unsqueeze(1)
            for name, array in arrays.items()
            if (array != UNUSED[name]).any()
        }
        sent = platform_of(self._device).send([*used.values()], self._device)
        return SamplingRows(**(dict.fromkeys(arrays) | dict(zip(used, sent, strict=True))))

    def append(
        self, step: DecodeStep, ids: np.ndarray, logprobs: np.ndarray, kept: np.ndarray
    ) -> list[tuple[int, FinishReason]]:
        """Add one token to each rollout that is still in its slot. Returns the slots that stopped,
        and why."""
        slots = step.slots
        is_there = self.num_released[slots] == step.num_released
        if not is_there.all():
            slots, ids, logprobs = slots[is_there], ids[is_there], logprobs[is_there]
            kept = kept[is_there]
        self.num_written += len(slots)
        self.in_flight[slots] -= 1
        place = self.cached[slots] + 1
        self.cached[slots] = place
        self.sequence[slots, place] = ids
        self.logprobs[slots, place] = logprobs
        if self.kept.shape[2]:
            self.kept[slots, place] = kept
        self.versions[slots, place] = step.version
        stopped = (self.stop_ids[slots] == ids[:, None]).any(axis=1)
        full = place + 1 >= self.limit[slots]
        cut = place + 1 >= self.segment_end[slots]
        reasons = [(FinishReason.SEGMENT, cut), (FinishReason.LENGTH, full)]
        reasons.append((FinishReason.STOP, stopped))  # the last one that holds is the reason
        ended = {slot: reason for reason, holds in reasons for slot in slots[holds].tolist()}
        return list(ended.items())


START_SHARE = 16  # rollouts start when 1/16 of the slots is free: short prompts prefill together

EDGE_TOKENS = 8  # more than a character's bytes, so characters are whole where a window begins


@dataclass(slots=True, kw_only=True)
class QueuedRequest:
    """A request in the queue; `written` is empty unless it is resumed."""

    request: Request
    written: PartialOutput = field(default_factory=PartialOutput)


def fewest_free(max_num_seqs: int, num_waiting: int) -> int:
    """Return how many slots must be free before `num_waiting` rollouts, which all may start, do
    so."""
    return max(1, min(max_num_seqs // START_SHARE, num_waiting))


def check_request(request: Request, *, context: int, vocab_size: int, reads_text: bool) -> None:
    """Raise ValueError if the prompt is empty, leaves no room for a token in `context` or has ids
    outside the vocabulary, or if it has stop strings and the engine has no tokenizer to read them
    with."""
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
    """Return True if the last token of a response, or a turn, of these `ids` completed a stop
    string."""
    if not sampling.stop_strings:
        return False
    assert decode_text is not None  # else `check_request` has refused the request
    # A token with text is at least one byte, so this many of them hold the longest string.
    missing = max(len(text.encode()) for text in sampling.stop_strings) + EDGE_TOKENS
    start = len(ids)
    while start and missing:
        start -= 1
        missing -= _has_text(int(ids[start]), decode_text)
    text = decode_text(list(ids[start:]))
    return any(stop in text for stop in sampling.stop_strings)


@functools.lru_cache(1 << 18)
def _has_text(token: int, decode_text: Callable[[Sequence[int]], str]) -> bool:
    """Return False for special tokens, which decoders leave out."""
    return bool(decode_text([token]))


Place = tuple[tuple[int, int, int], int]
"""The place of a rollout in the queue: its urgency, and how many came before it."""


class Queue:
    """The waiting rollouts. Adding and taking one costs the logarithm of how many wait."""

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
        """Return how many rollouts may start under `version`."""
        return sum(len(line) for min_version, line in self._lines.items() if min_version <= version)

    def abort(self, row_ids: set[int]) -> list[RequestOutput]:
        """Remove the rollouts with these row ids, and return them, marked ABORTED, in the order
        they came."""
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
    """Counts the rollouts of each prefix group that have not stopped."""

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def __getitem__(self, group: object) -> int:
        return self._counts[group]

    def add(self, requests: Iterable[Request]) -> None:
        """Count these as running."""
        self._counts.update(request.prefix_group for request in requests)

    def stop(self, request: Request, reason: FinishReason) -> bool:
        """Count one that stopped. Returns True if it should be reported now: it was its group's
        last, or it is to go on."""
        self._counts[request.prefix_group] -= 1
        is_last = not self._counts[request.prefix_group]
        if is_last:
            del self._counts[request.prefix_group]
        return is_last or reason is FinishReason.SEGMENT


class PrefixIndex:
    """The content of the slots' caches: the prompt whose keys and values a slot holds, with their
    version, and the episode that waits there for its environment.

    An entry outlives its rollout until the slot is written again."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}  # by slot
        self._slots: dict[tuple[tuple[int, ...], int], set[int]] = {}
        self._episodes: dict[int, KeptEpisode] = {}  # by row, the oldest first
        self._rows: dict[int, int] = {}  # of those, by slot

    def put(self, slot: int, prompt: tuple[int, ...], version: int) -> None:
        """Note that `slot` holds `prompt`, computed under `version`, and nothing else."""
        if (row_id := self._rows.pop(slot, None)) is not None:
            del self._episodes[row_id]
        if (old := self._held.get(slot)) is not None:
            self._slots[old].discard(slot)
            if not self._slots[old]:
                del self._slots[old]
        self._held[slot] = prompt, version
        self._slots.setdefault((prompt, version), set()).add(slot)

    def keep(self, row_id: int, episode: KeptEpisode) -> None:
        """Note that an episode has stopped in its slot, and will be resumed."""
        self.take(row_id)
        self._episodes[row_id], self._rows[episode.slot] = episode, row_id

    def clear(self) -> None:
        """Forget the content of all slots."""
        self._held.clear()
        self._slots.clear()
        self._episodes.clear()
        self._rows.clear()

    def find(self, prompt: tuple[int, ...], version: int) -> list[int]:
        """Return the slots that hold `prompt` under exactly `version`, in ascending order."""
        return sorted(self._slots.get((prompt, version), ()))

    def take(self, row_id: int) -> KeptEpisode | None:
        """Return where this episode was, if it is still there, and keep it no longer."""
        if (episode := self._episodes.pop(row_id, None)) is not None:
            del self._rows[episode.slot]
        return episode

    def least_needed(self, free: set[int]) -> int:
        """Return the first of these slots that keeps no episode, or the one that keeps the
        oldest."""
        unused = free - self._rows.keys()
        if unused:
            return min(unused)
        return next(each.slot for each in self._episodes.values() if each.slot in free)


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """An episode whose prompt and response, with these `ids`, are in the cache of `slot`, except
    the last token; `version` was the newest when it stopped."""

    slot: int
    ids: np.ndarray
    version: int

    def is_start_of(self, ids: np.ndarray) -> bool:
        """Return whether the response continues this one. It does not if it has begun again
        since."""
        return len(self.ids) > 0 and np.array_equal(self.ids, ids[: len(self.ids)])


class SlotAssignment(NamedTuple):
    """Rollout `waiting` starts in `slot`. If an episode was kept there, `num_cached` of its tokens
    are in the slot's cache. Else the prompt's keys and values are copied from slot `source`, are in
    place already (`source == slot`), or must be computed (`source` None)."""

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
    taken next, before another rollout overwrites it; other resumed rollouts are always computed."""
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
