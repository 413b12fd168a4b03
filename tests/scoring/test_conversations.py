"""The conversations of agents' episodes at the executor, with real processes: the ids that they
begin and go on with, their limits, and what ends them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from llamarl.core.records import EpisodeState, StageStatus, TurnResult
from tests.scoring.played import Setting, playing

pytestmark = pytest.mark.full

TASK = '''
import json, threading, time, urllib.error, urllib.request

from llamarl.scoring.agent import AgentEnvironment


def user(text):
    return {"role": "user", "content": text}


class Agent(AgentEnvironment):
    def play(self, url, acts, reward=1.0, **row):
        self.url, self.codes, self.said = url, [], []
        for act in acts:
            if isinstance(act, str):
                getattr(self, act)()
            else:
                self.ask(act)
        own = {self.said[0][1]: 0.25} if row.get("own") else {}
        return (reward + 0.01 * len(self.codes), own)

    def ask(self, texts):
        """Messages of the user, with "-" for what the model said last."""
        messages = []
        for text in texts:
            said = {"role": "assistant", "content": self.said[-1][0]} if text == "-" else user(text)
            messages.append(said)
        body = json.dumps({"messages": messages}).encode()
        try:
            request = urllib.request.Request(f"{self.url}/chat/completions", body)
            found = json.load(urllib.request.urlopen(request))
            self.said.append((found["choices"][0]["message"]["content"], found["id"]))
        except urllib.error.HTTPError as error:
            self.codes.append(json.load(error)["error"]["code"])

    def leave_one(self):
        threading.Thread(target=self.ask, args=(["left"],), daemon=True).start()
        time.sleep(0.3)

    def for_ever(self):
        while not self.codes:
            self.ask([f"{len(self.said)}"])

    def fail(self):
        raise OSError("no disk")

    def hang(self):
        time.sleep(1000)


environment = Agent
'''
OVER = (EpisodeState.DONE, EpisodeState.LIMIT)


async def next_of(setting: Setting, row: int, conversation: int) -> TurnResult:
    found = await setting.open(row, conversation)
    assert found.status is StageStatus.OK, found.error
    return found


def text(setting: Setting, result: TurnResult) -> str:
    assert result.prompt_ids is not None
    return setting.tokenizer.decode_raw(result.prompt_ids)


def shown(*parts: str) -> str:
    """A conversation of the user and the model in turns, as this model's template shows it."""
    roles = ["user", "assistant"] * len(parts)
    pairs = zip(roles, parts, strict=False)
    whole = "".join(f"<|im_start|>{role}\n{part}<|im_end|>\n" for role, part in pairs)
    return f"{whole}<|im_start|>assistant\n"


async def test_a_conversation_goes_on_from_its_ids_and_another_one_branches_off(
    tmp_path: Path,
) -> None:
    acts = [["a"], ["a", "-", "b"], ["a", "-", "c"], ["d", "-", "e"], ["f"]]
    async with playing(tmp_path, task=TASK) as setting:
        begun = await setting.begin(1, acts=acts, own=1)
        head, _, rest = text(setting, begun).partition("<|im_start|>user")
        assert f"<|im_start|>user{rest}" == shown("a")
        assert begun.has_more
        second = asyncio.create_task(next_of(setting, 1, 1))
        turn = await setting.turn(1, "A<|im_end|>")
        assert (turn.state, setting.tokenizer.decode_raw(turn.observation)) == (
            EpisodeState.GOES_ON,
            "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
        )
        after_b = asyncio.create_task(setting.turn(1, "A<|im_end|>"))
        assert text(setting, await second) == head + shown("a", "A", "c"), "after the first turn"
        first_turn = (*(begun.prompt_ids or ()), *setting.tokenizer.encode("A<|im_end|>"))
        assert (await second).prompt_ids[: len(first_turn)] == first_turn  # type: ignore[index]
        third = asyncio.create_task(next_of(setting, 1, 2))
        after_c = asyncio.create_task(setting.turn(1, "C<|im_end|>", conversation=1))
        assert text(setting, await third) == head + shown("d", "C", "e"), "read, not branched off"
        fourth = asyncio.create_task(next_of(setting, 1, 3))
        after_e = asyncio.create_task(setting.turn(1, "E<|im_end|>", conversation=2))
        assert text(setting, await fourth) == head + shown("f")
        end = asyncio.create_task(next_of(setting, 1, 4))
        after_f = asyncio.create_task(setting.turn(1, "F<|im_end|>", conversation=3))
        found = await end
        assert (found.state, found.reward, found.own_rewards) == (
            EpisodeState.DONE,
            1.0,
            (0.25, None, None, None),
        )
        assert found.numbers.items() >= {"turns": 5.0, "conversations": 4.0}.items()
        for closed in (after_b, after_c, after_e, after_f):
            assert (await closed).state is EpisodeState.CLOSED
        assert not setting.executor._episodes


async def test_a_request_that_is_too_long_is_refused_and_the_program_may_shorten(
    tmp_path: Path,
) -> None:
    acts = [["a" * 3000], ["a"], ["a", "-", "b" * 3000], ["short"]]
    async with playing(tmp_path, task=TASK) as setting:
        begun = await setting.begin(1, acts=acts)
        assert "user\na<|im_end|>" in text(setting, begun), "the first that fits"
        second = asyncio.create_task(next_of(setting, 1, 1))
        closed = asyncio.create_task(setting.turn(1, "A<|im_end|>"))
        assert "user\nshort<|im_end|>" in text(setting, await second)
        end = asyncio.create_task(next_of(setting, 1, 2))
        await setting.turn(1, "S<|im_end|>", conversation=1)
        found = await end
        assert (found.state, found.reward) == (EpisodeState.DONE, 1.02)
        assert found.numbers["overlong"] == 2
        assert (await closed).state is EpisodeState.CLOSED


@pytest.mark.parametrize(
    ("limits", "acts", "limit", "num_turns"),
    [
        ({"max_turns": 3}, ["for_ever"], "turns", 3),
        ({"max_conversations": 4, "max_turns": 100}, ["for_ever"], "conversations", 4),
        ({"max_episode_tokens": 5, "max_turns": 100}, ["for_ever"], "tokens", 3),
    ],
)
async def test_a_program_that_asks_for_ever_is_ended_by_a_limit_and_scored(
    tmp_path: Path, limits: dict[str, int], acts: list[str], limit: str, num_turns: int
) -> None:
    async with playing(tmp_path, task=TASK, **limits) as setting:
        await setting.begin(1, acts=acts)
        turns = []
        for conversation in range(100):
            question = asyncio.create_task(next_of(setting, 1, conversation + 1))
            said = setting.turn(1, "A<|im_end|>", conversation=conversation)
            turns.append(asyncio.create_task(said))
            if (found := await question).state in OVER:
                break
        assert (found.state, found.reward) == (EpisodeState.LIMIT, 1.01)
        assert found.numbers["turns"] == len(turns) == num_turns
        assert found.numbers[f"limited/{limit}"] == 1
        assert {(await turn).state for turn in turns} == {EpisodeState.CLOSED}


async def test_a_program_may_end_while_the_model_still_writes(tmp_path: Path) -> None:
    async with playing(tmp_path, task=TASK) as setting:
        await setting.begin(1, acts=["leave_one"])
        found = await next_of(setting, 1, 1)
        assert (found.state, found.reward) == (EpisodeState.DONE, 1.0)
        assert (await setting.turn(1, "A<|im_end|>")).state is EpisodeState.LOST, "nobody waits"


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [("fail", StageStatus.RAISED, "no disk"), ("hang", StageStatus.HUNG, "in hang")],
)
async def test_a_program_that_fails_amid_a_conversation_fails_its_episode(
    tmp_path: Path, act: str, status: StageStatus, words: str
) -> None:
    async with playing(tmp_path, task=TASK, timeout_s=1.0) as setting:
        await asyncio.gather(
            setting.begin(1, acts=[["a"], act]), setting.begin(2, acts=[["a"], ["b"]])
        )
        end = asyncio.create_task(setting.open(1, 1))
        closed = asyncio.create_task(setting.turn(1, "A<|im_end|>"))
        found = await end
        assert (found.status, found.state) == (status, EpisodeState.DONE)
        assert words in found.error
        assert (await closed).state is EpisodeState.CLOSED
        other = asyncio.create_task(next_of(setting, 2, 1))
        left = asyncio.create_task(setting.turn(2, "A<|im_end|>"))
        assert "user\nb" in text(setting, await other), "others go on"
        left.cancel()


async def test_a_process_that_is_killed_loses_all_conversations_of_its_episodes(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, task=TASK) as setting:
        await setting.begin(1, acts=[["a"], ["b"], ["c"]])
        second = asyncio.create_task(next_of(setting, 1, 1))
        idle = asyncio.create_task(setting.turn(1, "A<|im_end|>"))
        await second
        end = asyncio.create_task(setting.open(1, 2))
        await asyncio.sleep(0)
        os.kill(setting.executor._pools[0].pids[0], signal.SIGKILL)
        assert (await end).state is EpisodeState.LOST
        assert (await idle).state in (EpisodeState.CLOSED, EpisodeState.LOST)
        again = await setting.begin(1, attempt=1, acts=[["a"]])
        assert again.state is EpisodeState.GOES_ON


async def test_episodes_that_are_given_up_leave_nothing_behind(tmp_path: Path) -> None:
    async with playing(tmp_path, task=TASK) as setting:
        await asyncio.gather(*(setting.begin(row, acts=[["a"]] * 50) for row in range(20)))
        ends = [asyncio.create_task(setting.open(row, 1)) for row in range(20)]
        await asyncio.sleep(0)
        await setting.link.forget([*range(20)])
        assert {(await end).state for end in ends} == {EpisodeState.LOST}
        assert not setting.executor._episodes
        begun = await setting.begin(30, acts=[["a"]])
        assert begun.state is EpisodeState.GOES_ON
