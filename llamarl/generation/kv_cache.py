"""Keys and values of all running rollouts.

Owns: the two cache tensors, copies between slots, and the grouping of slots by length that keeps
one long rollout from making every short one pay. Does not own: which rollout sits in which slot
(`engine.py`). Invariant: allocated once; position p of slot s is written before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP_FILL = 0.8  # a slot joins a group if it is at least this full relative to the longest
MIN_GROUP = 4  # smaller groups cost more in calls than they save in reads


@dataclass(slots=True)
class Group:
    """Slots `start:stop`, read up to the longest of them; `is_even`: all have equal lengths."""

    start: int
    stop: int
    length: int
    is_even: bool


def group_slots(lengths: np.ndarray) -> list[Group]:
    """Cut slots (their `lengths` int [n], in slot order) into runs of similar length."""
    groups: list[Group] = []
    start, longest, shortest = 0, 0, 0
    for slot, length in enumerate(lengths.tolist()):
        low, high = min(shortest, length), max(longest, length)
        if slot - start >= MIN_GROUP and low < GROUP_FILL * high:
            groups.append(Group(start, slot, longest, shortest == longest))
            start, low, high = slot, length, length
        elif slot == start:
            low, high = length, length
        longest, shortest = high, low
    if len(lengths):
        groups.append(Group(start, len(lengths), longest, shortest == longest))
    return groups


def grouped_reads(lengths: np.ndarray) -> int:
    """Positions that attention reads per head with these `lengths` in this order."""
    return sum((g.stop - g.start) * g.length for g in group_slots(lengths))


class KVCache:
    """`keys` and `values`: [layers, slots, kv_heads, context, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        num_positions: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_positions = num_positions
        self.num_kv_heads = num_kv_heads
        # One allocation for both, so that one indexed write stores keys and values together.
        shape = (num_layers, 2, num_slots, num_kv_heads, num_positions, head_dim)
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = self.store[:, 0]
        self.values = self.store[:, 1]
        # Rows of head_dim numbers, for indexed writes; and one [slots * kv_heads] batch per layer.
        self.rows = [layer.view(-1, head_dim) for layer in self.store]
        batch = (num_slots * num_kv_heads, num_positions, head_dim)
        self.key_batches = [layer.view(batch) for layer in self.keys]
        self.value_batches = [layer.view(batch) for layer in self.values]
        heads = np.arange(num_kv_heads, dtype=np.int64)[None, :, None] * num_positions
        kind = np.arange(2, dtype=np.int64)[None, None, :]
        kind = kind * num_slots * num_kv_heads * num_positions
        self._offsets = heads + kind

    def row_index(self, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Rows of keys and values of (slot, position) pairs: int64 [n, kv_heads, 2]."""
        first = slots * (self.num_kv_heads * self.num_positions) + positions
        index = torch.from_numpy(first[:, None, None] + self._offsets)
        return index.to(self.store.device)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        self.store[:, :, target, :, :length] = self.store[:, :, source, :, :length]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Move slots (any permutation) layer by layer; `length`: the longest of them."""
        source = torch.tensor(sources, device=self.store.device)
        target = torch.tensor(targets, device=self.store.device)
        for layer in self.store:
            live = layer[:, :, :, :length]
            live[:, target] = live[:, source]
