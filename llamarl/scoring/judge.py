"""The reward `judge`: what a model behind an OpenAI-compatible endpoint thinks of a completion."""

from __future__ import annotations

import asyncio
import os
import re
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from llamarl.core.config import RewardConfig
from llamarl.core.fields import require
from llamarl.core.records import Prompt, filled
from llamarl.scoring.user_code.calls import InvalidRewardError, shown

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NAME = "judge"
KEY = f"reward.{NAME}"
NO_KEY = "none"  # for a server that asks for none; the client wants a text


def question(config: RewardConfig, prompt: Prompt, completion: str) -> str:
    """Return what the judge is asked about a completion. Raises ValueError, which begins with the
    line number, if the template names a field that the row lacks."""
    known = {**prompt.fields, "prompt": prompt.text, "completion": completion}
    try:
        return filled(config.judge.prompt, known, f"{KEY}.prompt")
    except ValueError as error:
        raise ValueError(f"line {prompt.line}: {error}") from error


def check_judge(config: RewardConfig) -> None:
    """Raise ValueError, one line, if a judge cannot be asked with this section."""
    judge = config.judge
    is_address = re.fullmatch(r"https?://[^\s/]+(/\S*)?", judge.url) is not None
    must = "be the address of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1"
    require(is_address, f"{KEY}.url", must, judge.url)
    require(bool(judge.model), f"{KEY}.model", "name the model that judges", judge.model)
    try:
        num_groups = re.compile(judge.pattern).groups
    except re.error as error:
        must = f"{KEY}.pattern must be a regular expression"
        raise ValueError(f"{must}, got {judge.pattern!r}: {error}") from error
    must = "have a group around the score"
    require(num_groups >= 1, f"{KEY}.pattern", must, judge.pattern)
    must = "be drop with the reward judge: an answer that cannot be read says nothing"
    require(config.on_failure == "drop", "reward.on_failure", must, config.on_failure)
    must = f"be at least {KEY}.timeout_s ({judge.timeout_s:g}), for it holds for all attempts"
    require(config.timeout_s >= judge.timeout_s, "reward.timeout_s", must, config.timeout_s)
    if find_spec("openai") is None:
        must = "go with the package openai (pip install 'llamarl[judge]')"
        raise ValueError(f"reward.functions=[{NAME}] must {must}, got none")


class Judge:
    """Asks the endpoint of `config.judge`, up to its `max_requests` times at once."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._turns = asyncio.Semaphore(config.judge.max_requests)
        self._client: AsyncOpenAI | None = None

    async def reward(
        self, prompt: Prompt, completion: str, finished: bool, config: RewardConfig
    ) -> dict[str, float]:
        """Return the score in the judge's answer, with the seconds and tokens that it took and how
        often it was asked again. Raises InvalidRewardError for an answer without a score, and
        RuntimeError if there is no answer."""
        async with self._turns:
            began_s = time.monotonic()
            text, cost = await self._ask(question(config, prompt, completion))
            seconds = time.monotonic() - began_s
        return {"score": read_score(config, text), "judge_s": seconds} | cost

    async def _ask(self, content: str) -> tuple[str, dict[str, float]]:
        """Return the answer's text, and its cost."""
        import openai  # here, for it takes half a second

        judge = self._config.judge
        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=judge.url,
                api_key=os.environ.get(judge.key_variable) or NO_KEY,
                max_retries=judge.max_retries,
                timeout=judge.timeout_s,
            )
        options = {name: value for name, value in judge.options.items() if value is not None}
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=judge.model, messages=[{"role": "user", "content": content}], **options
            )
            answer = raw.parse()
            (choice, *_) = answer.choices
            text = choice.message.content
        except openai.OpenAIError as error:
            must = f"{KEY}.url must answer within {judge.max_retries} retries"
            got = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{must}, got {got:.500} from {judge.url}") from None
        except (ValueError, TypeError, AttributeError) as error:
            must = f"{KEY}.url must answer as OpenAI's chat completions do"
            raise RuntimeError(f"{must}, got {error!r:.200} from {judge.url}") from None
        if choice.finish_reason == "length":
            must = f"end its answer itself (max_tokens of {KEY}.options)"
            raise InvalidRewardError(f"the judge must {must}, got a cut one: {shown(text)}")
        cost = {"judge_retries": float(raw.retries_taken)}
        if answer.usage is not None:
            cost["judge_prompt_tokens"] = float(answer.usage.prompt_tokens)
            cost["judge_completion_tokens"] = float(answer.usage.completion_tokens)
        return text or "", cost


def read_score(config: RewardConfig, text: str) -> float:
    """Return the number in group 1 of the pattern's last match in the judge's answer. Raises
    InvalidRewardError if there is none: a judge quotes what it judges, so the last one counts."""
    matches = [*re.finditer(config.judge.pattern, text)]
    try:
        return float(matches[-1][1])
    except (IndexError, ValueError, TypeError):
        must = f"give a number where {KEY}.pattern ({config.judge.pattern}) finds it"
        raise InvalidRewardError(f"the judge must {must}, got {shown(text)}") from None
