"""The gradient of every algorithm, and of several steps on one batch, out of real trainer ranks,
against independent formulas."""

import uuid
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import pytest
import torch

from llamarl.core.config import TrainerConfig
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
)
from llamarl.trainer.losses.clip import PPOConfig
from tests.loss_formulas import CONFIGS, NO_BOUNDS, NO_RATIO, PAPERS, Sampled, step
from tests.tiny_checkpoints import load
from tests.trainer.rollouts import TEMPERATURE, add_reference, make_batch, make_rollouts
from tests.trainer.test_trainer import relative_errors
from tests.trainer.training import Job, train

pytestmark = pytest.mark.full

LR = 0.5
SGD = TrainerConfig(optimizer="sgd", lr=LR, max_grad_norm=1e6)
SEVERAL = replace(SGD, num_passes=2, num_mini_batches=2)
MAX_TOKENS = 64  # of the executor that `training` makes
PENALTIES = {"kl_coefficient": 0.1, "entropy_coefficient": 0.02}
ESTIMATORS = dict(zip(PAPERS, cycle(["k1", "k2", "k3"]), strict=False))
TOLERANCE = 2e-5  # float32 ranks against float64


@dataclass
class Expected:
    loss: float
    gradients: dict[str, np.ndarray]  # of the loss as the optimizer gets it


@pytest.fixture(scope="module")
def stored():
    """(cells, rows): odd lengths, tokens of three versions of which the oldest has no weight."""
    cells, rows = make_rollouts(oldest_version=1)
    add_reference(cells)
    return cells, rows


class Formula:
    """The same steps in float64, one rollout at a time."""

    def __init__(self, checkpoint, cells, algorithm, is_masked=False, **options):
        self.model = load(checkpoint).double()
        self.cells, self.algorithm = cells, algorithm
        self.is_masked, self.options = is_masked, options

    def outputs(self, row):
        """Log-prob and entropy of each token."""
        cell = self.cells[row.row_id]
        ids = torch.tensor(np.concatenate([cell[PROMPT_IDS], cell[RESPONSE_IDS]]).astype(np.int64))
        logits = self.model.logits(ids[:-1], [len(ids) - 1])[row.num_prompt_tokens - 1 :]
        log_all = torch.log_softmax(logits / TEMPERATURE, -1)
        log_pi = log_all.gather(1, ids[row.num_prompt_tokens :, None])[:, 0]
        return log_pi, -(log_all.exp() * log_all).sum(-1)

    def all_log_pi(self, rows):
        return {row.row_id: self.outputs(row)[0].tolist() for row in rows}

    def step(self, rows, log_prox=None) -> Expected:
        """A step's loss and gradients by the formulas; the weights are then those after it."""
        outputs, rollouts = [], []
        for row in rows:
            cell, (log_pi, entropy) = self.cells[row.row_id], self.outputs(row)
            is_truncated = cell[SAMPLING][-1] == FINISH_CODES[FinishReason.LENGTH]
            is_out = self.is_masked and is_truncated
            weights = (cell[TOKEN_VERSIONS] >= row.oldest_version) & (not is_out)
            outputs += [log_pi, entropy]
            rollouts.append(
                Sampled(
                    log_pi=log_pi.tolist(),
                    log_mu=cell[GENERATOR_LOGPROBS].tolist(),
                    log_ref=cell.get(REF_LOGPROBS, log_pi).tolist(),
                    entropy=entropy.tolist(),
                    weights=weights.astype(int).tolist(),
                    advantage=float(np.float32(row.advantage)),
                    log_prox=log_prox and log_prox[row.row_id],
                )
            )
        loss, *slopes = step(self.algorithm, rollouts, max_tokens=MAX_TOKENS, **self.options)
        both = [torch.tensor(xs).double() for pair in zip(*slopes, strict=True) for xs in pair]
        torch.autograd.backward(outputs, both)
        gradients = {}
        for name, parameter in self.model.named_parameters():
            gradients[name] = parameter.grad.numpy()
            with torch.no_grad():
                parameter -= LR * parameter.grad
            parameter.grad = None
        return Expected(loss, gradients)


def expected(checkpoint, cells, rows, algorithm) -> Expected:
    options = {"kl_estimator": ESTIMATORS[algorithm], **PENALTIES}
    return Formula(checkpoint, cells, algorithm, is_masked=True, **options).step(rows)


def trained(ranks, num_ranks, checkpoint, cells, rows, algorithm):
    """What rank 0 saw of one step in two parts of several micro-batches each."""
    config = replace(
        CONFIGS[algorithm], kl_estimator=ESTIMATORS[algorithm], mask_truncated=True, **PENALTIES
    )
    parts = [make_batch(part, num_ranks, 60) for part in (rows[:8], rows[8:])]
    job = Job(
        checkpoint=checkpoint,
        rendezvous=f"{checkpoint}-{uuid.uuid4()}",
        cells=cells,
        steps=[parts],
        trainer=SGD,
        algorithm=config,
    )
    return ranks(num_ranks).run(train, job)[0]


def errors(seen, want: Expected) -> dict[str, float]:
    """Relative error of each parameter's gradient, which the ranks hold before the division."""
    scale = seen["stats"][0].scalars["grad_norm"] / norm(seen["gradients"][0])
    scaled = {name: gradient * scale for name, gradient in seen["gradients"][0].items()}
    return relative_errors(scaled, want.gradients)


def norm(gradients) -> float:
    return float(np.sqrt(sum(np.sum(g.astype("f8") ** 2) for g in gradients.values())))


def compare(ranks, num_ranks, checkpoint, stored, algorithm):
    want = expected(checkpoint, *stored, algorithm)
    seen = trained(ranks, num_ranks, checkpoint, *stored, algorithm)
    found = errors(seen, want)
    assert max(found.values()) < TOLERANCE, found
    scalars = seen["stats"][0].scalars
    assert scalars["loss"] == pytest.approx(want.loss, rel=1e-4)
    assert scalars["grad_norm"] == pytest.approx(norm(want.gradients), rel=1e-4)
    assert scalars["masked_tokens"] > 0
    has_bounds = algorithm not in NO_BOUNDS
    assert (scalars["ratio_clipped_share"] > 0) == has_bounds, "no token tests the bounds"
    # The ratios of a first step should be 1.
    assert len(seen["warnings"]) == (scalars["ratio_clipped_share"] > 0.05)


def in_full(first):
    """All algorithms, of which the default set runs the `first`."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[] if name in first else slow) for name in PAPERS]


@pytest.mark.parametrize("algorithm", PAPERS)
def test_two_ranks_have_the_gradient_of_the_formula(ranks, checkpoint, stored, algorithm):
    compare(ranks, 2, checkpoint, stored, algorithm)


@pytest.mark.parametrize("algorithm", in_full(["grpo", "gspo"]))
def test_one_rank_has_the_gradient_of_the_formula(ranks, checkpoint, stored, algorithm):
    compare(ranks, 1, checkpoint, stored, algorithm)


@pytest.mark.parametrize("algorithm", in_full(["grpo"]))
@pytest.mark.parametrize("column", [REF_LOGPROBS, GENERATOR_LOGPROBS])
def test_a_column_one_token_late_fails_the_comparison(ranks, checkpoint, stored, column, algorithm):
    cells, rows = stored
    late = {row_id: cell | {column: np.roll(cell[column], 1)} for row_id, cell in cells.items()}
    want = expected(checkpoint, cells, rows, algorithm)
    found = errors(trained(ranks, 1, checkpoint, late, rows, algorithm), want)
    if column == GENERATOR_LOGPROBS and algorithm in NO_RATIO:
        assert max(found.values()) < TOLERANCE  # no ratio in these
    else:
        assert min(found.values()) > 100 * TOLERANCE, found


def run_several(ranks, num_ranks, checkpoint, cells, steps, proximal="none", ahead=()):
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
        trainer=SEVERAL,
        algorithm=PPOConfig(proximal=proximal),
        ahead={number: batch(rows, number) for number, rows in ahead},
    )
    return ranks(num_ranks).run(train, job)[0]


def assert_close(got, rows, want: Expected):
    """Gradients are summed over tokens until the step divides them."""
    num_tokens = sum(row.num_tokens for row in rows)
    summed = {name: gradient * num_tokens for name, gradient in want.gradients.items()}
    assert max(relative_errors(got, summed).values()) < TOLERANCE


def test_two_mini_batches_are_two_plain_steps_bit_for_bit(ranks, checkpoint):
    cells, rows = make_rollouts()
    for num_ranks in (1, 2):
        plain = run_several(
            ranks, num_ranks, checkpoint, cells, [(rows[:7], None), (rows[7:], None)]
        )
        cut = run_several(ranks, num_ranks, checkpoint, cells, [(rows[:7], 0), (rows[7:], 0)])
        for one, other in zip(plain["gradients"], cut["gradients"], strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
        weights = plain["weights"]
        assert all(np.array_equal(weights[name], cut["weights"][name]) for name in weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_recomputed_log_probs_are_those_before_the_first_step_in_all_passes(
    num_ranks, ranks, checkpoint
):
    cells, rows = make_rollouts()
    first, second = rows[:7], rows[7:]
    steps = [(first, 0), (second, 0), (first, 0), (second, 0)]
    seen = run_several(
        ranks, num_ranks, checkpoint, cells, steps, proximal="recompute", ahead=[(0, second)]
    )
    formula = Formula(checkpoint, cells, "ppo")
    log_prox = formula.all_log_pi(rows)
    for got, (part, _) in zip(seen["gradients"], steps, strict=True):
        assert_close(got, part, formula.step(part, log_prox))
    clipped = [each.scalars["ratio_clipped_share"] for each in seen["stats"]]
    assert clipped[0] == 0, "in the first step the ratio is 1"
    assert clipped[3] > 0, "no token tests the bounds"


def test_interpolated_log_probs_follow_the_versions_of_the_tokens(ranks, checkpoint):
    cells, rows = make_rollouts()
    first, second = rows[:7], rows[7:]
    steps = [(first, 0), (second, 1), (first, 2), (second, 2)]
    seen = run_several(ranks, 1, checkpoint, cells, steps, proximal="interpolate")
    formula = Formula(checkpoint, cells, "ppo")
    for got, (part, start), version in zip(seen["gradients"], steps, range(4), strict=True):
        log_pi, log_prox = formula.all_log_pi(part), {}
        for row_id, logprobs in log_pi.items():
            cell = cells[row_id]
            triples = zip(logprobs, cell[GENERATOR_LOGPROBS], cell[TOKEN_VERSIONS], strict=True)
            log_prox[row_id] = [
                pi if version == start else mu + max(0, start - w) / (version - w) * (pi - mu)
                for pi, mu, w in ((pi, float(mu), int(w)) for pi, mu, w in triples)
            ]
        assert_close(got, part, formula.step(part, log_prox))
