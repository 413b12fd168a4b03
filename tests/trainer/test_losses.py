"""What holds for every loss: tokens without weight, order, averages, metrics; teachers.

The example: rollout 0 has two tokens with ratios 2 and 1/2 and advantage 1, rollout 1 has one
token with ratio 8 and advantage -2. test_loss_formulas compares losses and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from llamarl.core.config import AlgorithmConfig, LoraConfig
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses import algorithms
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.clip import DrGRPOConfig, GRPOConfig, PPOConfig
from llamarl.trainer.losses.distill import DistillConfig
from llamarl.trainer.losses.sft import SFTConfig
from llamarl.trainer.policy_loss import (
    LossMetrics,
    denominator,
    is_inert,
    kl_penalty,
    on_policy_warning,
    policy_loss,
    statistics,
)
from tests.loss_formulas import CONFIGS

PI = [-1.0, -2.0, -0.5]  # log pi of the three tokens
RATIOS = [2.0, 0.5, 8.0]
ADVANTAGES = [1.0, 1.0, -2.0]


def example(weights: tuple[float, ...] = (1, 1, 1)) -> LossInputs:
    trainer = torch.tensor(PI, dtype=torch.float64, requires_grad=True)
    return LossInputs(
        trainer_logprobs=trainer,
        generator_logprobs=trainer.detach() - torch.tensor(RATIOS, dtype=torch.float64).log(),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
        entropy=torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64, requires_grad=True),
        rollout_index=torch.tensor([0, 0, 1]),
        rollout_lengths=torch.tensor([2, 1]),
        ref_logprobs=torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64),
    )


def loss_and_gradient(
    config: AlgorithmConfig, weights: tuple[float, ...] = (1, 1, 1)
) -> tuple[float, list[float]]:
    inputs = example(weights)
    outputs = policy_loss(inputs, config)
    outputs.loss.backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None
    return outputs.loss.item(), gradient.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_kl_gradient_is_exact_in_expectation(estimator):
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)
    log_pi = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - ref)).sum(), logits)
    log_pi = torch.log_softmax(logits, 0)
    expectation = (log_pi.detach().exp() * kl_penalty(log_pi - ref, estimator)).sum()
    (estimated,) = torch.autograd.grad(expectation, logits)
    assert estimated.tolist() == pytest.approx(exact.tolist())


def test_kl_penalty_without_reference_is_refused():
    inputs = replace(example(), ref_logprobs=None)
    with pytest.raises(ValueError, match="ref_logprobs must be given"):
        policy_loss(inputs, GRPOConfig())
    assert policy_loss(inputs, PPOConfig()).sums["ref_kl"].item() == 0


def test_metrics_are_sums_over_tokens():
    sums = policy_loss(example(), AIPOConfig(rho=4)).sums
    assert sums["tokens"].item() == 3
    assert sums["ratio"].item() == pytest.approx(10.5)
    assert sums["clipped"].item() == 1
    assert sums["kl"].item() == pytest.approx(10.5 - 3 - math.log(8))
    assert sums["entropy"].item() == pytest.approx(0.7)
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_token_without_weight_has_no_part_in_anything(config):
    inputs = example(weights=(0, 1, 1))
    outputs = policy_loss(replace(inputs), config)
    poisoned = inputs.trainer_logprobs.detach().clone()
    poisoned[0] = -1e4
    poisoned.requires_grad_()
    generator = inputs.generator_logprobs.clone()
    generator[0] = -1e5  # ratio e^90000
    other = policy_loss(
        replace(inputs, trainer_logprobs=poisoned, generator_logprobs=generator), config
    )
    other.loss.backward()
    assert poisoned.grad is not None
    assert poisoned.grad[0] == 0
    assert poisoned.grad.isfinite().all()
    assert other.loss.item() == outputs.loss.item()
    assert {k: v.item() for k, v in other.sums.items()} == {
        k: v.item() for k, v in outputs.sums.items()
    }
    assert outputs.sums["tokens"].item() == 2
    assert outputs.ratio_max.item() == pytest.approx(8)


def test_trl_and_verl_write_the_gradient_of_k2_in_other_ways():
    """TRL 1.16 (use_bias_correction_kl): k3 times the ratio, 1 here; verl 0.9.1: kl+, low_var_kl+.

    Their plain kl has a gradient of 1 for every token, which the page on both says.
    """
    d = torch.tensor([-2.5, -1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    k3 = torch.exp(-d) + d - 1
    corrected = k3 * torch.exp(d - d.detach())
    straight = d.square() / 2 - (d.square() / 2).detach() + k3.detach()
    (wanted,) = torch.autograd.grad(kl_penalty(d, "k2").sum(), d)
    for theirs in (corrected, straight, kl_penalty(d, "k1")):
        (found,) = torch.autograd.grad(theirs.sum(), d)
        assert found.tolist() == pytest.approx(wanted.tolist())
    assert torch.equal(straight, k3)
    assert torch.equal(kl_penalty(d, "k1"), d)


@pytest.mark.parametrize(("ratio", "warns"), [(1.01, False), (1.5, True)])
def test_a_first_step_that_clips_is_warned_of(ratio, warns):
    inputs = example()
    loss_metrics = LossMetrics()
    noisy = replace(
        inputs,
        generator_logprobs=inputs.trainer_logprobs.detach() - math.log(ratio),
        advantages=torch.ones_like(inputs.advantages),
    )
    loss_metrics.add(policy_loss(noisy, PPOConfig()), 3)
    message = on_policy_warning(statistics(loss_metrics.vector()[None], 3.0))
    if warns:
        assert message is not None
        assert "clipped 100% of its tokens" in message
        assert "largest ratio 1.5" in message
    else:
        assert message is None


def test_nothing_trained_is_a_zero_loss_that_backpropagates():
    inputs = example(weights=(0, 0, 0))
    outputs = policy_loss(inputs, AIPOConfig())
    outputs.loss.backward()
    assert outputs.loss.item() == 0
    assert outputs.ratio_max.item() == 0
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == [0, 0, 0]


def random_rollouts(order: list[int]) -> LossInputs:
    """Four rollouts of lengths 3, 1, 5, 2 packed in `order`; one token in six has no weight."""
    rng = torch.Generator().manual_seed(0)
    lengths = [3, 1, 5, 2]
    columns = [torch.randn(6, length, generator=rng, dtype=torch.float64) for length in lengths]
    packed = torch.cat([columns[i] for i in order], dim=1)
    return LossInputs(
        trainer_logprobs=(packed[0] - 3).requires_grad_(),
        generator_logprobs=packed[1] - 3,
        advantages=packed[2],
        weights=(packed[3] > -1).to(torch.float64),
        entropy=packed[4],
        rollout_index=torch.repeat_interleave(
            torch.arange(len(order)), torch.tensor([lengths[i] for i in order])
        ),
        rollout_lengths=torch.tensor([lengths[i] for i in order]),
        ref_logprobs=packed[5] - 3,
    )


@pytest.mark.parametrize("normalization", ["tokens", "rollouts", "constant"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_order_and_cutting_of_rollouts_change_neither_loss_nor_gradient(config, normalization):
    config = replace(config, normalization=normalization, kl_coefficient=0.1)
    whole = random_rollouts([0, 1, 2, 3])
    expected = policy_loss(whole, config)
    expected.loss.backward()
    assert whole.trainer_logprobs.grad is not None
    by_rollout = whole.trainer_logprobs.grad.split([3, 1, 5, 2])

    loss, ratio = 0.0, 0.0
    for order in ([2, 0], [3], [1]):
        part = random_rollouts(order)
        outputs = policy_loss(part, config)
        outputs.loss.backward()
        loss += outputs.loss.item()
        ratio += outputs.sums["ratio"].item()
        torch.testing.assert_close(
            part.trainer_logprobs.grad, torch.cat([by_rollout[i] for i in order])
        )
    assert loss == pytest.approx(expected.loss.item())
    assert ratio == pytest.approx(expected.sums["ratio"].item())


def test_denominators_count_tokens_rollouts_or_the_budget():
    assert denominator(130, 4, 64, AIPOConfig()) == 130
    assert denominator(130, 4, 64, GRPOConfig()) == 4
    assert denominator(130, 4, 64, DrGRPOConfig()) == 256


def test_only_rollouts_without_any_gradient_are_inert():
    assert is_inert(0.0, AIPOConfig())
    assert not is_inert(0.1, AIPOConfig())
    assert not is_inert(0.0, GRPOConfig())
    assert not is_inert(0.0, AIPOConfig(entropy_coefficient=0.01))


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
