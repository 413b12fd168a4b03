"""The state of the running rollouts, as arrays over slots.

Owns: tokens, log-probs, versions and stop conditions of the rollout in each slot. Does not own:
keys and values (`cpu_kv_cache.py`) or the choice of a slot (`scheduler.py`). Invariant: one decode
step runs a constant number of array operations, never a loop over rollouts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from llamarl.device.devices import platform_of
from llamarl.episode import turn_start
from llamarl.generation.protocol import PartialOutput
from llamarl.generation.sampling import SamplingRows, uniforms
from llamarl.generation.scheduler import QueuedRequest
from llamarl.types import FinishReason, Request

_NO_ID = -1
UNUSED = {"temperature": 1.0, "greedy": False, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step on its way: one token for each of `slots`, by the weights of `version`.

    `num_released` is `RunningBatch.num_released` of these slots at the launch. `read` waits for ids
    int [n] and log-probs float32 [n].
    """

    slots: np.ndarray
    num_released: np.ndarray
    version: int
    read: Callable[[], tuple[np.ndarray, np.ndarray]]


class RunningBatch:
    """Rollouts by slot; `occupied` bool [slots] marks the slots that hold one.

    `sequence` int32 [slots, context] is prompt and response; `cached` int64 [slots] counts the
    tokens whose keys and values are stored: all but the last one. `in_flight` counts the tokens
    that a launched step computes, and `num_released` the rollouts that have left a slot: what a
    step wrote for one that is gone is dropped.
    """

    def __init__(self, num_slots: int, num_positions: int, device: torch.device) -> None:
        self._device = device
        wide = (num_slots, num_positions)
        self.requests: dict[int, Request] = {}
        self.num_written = 0  # tokens, since the start
        self.num_kept: dict[int, int] = {}
        self.sequence = np.zeros(wide, np.int32)
        self.logprobs = np.zeros(wide, np.float32)
        self.versions = np.zeros(wide, np.int32)
        self.uniform = np.zeros(wide, np.float32)
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
        self.temperature = np.ones(num_slots, np.float32)
        self.greedy = np.zeros(num_slots, bool)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.watches_text = np.zeros(num_slots, bool)
        self.occupied = np.zeros(num_slots, bool)

    def by_length(self) -> np.ndarray:
        """Occupied slots, the longest rollout first: int64 [n]."""
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
        self.greedy[slot] = sampling.temperature == 0
        self.temperature[slot] = sampling.temperature or 1.0
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.watches_text[slot] = bool(sampling.stop_strings)
        self.occupied[slot] = True

    def release(self, slot: int) -> tuple[Request, PartialOutput]:
        """Empty `slot`; returns the rollout and all it has written."""
        part = slice(int(self.prompt_length[slot]), int(self.cached[slot]) + 1)
        written = PartialOutput(
            ids=self.sequence[slot, part].copy(),
            logprobs=self.logprobs[slot, part].copy(),
            versions=self.versions[slot, part].copy(),
            num_kept=self.num_kept.pop(slot),
        )
        self.occupied[slot] = self.watches_text[slot] = False
        self.cached[slot], self.in_flight[slot] = self._spare, 0
        self.num_released[slot] += 1
        self.temperature[slot], self.top_k[slot], self.top_p[slot] = 1.0, 0, 1.0
        self.greedy[slot] = False
        return self.requests.pop(slot), written

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """Sampling parameters of `slots`; None for those that no rollout uses."""
        arrays = {
            "temperature": self.temperature[slots],
            "greedy": self.greedy[slots],
            "top_k": self.top_k[slots],
            "top_p": self.top_p[slots],
        }
        used = {
            name: torch.from_numpy(array).unsqueeze(1)
            for name, array in arrays.items()
            if (array != UNUSED[name]).any()
        }
        sent = platform_of(self._device).send([*used.values()], self._device)
        return SamplingRows(**(dict.fromkeys(arrays) | dict(zip(used, sent, strict=True))))

    def append(
        self, step: DecodeStep, ids: np.ndarray, logprobs: np.ndarray
    ) -> list[tuple[int, FinishReason]]:
        """Add one token to each rollout that is still in its slot; returns the slots that stopped,
        and why."""
        slots = step.slots
        is_there = self.num_released[slots] == step.num_released
        if not is_there.all():
            slots, ids, logprobs = slots[is_there], ids[is_there], logprobs[is_there]
        self.num_written += len(slots)
        self.in_flight[slots] -= 1
        place = self.cached[slots] + 1
        self.cached[slots] = place
        self.sequence[slots, place] = ids
        self.logprobs[slots, place] = logprobs
        self.versions[slots, place] = step.version
        stopped = (self.stop_ids[slots] == ids[:, None]).any(axis=1)
        full = place + 1 >= self.limit[slots]
        cut = place + 1 >= self.segment_end[slots]
        reasons = [(FinishReason.SEGMENT, cut), (FinishReason.LENGTH, full)]
        reasons.append((FinishReason.STOP, stopped))  # the last one that holds is the reason
        ended = {slot: reason for reason, holds in reasons for slot in slots[holds].tolist()}
        return list(ended.items())
