"""What the stage `score` runs: the reward functions of a rollout, or of a group at once.

Owns: the order of the calls, and the weighted sum. Does not own: the functions (`functions.py`) or
the processes (`executors/stage.py`). Invariant: only finite numbers leave.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from llamarl.config import RewardConfig
from llamarl.environments.rewards.functions import (
    ANSWER,
    ENVIRONMENT,
    NO_ANSWER,
    OF_GROUP,
    TASK,
    Reward,
)
from llamarl.types import FinishReason, Prompt, finish_reason
from llamarl.user_code.calls import InvalidReturnError, checked_number, shown


def make_score(
    functions: Mapping[str, Reward], config: RewardConfig
) -> Callable[..., Awaitable[tuple[Any, ...]]]:
    """(prompt, completion, SAMPLING cell, and of an episode the reward of its environment) -> the
    weighted sum, then what each function gave, and last the number of the answer of a held-out
    prompt (`NO_ANSWER`: it has none); with `group_reward` a list of each -> a list of each.
    InvalidReturnError for what is no finite number."""
    are_coroutines = any(map(inspect.iscoroutinefunction, functions.values()))

    async def score(
        prompt: Prompt, completion: str, sampling: Sequence[float], given: Mapping[str, float]
    ) -> tuple[float, ...]:
        """`given` are rewards that are known already."""
        finished = finish_reason(sampling) is FinishReason.STOP
        parts = {}
        for name in config.functions:
            if name in given:
                parts[name] = given[name]
                continue
            more = () if name == TASK else (finished, config)
            found = await _awaited(functions[name](prompt, completion, *more))
            parts[name] = checked_number(found, name)
        pairs = zip(config.functions, config.weights, strict=True)
        has_answer = prompt.is_held_out and ANSWER in functions
        answer = functions[ANSWER](prompt, completion) if has_answer else None
        total = sum(weight * parts[name] for name, weight in pairs)
        return total, *parts.values(), _number_of(answer)

    async def score_rollout(
        prompt: Prompt, completion: str, sampling: Sequence[float], *of_episode: float
    ) -> tuple[float, ...]:
        given = dict(zip([ENVIRONMENT], of_episode, strict=False))
        return await score(prompt, completion, sampling, given)

    async def score_group(
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        samplings: Sequence[Sequence[float]],
        *of_episodes: Sequence[float],
    ) -> tuple[tuple[float, ...], ...]:
        found = await _awaited(functions[OF_GROUP](prompts[0], [*completions]))
        given: dict[str, Sequence[float]] = {OF_GROUP: _one_each(found, len(completions))}
        given |= dict(zip([ENVIRONMENT], of_episodes, strict=False))
        each = [{name: given[name][i] for name in given} for i in range(len(completions))]
        calls = map(score, prompts, completions, samplings, each)
        rows = await _at_once(calls) if are_coroutines else [await call for call in calls]
        return tuple(zip(*rows, strict=True))

    return score_group if OF_GROUP in functions else score_rollout


def _number_of(answer: object) -> float:
    """A whole number, which a float holds: the same for equal answers, others for others."""
    if answer is None:
        return NO_ANSWER
    digest = hashlib.blake2b(str(answer).strip().encode(errors="replace"), digest_size=6)
    return float(int.from_bytes(digest.digest()))


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


async def _at_once(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What they return; the first exception once all have ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _one_each(found: Any, count: int) -> list[float]:
    """What `group_reward` returned, as numbers."""
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != count:
        raise InvalidReturnError(f"have one number per completion ({count}), got {shown(found)}")
    return [checked_number(value, OF_GROUP) for value in values]
