"""How `llamarl check` compares rollouts with captured graphs and without them."""

import numpy as np
import pytest

from llamarl.cli.check_trial import same_rollouts
from llamarl.core.records import GENERATOR_LOGPROBS, RESPONSE_IDS


def columns(*rollouts):
    return {
        RESPONSE_IDS: [np.array(ids, np.int32) for ids, _ in rollouts],
        GENERATOR_LOGPROBS: [np.array(logprobs, np.float32) for _, logprobs in rollouts],
    }


PLAIN = columns(([1, 2, 3, 4], [-1, -2, -3, -4]), ([5, 6, 7], [-1, -1, -1]))


def test_equal_rollouts_are_the_same():
    assert same_rollouts(PLAIN, PLAIN, 0.01).startswith("2 of 2 rollouts are the same")


def test_a_token_that_rounding_changed_is_no_mistake():
    others = columns(([1, 2, 3, 9], [-1, -2, -3.005, -8]), ([5, 6, 7], [-1, -1, -1]))
    assert same_rollouts(PLAIN, others, 0.01).startswith("1 of 2 rollouts are the same")


@pytest.mark.parametrize(
    "others",
    [
        columns(([1, 2, 3, 4], [-1, -2, -3.1, -4]), ([5, 6, 7], [-1, -1, -1])),
        columns(([9, 2, 3, 4], [-1, -2, -3, -4]), ([5, 9, 7], [-1, -1, -1])),
        columns(([1], [-1]), ([5], [-1])),
    ],
)
def test_log_probs_that_are_apart_and_rollouts_that_are_others_are(others):
    with pytest.raises(RuntimeError, match=r"set generator\.enforce_eager=true"):
        same_rollouts(PLAIN, others, 0.01)
