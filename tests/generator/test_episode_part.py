"""Episodes on the ranks of one replica, under random answers, aborts and orders of events."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamarl.core.batcher import Gathering
from llamarl.core.records import (
    EPISODE_ROWS,
    NO_VERSION,
    EpisodeState,
    FinishReason,
    Prompt,
    Request,
    Sampling,
    StageStatus,
    TurnItem,
    TurnOptions,
    TurnResult,
    episode_of,
)
from llamarl.generator.episodes import EpisodePart, Rank
from llamarl.generator.protocol import PartialOutput, RequestOutput
from llamarl.scoring.environment import Environments
from tests.random_search import case, searched

PROMPT = Prompt(prompt_id=1, text="q", token_ids=(5, 6), fields={})
MAX_TOKENS, CONTEXT = 30, 28
ROUNDS = 60


class Environment:
    """faces.Environment whose answers come when `rng` says; it keeps what it was asked. Episodes of
    odd rows are an agent's, with several conversations."""

    name = "environment-0"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.asked: list[TurnItem] = []
        self.open: dict[asyncio.Future[None], TurnItem] = {}
        self.forgotten: list[int] = []
        self.told: list[TurnItem] = []

    async def progress(self, turns: Sequence[TurnItem]) -> None:
        self.told += turns

    async def answer(self, turn: TurnItem) -> TurnResult:
        self.asked.append(turn)
        answered = asyncio.get_running_loop().create_future()
        self.open[answered] = turn
        await answered
        is_agent = turn.row_id % 2 == 1
        if is_agent and not turn.opens:
            return self.follow(turn)
        kinds = ["more", "more", "more", "done", "limit", "lost", "failed"]
        kind = self.rng.choice(["more"] * 4 * is_agent + kinds)
        result = TurnResult(
            row_id=turn.row_id,
            attempt=turn.attempt,
            state={
                "done": EpisodeState.DONE,
                "limit": EpisodeState.LIMIT,
                "lost": EpisodeState.LOST,
            }.get(kind, EpisodeState.GOES_ON),
            status=StageStatus.HUNG if kind == "failed" else StageStatus.OK,
            numbers={"turns": 1.0},
        )
        if kind == "more" and is_agent:
            return replace(result, prompt_ids=(5, 6, turn.conversation), has_more=True)
        if kind == "more" and turn.prompt is not None:
            return replace(result, prompt_ids=self.rng.choice([None, (5, 6, 7)]))
        return replace(result, observation=(9,) * self.rng.randint(1, 3) * (kind == "more"))

    def follow(self, turn: TurnItem) -> TurnResult:
        """What follows a turn in one of several conversations."""
        goes_on = self.rng.random() < 0.7
        return TurnResult(
            row_id=turn.row_id,
            attempt=turn.attempt,
            state=EpisodeState.GOES_ON if goes_on else EpisodeState.CLOSED,
            observation=(9,) * self.rng.randint(1, 3) * goes_on,
        )

    async def forget(self, row_ids: Sequence[int]) -> None:
        self.forgotten += row_ids

    def close(self) -> None: ...


class TwoRanks:
    """Two ranks in lockstep, each with an engine that is a dictionary. As in
    `generator/decoding.py`, rank 1's command waits until rank 0 has come to the one with its key,
    and a rank's event loop may be behind the other's."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.environment = rng, Environment(rng)
        links: Any = (self.environment,)
        reached = Environments(links, 0, CONTEXT), Environments((), 0, CONTEXT)  # by rank 0 only
        self.engines: list[dict[int, tuple[Request, PartialOutput]]] = [{}, {}]
        self.out: list[list[RequestOutput]] = [[], []]
        self.called: list[deque[Callable[[], None]]] = [deque(), deque()]
        self.commands: list[dict[object, Callable[[], None]]] = [{}, {}]
        self.shared: Sequence[int] = ()
        self.errors: list[BaseException] = []
        self.aborting: list[list[int]] = [[], []]  # rows, of each rank
        waits = [Gathering(limit_s=rng.choice([0.0, 0.0, 0.001])) for _ in range(2)]
        self.parts = [EpisodePart(self._rank(n), reached[n], waits[n]) for n in range(2)]

    def _rank(self, number: int) -> Rank:
        def post(call: Callable[[], None], key: object) -> None:
            assert key not in self.commands[number], "two commands of one key"
            self.commands[number][key] = call

        def share(numbers: Sequence[int] | None) -> Sequence[int]:
            if number == 0:
                assert numbers is not None
                self.shared = numbers
            return self.shared

        def resume(request: Request, written: PartialOutput) -> None:
            assert request.row_id not in self.engines[number]
            self.engines[number][request.row_id] = request, written

        return Rank(
            number=number,
            post=post,
            share=share,
            resume=resume,
            abort=self.aborting[number].extend,
            put=self.out[number].append,
            call_soon=self.called[number].append,
            fail=self.errors.append,
        )

    def command(self, call: Callable[[int], object]) -> None:
        """Between the same two steps of both ranks."""
        for number in range(2):
            call(number)

    async def events(self) -> None:
        """Some of what waits happens: in event loops, in the environment, between steps."""
        for _ in range(self.rng.randint(0, 6)):
            kind = self.rng.choice(["call", "answer", "command"])
            number = self.rng.randrange(2)
            if kind == "call" and self.called[number]:
                self.called[number].popleft()()
            elif kind == "answer" and self.environment.open:
                answered = self.rng.choice([*self.environment.open])
                del self.environment.open[answered]
                answered.set_result(None)
            elif kind == "command":
                for key in [k for k in self.commands[0] if k in self.commands[1]][:1]:
                    self.command(lambda n, key=key: self.commands[n].pop(key)())
                    self.stop_aborted()
            for _ in range(6):
                await asyncio.sleep(0)

    def write(self, row_id: int, reason: FinishReason, num_tokens: int, num_kept: int) -> None:
        """The engine of each rank writes a turn, or a segment, and stops."""

        def stop(number: int) -> None:
            request, before = self.engines[number].pop(row_id)
            added = np.full(num_tokens, 3, np.int32)
            written = PartialOutput(
                ids=np.concatenate([before.ids, added]),
                logprobs=np.concatenate([before.logprobs, np.full(num_tokens, -0.5, np.float32)]),
                versions=np.concatenate([before.versions, added]),
                num_kept=num_kept * request.resume,
            )
            item = RequestOutput(request=request, written=written, reason=reason)
            self.parts[number].leave_engine(item)

        self.command(stop)
        self.stop_aborted()

    def stop_aborted(self) -> None:
        """The engine stops what was aborted, amid a turn or before its first token."""
        first, second = self.aborting
        assert first == second
        rows = [row for row in first if row in self.engines[0]]
        for row in (*first,):
            first.remove(row)
            second.remove(row)
        for row in rows:
            self.write(row, FinishReason.ABORTED, self.rng.randint(0, 2), 0)


def request(row_id: int, attempt: int) -> Request:
    sampling = Sampling(max_tokens=MAX_TOKENS)
    ids = PROMPT.token_ids
    return Request(
        row_id=row_id, prompt_ids=ids, sampling=sampling, seed=1, prompt=PROMPT, attempt=attempt
    )


async def play(rng: random.Random) -> None:
    ranks, attempts, opened = TwoRanks(rng), Counter[int](), Counter[int]()
    resumable: dict[int, RequestOutput] = {}
    for _ in range(ROUNDS):
        rows, engine = range(4), ranks.engines[0]
        kind, row_id = rng.choice(["open", "stop", "stop", "abort", "cut"]), rng.choice(rows)
        is_open = opened[row_id] > sum(o.request.row_id == row_id for o in ranks.out[0])
        if kind == "open" and not is_open:
            item = resumable.pop(row_id, None)
            asked = request(row_id, attempts[row_id])
            written = PartialOutput()
            if item is not None:
                asked = replace(item.request, resume=True, environment=0)
                written = item.written
            else:
                attempts[row_id] += 1
            opened[row_id] += 1
            ranks.command(lambda n, a=asked, w=written: ranks.parts[n].open(a, w))
        elif kind == "stop" and (those := [r for r in engine if r % EPISODE_ROWS == row_id]):
            reason = rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
            ranks.write(rng.choice(those), reason, rng.randint(1, 3), rng.choice([0, 4]))
        elif kind == "cut" and row_id in engine:
            num_out = len(ranks.out[0])
            ranks.write(row_id, FinishReason.SEGMENT, 1, 0)
            if row_id % 2:
                assert row_id in engine, "an agent's episode stays"
            else:
                assert len(ranks.out[0]) == num_out + 1
                resumable[row_id] = ranks.out[0][-1]
        elif kind == "abort":
            is_running = any(r % EPISODE_ROWS == row_id for r in engine)
            ranks.command(lambda n, r=row_id: ranks.parts[n].abort([r]))
            assert not is_open or is_running or ranks.out[0][-1].reason is FinishReason.ABORTED
            ranks.stop_aborted()
            assert not any(r % EPISODE_ROWS == row_id for r in engine)
        await ranks.events()
        check(ranks)
    assert not ranks.errors, ranks.errors
    for part in ranks.parts:
        await part.close()


def check(ranks: TwoRanks) -> None:
    """Both ranks are at the same point with the same tokens, and what came out is right."""
    first, second = ({r: both(*e) for r, e in each.items()} for each in ranks.engines)
    assert first == second, "the ranks went on from different tokens"
    assert [o.request.row_id for o in ranks.out[0]] == [o.request.row_id for o in ranks.out[1]]
    for item in ranks.out[0]:
        episode = item.episode
        assert episode is not None
        assert episode.attempt == item.request.attempt
        assert episode.numbers["kept"] <= episode.numbers["resumed"]
        for number, each in enumerate((item, *item.conversations)):
            written = each.written
            observed = written.versions == NO_VERSION
            assert {*written.ids[observed].tolist()} <= {9}
            assert {*written.ids[~observed].tolist()} <= {3}
            assert not written.logprobs[observed].any()
            assert (written.logprobs[~observed] == -0.5).all()
            if each.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert not observed[-1:].any(), "a turn follows each observation"
            if number:
                assert len(written.ids), "a conversation in which nothing was written is no row"
                row_id, conversation = episode_of(each.request.row_id)
                assert row_id == item.request.row_id
                assert each.request.prompt_ids == (5, 6, conversation)
                assert each.request.seed != item.request.seed
    for turn in ranks.environment.asked:
        assert set(turn.ids) <= {3}, "only what the model wrote"
        assert turn.row_id % 2 or (turn.prompt is None) == bool(turn.ids)
        assert turn.room < MAX_TOKENS


def both(asked: Request, written: PartialOutput) -> tuple[tuple[int, ...], list[int], list[int]]:
    return asked.prompt_ids, written.ids.tolist(), written.versions.tolist()


@searched(few=60, many=3000)
def test_ranks_go_on_from_the_same_tokens_and_every_episode_comes_out_once(
    seeds: list[int],
) -> None:
    for seed in seeds:
        with case(seed):
            asyncio.run(play(random.Random(seed)))


def test_an_observation_may_fill_what_is_left_but_for_one_token_of_the_model() -> None:
    async def main() -> list[int]:
        ranks = TwoRanks(random.Random(0))
        rooms = []
        for row_id, (prompt_ids, num_tokens) in enumerate([((5,) * 2, 4), ((5,) * 20, 4)]):
            asked = replace(request(row_id, 0), prompt_ids=prompt_ids, resume=True, environment=0)
            ranks.command(lambda n, a=asked: ranks.parts[n].open(a, PartialOutput()))
            ranks.write(row_id, FinishReason.STOP, num_tokens, 0)
            ranks.called[0].popleft()()
            await asyncio.sleep(0)
            rooms.append(ranks.environment.asked[-1].room)
        for part in ranks.parts:
            await part.close()
        return rooms

    assert asyncio.run(main()) == [
        min(MAX_TOKENS - 4, CONTEXT - 2 - 4) - 1,
        min(MAX_TOKENS - 4, CONTEXT - 20 - 4) - 1,
    ]


async def test_a_turn_that_streams_is_told_in_pieces_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamarl.generator.episodes.STREAM_S", 0.0)
    ranks = TwoRanks(random.Random(0))
    written: dict[int, list[int]] = {}

    async def answer(turn: TurnItem) -> TurnResult:
        ranks.environment.asked.append(turn)
        options = TurnOptions(streams=turn.row_id == 1 and len(ranks.environment.asked) < 4)
        result = TurnResult(row_id=turn.row_id, attempt=0, state=EpisodeState.GOES_ON)
        return replace(result, observation=(9,) * (not turn.opens), options=options)

    monkeypatch.setattr(ranks.environment, "answer", answer)

    async def settle() -> None:
        for number in range(2):
            while ranks.called[number]:
                ranks.called[number].popleft()()
        for _ in range(20):
            await asyncio.sleep(0)
        for key in [k for k in ranks.commands[0] if k in ranks.commands[1]]:
            ranks.command(lambda n, key=key: ranks.commands[n].pop(key)())

    for row_id in (1, 2):
        asked = request(row_id, 0)
        ranks.command(lambda n, a=asked: ranks.parts[n].open(a, PartialOutput()))
    await settle()
    for ids in ([], [3], [3, 3], [3, 3, 3]):
        written = {1: ids, 2: ids}
        ranks.command(lambda n, w=written: ranks.parts[n].stream(w.__getitem__))
        await settle()
    told = [(turn.row_id, turn.ids, turn.start) for turn in ranks.environment.told]
    assert told == [(1, (3,), 0), (1, (3,), 1), (1, (3,), 2)]
    ranks.write(1, FinishReason.STOP, 4, 0)
    await settle()
    ranks.command(lambda n: ranks.parts[n].stream({1: [3, 3]}.__getitem__))
    await settle()
    told = [(turn.row_id, turn.ids, turn.start) for turn in ranks.environment.told[3:]]
    assert told == [(1, (3, 3), 5)], "the next turn begins after the observation"
    for part in ranks.parts:
        await part.close()
