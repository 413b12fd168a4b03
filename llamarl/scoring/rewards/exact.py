"""`exact`: the answer that a pattern finds in the completion equals the expected one."""

import re

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from llamarl.scoring.rewards.answer import expected_answer, normal_form


def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """1 if group 1 of `config.pattern`, searched in the completion, is the expected answer, up to
    white space and number format; else 0, also if `config.require_stop` and not `finished`. Raises
    as `expected_answer` does."""
    expected = normal_form(expected_answer(prompt, config))
    if config.require_stop and not finished:
        return 0.0
    return float(answer(completion, config) == expected)


def answer(completion: str, config: RewardConfig) -> str | None:
    """Group 1 of `config.pattern` in the completion, in one spelling; None if there is none."""
    match = re.search(config.pattern, completion)
    return None if match is None or match[1] is None else normal_form(match[1])
