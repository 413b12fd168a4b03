"""The output head, which turns hidden states into log-probs and entropy of the next token.

Logits and softmax are float32 with any compute dtype (bfloat16 logits would move log-probs by
hundredths), and at most `Platform.num_logits` logits are in memory."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llamarl.core.device.devices import platform_of

LEFT_OUT = -1e30  # the logit of a token that is not among those kept: its power is 0
TILE_TOKENS = 128  # a chunk is a multiple of the tile that GPU kernels of matrix products work on


class TokenStats(NamedTuple):
    """The statistics of each token: `logprobs` float32 [N] of the targets, `entropy` float32 [N] in
    nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def token_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    chosen: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> TokenStats:
    """Return log softmax(hidden weight^T / temperature) at `targets`, and that distribution's
    entropy.

    `hidden` [N, H]; `weight` [V, H]; `targets` int64 [N]; temperature above 0. It is differentiable
    in `hidden` and `weight`; logits are computed again in the backward pass. With `chosen` int64
    [T], different tokens, it returns these only: [T]. With `kept` int64 [N, K] the distribution of
    a token is the one over these next tokens alone, renormalised; -1 stands for none, and the
    target is among them.

    With a `group` of T ranks, `weight` [V / T, H] is this rank's range of the vocabulary and
    everything else is equal on all ranks; the gradient of `hidden` is then this rank's addend."""
    if chosen is not None:
        targets = targets.index_select(0, chosen)
        kept = None if kept is None else kept.index_select(0, chosen)
    stats = _TokenStats.apply(hidden, weight, targets, float(temperature), group, chosen, kept)
    return TokenStats(*stats)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        chosen: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the statistics from logits z with largest z* and total S = sum exp(z - z*):

        log p_t = z_t - z* - log S and entropy = log S - sum exp(z - z*) (z - z*) / S"""
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, peaks, log_totals = (torch.empty_like(logprobs) for _ in range(3))
        index, is_held = _find(targets, len(weight), group)
        for part in _chunks(targets, weight):
            logits = _logits(_rows(hidden, part, chosen), weight, temperature)
            own = logits.gather(1, index[part, None]).squeeze(1)
            if kept is not None:
                logits = _keep(logits, kept[part], group)
            peak = _reduce(logits.amax(1), dist.ReduceOp.MAX, group)
            logits -= peak[:, None]
            own = (own - peak) * is_held[part]
            powers = logits.exp()
            sums = [powers.sum(1), torch.linalg.vecdot(powers, logits), own]
            total, moment, own = _reduce(torch.stack(sums), dist.ReduceOp.SUM, group)
            peaks[part], log_totals[part] = peak, total.log()
            logprobs[part] = own - log_totals[part]
            entropy[part] = log_totals[part] - moment / total
        saved = hidden, weight, index, is_held, entropy, peaks, log_totals, chosen, kept
        ctx.save_for_backward(*saved)
        ctx.temperature, ctx.group = temperature, group
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None, None]:
        """Compute the gradients from those of logits z: d log p_t / dz = onehot(t) - p and d
        entropy / dz = -p (log p + entropy)."""
        hidden, weight, index, is_held, entropy, peaks, log_totals, chosen, kept = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # beside adapters the head is frozen
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        for part in _chunks(index, weight):
            rows = _rows(hidden, part, chosen)
            log_p = logits = _logits(rows, weight, ctx.temperature)
            if kept is not None:
                log_p = _keep(logits, kept[part], ctx.group)
            log_p -= (peaks[part] + log_totals[part])[:, None]
            # To pass over the many logits seldom, the factors of p come first, then p.
            factor = torch.zeros_like(peaks[part])
            if grad_logprobs is not None:
                factor -= grad_logprobs[part]
            if grad_entropy is None:
                grad = log_p.exp_().mul_(factor[:, None])
            else:
                factor -= grad_entropy[part] * entropy[part]
                grad = torch.addcmul(factor[:, None], log_p, grad_entropy[part, None], value=-1)
                grad *= log_p.exp_()
            if kept is not None:  # all other logits have no gradient
                places, is_here = _find(kept[part], len(weight), ctx.group)
                grad = torch.zeros_like(logits).scatter_add_(1, places, grad * is_here)
            if grad_logprobs is not None:
                own = grad_logprobs[part] * is_held[part]
                grad.scatter_add_(1, index[part, None], own[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if chosen is None:
                torch.mm(grad, weight, out=grad_hidden[part])
            else:
                grad_hidden.index_copy_(0, chosen[part], grad @ weight)
            if grad_weight is None:
                continue
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), rows)
            else:
                grad_weight += grad.t() @ rows
        whole = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, whole, None, None, None, None, None


def _keep(
    logits: torch.Tensor, kept: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the logits of these next tokens [n, K]; LEFT_OUT for those that this rank does not
    hold."""
    places, is_here = _find(kept, logits.shape[1], group)
    return torch.where(is_here > 0, logits.gather(1, places), LEFT_OUT)


def _rows(hidden: torch.Tensor, part: slice, chosen: torch.Tensor | None) -> torch.Tensor:
    return hidden[part] if chosen is None else hidden.index_select(0, chosen[part])


def _chunks(targets: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    size = max(1, platform_of(targets.device).num_logits // len(weight))
    size -= size % TILE_TOKENS if size > TILE_TOKENS else 0
    return [slice(start, start + size) for start in range(0, len(targets), size)]


def _find(
    targets: torch.Tensor, num_held: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each target among this rank's logits, and 1.0 if this rank holds it, both
    in the shape of `targets`."""
    index = targets if group is None else targets - dist.get_rank(group) * num_held
    is_held = (index >= 0) & (index < num_held)
    return index.clamp(0, num_held - 1), is_held.float()


def _reduce(
    values: torch.Tensor, how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(values, how, group)
    return values


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the logits, float32 [n, V]."""
    if hidden.dtype == torch.float32:
        logits = hidden @ weight.t()
    elif platform_of(hidden.device).has_wide_mm:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:  # CPUs have no such kernel, but a float32 product is no slower there
        logits = hidden.float() @ weight.float().t()
    if temperature != 1.0:
        logits /= temperature
    return logits
