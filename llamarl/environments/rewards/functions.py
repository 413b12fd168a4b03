"""The rewards by name, whether a reward section can work at all, and what the pool's processes run.

Owns: the table of rewards, the checks made before any process starts, the service of those
processes (`load`). Does not own: the functions, one file each. Invariant: only what the section
names is imported (math-verify takes half a second, and task.py runs only in the pool's processes).
"""

import importlib
import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config import RewardConfig
from llamarl.config.check import require_choice
from llamarl.config.reward import LARGEST
from llamarl.environments.rewards.answer import expected_answer
from llamarl.task_file import execute
from llamarl.types import Prompt, StageStatus
from llamarl.user_code.report import user_traceback

Reward = Callable[[Prompt, str, bool, RewardConfig], float]
"""(prompt, completion, finished, config) -> reward; see the package's docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a reward needs: an expected answer in each prompt's row (`answer.py`); `reward.pattern`
    with at least `num_groups` groups (None: it has no use for the pattern)."""

    answer: bool = False
    num_groups: int | None = None


REWARDS: dict[str, Needs] = {
    "math": Needs(answer=True),
    "exact": Needs(answer=True, num_groups=1),
    "format": Needs(num_groups=0),
    "task": Needs(),
}
"""By their names in `reward.functions`, which are those of their files here; `task` is the recipe's
own task.py."""


def load_functions(config: RewardConfig, task_source: str | None) -> dict[str, Reward]:
    """The functions `config` names, by name and in its order. ValueError unless a task.py has a
    function `reward` of two arguments."""
    functions: dict[str, Reward] = {}
    for name in config.functions:
        if name == "task":
            assert task_source is not None, "reward.functions=[task] comes with a task.py"
            functions[name] = _load_reward(task_source)
        else:
            module = importlib.import_module(f"llamarl.environments.rewards.{name}")
            functions[name] = module.reward
    return functions


def _load_reward(source: str) -> Reward:
    """The function `reward(prompt, completion)` of a task.py; what its text raises is passed on."""
    function = execute(source, ["reward"])["reward"]
    return lambda prompt, completion, finished, config: function(prompt, completion)


def check_rewards(config: RewardConfig) -> None:
    """Raise ValueError, one line, if the section cannot work with any prompts."""
    for name in config.functions:
        require_choice("reward.functions", name, REWARDS)
        wanted = REWARDS[name].num_groups
        if wanted is None:
            continue
        try:
            num_groups = re.compile(config.pattern).groups
        except re.error as error:
            must = "reward.pattern must be a regular expression"
            raise ValueError(f"{must}, got {config.pattern!r}: {error}") from error
        if num_groups < wanted:
            must = f"reward.pattern must have a group around the answer for {name}"
            raise ValueError(f"{must}, got {config.pattern!r}")


def check_answers(config: RewardConfig, prompts: Sequence[Prompt], path: str | Path) -> None:
    """Raise ValueError, one line with file and line number, if a prompt of the file `path` lacks
    the expected answer that one of the rewards needs."""
    if not any(REWARDS[name].answer for name in config.functions):
        return
    for prompt in prompts:
        try:
            expected_answer(prompt, config)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{error.args[0].removeprefix('line ')}") from error


def load(setup: dict[str, Any]) -> Callable[[Prompt, str, bool], dict[str, Any]]:
    """What a process of the reward pool serves: (prompt, completion, finished) -> `grade`."""
    config = RewardConfig(**setup["config"])
    functions = load_functions(config, setup["task_source"])
    return lambda prompt, completion, finished: grade(
        functions, prompt, completion, finished, config
    )


def grade(
    functions: dict[str, Reward],
    prompt: Prompt,
    completion: str,
    finished: bool,
    config: RewardConfig,
) -> dict[str, Any]:
    """Run every function on one completion: {"parts": {function: float}}; the first failure is the
    whole answer, {"status": str, "error": str}."""
    parts = {}
    for name, function in functions.items():
        try:
            value = function(prompt, completion, finished, config)
            number = float(value) if isinstance(value, numbers.Real) else math.nan
            shown = repr(value)[:200]
        except BaseException as error:  # noqa: BLE001 - user reward code may raise anything
            return {
                "status": StageStatus.RAISED,
                "error": f"{name}: {user_traceback(error, __file__)}",
            }
        if not abs(number) <= LARGEST:
            return {
                "status": StageStatus.INVALID,
                "error": f"{name}: a reward must be a finite number, at most {LARGEST:g} either "
                f"way, got {shown}",
            }
        parts[name] = number
    return {"parts": parts}
