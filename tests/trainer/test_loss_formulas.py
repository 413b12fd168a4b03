"""All algorithms against formulas written independently of them, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.advantages import ADVANTAGES
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses import algorithms
from llamarl.trainer.losses.gspo import GSPOConfig
from llamarl.trainer.policy_loss import denominator, policy_loss
from tests.loss_formulas import CONFIGS, PAPERS, Sampled, advantages, step

MAX_TOKENS = 16
PENALTIES = {"kl_coefficient": 0.3, "entropy_coefficient": 0.05}
TOLERANCE = 1e-9


@dataclass
class Ours:
    loss: float
    by_log_pi: list[list[float]]
    by_entropy: list[list[float]]


def ours(config: AlgorithmConfig, rollouts: list[Sampled], dtype=torch.float64) -> Ours:
    """What `policy_loss` and `denominator` make of a step."""

    def packed(name: str) -> torch.Tensor:
        values = [x for rollout in rollouts for x in getattr(rollout, name)]
        return torch.tensor(values, dtype=dtype)

    lengths = [len(rollout.log_pi) for rollout in rollouts]
    advantage = torch.tensor([rollout.advantage for rollout in rollouts], dtype=dtype)
    inputs = LossInputs(
        trainer_logprobs=packed("log_pi").requires_grad_(),
        generator_logprobs=packed("log_mu"),
        advantages=torch.repeat_interleave(advantage, torch.tensor(lengths)),
        weights=packed("weights"),
        entropy=packed("entropy").requires_grad_(),
        rollout_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        rollout_lengths=torch.tensor(lengths),
        ref_logprobs=packed("log_ref"),
        proximal_logprobs=packed("log_prox") if rollouts[0].log_prox else None,
    )
    divisor = denominator(sum(lengths), len(lengths), MAX_TOKENS, config)
    loss = policy_loss(inputs, config).loss / divisor
    loss.backward()
    gradients = []
    for leaf in (inputs.trainer_logprobs, inputs.entropy):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradients.append([part.tolist() for part in gradient.split(lengths)])
    return Ours(loss.item(), *gradients)


def theirs(algorithm: str, rollouts: list[Sampled], **fields) -> Ours:
    return Ours(*step(algorithm, rollouts, max_tokens=MAX_TOKENS, **fields))


def difference(left: Ours, right: Ours) -> float:
    """The largest, relative to the numbers themselves where they are above 1."""
    pairs = [(left.loss, right.loss)]
    for name in ("by_log_pi", "by_entropy"):
        for xs, ys in zip(getattr(left, name), getattr(right, name), strict=True):
            pairs += zip(xs, ys, strict=True)
    return max(abs(x - y) / max(1.0, abs(y)) for x, y in pairs)


def random_rollouts(seed: int = 0, num: int = 6, spread: float = 1.0) -> list[Sampled]:
    """Of 1 to 12 tokens; one token in five has no weight, and in one rollout no token has any."""
    random = np.random.default_rng(seed)
    rollouts = []
    for i in range(num):
        length = int(random.integers(1, 13))
        log_pi = random.uniform(-4, 0, length)
        rollouts.append(
            Sampled(
                log_pi=log_pi.tolist(),
                log_mu=np.minimum(log_pi - random.normal(0, spread, length), -1e-3).tolist(),
                log_ref=(log_pi - random.normal(0, 2 * spread, length)).tolist(),
                entropy=random.uniform(0, 3, length).tolist(),
                weights=[0] * length
                if i == 1
                else (random.random(length) > 0.2).astype(int).tolist(),
                advantage=0.0 if i == 2 else float(random.normal()),
            )
        )
    return rollouts


@st.composite
def steps(draw: st.DrawFn) -> list[Sampled]:
    logprob = st.floats(-12, -0.01)
    rollouts = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 6))
        column = st.lists(logprob, min_size=length, max_size=length)
        rollouts.append(
            Sampled(
                log_pi=draw(column),
                log_mu=draw(column),
                log_ref=draw(column),
                entropy=[-x for x in draw(column)],
                weights=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
                advantage=draw(st.floats(-3, 3)),
            )
        )
    return rollouts


def test_all_algorithms_are_here():
    assert CONFIGS.keys() == PAPERS.keys()
    assert CONFIGS.keys() == algorithms().keys() - {"task"}
    assert all(type(config) is algorithms()[name] for name, config in CONFIGS.items())


@pytest.mark.parametrize("algorithm", PAPERS)
@settings(max_examples=30, deadline=None)
@given(rollouts=steps())
def test_loss_and_gradient_are_the_paper_s(algorithm, rollouts):
    assert difference(ours(CONFIGS[algorithm], rollouts), theirs(algorithm, rollouts)) < TOLERANCE


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("averaged_over", ["tokens", "rollouts", "constant"])
@pytest.mark.parametrize("algorithm", PAPERS)
def test_every_average_penalty_and_bonus_is_the_formula_s(algorithm, averaged_over, estimator):
    config = replace(
        CONFIGS[algorithm], normalization=averaged_over, kl_estimator=estimator, **PENALTIES
    )
    fields = {"averaged_over": averaged_over, "kl_estimator": estimator, **PENALTIES}
    for seed, spread in ((0, 0.02), (1, 1.0), (2, 4.0)):
        rollouts = random_rollouts(seed, spread=spread)
        want = theirs(algorithm, rollouts, **fields)
        assert difference(ours(config, rollouts), want) < TOLERANCE
        assert max(abs(x) for xs in want.by_log_pi for x in xs) > 1e-3, "nothing to compare"


@pytest.mark.parametrize("algorithm", PAPERS)
@settings(max_examples=25, deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0]), min_size=2, max_size=8))
def test_advantages_are_the_paper_s(algorithm, rewards):
    got = ADVANTAGES[CONFIGS[algorithm].advantage](rewards)
    # 1e-6 in the divisor keeps nearly equal rewards from exploding
    assert got == pytest.approx(advantages(algorithm, rewards), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("algorithm", PAPERS)
def test_no_ratio_and_no_reference_however_far_makes_a_loss_or_gradient_explode(algorithm):
    config = replace(CONFIGS[algorithm], kl_coefficient=1.0, kl_estimator="k3")
    for far in (5.0, 20.0, 90.0, 300.0):  # e^90 is beyond float32
        for mu, ref in ((far, 0.0), (-far, 0.0), (0.0, far), (0.0, -far)):
            for advantage in (-1.0, 1.0):
                rollout = Sampled([-1.0], [-1 - mu], [-1 - ref], [0.5], [1], advantage)
                got = ours(replace(config, normalization="tokens"), [rollout], torch.float32)
                assert abs(got.by_log_pi[0][0]) < 25
                assert abs(got.loss) < 25 + 25 * max(abs(ref), 1)


def engine_noise_clips(bounds: dict[str, float], num_tokens: int, sigma: float) -> float:
    """Share of rollouts that GSPO clips although pi and mu are the same but for noise."""
    random = np.random.default_rng(0)
    num = 2000
    # E[pi / mu] = 1 under mu: the mean of the log is half the variance below zero
    noise = torch.tensor(random.normal(-(sigma**2) / 2, sigma, num * num_tokens))
    index = torch.arange(num).repeat_interleave(num_tokens)
    log_pi = torch.full((num * num_tokens,), -1.0, dtype=torch.float64)
    outputs = policy_loss(
        LossInputs(
            trainer_logprobs=log_pi,
            generator_logprobs=log_pi - noise,
            advantages=torch.tensor(random.choice([-1.0, 1.0], num))[index],
            weights=torch.ones_like(log_pi),
            entropy=log_pi,
            rollout_index=index,
            rollout_lengths=torch.full((num,), num_tokens),
        ),
        GSPOConfig(**bounds),
    )
    return (outputs.sums["clipped"] / outputs.sums["tokens"]).item()


def test_gspo_s_bounds_stand_above_the_noise_between_two_engines():
    paper = {"clip_low": 3e-4, "clip_high": 4e-4}
    for num_tokens in (30, 100, 300):
        assert engine_noise_clips(paper, num_tokens, 0.03) > 0.4
        assert engine_noise_clips({}, num_tokens, 0.03) < 0.01
    # What they are for: rollouts whose tokens really moved, by 10 % each.
    assert engine_noise_clips({}, 100, 0.45) > 0.4
