"""Causal attention over packed rollouts.

A rollout attends only to itself, and padding never reaches a result or a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from llamarl.core.device.devices import platform_of

SPLIT_RATIO = 2  # a block's longest rollout is at most so many times as long as its shortest one


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A block of `num_rows` rollouts padded on the right to `width` tokens.

    `tokens` int64 [n] are the packed tokens that it holds; `cells` int64 [n] are their places among
    the block's num_rows * width cells. Both are None if the block is the packed tokens in their
    order."""

    num_rows: int
    width: int
    tokens: torch.Tensor | None
    cells: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Packing:
    """N packed tokens: `positions` int64 [N] restart at 0 with each rollout; `blocks` cover all."""

    positions: torch.Tensor
    num_positions: int
    blocks: tuple[AttentionBlock, ...]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The N tokens of packed rollouts that a model is fed, on one device: `token_ids`, and
    `targets`, whose log-probs it returns, int64 [N]. With `chosen` int64 [T], different tokens, it
    returns theirs only: prompts need no logits. With `kept` int64 [N, K] the log-prob of a target
    is that among these next tokens (see `head.token_stats`). In each layer with experts the tokens
    go to `experts` [N, layers, k], a record of those that the generator chose; None: the routers
    choose."""

    token_ids: torch.Tensor
    packing: Packing
    targets: torch.Tensor
    chosen: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    experts: torch.Tensor | None = None


def make_packing(lengths: Sequence[int], multiple: int = 1) -> Packing:
    """Return positions and attention blocks of rollouts of these lengths (at least 1, in packed
    order), in host memory; a rollout more makes the number of tokens a `multiple`, if it is not.
    Raises ValueError for other lengths."""
    if min(lengths, default=0) < 1:
        raise ValueError(f"lengths must be above 0, and at least one, got {tuple(lengths)}")
    num_added = -sum(lengths) % multiple
    sizes = np.asarray([*lengths, *[num_added] * (num_added > 0)], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    longest = int(sizes.max())
    if int(sizes.min()) == longest:
        blocks = [AttentionBlock(len(sizes), longest, None, None)]
    else:
        order = np.argsort(-sizes, kind="stable")
        blocks, first = [], 0
        for i in range(1, len(order) + 1):
            if i == len(order) or sizes[order[i]] * SPLIT_RATIO < sizes[order[first]]:
                chosen = order[first:i]
                blocks.append(_block(sizes[chosen], starts[chosen]))
                first = i
    return Packing(torch.from_numpy(positions), longest, tuple(blocks))


def _block(sizes: np.ndarray, starts: np.ndarray) -> AttentionBlock:
    width = int(sizes[0])
    before = np.cumsum(sizes) - sizes
    offset = np.arange(sizes.sum()) - np.repeat(before, sizes)
    tokens = np.repeat(starts, sizes) + offset
    cells = np.repeat(np.arange(len(sizes)) * width, sizes) + offset
    return AttentionBlock(len(sizes), width, torch.from_numpy(tokens), torch.from_numpy(cells))


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v, causal, per rollout; `scale` None is 1 / sqrt(head_dim).

    `q` [N, num_heads, head_dim]; `k`, `v` [N, num_kv_heads, head_dim], whose heads may have another
    size in `v`; query head h reads key head h // (num_heads / num_kv_heads). With a `window` a
    token sees itself and the `window` - 1 tokens before it. Returns [N, num_heads, head_dim of
    v]."""
    if len(packing.blocks) == 1 and packing.blocks[0].tokens is None:
        return _attend(q, k, v, packing.blocks[0], scale, window).flatten(0, 1)
    out: torch.Tensor | None = None
    for block in packing.blocks:
        assert block.tokens is not None
        assert block.cells is not None
        num_cells = block.num_rows * block.width
        pad_q, pad_k, pad_v = (
            _Move.apply(x, block.tokens, block.cells, num_cells) for x in (q, k, v)
        )
        attended = _attend(pad_q, pad_k, pad_v, block, scale, window).flatten(0, 1)
        part = _Move.apply(attended, block.cells, block.tokens, len(q))
        out = part if out is None else out + part
    assert out is not None
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: AttentionBlock,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of one padded block, [num_rows, width, heads, head_dim]. Padding is on
    the right, so the causal mask hides it."""
    q, k, v = (
        x.reshape(block.num_rows, block.width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
    )
    band = None
    if window is not None and window < block.width:  # else every token sees all before it
        band = q.new_ones(block.width, block.width, dtype=torch.bool).tril().triu(1 - window)
    return attend_causally(q, k, v, band, scale).transpose(1, 2)


def attend_causally(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of `q` [rows, num_heads, width, head_dim] over `k` and `v` [rows,
    num_kv_heads, width, ...] as `mask` says, or else causal, by a fused kernel of the device.

    If no such kernel lets query heads share a key head, the key heads are repeated: torch would
    keep the scores of all pairs of tokens otherwise."""
    group = q.shape[1] // k.shape[1]
    has_groups = platform_of(q.device).has_grouped_attention(q.dtype, is_masked=mask is not None)
    if group > 1 and not has_groups:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=group > 1 and has_groups,
    )


class _Move(torch.autograd.Function):
    """Copies rows `source` of [n, ...] to rows `target` of zeros [size, ...]; no row occurs twice.

    Autograd's backward of indexing sums duplicates, which is several times slower.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int
    ) -> torch.Tensor:
        ctx.save_for_backward(source, target)
        ctx.num_rows = len(x)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, target = ctx.saved_tensors
        rows = grad.index_select(0, target)
        moved = grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, source, rows)
        return moved, None, None, None
