"""The gradient of every algorithm, out of real trainer ranks, against independent formulas."""

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
from tests.distributed.rollouts import (
    TEMPERATURE,
    add_reference,
    make_batch,
    make_rollouts,
)
from tests.distributed.training import Job, train
from tests.loss_formulas import CONFIGS, NO_BOUNDS, NO_RATIO, PAPERS, Sampled, step
from tests.tiny_checkpoints import load, write_checkpoint

SGD = TrainerConfig(optimizer="sgd", lr=0.5, max_grad_norm=1e6)
MAX_TOKENS = 64  # of the executor that `training` makes
PENALTIES = {"kl_coefficient": 0.1, "entropy_coefficient": 0.02}
ESTIMATORS = dict(zip(PAPERS, cycle(["k1", "k2", "k3"]), strict=False))
TOLERANCE = 2e-5  # float32 ranks against float64


@dataclass
class Expected:
    loss: float
    gradients: dict[str, np.ndarray]  # of the loss as the optimizer gets it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def stored():
    """(cells, rows): odd lengths, tokens of three versions of which the oldest has no weight."""
    cells, rows = make_rollouts(oldest_version=1)
    add_reference(cells)
    return cells, rows


def expected(checkpoint, cells, rows, algorithm) -> Expected:
    """One rollout at a time in float64, the loss's derivatives from the formulas."""
    model = load(checkpoint)
    model.double()
    rollouts, outputs = [], []
    for row in rows:
        cell = cells[row.row_id]
        ids = torch.tensor(np.concatenate([cell[PROMPT_IDS], cell[RESPONSE_IDS]]).astype(np.int64))
        logits = model.logits(ids[:-1], [len(ids) - 1])[row.num_prompt_tokens - 1 :] / TEMPERATURE
        log_all = torch.log_softmax(logits, -1)
        log_pi = log_all.gather(1, ids[row.num_prompt_tokens :, None])[:, 0]
        entropy = -(log_all.exp() * log_all).sum(-1)
        is_truncated = cell[SAMPLING][-1] == FINISH_CODES[FinishReason.LENGTH]
        weights = (cell[TOKEN_VERSIONS] >= row.oldest_version) & (not is_truncated)
        outputs.append((log_pi, entropy))
        rollouts.append(
            Sampled(
                log_pi=log_pi.tolist(),
                log_mu=cell[GENERATOR_LOGPROBS].tolist(),
                log_ref=cell[REF_LOGPROBS].tolist(),
                entropy=entropy.tolist(),
                weights=weights.astype(int).tolist(),
                advantage=float(np.float32(row.advantage)),
            )
        )
    loss, by_log_pi, by_entropy = step(
        algorithm,
        rollouts,
        max_tokens=MAX_TOKENS,
        kl_estimator=ESTIMATORS[algorithm],
        **PENALTIES,
    )
    leaves = [tensor for pair in outputs for tensor in pair]
    slopes = [torch.tensor(xs) for pair in zip(by_log_pi, by_entropy, strict=True) for xs in pair]
    torch.autograd.backward(leaves, [slope.double() for slope in slopes])
    return Expected(loss, {name: p.grad.numpy() for name, p in model.named_parameters()})


def trained(ranks, num_ranks, checkpoint, cells, rows, algorithm):
    """What rank 0 saw of one step in two parts of several micro-batches each."""
    config = replace(
        CONFIGS[algorithm],
        kl_estimator=ESTIMATORS[algorithm],
        mask_truncated=True,
        **PENALTIES,
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
    return {
        name: float(np.linalg.norm(gradient * scale - want.gradients[name]))
        / float(np.linalg.norm(want.gradients[name]))
        for name, gradient in seen["gradients"][0].items()
    }


def norm(gradients) -> float:
    return float(np.sqrt(sum(np.sum(g.astype("f8") ** 2) for g in gradients.values())))


def compare(ranks, num_ranks, checkpoint, stored, algorithm):
    want = expected(checkpoint, *stored, algorithm)
    seen = trained(ranks, num_ranks, checkpoint, *stored, algorithm)
    assert seen["gradients"][0].keys() == want.gradients.keys()
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
