"""The rewards by name, whether a reward section can work at all, and what the stage `score` runs.

Owns: the table of rewards, the checks made before any process starts, the weighted sum. Does not
own: the functions, one file each, or the processes (`executors/stage.py`). Invariant: only what the
section names is imported (math-verify takes half a second, and task.py runs only in the processes
of the stage).
"""

import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.config import RewardConfig
from llamarl.config.check import require, require_choice
from llamarl.environments.rewards.answer import expected_answer
from llamarl.environments.rewards.code import read_tests
from llamarl.task_file import find, load_module
from llamarl.types import FinishReason, Prompt, finish_reason
from llamarl.user_code.calls import checked_number

Reward = Callable[..., Any]
"""(prompt, completion, finished, config) -> reward, see the package's docstring; that of a task.py
takes (prompt, completion), and may be a coroutine."""
TASK = "task"  # the recipe's own task.py
ENVIRONMENT = "environment"  # what the episode's environment gave


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a reward needs: an expected answer in each prompt's row (`answer.py`), or tests
    (`code.py`); `reward.pattern` with at least `num_groups` groups (None: it has no use for the
    pattern)."""

    answer: bool = False
    tests: bool = False
    num_groups: int | None = None


REWARDS: dict[str, Needs] = {
    "math": Needs(answer=True),
    "exact": Needs(answer=True, num_groups=1),
    "format": Needs(num_groups=0),
    "code": Needs(tests=True),
    TASK: Needs(),
    ENVIRONMENT: Needs(),
}
"""By their names in `reward.functions`, which are those of their files here."""


def load_functions(config: RewardConfig, task_source: str | None) -> dict[str, Reward]:
    """The functions `config` names, by name and in its order. ValueError unless a task.py has a
    function `reward` of two arguments; what its text raises is passed on."""
    functions: dict[str, Reward] = {}
    for name in config.functions:
        if name == ENVIRONMENT:
            continue
        if name == TASK:
            assert task_source is not None, "reward.functions=[task] comes with a task.py"
            functions[name] = find(load_module(task_source), "reward")
        else:
            module = importlib.import_module(f"llamarl.environments.rewards.{name}")
            functions[name] = module.reward
    return functions


def make_score(
    functions: dict[str, Reward], config: RewardConfig
) -> Callable[..., Awaitable[tuple[float, ...]]]:
    """What the stage `score` runs: (prompt, completion, SAMPLING cell, and of an episode the reward
    of its environment) -> the weighted sum, then what each function gave. InvalidReturnError for
    what is no finite number."""

    async def score(
        prompt: Prompt, completion: str, sampling: Sequence[float], *of_episode: float
    ) -> tuple[float, ...]:
        finished = finish_reason(sampling) is FinishReason.STOP
        parts = {}
        for name in config.functions:
            if name == ENVIRONMENT:
                (parts[name],) = of_episode
                continue
            function = functions[name]
            more = () if name == TASK else (finished, config)
            value = function(prompt, completion, *more)
            found = await value if inspect.isawaitable(value) else value
            parts[name] = checked_number(found, name)
        pairs = zip(config.functions, config.weights, strict=True)
        return sum(weight * parts[name] for name, weight in pairs), *parts.values()

    return score


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
        must = f"have a group around the answer for {name}"
        require(num_groups >= wanted, "reward.pattern", must, config.pattern)


def check_answer(config: RewardConfig, prompt: Prompt) -> None:
    """ValueError, one line, if the row of a prompt lacks the expected answer or the tests that one
    of the rewards needs."""
    needs = [REWARDS[name] for name in config.functions]
    try:
        if any(each.answer for each in needs):
            expected_answer(prompt, config)
        if any(each.tests for each in needs):
            read_tests(prompt, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(error.args[0].partition(": ")[2]) from error
