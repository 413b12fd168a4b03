"""Decoupled PPO: the policy that a ratio is taken to, between the generator's and the trainer's.

Owns: the interpolation, and the weight that corrects for the age of a token. Does not own: the
losses, or which version a batch begins with. Invariant: nothing here has a gradient.

    loss      sg(min(prox / mu, rho)) * L(pi / prox), L any loss of a ratio
    source    Hilton et al. (arXiv 2110.00641), eq. 3; AReaL (arXiv 2505.24298), eq. 5

mu wrote the token, prox is the trainer's policy before the first step of the batch, pi is trained.
A clip around prox keeps a batch's steps close to where they began, however old its tokens are; a
clip around mu leaves old tokens no room. AReaL leaves out tokens whose weight is above its bound
(5); here the weight is cut there.
"""

import numpy as np
from torch import Tensor

from llamarl.algorithms.loss_inputs import LossInputs, bounded_ratio


def share_of_way(versions: np.ndarray, first_version: int, version: int) -> np.ndarray:
    """Where prox is taken to be between mu (0) and pi (1), float32 [N], for tokens written by
    `versions` [N], in a step at trainer version `version` of a batch that began at
    `first_version`.

        log prox = log mu + share * (log pi - log mu),  share = (first - w) / (version - w)

    for a token of version w: as if each optimizer step moved log-probs equally far (AReaL's
    "loglinear"). It is 1 in the first step of a batch, where prox is pi, and 0 for what was written
    after that.
    """
    if first_version == version:
        return np.ones(len(versions), np.float32)
    num_before = np.maximum(first_version - versions, 0)
    return (num_before / np.maximum(version - versions, 1)).astype(np.float32)


def interpolated(generator_logprobs: Tensor, trainer_logprobs: Tensor, share: Tensor) -> Tensor:
    """log prox of each token by `share_of_way`, [N] without gradient."""
    return generator_logprobs.lerp(trainer_logprobs.detach(), share)


def age_weight(inputs: LossInputs, rho: float) -> Tensor:
    """min(prox / mu, rho) of each token, [N]; 1 where the weight is 0."""
    assert inputs.proximal_logprobs is not None
    log_weight = inputs.proximal_logprobs - inputs.generator_logprobs
    return bounded_ratio(log_weight.masked_fill(inputs.weights <= 0, 0.0)).clamp(max=rho)
