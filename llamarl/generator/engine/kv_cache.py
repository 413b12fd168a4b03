"""The KV cache, allocated once: by blocks on CPUs, padded where graphs are captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llamarl.core.config import EmbeddedConfig
from llamarl.core.device.devices import platform_of
from llamarl.model.architecture import Architecture

BLOCK = 32  # positions per key block; 16 to 128 measured, 32 is best or close to it
PLAN_STEPS = 8  # decode steps that one plan serves
CALL_COST = 500  # positions one could read in the time that one more set of calls takes


def empty_record(
    architecture: Architecture, num_slots: int, num_positions: int, device: torch.device
) -> Tensor:
    """Return the record of the experts that tokens go to, [layers, slots, positions, k], of the
    layers with experts; without any it is empty. It lies beside keys and values and is copied with
    them, so that a prompt that several rollouts share has its record in each."""
    sizes = architecture.experts
    if sizes is None:
        return torch.zeros(0, num_slots, num_positions, 0, dtype=torch.uint8, device=device)
    shape = (len(architecture.sparse_layers), num_slots, num_positions, sizes.num_chosen)
    return torch.zeros(shape, dtype=getattr(torch, sizes.index_dtype), device=device)


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

    A run ends where reading too far would cost more than the calls of another run."""
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
    """Keys [layers, slots, kv_heads, blocks, head_dim, BLOCK] and values [layers, slots, kv_heads,
    positions, head_dim]; `num_positions` is rounded up to whole blocks."""

    def __init__(
        self,
        architecture: Architecture,
        config: EmbeddedConfig,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        num_slots, num_positions = config.max_num_seqs, config.max_model_len
        dtype: torch.dtype = getattr(torch, config.dtype)
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
        self.experts = empty_record(architecture, num_slots, self.num_positions, device)
        self._records = [layer.flatten(0, 1) for layer in self.experts]

    def write_index(self, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Return where the tokens at `positions` int64 [n] of `slots` int64 [n] are stored, in host
        memory: key block [n, kv_heads], column in it [n, 1], value row [n, kv_heads], row of the
        experts' record [n]."""
        first = slots[:, None] * self.num_kv_heads + np.arange(self.num_kv_heads)
        block = first * self.num_blocks + positions[:, None] // BLOCK
        row = first * self.num_positions + positions[:, None]
        index = (block, positions[:, None] % BLOCK, row, slots * self.num_positions + positions)
        return tuple(torch.from_numpy(each) for each in index)

    def write(self, layer: int, index: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] of one layer."""
        block, column, row, _ = index
        self._key_blocks[layer][block, :, column] = keys
        self._value_tables[layer].index_put_((row,), values)

    def record(self, layer: int, index: Sequence[Tensor], chosen: Tensor) -> None:
        """Store the experts [n, k] that tokens go to in one of the layers with experts."""
        self._records[layer][index[3]] = chosen.to(self.experts.dtype)

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, length, head_dim] of the first positions of `slots`
        int64 [n]."""
        blocks = self.keys[layer, slots, :, : -(-length // BLOCK)]
        keys = blocks.transpose(3, 4).reshape(len(slots), self.num_kv_heads, -1, self.head_dim)
        return keys[:, :, :length], self.values[layer, slots, :, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        whole = -(-length // BLOCK)
        self.keys[:, target, :, :whole] = self.keys[:, source, :, :whole]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.experts[:, target, :length] = self.experts[:, source, :length]

    def plan(self, slots: np.ndarray, lengths: np.ndarray) -> list[PaddedRows]:
        """Return how to read `slots` (int64 [n]) with `lengths` (int64 [n], falling) for PLAN_STEPS
        steps.

        `lengths` count the positions visible in the first of these steps."""
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
        """Return the attention output [n, heads * head_dim] of `queries` [n, heads, head_dim]."""
        parts = [self._attend_group(layer, queries[g.start : g.stop], g) for g in groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(queries.shape[0], -1)

    def _attend_group(self, layer: int, queries: Tensor, group: PaddedRows) -> Tensor:
        num_rows, num_heads, dim = queries.shape
        weights = queries.unsqueeze(2).expand(-1, -1, group.num_blocks, -1).reshape(-1)
        # This is the plain operator, as nn.functional's checks would cost as much as the sum.
        scores = torch.embedding_bag(
            self._key_tables[layer],
            group.key_index,
            group.key_bags,
            per_sample_weights=weights,
            include_last_offset=True,
        )[0].view(num_rows, num_heads, -1)
        # This is mask + scores / sqrt(head_dim), with the cut to `length`, in one pass.
        scores = torch.add(group.mask, scores[:, :, : group.length], alpha=dim**-0.5)
        return torch.embedding_bag(
            self._value_tables[layer],
            group.value_index,
            group.value_bags,
            per_sample_weights=torch.softmax(scores, dim=-1).view(-1),
            include_last_offset=True,
        )[0]

    def _index(self, rows: Tensor, group: int) -> Tensor:
        """Return int32 table rows [n, kv_heads, 1, rows], repeated for each query head of a kv
        head."""
        return rows.to(torch.int32).expand(-1, -1, group, -1).reshape(-1)

    def _bags(self, index: Tensor, size: int) -> Tensor:
        return torch.arange(0, len(index) + 1, size, dtype=torch.int32, device=self.device)


PADDED_BLOCK = 32  # positions are rounded up to it: kernels want masks whose rows are aligned
SHORTEST = 128  # the smallest length that all rows are read up to

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attention_kernel(device: torch.device) -> Kernel | None:
    """Return `decode_attention.attend`, or None where torch's operations do its work."""
    if not platform_of(device).has_triton(device):
        return None
    from llamarl.generator.engine.decode_attention import attend

    return attend


class PaddedKVCache:
    """Keys and values [layers, slots, kv_heads, positions, head_dim]; `num_positions` is rounded up
    to whole blocks."""

    def __init__(
        self,
        architecture: Architecture,
        config: EmbeddedConfig,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots = config.max_num_seqs
        self.num_kv_heads = architecture.num_kv_heads // num_ranks
        self.dtype, self.device = getattr(torch, config.dtype), device
        self.num_positions = -(-config.max_model_len // PADDED_BLOCK) * PADDED_BLOCK
        slots = (architecture.num_layers, num_slots, self.num_kv_heads)
        shape = (*slots, self.num_positions, architecture.head_dim)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.experts = empty_record(architecture, num_slots, self.num_positions, device)
        self._slot = torch.arange(num_slots, device=device)[:, None]
        self._head = torch.arange(self.num_kv_heads, device=device)[None]
        self._position = torch.arange(self.num_positions, device=device)
        self._kernel = attention_kernel(device)

    def write_index(self, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Return where the tokens at `positions` int64 [n] of `slots` int64 [n] are stored, in host
        memory: slot [n, 1], position [n, 1]."""
        return torch.from_numpy(slots)[:, None], torch.from_numpy(positions)[:, None]

    def next_index(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the same for one token of each of the first slots, on the device, where
        `positions` int64 [n] are."""
        return self._slot[: len(positions)], positions[:, None]

    def write(self, layer: int, index: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] of one layer."""
        slot, position = index
        place = slot, self._head, position
        self.keys[layer].index_put_(place, keys)
        self.values[layer].index_put_(place, values)

    def record(self, layer: int, index: Sequence[Tensor], chosen: Tensor) -> None:
        """See `CpuKVCache.record`."""
        slot, position = index
        place = slot[:, 0], position[:, 0]
        self.experts[layer].index_put_(place, chosen.to(self.experts.dtype))

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, length, head_dim] of the first positions of `slots`
        int64 [n]."""
        return self.keys[layer, slots, :, :length], self.values[layer, slots, :, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]
        self.experts[:, target, :length] = self.experts[:, source, :length]

    def bucket(self, longest: int) -> int:
        """Return the number of positions that a step plans for if its longest row has `longest`: a
        power of two, so that steps have few shapes; or, for the kernel, all, as its shapes differ
        by rows alone."""
        if self._kernel is not None:
            return self.num_positions
        return min(1 << (max(longest, SHORTEST) - 1).bit_length(), self.num_positions)

    def plan(self, lengths: Tensor, bucket: int) -> Tensor:
        """Return the argument of `attend` for rows of `lengths` int64 [n] within their `bucket`:
        the lengths for the kernel, else a mask [n, 1, 1, bucket], 0 up to each row's own and -inf
        behind."""
        if self._kernel is not None:
            return lengths
        hidden = self._position[:bucket] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def attend(self, layer: int, queries: Tensor, plan: Tensor) -> Tensor:
        """Return the attention output [n, heads * head_dim] of `queries` [n, heads, head_dim] of
        the first slots, over the positions of their `plan`."""
        if self._kernel is not None:
            return self._kernel(queries, self.keys[layer], self.values[layer], plan)
        num_rows, length = len(queries), plan.shape[-1]
        grouped = queries.unflatten(1, (self.num_kv_heads, -1))
        out = functional.scaled_dot_product_attention(
            grouped,
            self.keys[layer, :num_rows, :, :length],
            self.values[layer, :num_rows, :, :length],
            attn_mask=plan.expand(-1, -1, grouped.shape[2], -1),
        )
        return out.reshape(num_rows, -1)
