"""The rewards by name, and whether a reward section can work at all.

Only what the section names is imported (math-verify takes half a second, and task.py runs only
in the processes of the stage)."""

import importlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.config.inputs import OF_EPISODE
from llamarl.core.extensions import TaskSource, find, load_module
from llamarl.core.fields import require, require_choice
from llamarl.core.records import Prompt
from llamarl.scoring.rewards.answer import ZERO_BELOW, expected_answer
from llamarl.scoring.rewards.code import read_tests

Reward = Callable[..., Any]
"""(prompt, completion, finished, config) -> reward, see the package's docstring; those of a task.py
take (prompt, completion), or (prompt, completions) and give one each, and may be coroutines."""
TASK = "task"  # the recipe's own task.py
OF_GROUP = "group"  # its function for all rollouts of a prompt at once
OWN = {TASK: "reward", OF_GROUP: "group_reward"}  # the functions of task.py behind these names
ENVIRONMENT = "environment"  # what the episode's environment gave
ANSWER = "majority_answer"  # of a task.py, and what the stage gives beside the rewards
NO_ANSWER = -1.0
ESCAPE = re.compile(r"\\(?=\W)")  # of a letter that stands for itself
NUMBERED = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")  # a letter by its number
FLAGS = re.compile(r"\(\?[aimsux]+\)")
SYNTAX = re.compile(rf"{ESCAPE.pattern}|(?<!\\)(?:\((?:\?(?::|P<\w+>))?|[)\[\]])")  # and of groups


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
    OF_GROUP: Needs(),
    ENVIRONMENT: Needs(),
}
"""By their names in `reward.functions`, which are those of their files here."""


def needs_of(name: str) -> Needs:
    """What the reward of this name in `reward.functions` needs."""
    return REWARDS[ENVIRONMENT if name.startswith(OF_EPISODE) else name]


def load_functions(config: RewardConfig, task_source: TaskSource | None) -> dict[str, Reward]:
    """The functions `config` names, by name and in its order; as ANSWER, what finds the answer in a
    completion if the first one has such. ValueError unless a task.py has those of them that are its
    own, in their form; what its text raises is passed on."""
    functions: dict[str, Reward] = {}
    answers: dict[str, Reward] = {}
    own = None
    for name in config.functions:
        if name == ENVIRONMENT or name.startswith(OF_EPISODE):
            continue
        if name in OWN:
            assert task_source is not None, f"reward.functions=[{name}] comes with a task.py"
            own = own or load_module(task_source)
            functions[name] = find(own, OWN[name])
            if hasattr(own, ANSWER):
                answers[name] = find(own, ANSWER)
        else:
            module = importlib.import_module(f"llamarl.scoring.rewards.{name}")
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


def check_rewards(config: RewardConfig) -> None:
    """Raise ValueError, one line, if the section cannot work with any prompts."""
    for name in config.functions:
        if not name.startswith(OF_EPISODE):
            require_choice("reward.functions", name, REWARDS)
        wanted = needs_of(name).num_groups
        if wanted is None:
            continue
        try:
            num_groups = re.compile(config.pattern).groups
        except re.error as error:
            must = "reward.pattern must be a regular expression"
            raise ValueError(f"{must}, got {config.pattern!r}: {error}") from error
        must = f"have a group around the answer for {name}"
        require(num_groups >= wanted, "reward.pattern", must, config.pattern)


def check_pattern(config: RewardConfig, special_tokens: Collection[str]) -> None:
    """ValueError if the pattern asks for a special token, which the text of a completion does not
    show."""
    if not any(needs_of(name).num_groups is not None for name in config.functions):
        return
    pattern = NUMBERED.sub(lambda found: chr(int(found[1] or found[2], 16)), config.pattern)
    pattern = FLAGS.sub("", pattern)
    is_folded = bool(re.compile(config.pattern).flags & re.IGNORECASE)
    folded: Callable[[str], str] = str.lower if is_folded else str
    readings = [*map(folded, (pattern, ESCAPE.sub("", pattern), SYNTAX.sub("", pattern)))]
    for token in special_tokens:
        is_asked = any(folded(token) in reading for reading in readings)
        must = f"hold no special token of the tokenizer, which completions do not show ({token})"
        require(not is_asked, "reward.pattern", must, config.pattern)


def check_answer(config: RewardConfig, prompt: Prompt) -> None:
    """ValueError, one line, if the row of a prompt lacks the expected answer or the tests that one
    of the rewards needs."""
    needs = [needs_of(name) for name in config.functions]
    try:
        if any(each.answer for each in needs):
            text = expected_answer(prompt, config)
            if "math" in config.functions and ZERO_BELOW.search(text):
                must = f"line {prompt.line}: {config.answer_field!r} must have a finite value"
                raise ValueError(f"{must}, got {text!r}")
        if any(each.tests for each in needs):
            read_tests(prompt, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(error.args[0].partition(": ")[2]) from error
