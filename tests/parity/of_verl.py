"""verl's own loss functions, of the same rollouts. In all of them mu is the old policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from tests.parity.rollouts import MAX_TOKENS, Padded

kl_penalty = core_algos.kl_penalty
AVERAGES = {
    "tokens": "token-mean",
    "rollouts": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def loss(
    mode: str,
    rollouts: Padded,
    average: str,
    correction: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[float, torch.Tensor]:
    """(Loss, gradient by log pi) under `policy_loss.loss_mode=mode`; `correction` are the options
    of `rollout_correction`. Its divisors count what is masked too, as llamarl's do."""
    leaf = rollouts.log_pi.clone().requires_grad_()
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(rollout_correction=correction),
        global_batch_info={
            "batch_num_tokens": rollouts.num_tokens,
            "global_batch_size": len(rollouts.mask),
            "loss_scale_factor": MAX_TOKENS,
        },
        **fields,
    )
    found, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=rollouts.log_mu,
        log_prob=leaf,
        advantages=rollouts.advantages[:, None] * rollouts.mask,
        response_mask=rollouts.mask,
        loss_agg_mode=AVERAGES[average],
        config=config,
    )
    found.backward()
    assert leaf.grad is not None
    return found.item(), leaf.grad


def advantages(estimator: str, rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[groups, rollouts] from rewards [groups, functions, rollouts] of one token each: "gdpo" gets
    them apart, the others their weighted sum."""
    num_groups, num_functions, size = rewards.shape
    count = num_groups * size
    columns = {f"r{k}": rewards[:, k].ravel() for k in range(num_functions)}
    summed = np.einsum("gkn,k->gn", rewards, weights)
    apart = {
        "config": {"gdpo_reward_keys": [*columns], "gdpo_reward_weights": weights.tolist()},
        "non_tensor_batch": columns,
        "batch": {
            "prompts": torch.zeros(count, 1),
            "attention_mask": torch.ones(count, 2, dtype=torch.long),
        },
    }
    found, _ = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=torch.tensor(summed.ravel()[:, None]),
        response_mask=torch.ones(count, 1),
        index=np.repeat(np.arange(num_groups), size).astype(str).astype(object),
        **(apart if estimator == "gdpo" else {}),
    )
    return found.numpy().reshape(num_groups, size)
