"""The rewards by name, whether a reward section can work at all, and what the stage `score` runs.

Owns: the table of rewards, the checks made before any process starts, the weighted sum. Does not
own: the functions, one file each, or the processes (`executors/stage.py`). Invariant: only what the
section names is imported (math-verify takes half a second, and task.py runs only in the processes
of the stage).
"""

import hashlib
import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
ANSWER = "majority_answer"  # of a task.py, and what the stage gives beside the rewards
NO_ANSWER = -1.0


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
    """The functions `config` names, by name and in its order; as ANSWER, what finds the answer in a
    completion if the first one has such. ValueError unless a task.py has a function `reward` of two
    arguments; what its text raises is passed on."""
    functions: dict[str, Reward] = {}
    answers: dict[str, Reward] = {}
    for name in config.functions:
        if name == ENVIRONMENT:
            continue
        if name == TASK:
            assert task_source is not None, "reward.functions=[task] comes with a task.py"
            task = load_module(task_source)
            functions[name] = find(task, "reward")
            if hasattr(task, ANSWER):
                answers[name] = find(task, ANSWER)
        else:
            module = importlib.import_module(f"llamarl.environments.rewards.{name}")
            functions[name] = module.reward
            if REWARDS[name].answer:
                answers[name] = partial(_answer, module.answer, config)
    if config.functions[0] in answers:
        functions[ANSWER] = answers[config.functions[0]]
    return functions


def _answer(
    find_answer: Callable[[str, RewardConfig], str | None],
    config: RewardConfig,
    prompt: Prompt,
    completion: str,
) -> str | None:
    """With the arguments that `majority_answer` of a task.py gets."""
    return find_answer(completion, config)


def make_score(
    functions: dict[str, Reward], config: RewardConfig
) -> Callable[..., Awaitable[tuple[float, ...]]]:
    """What the stage `score` runs: (prompt, completion, SAMPLING cell, and of an episode the reward
    of its environment) -> the weighted sum, then what each function gave, and last the number of
    the answer of a held-out prompt (`NO_ANSWER`: it has none). InvalidReturnError for what is no
    finite number."""

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
        has_answer = prompt.is_held_out and ANSWER in functions
        answer = functions[ANSWER](prompt, completion) if has_answer else None
        total = sum(weight * parts[name] for name, weight in pairs)
        return total, *parts.values(), _number_of(answer)

    return score


def _number_of(answer: object) -> float:
    """A whole number, which a float holds: the same for equal answers, others for others."""
    if answer is None:
        return NO_ANSWER
    digest = hashlib.blake2b(str(answer).strip().encode(errors="replace"), digest_size=6)
    return float(int.from_bytes(digest.digest()))


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


def check_answers(config: RewardConfig, prompts: Sequence[Prompt], path: str | Path) -> None:
    """Raise ValueError, one line with file and line number, if a prompt of the file `path` lacks
    the expected answer or the tests that one of the rewards needs."""
    needs = [REWARDS[name] for name in config.functions]
    has_answer, has_tests = any(each.answer for each in needs), any(each.tests for each in needs)
    for prompt in prompts if has_answer or has_tests else ():
        try:
            if has_answer:
                expected_answer(prompt, config)
            if has_tests:
                read_tests(prompt, config)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{error.args[0].removeprefix('line ')}") from error
