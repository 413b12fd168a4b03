"""The state of running rollouts, as arrays over slots.

Owns: tokens, log-probs, versions and stop conditions of whatever occupies each slot. Does not
own: keys and values (`kv_cache.py`) or which slot is taken (`engine.py`). Invariant: one decode
step touches a constant number of arrays, never one rollout at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from llamarl.generation.sampling import SamplingRows, uniforms
from llamarl.generation.scheduler import Waiting, Written
from llamarl.types import FinishReason, Request

_NO_ID = -1


class Running:
    """Rollouts by slot; `occupied` bool [slots] says where one is.

    `sequence` int32 [slots, context] is prompt and response; `cached` int64 [slots] counts the
    tokens whose keys and values are stored: always all but the last one.
    """

    def __init__(self, num_slots: int, num_positions: int) -> None:
        wide = (num_slots, num_positions)
        self.requests: list[Request | None] = [None] * num_slots
        self.sequence = np.zeros(wide, np.int32)
        self.logprobs = np.zeros(wide, np.float32)
        self.versions = np.zeros(wide, np.int32)
        self.uniform = np.zeros(wide, np.float32)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)  # total tokens at which it must stop
        self.segment_end = np.zeros(num_slots, np.int64)  # total tokens at which it is cut
        self.stop_ids = np.full((num_slots, 1), _NO_ID, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.greedy = np.zeros(num_slots, bool)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.watches_text = np.zeros(num_slots, bool)
        self.occupied = np.zeros(num_slots, bool)

    @property
    def num_rows(self) -> int:
        """Slots up to the last occupied one: the rows of a decode step."""
        return int(np.flatnonzero(self.occupied)[-1]) + 1 if self.occupied.any() else 0

    def start(self, slot: int, waiting: Waiting) -> None:
        """Put a rollout into `slot`."""
        request, written = waiting.request, waiting.written
        sampling = request.sampling
        num_prompt, num_written = len(request.prompt_ids), len(written.ids)
        total = num_prompt + num_written
        self.requests[slot] = request
        self.sequence[slot, :num_prompt] = request.prompt_ids
        for array, values in (
            (self.sequence, written.ids),
            (self.logprobs, written.logprobs),
            (self.versions, written.versions),
        ):
            array[slot, num_prompt:total] = values
        num_positions = self.sequence.shape[1]
        limit = min(num_prompt + sampling.max_tokens, num_positions)
        self.uniform[slot, num_prompt:limit] = uniforms(request.seed, limit - num_prompt)
        self.prompt_length[slot] = num_prompt
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

    def release(self, slot: int) -> tuple[Request, Written]:
        """Empty `slot`; returns the rollout and all it has written."""
        request = self.requests[slot]
        assert request is not None
        part = slice(int(self.prompt_length[slot]), int(self.cached[slot]) + 1)
        written = Written(
            ids=self.sequence[slot, part].copy(),
            logprobs=self.logprobs[slot, part].copy(),
            versions=self.versions[slot, part].copy(),
        )
        self.clear(slot)
        return request, written

    def clear(self, slot: int) -> None:
        """Mark `slot` empty; among occupied slots it costs one position and asks for nothing."""
        self.requests[slot] = None
        self.occupied[slot] = self.greedy[slot] = self.watches_text[slot] = False
        self.temperature[slot], self.top_k[slot], self.top_p[slot] = 1.0, 0, 1.0
        self.cached[slot] = 0

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rollouts between slots (any permutation of slots)."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[targets] = array[sources]
        held = [self.requests[slot] for slot in sources]
        for target, request in zip(targets, held, strict=True):
            self.requests[target] = request

    def sampling_rows(self, num_rows: int) -> SamplingRows:
        """Sampling parameters of slots 0..num_rows-1, only those that some rollout uses."""
        temperature, greedy = self.temperature[:num_rows], self.greedy[:num_rows]
        top_k, top_p = self.top_k[:num_rows], self.top_p[:num_rows]

        def column(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.copy()).unsqueeze(1)

        return SamplingRows(
            temperature=column(temperature) if (temperature != 1).any() else None,
            greedy=torch.from_numpy(greedy.copy()) if greedy.any() else None,
            top_k=column(top_k) if (top_k > 0).any() else None,
            top_p=column(top_p) if (top_p < 1).any() else None,
        )

    def append(
        self, ids: np.ndarray, logprobs: np.ndarray, version: int
    ) -> list[tuple[int, FinishReason]]:
        """Add one token to each of slots 0..n-1; returns which of them stopped, and why."""
        num_rows = len(ids)
        rows = np.arange(num_rows)
        self.cached[:num_rows] += 1
        place = self.cached[:num_rows]
        self.sequence[rows, place] = ids
        self.logprobs[rows, place] = logprobs
        self.versions[rows, place] = version
        stopped = (self.stop_ids[:num_rows] == ids[:, None]).any(axis=1)
        total = place + 1
        full = total >= self.limit[:num_rows]
        ended = (stopped | full | (total >= self.segment_end[:num_rows])) & self.occupied[:num_rows]
        if not ended.any():
            return []
        return [
            (
                slot,
                FinishReason.STOP
                if stopped[slot]
                else FinishReason.LENGTH
                if full[slot]
                else FinishReason.SEGMENT,
            )
            for slot in np.flatnonzero(ended).tolist()
        ]
