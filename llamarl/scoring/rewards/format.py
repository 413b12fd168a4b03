"""`format`: the completion has the required form, right or wrong."""

import re

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt


def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """1 if `config.pattern` is found in the completion; 0 if not, or if `config.require_stop` and
    the completion did not end by itself."""
    if config.require_stop and not finished:
        return 0.0
    return float(re.search(config.pattern, completion) is not None)
