"""A step of rollouts in the form that TRL and verl take, and what llamarl's loss is of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.policy_loss import denominator, policy_loss

MAX_TOKENS = 16
NUM_ROLLOUTS = 24


@dataclass
class Padded:
    """Rollouts in rows, of different lengths, padded on the right; float64 [rollouts, tokens]."""

    log_pi: torch.Tensor
    log_mu: torch.Tensor
    log_ref: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor  # [rollouts]

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())


def random_rollouts(seed: int, spread: float) -> Padded:
    """The log of the ratio has this deviation per token."""
    random = np.random.default_rng(seed)
    shape = (NUM_ROLLOUTS, MAX_TOKENS)
    lengths = random.integers(1, MAX_TOKENS + 1, NUM_ROLLOUTS)
    lengths[0] = MAX_TOKENS
    log_pi = random.uniform(-4, -0.01, shape)
    log_mu = np.minimum(log_pi + random.normal(0, spread, shape), -1e-3)
    log_ref = np.minimum(log_pi + random.normal(0, 0.3, shape), -1e-3)
    mask = np.arange(MAX_TOKENS) < lengths[:, None]
    advantages = random.normal(0, 1, NUM_ROLLOUTS)
    return Padded(*map(torch.tensor, (log_pi, log_mu, log_ref, mask.astype(float), advantages)))


def ours(config: AlgorithmConfig, rollouts: Padded) -> tuple[float, torch.Tensor]:
    """(The step's loss, its gradient by log pi [rollouts, tokens], 0 at padding)."""
    leaf = rollouts.log_pi.clone().requires_grad_()
    kept = rollouts.mask > 0
    lengths = kept.sum(1)
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    inputs = LossInputs(
        trainer_logprobs=leaf[kept],
        generator_logprobs=rollouts.log_mu[kept],
        advantages=rollouts.advantages[index],
        weights=torch.ones(rollouts.num_tokens, dtype=torch.float64),
        entropy=torch.zeros(rollouts.num_tokens, dtype=torch.float64),
        rollout_index=index,
        rollout_lengths=lengths,
        ref_logprobs=rollouts.log_ref[kept] if config.has_reference else None,
    )
    divisor = denominator(rollouts.num_tokens, len(lengths), MAX_TOKENS, config)
    loss = policy_loss(inputs, config).loss / divisor
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad
