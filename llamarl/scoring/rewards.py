"""The rewards by name, the fields that they need in a prompt's row, and the function of the stage
`score`, for a rollout or for a group at once. Only finite numbers leave it."""

import asyncio
import hashlib
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.config.inputs import ENVIRONMENT, LARGEST, OF_EPISODE
from llamarl.core.extensions import FILE, TaskSource, find, load_module
from llamarl.core.fields import require, require_choice
from llamarl.core.records import FinishReason, Prompt, finish_reason
from llamarl.scoring import judge
from llamarl.scoring.reward_functions import (
    expected_answer,
    find_exact,
    read_tests,
    reward_code,
    reward_exact,
    reward_format,
)
from llamarl.scoring.user_code.calls import InvalidRewardError, as_number, awaited, shown

Reward = Callable[..., Any]
"""A function (prompt, completion, finished, config) -> reward. That of a task.py takes (prompt,
completion), or (prompt, completions) and returns one reward each; it may be a coroutine."""
TASK = "task"  # the recipe's own task.py
OF_GROUP = "group"  # its function for all rollouts of a prompt at once
OWN = {TASK: "reward", OF_GROUP: "group_reward"}  # the functions of task.py behind these names
ANSWER = "majority_answer"  # of a task.py, and what the stage gives beside the rewards
NO_ANSWER = -1.0
ZERO_BELOW = re.compile(r"/\s*0+(?![\d.])|frac\s*\{[^{}]*\}\s*\{\s*0+\s*\}")  # of a fraction


def reward_math(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """See `math_reward.reward`."""
    from llamarl.scoring import math_reward  # here, for math-verify takes half a second

    return math_reward.reward(prompt, completion, config)


def find_math(completion: str, config: RewardConfig) -> str | None:
    """See `math_reward.find_answer`."""
    from llamarl.scoring import math_reward

    return math_reward.find_answer(completion)


@dataclass(frozen=True, slots=True)
class Shipped:
    """A reward by its name: `function`, unless task.py, the environment or a judge gives it, and
    `find_answer`, which finds the answer in a completion and makes an expected answer necessary in
    each prompt's row, as `needs_tests` does tests. `reward.pattern` needs at least `num_groups`
    groups (None: the reward does not use it)."""

    function: Reward | None = None
    find_answer: Callable[[str, RewardConfig], str | None] | None = None
    needs_tests: bool = False
    num_groups: int | None = None


REWARDS = {
    "math": Shipped(reward_math, find_math),
    "exact": Shipped(reward_exact, find_exact, num_groups=1),
    "format": Shipped(reward_format, num_groups=0),
    "code": Shipped(reward_code, needs_tests=True),
    judge.NAME: Shipped(),
    TASK: Shipped(),
    OF_GROUP: Shipped(),
    ENVIRONMENT: Shipped(),
}
"""Rewards by their names in `reward.functions`; each of `episode_rewards` is environment.NAME."""


def _shipped(config: RewardConfig) -> list[tuple[str, Shipped]]:
    """Return the rewards that the section names, with their names."""
    names = config.functions
    return [(name, REWARDS[ENVIRONMENT if name.startswith(OF_EPISODE) else name]) for name in names]


def load_functions(config: RewardConfig, task_source: TaskSource | None) -> dict[str, Reward]:
    """Return the functions that `config` names, by name and in its order; under ANSWER, the
    function that finds the answer in a completion, if the first reward has one. Raises ValueError
    unless task.py defines its own ones in their form; what its text raises is passed on."""
    if "math" in config.functions:
        from llamarl.scoring import math_reward  # noqa: F401 - the first call has no time for it
    functions: dict[str, Reward] = {}
    own = None
    for name, shipped in _shipped(config):
        if shipped.function is not None:
            functions[name] = shipped.function
        elif name == judge.NAME:
            functions[name] = judge.Judge(config).reward
        elif name in OWN:
            assert task_source is not None, f"reward.functions=[{name}] comes with a task.py"
            own = own or load_module(task_source)
            functions[name] = find(own, OWN[name])
    own_answer = find(own, ANSWER) if own is not None and hasattr(own, ANSWER) else None
    first, shipped = _shipped(config)[0]
    if (find_answer := shipped.find_answer) is not None:
        functions[ANSWER] = lambda prompt, completion: find_answer(completion, config)
    elif first in OWN and own_answer is not None:
        functions[ANSWER] = own_answer
    return functions


def check_rewards(config: RewardConfig) -> None:
    """Raise ValueError, one line, if the section cannot work with any prompts."""
    for name in config.functions:
        if not name.startswith(OF_EPISODE):
            require_choice("reward.functions", name, REWARDS)
    if judge.NAME in config.functions:
        judge.check_judge(config)
    for name, shipped in _shipped(config):
        if shipped.num_groups is None:
            continue
        try:
            num_groups = re.compile(config.pattern).groups
        except re.error as error:
            must = "reward.pattern must be a regular expression"
            raise ValueError(f"{must}, got {config.pattern!r}: {error}") from error
        must = f"have a group around the answer for {name}"
        require(num_groups >= shipped.num_groups, "reward.pattern", must, config.pattern)


ESCAPE = re.compile(r"\\(?=\W)")  # of a letter that stands for itself
NUMBERED = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")  # a letter by its number
FLAGS = re.compile(r"\(\?[aimsux]+\)")
SYNTAX = re.compile(rf"{ESCAPE.pattern}|(?<!\\)(?:\((?:\?(?::|P<\w+>))?|[)\[\]])")  # and of groups


def check_pattern(config: RewardConfig, special_tokens: Collection[str]) -> None:
    """Raise ValueError if the pattern asks for a special token, which the text of a completion does
    not show."""
    if all(shipped.num_groups is None for _, shipped in _shipped(config)):
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
    """Raise ValueError, one line, if the row of a prompt lacks the expected answer, the tests or
    the fields that a reward needs."""
    needed = [shipped for _, shipped in _shipped(config)]
    try:
        if any(each.find_answer for each in needed):
            text = expected_answer(prompt, config)
            if "math" in config.functions and ZERO_BELOW.search(text):
                must = f"line {prompt.line}: {config.answer_field!r} must have a finite value"
                raise ValueError(f"{must}, got {text!r}")
        if any(each.needs_tests for each in needed):
            read_tests(prompt, config)
        if judge.NAME in config.functions:
            judge.question(config, prompt, "")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(error.args[0].partition(": ")[2]) from error


SCORE = "score"  # of a dict that a reward returns: the reward itself
MOST_EXTRAS, MOST_NAME_CHARS = 64, 100


def make_score(
    functions: Mapping[str, Reward], config: RewardConfig
) -> Callable[..., Awaitable[tuple[Any, ...]]]:
    """Return the function of the stage `score`: (prompt, completion, SAMPLING cell, and for an
    episode its rewards at the end) -> the weighted sum, the result of each function, the number of
    the answer of a held-out prompt (`NO_ANSWER` if it has none), and the further numbers of
    functions that return a dict, as JSON. With `group_reward` it takes and returns a list of each.
    It raises InvalidRewardError for anything but finite numbers."""
    named = [OF_EPISODE + name for name in config.episode_rewards]
    are_coroutines = any(map(inspect.iscoroutinefunction, functions.values()))

    async def score(
        prompt: Prompt, completion: str, sampling: Sequence[float], given: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the scores of one rollout; `given` are rewards that are known already."""
        finished = finish_reason(sampling) is FinishReason.STOP
        parts, extras = {}, dict[str, float]()
        for name in config.functions:
            more = () if name == TASK else (finished, config)
            if name in given:
                found = given[name]
            else:
                found = await awaited(functions[name](prompt, completion, *more))
            parts[name] = read_reward(found, name, extras)
        pairs = zip(config.functions, config.weights, strict=True)
        has_answer = prompt.is_held_out and ANSWER in functions
        answer = functions[ANSWER](prompt, completion) if has_answer else None
        total = sum(weight * parts[name] for name, weight in pairs)
        return total, *parts.values(), _number_of(answer), json.dumps(extras)

    def read_episode(of_episode: Sequence[Any]) -> dict[str, float]:
        """Return the rewards of an episode's end: the environment's, if ENVIRONMENT is named, and
        one for each of `named`."""
        given = {ENVIRONMENT: of_episode[0]} if ENVIRONMENT in config.functions else {}
        return given | (dict(zip(named, of_episode[-1], strict=True)) if named else {})

    async def score_rollout(
        prompt: Prompt, completion: str, sampling: Sequence[float], *of_episode: Any
    ) -> tuple[Any, ...]:
        return await score(prompt, completion, sampling, read_episode(of_episode))

    async def score_group(
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        samplings: Sequence[Sequence[float]],
        *of_episodes: Sequence[Any],
    ) -> tuple[tuple[Any, ...], ...]:
        found = await awaited(functions[OF_GROUP](prompts[0], [*completions]))
        of_group = _one_each(found, len(completions))
        each = [
            {OF_GROUP: of_group[i]} | read_episode([column[i] for column in of_episodes])
            for i in range(len(completions))
        ]
        calls = map(score, prompts, completions, samplings, each)
        if are_coroutines:  # they run at once, and all have ended before the first error is raised
            rows = await asyncio.gather(*calls, return_exceptions=True)
            for error in rows:
                if isinstance(error, BaseException):
                    raise error
        else:
            rows = [await call for call in calls]
        return tuple(zip(*rows, strict=True))

    return score_group if OF_GROUP in functions else score_rollout


def read_reward(found: Any, name: str, extras: dict[str, float]) -> float:
    """Return the reward in the result of the function `name` of `reward.functions`: a number, or
    the entry SCORE of a dict, whose other finite numbers go to `extras` and whose texts and other
    values are ignored. Raises InvalidRewardError, a whole sentence, for anything else."""
    of = f"{OWN[name]} in {FILE}" if name in OWN else f"reward {name}"
    value = found
    if isinstance(found, Mapping):
        value = found.get(SCORE)
        for key, other in found.items():
            number = None if key == SCORE else _finite(other)
            if number is None:
                continue
            is_name = isinstance(key, str) and 0 < len(key) <= MOST_NAME_CHARS
            if not (is_name and key.isprintable()):
                must = f"name its numbers by texts of up to {MOST_NAME_CHARS} characters"
                raise InvalidRewardError(f"{of} must {must}, got {shown(key)}")
            if key in extras:
                must = "give numbers that no other reward function gives"
                raise InvalidRewardError(f"{of} must {must}, got {shown(key)} again")
            extras[key] = number
        if len(extras) > MOST_EXTRAS:
            must = f"return at most {MOST_EXTRAS} numbers besides {SCORE!r}"
            raise InvalidRewardError(f"{of} must {must}, got {len(extras)}")
    reward = as_number(value)
    if reward is None:
        must = f"return a number or a dict with {SCORE!r}, which is one"
        raise InvalidRewardError(f"{of} must {must}, got {shown(found)}")
    if not abs(reward) <= LARGEST:
        must = f"return a finite number, at most {LARGEST:g} either way"
        raise InvalidRewardError(f"{of} must {must}, got {shown(found)}")
    return reward


def read_extra(text: object) -> dict[str, float]:
    """Return the further numbers that `make_score` gave. Raises ValueError for anything else, as
    the process that gave them runs user code."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except RecursionError as error:
        raise ValueError("further numbers must not be nested") from error
    if not isinstance(found, dict) or not all(isinstance(each, float) for each in found.values()):
        raise ValueError(f"further numbers must have names, got {shown(text)}")
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"further numbers must be finite, got {shown(text)}")
    return found


def _finite(value: Any) -> float | None:
    """Return the value as a finite number; None for anything else, and for one that no float
    holds."""
    try:
        number = as_number(value)
    except OverflowError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _number_of(answer: object) -> float:
    """Return a whole number that a float holds: the same for equal answers, different ones for
    others."""
    if answer is None:
        return NO_ANSWER
    digest = hashlib.blake2b(str(answer).strip().encode(errors="replace"), digest_size=6)
    return float(int.from_bytes(digest.digest()))


def _one_each(found: Any, count: int) -> Sequence[Any]:
    """Return the results of `group_reward` by completion."""
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != count:
        must = f"return one number, or a dict with {SCORE!r}, per completion ({count})"
        raise InvalidRewardError(f"{OWN[OF_GROUP]} in {FILE} must {must}, got {shown(found)}")
    return values
