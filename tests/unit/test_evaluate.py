"""The held-out evaluation: what its figures are over."""

import asyncio

import pytest

from llamarl.evaluate import Evaluator, evaluate_alone
from llamarl.experience.ledger import Ledger, loop_stages
from llamarl.types import (
    FinishReason,
    Prompt,
    Row,
    Sampling,
    Score,
    ScoreStatus,
    VersionSpan,
)


class EchoGenerator:
    """A Generator that answers every request at once, with one token of `version`."""

    def __init__(self, version):
        self._version = version
        self._rows = asyncio.Queue()

    async def submit(self, requests):
        self._rows.put_nowait(
            [
                Row(
                    row_id=request.row_id,
                    num_prompt_tokens=1,
                    num_tokens=1,
                    spans=(VersionSpan(version=self._version, num_tokens=1),),
                    finish_reason=FinishReason.STOP,
                )
                for request in requests
            ]
        )

    async def collect(self):
        return await self._rows.get()


class ListScorer:
    """A Scorer that knows each row's reward; None is a reward that failed."""

    def __init__(self, rewards):
        self._rewards = rewards

    async def score(self, rollouts):
        return [self._score(row_id, self._rewards[row_id]) for row_id, _ in rollouts]

    def _score(self, row_id, reward):
        if reward is None:
            return Score(row_id=row_id, status=ScoreStatus.HUNG, error="too slow")
        return Score(row_id=row_id, status=ScoreStatus.OK, reward=reward, parts={"f": reward})


class FateStorage:
    """Remembers the fates of rows."""

    def __init__(self):
        self.fates = {}

    async def retire(self, row_ids, fate):
        self.fates |= dict.fromkeys(row_ids, fate)


def evaluate(rewards, version=0):
    async def run():
        generator, ledger = EchoGenerator(version), Ledger(loop_stages(has_reference=False))
        storage = FateStorage()
        evaluator = Evaluator(
            prompts=[Prompt(prompt_id=i, text="q", token_ids=(1,)) for i in range(len(rewards))],
            sampling=Sampling(max_tokens=1),
            seed=0,
            generator=generator,
            ledger=ledger,
            storage=storage,
        )
        result = await evaluate_alone(evaluator, generator, ListScorer(rewards), ledger)
        return result, storage.fates

    return asyncio.run(run())


def test_a_failed_reward_counts_as_wrong_and_is_counted():
    result, fates = evaluate([1.0, 1.0, None, 0.5])
    assert (result.accuracy, result.reward) == (0.5, 0.625)
    assert (result.num_prompts, result.num_failed) == (4, 1)
    assert [fates[row]["correct"] for row in range(4)] == [1, 1, 0, 0]


def test_an_evaluation_whose_rewards_all_failed_says_why():
    with pytest.raises(ExceptionGroup) as error:
        evaluate([None, None])
    assert error.group_contains(RuntimeError, match="every reward .* failed: too slow")


def test_an_evaluation_with_tokens_of_another_version_is_refused():
    with pytest.raises(ExceptionGroup) as error:
        evaluate([1.0], version=3)
    assert error.group_contains(RuntimeError, match=r"version 0 met tokens of \[3\]")
