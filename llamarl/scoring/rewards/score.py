"""What the stage `score` runs: the reward functions of a rollout, or of a group at once.

Only finite numbers leave."""

import asyncio
import hashlib
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.config.inputs import LARGEST, OF_EPISODE
from llamarl.core.extensions import FILE
from llamarl.core.records import FinishReason, Prompt, finish_reason
from llamarl.scoring.rewards.functions import (
    ANSWER,
    ENVIRONMENT,
    NO_ANSWER,
    OF_GROUP,
    OWN,
    TASK,
    Reward,
)
from llamarl.scoring.user_code.calls import InvalidRewardError, as_number, shown

SCORE = "score"  # of a dict that a reward returns: the reward itself
MOST_EXTRAS, MOST_NAME_CHARS = 64, 100


def make_score(
    functions: Mapping[str, Reward], config: RewardConfig
) -> Callable[..., Awaitable[tuple[Any, ...]]]:
    """(prompt, completion, SAMPLING cell, and of an episode what was rewarded at its end) -> the
    weighted sum, then what each function gave, the number of the answer of a held-out prompt
    (`NO_ANSWER`: it has none), and as JSON the further numbers of functions that return a dict.
    With `group_reward` a list of each -> a list of each. InvalidRewardError for what is no finite
    number."""
    named = [OF_EPISODE + name for name in config.episode_rewards]
    are_coroutines = any(map(inspect.iscoroutinefunction, functions.values()))

    async def score(
        prompt: Prompt, completion: str, sampling: Sequence[float], given: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """`given` are rewards that are known already."""
        finished = finish_reason(sampling) is FinishReason.STOP
        parts, extras = {}, dict[str, float]()
        for name in config.functions:
            more = () if name == TASK else (finished, config)
            if name in given:
                found = given[name]
            else:
                found = await _awaited(functions[name](prompt, completion, *more))
            parts[name] = read_reward(found, name, extras)
        pairs = zip(config.functions, config.weights, strict=True)
        has_answer = prompt.is_held_out and ANSWER in functions
        answer = functions[ANSWER](prompt, completion) if has_answer else None
        total = sum(weight * parts[name] for name, weight in pairs)
        return total, *parts.values(), _number_of(answer), json.dumps(extras)

    def read_episode(of_episode: Sequence[Any]) -> dict[str, float]:
        """What is known of an episode's end: one number, if ENVIRONMENT is named, and one of each
        of `named`, if any is."""
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
        found = await _awaited(functions[OF_GROUP](prompts[0], [*completions]))
        of_group = _one_each(found, len(completions))
        each = [
            {OF_GROUP: of_group[i]} | read_episode([column[i] for column in of_episodes])
            for i in range(len(completions))
        ]
        calls = map(score, prompts, completions, samplings, each)
        rows = await _at_once(calls) if are_coroutines else [await call for call in calls]
        return tuple(zip(*rows, strict=True))

    return score_group if OF_GROUP in functions else score_rollout


def read_reward(found: Any, name: str, extras: dict[str, float]) -> float:
    """The reward that the function `name` of `reward.functions` gave: a number, or a dict with one
    as SCORE, whose other finite numbers go to `extras`; texts and what else it has are left out.
    InvalidRewardError, a whole sentence, for anything else."""
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
    """The further numbers that `make_score` gave. ValueError for anything else: the process that
    gave them runs user code."""
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
    """The number that it is; None for anything else, and for one that no float holds."""
    try:
        number = as_number(value)
    except OverflowError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _number_of(answer: object) -> float:
    """A whole number, which a float holds: the same for equal answers, others for others."""
    if answer is None:
        return NO_ANSWER
    digest = hashlib.blake2b(str(answer).strip().encode(errors="replace"), digest_size=6)
    return float(int.from_bytes(digest.digest()))


async def _awaited(found: Any) -> Any:
    while inspect.isawaitable(found):
        found = await found
    return found


async def _at_once(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What they return; the first exception once all have ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _one_each(found: Any, count: int) -> Sequence[Any]:
    """What `group_reward` returned, by completion."""
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != count:
        must = f"return one number, or a dict with {SCORE!r}, per completion ({count})"
        raise InvalidRewardError(f"{OWN[OF_GROUP]} in {FILE} must {must}, got {shown(found)}")
    return values
