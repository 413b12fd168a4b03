"""The output head: hidden states to log-probs and entropy of the next token.

Owns: the only place of the trainer where logits exist, a chunk of tokens at a time, in forward and
in backward. Does not own: which tokens count (the loss). Invariant: logits and softmax are
float32 whatever the compute dtype (bfloat16 logits would move log-probs by hundredths), and at
most CHUNK_ELEMENTS logits are alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

CHUNK_ELEMENTS = 2**24
"""Logits computed at once: 64 MiB in float32."""


class TokenStats(NamedTuple):
    """Per token: `logprobs` float32 [N] of the targets, `entropy` float32 [N] in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def token_stats(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> TokenStats:
    """log softmax(hidden weight^T / temperature) at `targets`, and that distribution's entropy.

    `hidden` [N, H]; `weight` [V, H]; `targets` int64 [N]; temperature above 0. Differentiable in
    `hidden` and `weight`; logits are computed again in the backward pass.
    """
    return TokenStats(*_TokenStats.apply(hidden, weight, targets, float(temperature)))


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part in _chunks(hidden, weight):
            log_p = _log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Of logits z: d log p_t / dz = onehot(t) - p and d entropy / dz = -p (log p + entropy)."""
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden, weight):
            log_p = _log_softmax(hidden[part], weight, ctx.temperature)
            p = log_p.exp()
            grad = torch.zeros_like(p) if grad_entropy is None else -(log_p + entropy[part, None])
            if grad_entropy is not None:
                grad *= grad_entropy[part, None]
            if grad_logprobs is not None:
                grad -= grad_logprobs[part, None]
            grad *= p
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 [n, V] log-probabilities."""
    if hidden.dtype == torch.float32:
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:  # no such kernel on CPUs, where a float32 product is no slower
        logits = hidden.float() @ weight.float().t()
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, dim=-1)
