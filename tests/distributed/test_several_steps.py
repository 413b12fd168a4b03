"""Several optimizer steps on one batch, out of real trainer ranks: the gradient of each step."""

import uuid
from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.core.config import TrainerConfig
from llamarl.core.records import GENERATOR_LOGPROBS, PROMPT_IDS, RESPONSE_IDS, TOKEN_VERSIONS
from llamarl.trainer.losses.clip import PPOConfig
from tests.distributed.rollouts import TEMPERATURE, make_batch, make_rollouts
from tests.distributed.training import Job, train
from tests.loss_formulas import Sampled, step
from tests.tiny_checkpoints import load, write_checkpoint

LR = 0.5
SGD = TrainerConfig(optimizer="sgd", lr=LR, max_grad_norm=1e6, num_passes=2, num_mini_batches=2)
TOLERANCE = 2e-5  # float32 ranks against float64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def stored():
    return make_rollouts()


def run(ranks, num_ranks, checkpoint, cells, steps, proximal="none", ahead=()):
    """What rank 0 saw. `steps`: (rows, first version of the batch, or None); `ahead`: (step, rows
    of later steps)."""

    def batch(rows, version, first=None):
        made = make_batch(rows, num_ranks, 60, version)
        return replace(made, first_version=first)

    job = Job(
        checkpoint=checkpoint,
        rendezvous=f"{checkpoint}-{uuid.uuid4()}",
        cells={row_id: dict(cell) for row_id, cell in cells.items()},
        steps=[[batch(rows, i, first)] for i, (rows, first) in enumerate(steps)],
        trainer=SGD,
        algorithm=PPOConfig(proximal=proximal),
        ahead={number: batch(rows, number) for number, rows in ahead},
    )
    return ranks(num_ranks).run(train, job)[0]


class Formula:
    """The same steps in float64, one rollout at a time."""

    def __init__(self, checkpoint, cells):
        self.model = load(checkpoint)
        self.model.double()
        self.cells = cells

    def log_pi(self, row):
        cell = self.cells[row.row_id]
        ids = torch.tensor(np.concatenate([cell[PROMPT_IDS], cell[RESPONSE_IDS]]).astype(np.int64))
        logits = self.model.logits(ids[:-1], [len(ids) - 1])[row.num_prompt_tokens - 1 :]
        log_all = torch.log_softmax(logits / TEMPERATURE, -1)
        return log_all.gather(1, ids[row.num_prompt_tokens :, None])[:, 0]

    def all_log_pi(self, rows):
        return {row.row_id: self.log_pi(row).tolist() for row in rows}

    def step(self, rows, log_prox=None):
        """The gradient of a step, summed over its tokens, which is then made."""
        outputs, rollouts = [], []
        for row in rows:
            outputs.append(self.log_pi(row))
            rollouts.append(
                Sampled(
                    log_pi=outputs[-1].tolist(),
                    log_mu=self.cells[row.row_id][GENERATOR_LOGPROBS].tolist(),
                    log_ref=outputs[-1].tolist(),
                    entropy=[0.0] * row.num_tokens,
                    weights=[1] * row.num_tokens,
                    advantage=float(np.float32(row.advantage)),
                    log_prox=log_prox and log_prox[row.row_id],
                )
            )
        _, slopes, _ = step("ppo", rollouts, max_tokens=64)
        torch.autograd.backward(outputs, [torch.tensor(each).double() for each in slopes])
        num_tokens = sum(row.num_tokens for row in rows)
        summed = {}
        for name, parameter in self.model.named_parameters():
            summed[name] = parameter.grad.numpy() * num_tokens
            with torch.no_grad():
                parameter -= LR * parameter.grad
            parameter.grad = None
        return summed


def largest_error(got, want):
    assert got.keys() == want.keys()
    return max(
        float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])) for name in want
    )


def test_two_mini_batches_are_two_plain_steps_bit_for_bit(ranks, checkpoint, stored):
    cells, rows = stored
    for num_ranks in (1, 2):
        plain = run(ranks, num_ranks, checkpoint, cells, [(rows[:7], None), (rows[7:], None)])
        cut = run(ranks, num_ranks, checkpoint, cells, [(rows[:7], 0), (rows[7:], 0)])
        for one, other in zip(plain["gradients"], cut["gradients"], strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
        weights = plain["weights"]
        assert all(np.array_equal(weights[name], cut["weights"][name]) for name in weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_recomputed_log_probs_are_those_before_the_first_step_in_all_passes(
    num_ranks, ranks, checkpoint, stored
):
    cells, rows = stored
    first, second = rows[:7], rows[7:]
    steps = [(first, 0), (second, 0), (first, 0), (second, 0)]
    seen = run(
        ranks, num_ranks, checkpoint, cells, steps, proximal="recompute", ahead=[(0, second)]
    )
    formula = Formula(checkpoint, cells)
    log_prox = formula.all_log_pi(rows)
    for got, (part, _) in zip(seen["gradients"], steps, strict=True):
        assert largest_error(got, formula.step(part, log_prox)) < TOLERANCE
    clipped = [each.scalars["ratio_clipped_share"] for each in seen["stats"]]
    assert clipped[0] == 0, "in the first step the ratio is 1"
    assert clipped[3] > 0, "no token tests the bounds"


def test_interpolated_log_probs_follow_the_versions_of_the_tokens(ranks, checkpoint, stored):
    cells, rows = stored
    first, second = rows[:7], rows[7:]
    steps = [(first, 0), (second, 1), (first, 2), (second, 2)]
    seen = run(ranks, 1, checkpoint, cells, steps, proximal="interpolate")
    formula = Formula(checkpoint, cells)
    for got, (part, start), version in zip(seen["gradients"], steps, range(4), strict=True):
        log_pi, log_prox = formula.all_log_pi(part), {}
        for row_id, logprobs in log_pi.items():
            cell = cells[row_id]
            triples = zip(logprobs, cell[GENERATOR_LOGPROBS], cell[TOKEN_VERSIONS], strict=True)
            log_prox[row_id] = [
                pi if version == start else mu + max(0, start - w) / (version - w) * (pi - mu)
                for pi, mu, w in ((pi, float(mu), int(w)) for pi, mu, w in triples)
            ]
        assert largest_error(got, formula.step(part, log_prox)) < TOLERANCE
