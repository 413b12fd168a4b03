"""Keys and values of all running rollouts, and how a decode step reads them on a CPU.

Owns: the two cache tensors, copies between slots, and the reading plan. Does not own: which
rollout sits in which slot (`engine.py`); `padded_kv_cache.py` is its counterpart for GPUs.
Invariant: allocated once; position p of a slot is written before it is read, or read under a mask.

A decode step reads with `embedding_bag`, whose kernel is a weighted sum of table rows picked by
index: it reads rows in any order, so slots need not be neighbours, and every rollout costs its own
length, not the longest one's. Values lie as table rows of head_dim numbers: the attention's output
is the sum of the rows of one head weighted by its probabilities. Keys lie transposed, in blocks of
BLOCK positions: a block's scores are the sum of its head_dim rows weighted by the query.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llamarl.models.architecture import Architecture

BLOCK = 32  # positions per key block; 16 to 128 measured, 32 is best or close to it
PLAN_STEPS = 8  # decode steps that one plan serves
CALL_COST = 500  # positions one could read in the time that one more set of calls takes


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Rows `start:stop` of the batch, of similar length: all are read up to `length`."""

    start: int
    stop: int
    length: int
    num_blocks: int
    key_index: Tensor
    key_bags: Tensor
    value_index: Tensor
    value_bags: Tensor
    mask: Tensor  # [rows, 1, length]: 0 up to each row's last position, -inf behind


def cut(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Cut `lengths` (int [n], falling) into runs; each is read up to its first length.

    A run ends where reading too far would cost more than the calls of another run.
    """
    runs: list[tuple[int, int]] = []
    start, wasted = 0, 0
    values = lengths.tolist()
    for row, length in enumerate(values):
        wasted += values[start] - length
        if wasted > CALL_COST:
            runs.append((start, row))
            start, wasted = row, 0
    if values:
        runs.append((start, len(values)))
    return runs


class CpuKVCache:
    """Keys [layers, slots, kv_heads, blocks, head_dim, BLOCK], values [layers, slots, kv_heads,
    positions, head_dim]; `num_positions` is rounded up to whole blocks."""

    def __init__(
        self,
        architecture: Architecture,
        num_ranks: int,
        num_slots: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head_dim = architecture.head_dim
        self.num_heads = architecture.num_heads // num_ranks
        self.num_kv_heads = architecture.num_kv_heads // num_ranks
        self.dtype, self.device = dtype, device
        # bfloat16's softmax is three times slower on rows that end within a vector (measured).
        self._unit = 16 if dtype == torch.bfloat16 else 1
        self.num_blocks = -(-num_positions // BLOCK)
        self.num_positions = self.num_blocks * BLOCK
        num_rows = num_slots * self.num_kv_heads * self.num_blocks * max(self.head_dim, BLOCK)
        if num_rows >= 1 << 31:
            raise ValueError(
                "generator.max_num_seqs times max_model_len must stay below 2^31 table rows, "
                f"got {num_slots} x {num_positions} ({num_rows} rows)"
            )
        slots = (architecture.num_layers, num_slots, self.num_kv_heads)
        keys = (*slots, self.num_blocks, self.head_dim, BLOCK)
        values = (*slots, self.num_positions, self.head_dim)
        self.keys = torch.zeros(keys, dtype=dtype, device=device)
        self.values = torch.zeros(values, dtype=dtype, device=device)
        self._key_blocks = [layer.view(-1, self.head_dim, BLOCK) for layer in self.keys]
        self._key_tables = [layer.view(-1, BLOCK) for layer in self.keys]
        self._value_tables = [layer.view(-1, self.head_dim) for layer in self.values]

    def write_index(self, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Where the tokens at `positions` int64 [n] of `slots` int64 [n] go, in host memory: key
        block [n, kv_heads], column in it [n, 1], value row [n, kv_heads]."""
        first = slots[:, None] * self.num_kv_heads + np.arange(self.num_kv_heads)
        block = first * self.num_blocks + positions[:, None] // BLOCK
        row = first * self.num_positions + positions[:, None]
        index = (block, positions[:, None] % BLOCK, row)
        return tuple(torch.from_numpy(each) for each in index)

    def write(self, layer: int, index: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] of one layer."""
        block, column, row = index
        self._key_blocks[layer][block, :, column] = keys
        self._value_tables[layer].index_put_((row,), values)

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, length, head_dim] of the first positions of `slots` int64
        [n]."""
        blocks = self.keys[layer, slots, :, : -(-length // BLOCK)]
        keys = blocks.transpose(3, 4).reshape(len(slots), self.num_kv_heads, -1, self.head_dim)
        return keys[:, :, :length], self.values[layer, slots, :, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        whole = -(-length // BLOCK)
        self.keys[:, target, :, :whole] = self.keys[:, source, :, :whole]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def plan(self, slots: np.ndarray, lengths: np.ndarray) -> list[PaddedRows]:
        """How to read `slots` (int64 [n]) with `lengths` (int64 [n], falling) for PLAN_STEPS steps.

        `lengths` count the positions visible in the first of these steps.
        """
        groups = []
        for start, stop in cut(lengths):
            length = int(lengths[start]) + PLAN_STEPS - 1
            length = min(-(-length // self._unit) * self._unit, self.num_positions)
            blocks = -(-length // BLOCK)
            part = torch.from_numpy(slots[start:stop]).to(self.device)
            heads = torch.arange(self.num_kv_heads, device=self.device)
            first = (part[:, None] * self.num_kv_heads + heads)[:, :, None, None]
            group = self.num_heads // self.num_kv_heads
            rows = torch.arange(blocks * self.head_dim, device=self.device)
            key_index = self._index(first * (self.num_blocks * self.head_dim) + rows, group)
            rows = torch.arange(length, device=self.device)
            value_index = self._index(first * self.num_positions + rows, group)
            seen = torch.from_numpy(np.arange(length) < lengths[start:stop, None, None])
            mask = torch.full(seen.shape, -torch.inf, dtype=self.dtype)
            groups.append(
                PaddedRows(
                    start=start,
                    stop=stop,
                    length=length,
                    num_blocks=blocks,
                    key_index=key_index,
                    key_bags=self._bags(key_index, self.head_dim),
                    value_index=value_index,
                    value_bags=self._bags(value_index, length),
                    mask=mask.masked_fill_(seen, 0).to(self.device),
                )
            )
        return groups

    def lengthen(self, groups: list[PaddedRows], positions: Tensor) -> None:
        """Unmask `positions` int64 [n], the next position of each row."""
        index = positions[:, None, None]
        for group in groups:
            group.mask.scatter_(2, index[group.start : group.stop], 0)

    def attend(self, layer: int, queries: Tensor, groups: list[PaddedRows]) -> Tensor:
        """Attention output [n, heads * head_dim] of `queries` [n, heads, head_dim]."""
        parts = [self._attend_group(layer, queries[g.start : g.stop], g) for g in groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(queries.shape[0], -1)

    def _attend_group(self, layer: int, queries: Tensor, group: PaddedRows) -> Tensor:
        num_rows, num_heads, dim = queries.shape
        weights = queries.unsqueeze(2).expand(-1, -1, group.num_blocks, -1).reshape(-1)
        # The plain operator: nn.functional's checks would cost as much as the sum itself.
        scores = torch.embedding_bag(
            self._key_tables[layer],
            group.key_index,
            group.key_bags,
            per_sample_weights=weights,
            include_last_offset=True,
        )[0].view(num_rows, num_heads, -1)
        # mask + scores / sqrt(head_dim), and the cut to `length`, in one pass.
        scores = torch.add(group.mask, scores[:, :, : group.length], alpha=dim**-0.5)
        return torch.embedding_bag(
            self._value_tables[layer],
            group.value_index,
            group.value_bags,
            per_sample_weights=torch.softmax(scores, dim=-1).view(-1),
            include_last_offset=True,
        )[0]

    def _index(self, rows: Tensor, group: int) -> Tensor:
        """int32 table rows [n, kv_heads, 1, rows], repeated for each query head of a kv head."""
        return rows.to(torch.int32).expand(-1, -1, group, -1).reshape(-1)

    def _bags(self, index: Tensor, size: int) -> Tensor:
        return torch.arange(0, len(index) + 1, size, dtype=torch.int32, device=self.device)
