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

import inspect
import linecache
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from llamarl.config import RewardConfig
from llamarl.environments.rewards.functions import Reward
from llamarl.types import Prompt

FILE = "task.py"


def load_task(source: str) -> Reward:
    """Run `source` as the module `task` and return its reward.

    Raises ValueError if it defines no function `reward` of two arguments, and whatever the source
    raises.
    """
    module = ModuleType("task")
    module.__file__ = FILE
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    sys.modules["task"] = module
    exec(compile(source, FILE, "exec"), module.__dict__)
    function = _require_reward(getattr(module, "reward", None))

    def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
        return function(prompt, completion)

    return reward


def _require_reward(function: Any) -> Callable[..., Any]:
    wanted = "task.py must define a function reward(prompt, completion)"
    if not callable(function):
        raise ValueError(f"{wanted}, got {'none' if function is None else repr(function)}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{wanted}, got an async one")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{wanted}, got reward{inspect.signature(function)}: {error}") from error
    except ValueError:  # of a builtin that does not say what it takes
        pass
    return function
