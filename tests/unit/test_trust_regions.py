"""GMPO, SAPO and DPPO against numbers and gradients worked by hand, on the example of
`test_losses.py`: ratios 2 and 1/2 with advantage 1 in rollout 0, 8 with -2 in rollout 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from llamarl.trainer.losses.dppo import DPPOKLConfig, DPPOTVConfig
from llamarl.trainer.losses.gmpo import GMPOConfig
from llamarl.trainer.losses.sapo import SAPOConfig
from tests.unit.test_losses import loss_and_gradient


def test_gmpo_bounds_tokens_before_it_takes_their_mean():
    # Rollout 0: log r is 0.69, which counts as 0.4, and -0.69; its mean is -0.1466. Rollout 1: 8,
    # as 3 by dual clip.
    ratio = math.exp((0.4 - math.log(2)) / 2)
    loss, gradient = loss_and_gradient(GMPOConfig())
    assert loss == pytest.approx(-ratio + 2 * 3)
    assert gradient == pytest.approx([0, -ratio / 2, 0])
    loss, gradient = loss_and_gradient(GMPOConfig(clip_ratio_c=1e9))
    assert loss == pytest.approx(-ratio + 2 * 8)
    assert gradient == pytest.approx([0, -ratio / 2, 2 * 8])


def test_sapo_fades_every_gradient_and_cuts_none():
    loss, gradient = loss_and_gradient(SAPOConfig(normalization="tokens"))
    gates = [4 / (1 + math.exp(-1)), 4 / (1 + math.exp(0.5)), 4 / 1.05 / (1 + math.exp(-7.35))]
    assert loss == pytest.approx(-gates[0] - gates[1] + 2 * gates[2])
    weights = [1 / math.cosh(x) ** 2 for x in (0.5, 0.25, 3.675)]
    assert gradient == pytest.approx([-2 * weights[0], -0.5 * weights[1], 2 * 8 * weights[2]])
    assert 0.2 > weights[2] * 8 > 0


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        # pi 0.368 0.135 0.607, mu 0.184 0.271 0.076: only the first moved as A wants it to
        (DPPOTVConfig(), (0, 1, 1)),
        (DPPOTVConfig(divergence_high=0.19), (1, 1, 1)),
        (DPPOKLConfig(), (0, 1, 1)),  # its divergence is 0.08093
        (DPPOKLConfig(divergence_high=0.0810), (1, 1, 1)),
        (DPPOKLConfig(divergence_high=0.0809), (0, 1, 1)),
    ],
)
def test_dppo_masks_by_the_move_of_the_probability(config, kept):
    _, gradient = loss_and_gradient(config)
    assert gradient == pytest.approx([-2 * kept[0], -0.5 * kept[1], 2 * 8 * kept[2]])
    _, gradient = loss_and_gradient(replace(config, rho=3))
    assert gradient == pytest.approx([-2 * kept[0], -0.5 * kept[1], 2 * 3 * kept[2]])
