"""Which functions a reward section names, and whether it can work at all.

Owns: the table from name to function and the checks made before any process starts. Does not
own: the functions. Invariant: only what the section names is imported (math-verify takes half a
second, and task.py runs only in the pool's processes).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from llamarl.config import RewardConfig
from llamarl.environments.rewards.answer import expected_answer
from llamarl.environments.rewards.source import check_source
from llamarl.types import Prompt

Reward = Callable[[Prompt, str, bool, RewardConfig], float]
"""(prompt, completion, finished, config) -> reward; see the package's docstring."""


def load_functions(config: RewardConfig, task_source: str | None) -> dict[str, Reward]:
    """The functions `config` names, by name and in its order."""
    functions = {}
    for name in config.functions:
        module = importlib.import_module(f"llamarl.environments.rewards.{name}")
        if name == "task":
            functions[name] = module.load_task(_require_task(task_source))
        else:
            functions[name] = module.reward
    return functions


def check_rewards(
    config: RewardConfig, task_source: str | None, task_path: str = "task.py"
) -> None:
    """Raise ValueError, one line, if the section cannot work whatever the prompts are.

    Checked: the pattern, and that task.py is there, is Python and may define `reward`; it is not
    run here.
    """
    if "exact" in config.functions or "format" in config.functions:
        try:
            num_groups = re.compile(config.pattern).groups
        except re.error as error:
            raise ValueError(
                f"reward.pattern must be a regular expression, got {config.pattern!r}: {error}"
            ) from error
        if "exact" in config.functions and num_groups < 1:
            raise ValueError(
                f"reward.pattern must have a group around the answer for exact, "
                f"got {config.pattern!r}"
            )
    if "task" in config.functions:
        check_source(_require_task(task_source), task_path)


def check_answers(config: RewardConfig, prompts: Sequence[Prompt], path: str | Path) -> None:
    """Raise ValueError, one line with file and line number, if a prompt of the file `path` lacks
    the expected answer that `exact` or `math` needs."""
    if "exact" not in config.functions and "math" not in config.functions:
        return
    for prompt in prompts:
        try:
            expected_answer(prompt, config)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{error.args[0].removeprefix('line ')}") from error


def _require_task(task_source: str | None) -> str:
    if task_source is None:
        raise ValueError(
            "reward.functions=[task] must have a task.py in the recipe's folder, got none"
        )
    return task_source
