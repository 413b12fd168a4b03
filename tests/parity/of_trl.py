"""TRL's own loss and advantages, of the same rollouts: the methods of its GRPOTrainer, on one that
was not built and has no model. Its old policy is mu."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.parity.rollouts import MAX_TOKENS, Padded

TEMPERATURES = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}


class Unbuilt(GRPOTrainer):
    """A GRPOTrainer in training with these attributes, whose model gives `log_probs` in turn."""

    def __init__(self, log_probs: list[torch.Tensor], **attributes: Any) -> None:
        self._log_probs = log_probs
        args = {
            **TEMPERATURES,
            "delta": None,
            "use_bias_correction_kl": False,
            "steps_per_generation": 1,
            "report_to": [],
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": len(log_probs[0]),
            "gradient_checkpointing_kwargs": None,
        }
        args |= {name: attributes.pop(name) for name in [*attributes] if name in args}
        accelerator = SimpleNamespace(
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            is_main_process=True,
            device=torch.device("cpu"),
        )
        defaults: dict[str, Any] = {
            "args": SimpleNamespace(**args),
            "accelerator": accelerator,
            "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "top_entropy_quantile": 1.0,
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "max_completion_length": MAX_TOKENS,
            "current_gradient_accumulation_steps": 1,
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
            "_metrics": {"train": defaultdict(list)},
        }
        for name, value in {**defaults, **attributes}.items():
            setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        found = self._log_probs.pop(0) if len(self._log_probs) > 1 else self._log_probs[0]
        return found, torch.zeros_like(found), None


def loss(
    rollouts: Padded, ratios: torch.Tensor | None = None, **options: Any
) -> tuple[float, torch.Tensor]:
    """(Loss, gradient by log pi) under these options, with the names of GRPOConfig; `ratios` are
    the importance sampling ratios [rollouts, 1] that `masked_ratios` gives."""
    leaf = rollouts.log_pi.clone().requires_grad_()
    trainer = Unbuilt([leaf], **options)
    inputs = {
        "prompt_ids": torch.zeros(len(leaf), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(leaf), 1, dtype=torch.long),
        "completion_ids": torch.zeros(leaf.shape, dtype=torch.long),
        "completion_mask": rollouts.mask,
        "advantages": rollouts.advantages,
        "old_per_token_logps": rollouts.log_mu,
        "ref_per_token_logps": rollouts.log_ref,
        "num_items_in_batch": rollouts.mask.sum(),
    }
    if ratios is not None:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = ratios
    found = trainer._compute_loss(None, inputs)
    found.backward()
    assert leaf.grad is not None
    return found.item(), leaf.grad


def generated(
    rollouts: Padded, rewards: np.ndarray, weights: np.ndarray, **options: Any
) -> dict[str, torch.Tensor]:
    """What `_generate_and_score_completions` makes of these rollouts, which the engine wrote with
    mu, and rewards [groups, functions, rollouts]."""
    num_functions, size = rewards.shape[1:]
    lengths = rollouts.mask.sum(1).long().tolist()
    ids = [[1] * length for length in lengths]
    sampled = [row[:n].tolist() for row, n in zip(rollouts.log_mu, lengths, strict=True)]
    flat = torch.tensor(rewards.transpose(0, 2, 1).reshape(-1, num_functions))
    trainer = Unbuilt(
        [rollouts.log_pi],
        environment_factories=None,
        environments=None,
        tools=None,
        _is_vlm=False,
        num_generations=size,
        num_iterations=1,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[2],
        chat_template_kwargs={},
        reward_weights=torch.tensor(weights),
        reward_funcs=[None] * num_functions,
        reward_func_names=[f"r{k}" for k in range(num_functions)],
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        ref_model=None,
        log_multimodal=False,
        _pending_extra_logs={},
        _pending_metrics={},
        _logs={
            **{name: [] for name in ("prompt", "completion", "advantages", "images")},
            "rewards": defaultdict(list),
            "extra": defaultdict(list),
        },
        **options,
    )
    trainer._generate = lambda prompts: ([[1]] * len(ids), ids, None, [""], sampled, {}, None, [])
    trainer._calculate_rewards = lambda *_: flat
    return trainer._generate_and_score_completions([{"prompt": "p"}] * len(ids))
