"""The forward passes of generation: packed prompts, then one token per running rollout.

Owns: the maths over bound weights and the KV cache, without autograd. Does not own: which rollout
is in which slot (`engine.py`) or drawing tokens (`sampling.py`). Invariant: the numbers equal those
of `models.transformer` on the same tokens, up to rounding.

On small models the calls cost as much as the arithmetic, so a decode step makes few of them: fused
qkv and gate-up products, one rotation for queries and keys, one write for keys and values, residual
sums inside the matrix products.

With several ranks each has some heads, some of the feed-forward and a range of the vocabulary. They
sum their contributions to the residual stream, twice per layer and once for the embedding, and
gather logits.
"""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from llamarl.device.devices import platform_of
from llamarl.generation.adapted import AdaptedMatrix
from llamarl.generation.cpu_kv_cache import CpuKVCache
from llamarl.generation.padded_kv_cache import PaddedKVCache
from llamarl.generation.parameters import LayerWeights, Matrix, Weights
from llamarl.generation.quantized import widened_mm
from llamarl.models.architecture import Architecture
from llamarl.models.attention import attend_causally
from llamarl.models.process_group import JOIN, form_group, meet
from llamarl.models.transformer import rope_tables

Cache = CpuKVCache | PaddedKVCache
LIMIT = timedelta(minutes=10)  # between two ranks within a step


class TensorParallelGroup:
    """The tensor-parallel ranks of one replica, which meet at the file `rendezvous` that no other
    group uses. What `sum` and `gather` return is equal on all of them, bit for bit, so all sample
    the same tokens.

    Waits for all; call it, and its methods, from the compute thread.
    """

    def __init__(self, rendezvous: str, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._platform = platform_of(device)
        store = meet(rendezvous, rank, num_ranks, JOIN)
        self._group = form_group(device, store, rank, num_ranks, LIMIT)

    def sum(self, x: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place; returns it."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, columns: Tensor) -> Tensor:
        """Lay the ranks' columns [n, m] side by side: [n, m * num_ranks]."""
        num_rows, width = columns.shape
        parts = columns.new_empty(self.num_ranks * num_rows, width)
        self._group._allgather_base(parts, columns.contiguous()).wait()
        return parts.view(-1, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def close(self) -> None:
        """Leave the group; a rank that is still computing fails."""
        if self._platform.runs_ahead and self._group is not None:
            self._group.abort()
        self._group = None


class Decoder:
    """Runs `weights`, which the engine sets at a commit, over `cache`: one rank's part of both if
    there is a `group`.

    A row of the fused qkv product is [heads + 2 * kv_heads, head_dim]: queries, keys, values.
    """

    def __init__(
        self, architecture: Architecture, cache: Cache, group: TensorParallelGroup | None = None
    ) -> None:
        self.architecture = architecture
        self.cache = cache
        self.weights: Weights | None = None
        self._group = group
        num_ranks = group.num_ranks if group is not None else 1
        self._num_heads = architecture.num_heads // num_ranks
        self._num_rotated = self._num_heads + architecture.num_kv_heads // num_ranks
        self._add = add_product if group is None else self._add_sum
        cos, sin = rope_tables(architecture, cache.num_positions)
        # Both halves of a head, so that the rotation is x * cos + roll(x) * sin: in float32, as in
        # the trainer, whatever the dtype of x.
        self._cos = torch.cat([cos, cos], dim=1).to(cache.device)
        self._sin = torch.cat([-sin, sin], dim=1).to(cache.device)
        width = architecture.hidden_size
        self._norm_floor, self._head_norm_floor = (
            torch.full((), (size * architecture.norm_eps) ** 0.5, device=cache.device)
            for size in (width, architecture.head_dim)
        )

    def prefill(self, sequences: list[tuple[int, int, np.ndarray]]) -> None:
        """Compute keys and values of tokens: (slot, position of the first, int tokens [t]) each, no
        logits. What lies before that position is in the slot's cache.

        Whole sequences of equal length share one attention call.
        """
        whole = sorted((each for each in sequences if not each[1]), key=lambda each: len(each[2]))
        later = [each for each in sequences if each[1]]
        sequences = [*whole, *later]
        lengths = [len(ids) for *_, ids in sequences]
        same = itertools.groupby(lengths[: len(whole)])
        runs = [(len(list(equal)), length) for length, equal in same]
        tokens = np.concatenate([ids for *_, ids in sequences])
        positions = np.concatenate(
            [np.arange(start, start + len(ids)) for _, start, ids in sequences]
        )
        slots = np.repeat(np.array([slot for slot, *_ in sequences]), lengths)
        weights = self._bound()
        fed = [torch.from_numpy(tokens), torch.from_numpy(positions), *_continued_rows(later)]
        host = [*fed, *self.cache.write_index(slots, positions)]
        sent = platform_of(self.cache.device).send(host, self.cache.device)
        ids, rows, *continued = sent[: len(fed)]
        places = sent[len(fed) :]
        x = self._embed(weights, ids)
        cos, sin = (table.index_select(0, rows).unsqueeze(1) for table in (self._cos, self._sin))
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._qkv(layer, x, cos, sin)
            self.cache.write(index, places, keys, values)
            if index < len(weights.layers) - 1:  # the last layer's output is not used
                attended = self._causal(queries, keys, values, runs)
                attended += self._continued(index, queries, later, *continued)
                self._finish_layer(layer, x, torch.cat(attended))

    def decode(
        self, tokens: Tensor, positions: Tensor, write_index: Sequence[Tensor], plan: Any
    ) -> Tensor:
        """Logits float32 [n, vocab] after one more token in each of n slots.

        `tokens` int [n] are at `positions` int64 [n]; `write_index` and `plan` are the cache's, for
        these rows: where keys and values go, and what the tokens attend to.
        """
        weights = self._bound()
        x = self._embed(weights, tokens)
        # Expanded to all heads once, so that every layer's rotation reads contiguous memory.
        shape = (len(positions), self._num_rotated, self.architecture.head_dim)
        cos = self._cos.index_select(0, positions).unsqueeze(1).expand(shape).contiguous()
        sin = self._sin.index_select(0, positions).unsqueeze(1).expand(shape).contiguous()
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._qkv(layer, x, cos, sin)
            self.cache.write(index, write_index, keys, values)
            self._finish_layer(layer, x, self.cache.attend(index, queries, plan))
        logits = float32_product(normalize(x, weights.norm, self._norm_floor), weights.head)
        return logits if self._group is None else self._group.gather(logits)

    def _embed(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Rows [n, hidden] of the embedding, of which each rank holds a range."""
        if self._group is None:
            return weights.embedding.index_select(0, tokens)
        num_held = len(weights.embedding)
        local = tokens - self._group.rank * num_held
        is_held = (local >= 0) & (local < num_held)
        x = weights.embedding.index_select(0, local.clamp_(0, num_held - 1))
        return self._group.sum(x.mul_(is_held.unsqueeze(1)))

    def _add_sum(self, total: Tensor, x: Tensor, matrix: Matrix) -> None:
        """Add all ranks' `x` times `matrix` to `total`, in place."""
        assert self._group is not None
        total.add_(self._group.sum(product(x, matrix)))

    def _bound(self) -> Weights:
        if self.weights is None:
            raise RuntimeError("weights must be bound before tokens are computed")
        return self.weights

    def _qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, heads, head_dim], rotated keys and values [n, kv_heads, head_dim]."""
        h = normalize(x, layer.input_norm, self._norm_floor)
        qkv = product(h, layer.qkv, layer.qkv_bias)
        num_heads, dim = self._num_heads, self.architecture.head_dim
        qkv = qkv.view(x.shape[0], -1, dim)
        heads = qkv[:, : self._num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            floor = self._head_norm_floor
            queries = normalize(heads[:, :num_heads], layer.q_norm, floor)
            heads = torch.cat([queries, normalize(heads[:, num_heads:], layer.k_norm, floor)], 1)
        rotated = (heads * cos).addcmul_(torch.roll(heads, dim // 2, 2), sin).to(x.dtype)
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, self._num_rotated :]

    def _finish_layer(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> None:
        """Add the attention's output and the MLP to the residual stream `x`, in place."""
        self._add(x, attended, layer.output)
        if layer.output_bias is not None:
            x.add_(layer.output_bias)
        h = normalize(x, layer.mlp_norm, self._norm_floor)
        gate, up = product(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        self._add(x, functional.silu(gate).mul_(up), layer.down)
        if layer.down_bias is not None:
            x.add_(layer.down_bias)

    def _causal(
        self, queries: Tensor, keys: Tensor, values: Tensor, runs: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Causal attention inside each sequence, for each of `runs` of (sequences, length): [n,
        width]."""
        parts = []
        start = 0
        for count, length in runs:
            q, k, v = (
                part[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
                for part in (queries, keys, values)
            )
            out = attend_causally(q, k, v)
            parts.append(out.transpose(1, 2).reshape(count * length, -1))
            start += count * length
        return parts

    def _continued(
        self,
        layer: int,
        queries: Tensor,
        later: list[tuple[int, int, np.ndarray]],
        *rows: Tensor,
    ) -> list[Tensor]:
        """Attention of the last rows of `queries`, those of `later` sequences, over all that is in
        their slots' caches up to themselves, in one call for all: [n, width], or nothing. `rows`
        are `_continued_rows` of these."""
        if not later:
            return []
        slots, seen = rows
        nums = [len(ids) for *_, ids in later]
        q = nn.utils.rnn.pad_sequence(
            list(queries[len(queries) - sum(nums) :].split(nums)), batch_first=True
        )
        k, v = self.cache.read(layer, slots, seen.shape[-1])
        # Query heads that share a key head become query positions: fused kernels of GPUs take
        # masks, or grouped heads, not both.
        num_rows, num_kv_heads, width = len(q), k.shape[1], q.shape[1]
        grouped = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        mask = seen.repeat(1, 1, grouped.shape[2], 1)
        out = functional.scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask)
        out = out.view(num_rows, num_kv_heads, -1, width, out.shape[-1])
        attended = out.permute(0, 3, 1, 2, 4).flatten(2)
        return [row[:num] for row, num in zip(attended, nums, strict=True)]


def _continued_rows(later: list[tuple[int, int, np.ndarray]]) -> list[Tensor]:
    """Slots int64 [n] of sequences of which the cache has the beginning, and which of the cache's
    positions each of their tokens sees, bool [n, 1, longest of the tokens, longest]; [] without
    any."""
    if not later:
        return []
    slots, starts = (torch.tensor([each[field] for each in later]) for field in (0, 1))
    nums = torch.tensor([len(ids) for *_, ids in later])
    place = starts[:, None] + torch.arange(int(nums.max()))  # of each query
    seen = torch.arange(int((starts + nums).max())) <= place[:, :, None]
    return [slots, seen.unsqueeze(1)]


def float32_product(x: Tensor, matrix: Matrix) -> Tensor:
    """`x` [n, in] times `matrix`: float32 [n, out], with operands of any dtype.

    For logits: rounding them to bfloat16 would change log-probs by hundredths, and so pi/mu.
    """
    if isinstance(matrix, Tensor):
        return widened_mm(x, matrix)
    return matrix.product(x, torch.float32)


def product(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x` [n, in] times `matrix`, plus `bias`: [n, out]."""
    if isinstance(matrix, Tensor):
        return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    out = matrix.product(x)
    return out if bias is None else out.add_(bias)


def add_product(total: Tensor, x: Tensor, matrix: Matrix) -> None:
    """Add `x` times `matrix` to `total`, in place."""
    if isinstance(matrix, AdaptedMatrix):
        add_product(total, x, matrix.base)
        matrix.add(total, x)
    elif isinstance(matrix, Tensor):
        torch.addmm(total, x, matrix, out=total)
    else:
        total.add_(matrix.product(x))


def normalize(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * w, computed in float32.

    `weight` is w * sqrt(size), float32, and `floor` sqrt(size * eps): with these the quotient is
    x / hypot(|x|, floor) * weight, which takes few operations.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.div(x, torch.hypot(norm, floor, out=norm)).mul_(weight).to(x.dtype)
