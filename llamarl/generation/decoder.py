"""The forward passes of generation: prompts in packs, then one token per running rollout.

Owns: the maths over bound weights and the KV cache, without autograd. Does not own: which rollout
is where (`engine.py`) or drawing tokens (`sampling.py`). Invariant: the numbers equal those of
`models.transformer` on the same tokens, up to rounding.

On small models the calls cost as much as the arithmetic, so a decode step does few of them:
fused qkv and gate-up products, one rotation for queries and keys, one write for keys and values,
residual sums inside the matrix products.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llamarl.generation.kv_cache import Group, KVCache
from llamarl.generation.parameters import LayerWeights, Weights
from llamarl.models.architecture import Architecture
from llamarl.models.transformer import rope_tables


class Decoder:
    """Runs `weights` (set by the engine, replaced at a flip) over `cache`.

    A row of the fused qkv product reads [kv_heads, group + 2, head_dim]: per kv head its queries,
    the key, the value.
    """

    def __init__(self, architecture: Architecture, cache: KVCache, device: torch.device) -> None:
        self.architecture = architecture
        self.cache = cache
        self.weights: Weights | None = None
        self._group = architecture.num_heads // architecture.num_kv_heads
        dtype = cache.store.dtype
        self._cos, self._sin = _head_tables(architecture, cache.num_positions, dtype, device)

    def prefill(self, sequences: list[tuple[int, list[int]]]) -> None:
        """Compute keys and values of whole sequences: (slot, tokens) each, no logits.

        Sequences of equal length share one attention call.
        """
        sequences = sorted(sequences, key=lambda item: len(item[1]))
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in sequences])
        positions = np.concatenate([np.arange(len(ids), dtype=np.int64) for _, ids in sequences])
        slots = np.repeat(
            np.array([slot for slot, _ in sequences], dtype=np.int64),
            [len(ids) for _, ids in sequences],
        )
        runs: list[tuple[int, int]] = []  # (sequences, length) of consecutive equal lengths
        for _, ids in sequences:
            if runs and runs[-1][1] == len(ids):
                runs[-1] = (runs[-1][0] + 1, len(ids))
            else:
                runs.append((1, len(ids)))
        weights = self._bound()
        device = self.cache.store.device
        x = weights.embedding[torch.from_numpy(tokens).to(device)]
        place = torch.from_numpy(positions).to(device)
        cos, sin = self._cos[place], self._sin[place]
        rows = self.cache.row_index(slots, positions)
        for index, layer in enumerate(weights.layers):
            last = index == len(weights.layers) - 1
            qkv = self._qkv(layer, x, cos, sin)
            self.cache.rows[index].index_put_((rows,), qkv[:, :, self._group :])
            if last:  # only the cache is wanted; the last layer's output is not
                return
            attended = self._causal(qkv, runs)
            self._finish_layer(layer, x, attended)

    def decode(
        self, tokens: Tensor, positions: np.ndarray, groups: list[Group], mask: Tensor
    ) -> Tensor:
        """Logits float32 [n, vocab] after one more token in each of slots 0..n-1.

        `tokens` int64 [n] go to `positions` int64 [n] of their slots. `groups` cut the slots for
        attention; `mask` [slots, 1, context] is 0 up to each slot's position and -inf behind.
        """
        weights = self._bound()
        num_rows = len(positions)
        x = weights.embedding.index_select(0, tokens)
        place = torch.from_numpy(positions).to(x.device)
        cos, sin = self._cos.index_select(0, place), self._sin.index_select(0, place)
        rows = self.cache.row_index(np.arange(num_rows), positions)
        heads = self.architecture.num_kv_heads
        dim = self.architecture.head_dim
        attended = x.new_empty(num_rows * heads, self._group, dim)
        flat = attended.view(num_rows, -1)
        for index, layer in enumerate(weights.layers):
            qkv = self._qkv(layer, x, cos, sin)
            self.cache.rows[index].index_put_((rows,), qkv[:, :, self._group :])
            queries = qkv.view(num_rows * heads, self._group + 2, dim)[:, : self._group]
            keys, values = self.cache.key_batches[index], self.cache.value_batches[index]
            for group in groups:
                start, stop = group.start * heads, group.stop * heads
                scores = torch.bmm(
                    queries[start:stop], keys[start:stop, : group.length].transpose(1, 2)
                )
                if not group.is_even:
                    rows_view = scores.view(group.stop - group.start, -1, group.length)
                    rows_view.add_(mask[group.start : group.stop, :, : group.length])
                probs = torch.softmax(scores, dim=-1)
                torch.bmm(probs, values[start:stop, : group.length], out=attended[start:stop])
            self._finish_layer(layer, x, flat)
        x = self._norm(x, weights.norm)
        return torch.mm(x, weights.head).float()

    def _bound(self) -> Weights:
        if self.weights is None:
            raise RuntimeError("weights must be bound before tokens are computed")
        return self.weights

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (weight.shape[0],), weight, self.architecture.norm_eps)

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries (scaled by 1/sqrt(head_dim)), rotated keys, and values of each row."""
        h = self._norm(x, layer.input_norm)
        if layer.qkv_bias is None:
            qkv = torch.mm(h, layer.qkv)
        else:
            qkv = torch.addmm(layer.qkv_bias, h, layer.qkv)
        group, dim = self._group, self.architecture.head_dim
        qkv = qkv.view(x.shape[0], self.architecture.num_kv_heads, group + 2, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :, :group] = self._norm(qkv[:, :, :group], layer.q_norm)
            qkv[:, :, group] = self._norm(qkv[:, :, group], layer.k_norm)
        half = dim // 2
        turned = qkv * cos
        turned[:, :, : group + 1, :half].addcmul_(qkv[:, :, : group + 1, half:], sin, value=-1)
        turned[:, :, : group + 1, half:].addcmul_(qkv[:, :, : group + 1, :half], sin)
        return turned

    def _finish_layer(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> None:
        """Add the attention's output and the MLP to the residual stream `x`, in place."""
        torch.addmm(x, attended, layer.output, out=x)
        if layer.output_bias is not None:
            x.add_(layer.output_bias)
        gate_up = torch.mm(self._norm(x, layer.mlp_norm), layer.gate_up)
        if layer.gate_up_bias is not None:
            gate_up.add_(layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=1)
        torch.addmm(x, functional.silu(gate).mul_(up), layer.down, out=x)
        if layer.down_bias is not None:
            x.add_(layer.down_bias)

    def _causal(self, qkv: Tensor, runs: list[tuple[int, int]]) -> Tensor:
        """Causal attention inside each packed sequence: [N, heads * head_dim]."""
        num_tokens, heads, dim = qkv.shape[0], qkv.shape[1], qkv.shape[3]
        group = self._group
        attended = qkv.new_empty(num_tokens, heads, group, dim)
        start = 0
        for count, length in runs:
            stop = start + count * length
            part = qkv[start:stop].view(count, length, heads, group + 2, dim)
            q = part[:, :, :, :group].flatten(2, 3).transpose(1, 2)
            k = part[:, :, :, group].repeat_interleave(group, dim=2).transpose(1, 2)
            v = part[:, :, :, group + 1].repeat_interleave(group, dim=2).transpose(1, 2)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            attended[start:stop] = out.transpose(1, 2).reshape(-1, heads, group, dim)
            start = stop
        return attended.view(num_tokens, -1)


def _head_tables(
    architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rotation factors per position and head kind: cos [P, 1, group + 2, head_dim], sin [P, 1,
    group + 1, head_dim / 2].

    Queries carry the attention's 1/sqrt(head_dim); values are multiplied by 1.
    """
    cos, sin = rope_tables(architecture, num_positions)
    group = architecture.num_heads // architecture.num_kv_heads
    half = architecture.head_dim // 2
    scale = torch.ones(group + 2, 1)
    scale[:group] = architecture.head_dim**-0.5
    all_cos = torch.ones(num_positions, 1, group + 2, architecture.head_dim)
    all_cos[:, 0, : group + 1] = torch.cat([cos[:, :half], cos[:, :half]], 1).unsqueeze(1)
    all_cos *= scale
    all_sin = sin[:, None, None, :half].float() * scale[: group + 1]
    return all_cos.to(device, dtype), all_sin.contiguous().to(device, dtype)
