"""DPPO: a token is masked by how far its probability moved, not by the ratio.

    formula   - sg(min(r, rho)) A log pi, and 0 where A > 0 and D_high, or A <= 0 and D_low

              dppo_tv                         dppo_kl
    D_high    pi - mu > high                  D > high and pi > mu
    D_low     pi - mu < - low                 D > low and pi < mu
    D         total variation of the token    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
              against all others
    low, high 0.15                            0.05
    source    Rethinking the Trust Region in LLM Reinforcement Learning (arXiv 2602.04879), eq. 12
              to 14; A = reward - mean, sum over tokens divided by a constant
    TRL       has no such loss
    verl      loss_mode dppo_tv, dppo_kl: the same; low and high are clip_ratio_low and
              clip_ratio_high, rho is clip_ratio_c, 3 unless set
    here      low and high of verl's example; rho 20, for the paper finds that a small one biases

r = pi / mu says little of a rare token: from 1e-5 to 1e-4 it is 10 and the policy has not moved. A
token with pi = 0.9 may lose half of its probability before r falls below 0.5. D weighs both by
what they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarl.core.config import AlgorithmConfig
from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms

if TYPE_CHECKING:
    from torch import Tensor


LEAST_REST = 1e-8  # of probability: keeps log(1 - pi) finite at pi = 1


@dataclass(kw_only=True)
class DPPOConfig(AlgorithmConfig):
    """Fields of both divergences."""

    normalization: str = "constant"
    divergence_low: float = number(0.15, above=0, most=100)
    """A token with A <= 0 that became less likely by more than this divergence has no gradient."""
    divergence_high: float = number(0.15, above=0, most=100)
    """A token with A > 0 that became likelier by more than this divergence has no gradient."""
    rho: float = number(20.0, least=1, most=1e6)
    """Upper bound of pi/mu as a weight, at least 1; the papers advise 2 to 10 for aipo, and a large
    one for dppo."""


@dataclass(kw_only=True)
class DPPOTVConfig(DPPOConfig):
    """DPPO with the total variation between a token and all others."""


@dataclass(kw_only=True)
class DPPOKLConfig(DPPOConfig):
    """DPPO with the KL divergence between a token and all others."""

    divergence_low: float = 0.05
    divergence_high: float = 0.05


ALGORITHMS = {"dppo_tv": DPPOTVConfig, "dppo_kl": DPPOKLConfig}


def loss(inputs: LossInputs, config: DPPOConfig) -> LossTerms:
    """Return the loss, and the tokens that are masked or above rho, [N] each."""
    ratio = inputs.ratio.detach()
    log_pi, log_mu = inputs.trainer_logprobs.detach(), inputs.centre_logprobs
    moved = log_pi.exp() - log_mu.exp()
    size = binary_kl(log_pi, log_mu) if isinstance(config, DPPOKLConfig) else moved.abs()
    is_high = (inputs.advantages > 0) & (moved > 0) & (size > config.divergence_high)
    is_low = (inputs.advantages <= 0) & (moved < 0) & (size > config.divergence_low)
    masked = is_high | is_low
    weight = ratio.clamp(max=config.rho).masked_fill(masked, 0.0)
    return -weight * inputs.advantages * inputs.trainer_logprobs, masked | (ratio > config.rho)


def binary_kl(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """Return KL(mu || pi) in nats of two outcomes, the token and any other, [N]."""
    rest_mu, rest_pi = ((-log_p.expm1()).clamp(min=0) for log_p in (log_mu, log_pi))
    log_rest = (rest_mu + LEAST_REST).log() - (rest_pi + LEAST_REST).log()
    return log_mu.exp() * (log_mu - log_pi) + rest_mu * log_rest
