"""Every algorithm against numbers and gradients worked by hand.

The example: rollout 0 has two tokens with ratios 2 and 1/2 and advantage 1, rollout 1 has one
token with ratio 8 and advantage -2.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses import algorithms
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.cispo import CISPOConfig
from llamarl.trainer.losses.clip import DAPOConfig, DrGRPOConfig, GRPOConfig, PPOConfig
from llamarl.trainer.losses.distill import DistillConfig
from llamarl.trainer.losses.dppo import DPPOKLConfig, DPPOTVConfig
from llamarl.trainer.losses.gmpo import GMPOConfig
from llamarl.trainer.losses.gspo import GSPOConfig
from llamarl.trainer.losses.reinforce import ReinforceConfig, RLOOConfig
from llamarl.trainer.losses.sapo import SAPOConfig
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

PI = [-1.0, -2.0, -0.5]  # log pi of the three tokens
RATIOS = [2.0, 0.5, 8.0]
ADVANTAGES = [1.0, 1.0, -2.0]
CONFIGS = [
    AIPOConfig(),
    ReinforceConfig(),
    RLOOConfig(),
    PPOConfig(),
    GRPOConfig(),
    DrGRPOConfig(),
    DAPOConfig(),
    CISPOConfig(),
    GSPOConfig(),
    GMPOConfig(),
    SAPOConfig(),
    DPPOTVConfig(),
    DPPOKLConfig(),
    SFTConfig(),
    DistillConfig(teacher="t"),
]


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


def test_every_algorithm_config_has_a_loss():
    found = {options for name, options in algorithms().items() if name != "task"}
    assert {type(config) for config in CONFIGS} == found


def test_aipo_weighs_log_pi_by_the_ratio_cut_at_rho():
    # - (2 * 1 * -1) - (1/2 * 1 * -2) - (4 * -2 * -0.5) = 2 + 1 - 4
    loss, gradient = loss_and_gradient(AIPOConfig(rho=4))
    assert loss == pytest.approx(-1)
    assert gradient == pytest.approx([-2, -0.5, 8])


def test_aipo_is_not_the_differentiated_cut_ratio():
    _, gradient = loss_and_gradient(AIPOConfig(rho=4))
    inputs = example()
    ratio = (inputs.trainer_logprobs - inputs.generator_logprobs).exp()
    (-ratio.clamp(max=4) * inputs.advantages).sum().backward()
    look_alike = inputs.trainer_logprobs.grad
    assert look_alike is not None
    # The same below rho; above it the look-alike learns nothing where AIPO keeps the weight rho.
    assert look_alike.tolist()[:2] == pytest.approx(gradient[:2])
    assert look_alike.tolist()[2] == 0
    assert gradient[2] == pytest.approx(8)


def test_aipo_gradient_scales_with_a_known_error_in_mu():
    inputs = example()
    shifted = replace(inputs, generator_logprobs=inputs.generator_logprobs - math.log(1.5))
    policy_loss(shifted, AIPOConfig(rho=100)).loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([-3, -0.75, 24])


@pytest.mark.parametrize("config", [ReinforceConfig(), RLOOConfig()])
def test_reinforce_ignores_the_ratio(config):
    # - (1 * -1) - (1 * -2) - (-2 * -0.5) = 1 + 2 - 1
    loss, gradient = loss_and_gradient(config)
    assert loss == pytest.approx(2)
    assert gradient == [-1, -1, 2]


@pytest.mark.parametrize("config", [PPOConfig(clip_ratio_c=10), DrGRPOConfig(clip_ratio_c=10)])
def test_clip_cuts_the_gain_but_never_the_loss(config):
    # - min(2, 1.2) - min(0.5, 0.8) - min(8 * -2, 1.2 * -2) = -1.2 - 0.5 + 16
    loss, gradient = loss_and_gradient(config)
    assert loss == pytest.approx(14.3)
    assert gradient == pytest.approx([0, -0.5, 16])


def test_dapo_clips_higher():
    loss, gradient = loss_and_gradient(DAPOConfig(clip_ratio_c=10))
    assert loss == pytest.approx(-1.28 - 0.5 + 16)
    assert gradient == pytest.approx([0, -0.5, 16])


def test_dual_clip_bounds_the_loss_of_a_growing_bad_token():
    # - min(2, 1.2) - min(0.5, 0.8) - max(min(8 * -2, 1.2 * -2), 3 * -2) = -1.2 - 0.5 + 6
    loss, gradient = loss_and_gradient(PPOConfig())
    assert loss == pytest.approx(4.3)
    assert gradient == pytest.approx([0, -0.5, 0])
    assert policy_loss(example(), PPOConfig()).sums["clipped"].item() == 2


def test_clip_low_bounds_a_shrinking_bad_token():
    # ratio 1/2, advantage -1: - min(-0.5, 0.8 * -1) = 0.8 and no gradient
    inputs = example()
    bad = replace(inputs, advantages=torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64))
    outputs = policy_loss(bad, PPOConfig())
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(0.8)
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == [0, 0, 0]
    assert outputs.sums["clipped"].item() == 1


def test_grpo_averages_each_rollout_and_adds_the_kl_penalty():
    # d = log pi - log ref = 0.5, -1, 0; k3 = e^-d - 1 + d; gradient 1 - e^-d
    # rollout 0 is halved: it has two tokens
    k3 = [math.exp(-0.5) - 0.5, math.e - 2, 0]
    loss, gradient = loss_and_gradient(GRPOConfig(kl_coefficient=0.04, clip_ratio_c=10))
    assert loss == pytest.approx((-1.2 - 0.5) / 2 + 16 + 0.04 * (k3[0] + k3[1]) / 2)
    expected = [0.04 * (1 - math.exp(-0.5)) / 2, (-0.5 + 0.04 * (1 - math.e)) / 2, 16]
    assert gradient == pytest.approx(expected)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # weights 2, 0.5, 5 (upper bound 1 + 4)
    loss, gradient = loss_and_gradient(CISPOConfig())
    assert loss == pytest.approx(2 + 1 - 5)
    assert gradient == pytest.approx([-2, -0.5, 10])
    # with bounds 0.8 and 1.2
    _, gradient = loss_and_gradient(CISPOConfig(clip_low=0.2, clip_high=0.2))
    assert gradient == pytest.approx([-1.2, -0.8, 2.4])


def test_gspo_uses_the_geometric_mean_ratio_of_the_rollout():
    # s_0 = sqrt(2 * 1/2) = 1, within bounds: loss -1, gradient -1/2 per token
    # s_1 = 8 with advantage -2: the smaller term is the free one, loss 16, gradient 16
    loss, gradient = loss_and_gradient(GSPOConfig(clip_ratio_c=10))
    assert loss == pytest.approx(-1 + 16)
    assert gradient == pytest.approx([-0.5, -0.5, 16])


def test_gspo_clips_whole_rollouts():
    inputs = example()
    good = replace(inputs, advantages=torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))
    outputs = policy_loss(good, GSPOConfig(clip_high=0.5))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-1.5 * 2)
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == [0, 0, 0]
    assert outputs.sums["clipped"].item() == 1


def test_gspo_averages_over_trained_tokens_only():
    # without token 0: s_0 = 1/2, advantage 1, one trained token of two
    loss, gradient = loss_and_gradient(GSPOConfig(clip_ratio_c=10), weights=(0, 1, 1))
    assert loss == pytest.approx(-0.5 / 2 + 16)
    assert gradient == pytest.approx([0, -0.5 / 2, 16])


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", [0.5, -1.0, 0.0], [0.5, -1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0], [0.5, -1.0, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2, 0.0], [1 - math.exp(-0.5), 1 - math.e, 0.0]),
    ],
)
def test_kl_estimators_have_the_stated_value_and_gradient(estimator, value, gradient):
    d = torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(d, estimator)
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx(value)
    assert d.grad is not None
    assert d.grad.tolist() == pytest.approx(gradient)


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


def test_entropy_bonus_rewards_entropy():
    inputs = example()
    plain = policy_loss(inputs, ReinforceConfig()).loss.item()
    outputs = policy_loss(inputs, ReinforceConfig(entropy_coefficient=0.5))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(plain - 0.5 * 0.7)
    assert inputs.entropy.grad is not None
    assert inputs.entropy.grad.tolist() == [-0.5, -0.5, -0.5]


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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
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


def test_k3_goes_on_straight_where_the_reference_is_far_likelier():
    d = torch.tensor([-3.0, -4.0, -20.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(d, "k3")
    penalty.sum().backward()
    assert penalty.tolist() == pytest.approx([16.085537, 35.171074, 340.539665])
    assert d.grad is not None
    assert d.grad.tolist() == pytest.approx([-19.085537] * 3)


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
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
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
