"""Sampling of tokens: the whole batch at once, each rollout from its own random stream.

Log-probs are those of the distribution drawn from: after temperature, top-k and top-p, and
renormalised. Temperature 0 takes the likeliest token and reports its log-prob at temperature 1.

The random number of token i of a rollout is a function of (seed, i) alone, so a rollout does not
depend on its neighbours, on the replica, or on having been cut and resumed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NONE = -1  # no token
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, num_tokens: int) -> np.ndarray:
    """Return a random number in [0, 1) per token index: float32 [num_tokens], from (seed, index)
    alone."""
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
    words = _mix(start + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64))
    # With 23 bits the largest number, times any float32 total, is still below the total.
    return ((words >> np.uint64(41)).astype(np.float32)) * np.float32(2.0**-23)


@dataclass(slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of the batch, one entry per row; None where no row needs them."""

    temperature: Tensor | None  # float32 [n, 1], 1 for greedy rows; None if all are 1
    greedy: Tensor | None  # bool [n, 1]
    top_k: Tensor | None  # int64 [n, 1], 0 is off
    top_p: Tensor | None  # float32 [n, 1], 1 is off
    min_p: Tensor | None = None  # float32 [n, 1], 0 is off

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return any(each is not None for each in (self.top_k, self.top_p, self.min_p))


def truncate(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None = None
) -> Tensor:
    """Return logits [n, V] with everything outside min-p, then outside top-k of the rest, then
    outside top-p of that, at -inf.

    min-p keeps what is at least p times as likely as the likeliest token, top-p keeps the smallest
    set of likeliest tokens whose probability reaches p. Of equal logits the lower token ids are
    kept."""
    if min_p is not None:
        least = logits.amax(dim=-1, keepdim=True) + min_p.log()
        logits = logits.masked_fill(logits < least, -torch.inf)
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        drop |= (rank >= top_k) & (top_k > 0)
        ordered = ordered.masked_fill(drop, -torch.inf)
    if top_p is not None:
        probs = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probs, dim=-1) - probs
        drop |= (before >= top_p) & (top_p < 1)
    return logits.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)


def sample(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, num_kept: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the distribution function at `uniform`.

    `logits` float32 [n, V] (overwritten), `uniform` float32 [n, 1]. Returns ids int64 [n],
    log-probs float32 [n], and the likeliest `num_kept` tokens among those that could be drawn,
    int32 [n, num_kept], with -1 where there are fewer.
    """
    if rows.temperature is not None:
        logits.div_(rows.temperature)
    if rows.is_restricted:
        logits = truncate(logits, rows.top_k, rows.top_p, rows.min_p)
    probs = torch.softmax(logits, dim=-1)
    ids = _invert(probs, uniform)
    if rows.greedy is not None:
        ids = torch.where(rows.greedy, logits.argmax(dim=-1, keepdim=True), ids)
    best = torch.topk(logits, num_kept, dim=-1) if num_kept else None
    kept = ids.new_empty((len(ids), 0)) if best is None else best.indices
    if best is not None:
        kept = kept.masked_fill(best.values == -torch.inf, NONE)
    return ids.squeeze(1), probs.gather(1, ids).log_().squeeze(1), kept.int()


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds `uniform` [n, 1]: int64 [n, 1].

    It works in two levels, over blocks of about sqrt(V) tokens and then inside one block, because a
    running sum over the whole vocabulary cannot use vector instructions."""
    num_rows, vocab = probs.shape
    block = 1 << max(vocab.bit_length() // 2, 1)
    if vocab % block:
        probs = torch.nn.functional.pad(probs, (0, block - vocab % block))
    blocks = probs.view(num_rows, -1, block)
    masses = blocks.sum(dim=-1)
    running = _running(masses)
    # Rounding may leave the total slightly off 1: scale, so that the last token is not favoured.
    target = uniform * running.amax(dim=1, keepdim=True)
    chosen = _first_above(running, target)
    before = running.gather(1, chosen) - masses.gather(1, chosen)
    inner = blocks.gather(1, chosen.unsqueeze(2).expand(-1, 1, block)).squeeze(1)
    offset = _first_above(_running(inner), (target - before).clamp_(min=0))
    return chosen.mul_(block).add_(offset)


def _running(masses: Tensor) -> Tensor:
    """Return running sums of `masses` [n, m], but 0 where a mass is 0, so that no search ends
    there.

    A GPU sums in a different order at each place, so its sums may rise where the mass is 0."""
    return masses.cumsum(dim=1).mul_(masses > 0)


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first of the `running` sums [n, m] above `target` [n, 1], or, if
    rounding leaves none, of the first largest one: int64 [n, 1]."""
    is_found = (running > target) | (running == running.amax(dim=1, keepdim=True))
    return is_found.view(torch.uint8).argmax(dim=1, keepdim=True)
