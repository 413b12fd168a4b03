"""The generator of a rehearsal, with an environment that answers as it is told."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from llamarl.core.records import (
    Columns,
    EpisodeState,
    FinishReason,
    Prompt,
    Request,
    Sampling,
    TurnItem,
    TurnResult,
)
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.rehearsal.environment import EpisodeLog
from llamarl.rehearsal.faults import Faults, Injector
from llamarl.rehearsal.policies import AskedTurn
from llamarl.rehearsal.replica import RehearsalReplica
from tests.places import ROOT

PROMPT = Prompt(prompt_id=1, text="q", token_ids=(5, 6), fields={})
LIMIT_S = 30.0


class Ending:
    """An agent's environment: a second conversation ends the episode while the model still writes
    in the first."""

    def __init__(self) -> None:
        self.logs: dict[int, EpisodeLog] = defaultdict(EpisodeLog)

    def form_of(self, row_id: int, conversation: int) -> Any:
        return None

    async def answer(self, turn: TurnItem) -> TurnResult:
        own = {"row_id": turn.row_id, "attempt": turn.attempt}
        if not turn.opens:
            return TurnResult(**own, state=EpisodeState.CLOSED)
        if turn.conversation == 2:
            return TurnResult(**own, state=EpisodeState.DONE, reward=1.0)
        opened: dict[str, Any] = {"prompt_ids": (5, 6), "has_more": True}
        return TurnResult(**own, state=EpisodeState.GOES_ON, **opened)

    async def progress(self, turns: Sequence[TurnItem]) -> None: ...

    async def forget(self, row_ids: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Store:
    """A column store that keeps nothing."""

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None: ...

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        raise NotImplementedError


class Slow:
    """A policy that never ends the first conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end = tokenizer.eos_token_ids[0]

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        if asked.conversation == 0:
            await asyncio.Event().wait()
        return [7, self.end]

    def commit(self) -> None: ...

    async def close(self) -> None: ...


def test_an_episode_that_ends_amid_a_turn_is_reported() -> None:
    async def play() -> None:
        tokenizer = load_tokenizer(ROOT / "recipes" / "quickstart_tools" / "checkpoint")
        environment: Any = Ending()
        replica = RehearsalReplica(
            Slow(tokenizer),
            environment,
            environment,
            Store(),
            tokenizer,
            Injector(Faults(), seed=0),
            context=100,
            at_once=10,
            is_reversed=False,
        )
        sampling = Sampling(max_tokens=20)
        request = Request(row_id=3, prompt_ids=(5, 6), sampling=sampling, seed=1, prompt=PROMPT)
        await replica.submit([request])
        async with asyncio.timeout(LIMIT_S):
            _, (rollout,) = await replica.collect(0)
        assert rollout.row_id == 3
        assert rollout.finish_reason is FinishReason.LENGTH, "its first conversation was given up"
        assert [each.num_generated for each in rollout.sequences] == [0, 2]
        await replica.close()

    asyncio.run(play())
