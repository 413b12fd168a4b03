"""The losses of demonstrations and of a teacher, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llamarl.core.config import LoraConfig
from llamarl.trainer.losses import algorithms
from llamarl.trainer.losses.distill import DistillConfig
from llamarl.trainer.losses.sft import SFTConfig
from llamarl.trainer.policy_loss import is_inert, policy_loss
from tests.unit.test_losses import example, loss_and_gradient


def test_sft_is_the_likelihood_whatever_was_drawn():
    loss, gradient = loss_and_gradient(SFTConfig())
    assert loss == pytest.approx(1 + 2 + 0.5)
    assert gradient == [-1, -1, -1]
    assert loss_and_gradient(SFTConfig(), (1, 0, 1)) == (1.5, [-1, 0, -1])


def test_distillation_weighs_log_pi_by_the_gap_to_the_teacher():
    # gaps -1.5 + 1, -1 + 2, -0.5 + 0.5; ratios 2, 1/2, 8 cut at 4; the gap of the last is 0
    loss, gradient = loss_and_gradient(DistillConfig(teacher="t"))
    assert gradient == pytest.approx([1, -0.5, 0])
    assert loss == pytest.approx(1 * -1 - 0.5 * -2)


def test_a_reward_counts_beside_the_teacher_by_its_coefficient():
    # advantages 1, 1, -2 times 3, and gaps times 2
    config = DistillConfig(teacher="t", teacher_coefficient=2.0, reward_coefficient=3.0)
    _, gradient = loss_and_gradient(config)
    assert gradient == pytest.approx([-2 * (3 - 1), -0.5 * (3 + 2), -4 * (-6 + 0)])


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl():
    """Over all tokens of a vocabulary, each as often as pi draws it."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, dtype=torch.float64), -1)
    log_pi = torch.log_softmax(logits, -1)
    kl = (log_pi.exp() * (log_pi - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    inputs = replace(
        example(),
        trainer_logprobs=log_pi,
        generator_logprobs=log_pi.detach(),
        advantages=torch.zeros(7, dtype=torch.float64),
        weights=torch.ones(7, dtype=torch.float64),
        entropy=torch.zeros(7, dtype=torch.float64),
        rollout_index=torch.zeros(7, dtype=torch.int64),
        rollout_lengths=torch.tensor([7]),
        ref_logprobs=teacher,
    )
    found = torch.zeros(7, dtype=torch.float64)
    for token in range(7):  # one at a time: the loss is a sum over what was drawn
        only = torch.zeros(7, dtype=torch.float64)
        only[token] = 1
        outputs = policy_loss(replace(inputs, weights=only), DistillConfig(teacher="t"))
        (gradient,) = torch.autograd.grad(outputs.loss, logits, retain_graph=True)
        found += log_pi[token].exp().detach() * gradient
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_token_that_the_teacher_finds_impossible_counts_as_five_nats():
    inputs = replace(example(), ref_logprobs=torch.tensor([-900.0, -1.0, -0.5]).double())
    outputs = policy_loss(inputs, DistillConfig(teacher="t"))
    outputs.loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([2 * 5, -0.5, 0])


def test_no_rollout_is_skipped_where_the_teacher_or_a_demonstration_has_a_gradient():
    assert not is_inert(0.0, DistillConfig(teacher="t"))
    assert not is_inert(0.0, SFTConfig())


def test_a_teacher_runs_beside_a_policy_with_adapters_too():
    lora = LoraConfig(rank=4)
    assert DistillConfig(teacher="t").runs_reference(lora)
    assert not algorithms()["grpo"](kl_coefficient=0.1).runs_reference(lora)
    assert algorithms()["grpo"](kl_coefficient=0.1).runs_reference(LoraConfig())


def test_distillation_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.teacher must name a checkpoint folder"):
        DistillConfig()
