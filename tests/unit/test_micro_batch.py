"""From stored rollouts to packed tensors, and the statistics of a step."""

import numpy as np
import pytest
import torch

from llamarl.core.records import GENERATOR_LOGPROBS, PROMPT_IDS, RESPONSE_IDS
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.passes import column, micro_batch
from llamarl.trainer.policy_loss import LossMetrics, policy_loss, statistics

COLUMNS = {
    PROMPT_IDS: [np.array([1, 2, 3], np.int32), np.array([9], np.int32)],
    RESPONSE_IDS: [np.array([4, 5], np.int32), np.array([6, 7, 8], np.int32)],
    GENERATOR_LOGPROBS: [np.array([-1, -2], np.float32), np.array([-3, -4, -5], np.float32)],
}


def test_packed_rollouts_predict_their_responses_and_nothing_else():
    packed = micro_batch(COLUMNS, [1, 0])
    assert packed.token_ids.tolist() == [9, 6, 7, 1, 2, 3, 4]
    assert packed.targets.tolist() == [6, 7, 8, 2, 3, 4, 5]
    assert packed.packing.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.targets[packed.response].tolist() == [6, 7, 8, 4, 5]
    assert packed.response_lengths == (3, 2)
    assert column(COLUMNS, GENERATOR_LOGPROBS, [1, 0]).tolist() == [-3, -4, -5, -1, -2]


def test_an_empty_micro_batch_feeds_one_token_and_predicts_none():
    packed = micro_batch(COLUMNS, [])
    assert packed.packing.positions.tolist() == [0]
    assert len(packed.token_ids) == len(packed.targets) == 1
    assert len(packed.response) == 0
    assert column(COLUMNS, GENERATOR_LOGPROBS, []).shape == (0,)


def outputs(trainer, generator, weights):
    num = len(trainer)
    inputs = LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float32),
        generator_logprobs=torch.tensor(generator, dtype=torch.float32),
        advantages=torch.ones(num),
        weights=torch.tensor(weights, dtype=torch.float32),
        entropy=torch.full((num,), 0.5),
        rollout_index=torch.zeros(num, dtype=torch.int64),
        rollout_lengths=torch.tensor([num]),
    )
    return policy_loss(inputs, AIPOConfig(rho=2.0))


def test_statistics_do_not_depend_on_how_tokens_are_cut_into_ranks_and_micro_batches():
    trainer, generator, weights = [-1.0, -1.0, -1.0], [-1.0, -3.0, -2.0], [1.0, 1.0, 0.0]
    whole, first, second = LossMetrics(), LossMetrics(), LossMetrics()
    whole.add(outputs(trainer, generator, weights), 3)
    first.add(outputs(trainer[:1], generator[:1], weights[:1]), 1)
    second.add(outputs(trainer[1:2], generator[1:2], weights[1:2]), 1)
    second.add(outputs(trainer[2:], generator[2:], weights[2:]), 1)
    together = statistics(whole.vector()[None], 3.0)
    vectors = torch.stack([first.vector(), LossMetrics().vector(), second.vector()])
    assert statistics(vectors, 3.0) == pytest.approx(together)
    assert together["ratio_mean"] == pytest.approx((1 + np.exp(2)) / 2)
    assert together["ratio_max"] == pytest.approx(np.exp(2))
    assert together["ratio_clipped_share"] == 0.5
    assert together["trained_tokens"] == 2
    assert together["masked_tokens"] == 1
    assert together["entropy"] == 0.5
    assert together["loss"] == pytest.approx((1 + 2) / 3)
