"""`task`: the reward that a recipe's own task.py defines.

task.py stands beside the recipe's run.yaml and defines one function:

    def reward(prompt, completion):
        return float(completion.strip() == prompt.fields["answer"])

`prompt` is a `llamarl.types.Prompt` (`fields` is its data row), `completion` the text after the
prompt without special tokens; the result is any finite number, 1 meaning full marks. The file
travels by content and runs as the module `task` in every process of the reward pool, so it may
import what is installed but not its neighbours in the recipe's folder.

Owns: turning that source into a reward. Invariant: tracebacks show the user's own lines.
"""

from __future__ import annotations

import linecache
import sys
from types import ModuleType

from llamarl.config import RewardConfig
from llamarl.rewards.functions import Reward
from llamarl.types import Prompt

FILE = "task.py"


def load_task(source: str) -> Reward:
    """Run `source` as the module `task` and return its reward.

    Raises ValueError if it defines no function `reward`, and whatever the source raises.
    """
    module = ModuleType("task")
    module.__file__ = FILE
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    sys.modules["task"] = module
    exec(compile(source, FILE, "exec"), module.__dict__)
    function = getattr(module, "reward", None)
    if not callable(function):
        raise ValueError("task.py must define a function reward(prompt, completion), got none")

    def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
        return function(prompt, completion)

    return reward
