"""Keys and values as a GPU's fused attention reads them.

Owns: the two cache tensors, copies between slots, and the attention of a decode step over them.
Does not own: which rollout sits in which slot (`engine.py`); `cpu_kv_cache.py` is its counterpart
for CPUs. Invariant: that of `cpu_kv_cache.py`; and a decode step is a function of tensors of fixed
shape that reads none of their values on the host, so that a CUDA graph can replay it.

Row i of a step is slot i, so keys and values are read where they lie. Where Triton runs, a kernel
reads each row up to its own length (`decode_attention.py`). Elsewhere all rows are read up to one
length, behind a mask, and the query heads that share a key-value head become the query positions of
one attention: fused kernels then read each key once per key-value head, however many query heads
share it, and need no support for grouped heads.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llamarl.device.devices import platform_of
from llamarl.models.architecture import Architecture

BLOCK = 32  # positions are rounded up to it: kernels want masks whose rows are aligned
SHORTEST = 128  # the smallest length that all rows are read up to

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attention_kernel(device: torch.device) -> Kernel | None:
    """`decode_attention.attend`, or None where torch's operations do its work."""
    if not platform_of(device).has_triton(device):
        return None
    from llamarl.generation.decode_attention import attend

    return attend


class PaddedKVCache:
    """Keys and values [layers, slots, kv_heads, positions, head_dim]; `num_positions` is rounded up
    to whole blocks."""

    def __init__(
        self,
        architecture: Architecture,
        num_ranks: int,
        num_slots: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.num_kv_heads = architecture.num_kv_heads // num_ranks
        self.dtype, self.device = dtype, device
        self.num_positions = -(-num_positions // BLOCK) * BLOCK
        slots = (architecture.num_layers, num_slots, self.num_kv_heads)
        shape = (*slots, self.num_positions, architecture.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._slot = torch.arange(num_slots, device=device)[:, None]
        self._head = torch.arange(self.num_kv_heads, device=device)[None]
        self._position = torch.arange(self.num_positions, device=device)
        self._kernel = attention_kernel(device)

    def write_index(self, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, ...]:
        """Where the tokens at `positions` int64 [n] of `slots` int64 [n] go, in host memory: slot
        [n, 1], position [n, 1]."""
        return torch.from_numpy(slots)[:, None], torch.from_numpy(positions)[:, None]

    def next_index(self, positions: Tensor) -> tuple[Tensor, ...]:
        """The same for one token of each of the first slots, on the device, where `positions` int64
        [n] are."""
        return self._slot[: len(positions)], positions[:, None]

    def write(self, layer: int, index: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] of one layer."""
        slot, position = index
        place = slot, self._head, position
        self.keys[layer].index_put_(place, keys)
        self.values[layer].index_put_(place, values)

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, length, head_dim] of the first positions of `slots` int64
        [n]."""
        return self.keys[layer, slots, :, :length], self.values[layer, slots, :, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def bucket(self, longest: int) -> int:
        """The positions that a step plans for if its longest row has `longest`: a power of two, so
        that steps have few shapes. For the kernel it is all: shapes differ by rows alone."""
        if self._kernel is not None:
            return self.num_positions
        return min(1 << (max(longest, SHORTEST) - 1).bit_length(), self.num_positions)

    def plan(self, lengths: Tensor, bucket: int) -> Tensor:
        """What `attend` takes for rows of `lengths` int64 [n] within their `bucket`: the lengths
        for the kernel, else a mask [n, 1, 1, bucket], 0 up to each row's own and -inf behind."""
        if self._kernel is not None:
            return lengths
        hidden = self._position[:bucket] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def attend(self, layer: int, queries: Tensor, plan: Tensor) -> Tensor:
        """Attention output [n, heads * head_dim] of `queries` [n, heads, head_dim] of the first
        slots, over the positions of their `plan`."""
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
