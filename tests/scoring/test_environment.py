"""The executor that answers turns at its socket, with real processes."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.records import EpisodeState, StageStatus, TurnItem
from llamarl.scoring.environment import EnvironmentLink, Environments
from tests.scoring.played import ADD, TASK, Setting, call, playing

pytestmark = pytest.mark.full


async def test_an_episode_from_its_reset_to_its_reward(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        begun = await setting.begin(1, start=5)
        assert (begun.state, begun.prompt_ids) == (EpisodeState.GOES_ON, None)
        turn = await setting.turn(1, "so " + ADD)
        assert turn.state is EpisodeState.GOES_ON
        assert turn.numbers.items() >= {"turns": 1, "calls/add": 1, "errors/add": 0}.items()
        assert setting.tokenizer.decode_raw(turn.observation) == (
            "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert turn.numbers["observed_tokens"] == len(turn.observation)
        done = await setting.turn(1, "Seven.<|im_end|>")
        assert (done.state, done.numbers["turns"]) == (EpisodeState.DONE, 2)
        assert (done.reward, done.observation) == (7.0, ())


async def test_what_a_reset_says_is_added_to_the_prompt(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        begun = await setting.begin(1, more=" Begin.")
        assert begun.prompt_ids is not None
        text = setting.tokenizer.decode_raw(begun.prompt_ids)
        assert "<|im_start|>user\nq Begin.<|im_end|>" in text
        assert '"name": "add"' in text, "tools stand at the head"


async def test_limits_end_an_episode_as_truncated_and_it_is_scored(tmp_path: Path) -> None:
    async with playing(tmp_path, max_turns=2) as setting:
        await setting.begin_all((1, 2, 3, 4))
        found = {1: await setting.turn(1, "cut off", is_cut=True)}
        said = await setting.turn(4, call("say", '{"text": "xxx"}'))
        size = len(said.observation)
        say = call("say", '{"text": "yyy"}')
        found[2] = await setting.turn(2, say, room=size - 1)
        assert found[2].numbers["overlong"] == 1
        assert (await setting.turn(4, "nothing", room=0)).state is EpisodeState.DONE
        for _ in range(2):
            found[3] = await setting.turn(3, "<tool_call></tool_call><|im_end|>")
        assert found[3].numbers["malformed"] == 1, "the call of the last turn is not run"
        for row, result in found.items():
            assert (result.state, result.observation) == (EpisodeState.LIMIT, ())
            assert result.reward == float(row)
        await setting.begin(5)
        fits = await setting.turn(5, say, room=size)
        assert fits.state is EpisodeState.GOES_ON, "as many as there is room for"


@pytest.mark.parametrize("tool", ["hang", "hang_softly"])
async def test_a_call_that_hangs_fails_its_episode_and_no_other(tmp_path: Path, tool: str) -> None:
    async with playing(tmp_path, timeout_s=0.5) as setting:
        await setting.begin_all((1, 2))
        hung, other = await asyncio.gather(setting.turn(1, call(tool)), setting.turn(2, ADD))
        assert hung.status is StageStatus.HUNG
        assert "environment.timeout_s" in hung.error
        assert f"in {tool}\n" in hung.error, "it says where the call was"
        assert hung.error.count("it was at") == 1
        assert "llamarl" not in hung.error
        assert (other.status, other.state) == (StageStatus.OK, EpisodeState.GOES_ON)
        assert (await setting.turn(2, "Done.<|im_end|>")).state is EpisodeState.DONE


async def test_all_calls_of_an_episode_together_have_a_limit(tmp_path: Path) -> None:
    async with playing(tmp_path, episode_timeout_s=1e-6) as setting:
        found = await setting.begin(1)
        assert found.status is StageStatus.HUNG
        assert "environment.episode_timeout_s" in found.error


async def test_a_process_that_is_killed_loses_its_own_episodes_only(tmp_path: Path) -> None:
    async with playing(tmp_path, num_workers=2) as setting:
        rows = range(6)
        await setting.begin_all(rows)
        pools = {row: setting.executor._episodes[row].pool for row in rows}
        assert {*pools.values()} == {0, 1}, "spread evenly"
        os.kill(setting.executor._pools[0].pids[0], signal.SIGKILL)
        found = await asyncio.gather(*(setting.turn(row, ADD) for row in rows))
        for row in rows:
            expected = EpisodeState.LOST if pools[row] == 0 else EpisodeState.GOES_ON
            assert (found[row].state, found[row].status) == (expected, StageStatus.OK)
        again = await setting.begin(0, attempt=1)
        assert again.state is EpisodeState.GOES_ON, "a new process took over"


async def test_an_episode_that_is_not_known_or_was_forgotten_is_lost(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        await setting.begin(2)
        await setting.link.forget([2, 3])
        for row in (1, 2):
            assert (await setting.turn(row, ADD)).state is EpisodeState.LOST


async def test_only_the_newest_attempt_of_an_episode_is_played(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        await setting.begin(1, attempt=3, start=5)
        assert (await setting.begin(1, attempt=2)).state is EpisodeState.LOST, "a late one"
        assert (await setting.begin(1, attempt=3)).state is EpisodeState.LOST, "or twice"
        assert (await setting.turn(1, ADD, attempt=2)).state is EpisodeState.LOST
        turn = await setting.turn(1, ADD, attempt=3)
        assert (turn.state, turn.attempt) == (EpisodeState.GOES_ON, 3)
        assert (await setting.begin(1, attempt=4, start=50)).state is EpisodeState.GOES_ON
        assert (await setting.turn(1, ADD, attempt=3)).state is EpisodeState.LOST
        done = await setting.turn(1, "So.<|im_end|>", attempt=4)
        assert done.reward == 50.0


async def test_with_a_replica_its_episodes_are_forgotten_and_no_other(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        await setting.begin_all((1, 2))
        other = setting.new_link()
        setting.link, first = other, setting.link
        assert (await setting.turn(2, ADD)).state is EpisodeState.GOES_ON, "it goes on elsewhere"
        first.close()
        while 1 in setting.executor._episodes:
            await asyncio.sleep(0.01)
        assert (await setting.turn(2, ADD)).state is EpisodeState.GOES_ON
        other.close()


async def test_an_episode_that_begins_again_elsewhere_is_forgotten_where_it_was_played(
    tmp_path: Path,
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    hosts = [Setting(tmp_path / name) for name in "ab"]
    for setting in hosts:
        await setting.executor.start()
    calls = [EnvironmentLink(f"{n}", host.executor, None) for n, host in enumerate(hosts)]
    replicas = [  # on its own host a replica uses the socket
        Environments((hosts[0].link, calls[1]), own=0, context=400),
        Environments((calls[0], hosts[1].link), own=1, context=400),
    ]
    prompt = hosts[0].prompt()
    begin = [TurnItem(row_id=1, attempt=attempt, prompt=prompt) for attempt in range(2)]
    ids = tuple(hosts[0].tokenizer.encode(ADD, special=False))
    turn = TurnItem(row_id=1, attempt=0, ids=ids, room=400)
    other = TurnItem(row_id=2, attempt=0, prompt=prompt)
    for item in (begin[0], other):
        assert (await replicas[0].answer(0, item)).state is EpisodeState.GOES_ON
    resumed = await replicas[1].answer(0, turn)
    assert resumed.state is EpisodeState.GOES_ON, "cut, it goes on from the other host"
    again = await replicas[1].answer(1, begin[1])
    assert again.state is EpisodeState.GOES_ON, "its replica was lost"
    assert [[*host.executor._episodes] for host in hosts] == [[2], [1]]
    for setting in hosts:
        setting.link.close()
        await setting.executor.close()


async def test_a_turn_asked_of_an_executor_that_ends_is_lost_and_the_next_one_begins_episodes(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as setting:
        await setting.begin(1)
        hung = asyncio.create_task(setting.turn(1, call("hang_softly")))
        await asyncio.sleep(0.1)
        await setting.executor.close()
        assert (await hung).state is EpisodeState.LOST
        beginning = asyncio.create_task(setting.begin(1, attempt=1, start=4))
        await asyncio.sleep(0.3)
        assert not beginning.done(), "it waits for an executor"
        setting.executor = Setting(tmp_path).executor
        await setting.executor.start()
        assert (await beginning).state is EpisodeState.GOES_ON
        assert (await setting.turn(1, "So.<|im_end|>", attempt=1)).reward == 4.0


async def test_what_an_environment_does_wrong_fails_its_episode(tmp_path: Path) -> None:
    async with playing(tmp_path, timeout_s=0.5) as setting:
        await setting.begin(1, start=-9)
        found = await setting.turn(1, "Done.<|im_end|>")
        assert found.status is StageStatus.INVALID
        assert "a finite number for get_reward" in found.error
        assert found.reward is None
        found = await setting.begin(2, hangs=True)
        assert found.status is StageStatus.HUNG
        more = await setting.begin(3, more="x" * 5000)
        assert more.status is StageStatus.INVALID
        assert "data.max_prompt_tokens" in more.error


async def test_too_many_failures_say_so_in_one_sentence_with_which_the_run_ends(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, max_failure_rate=0.1) as setting:
        await asyncio.gather(*(setting.begin(row, start=-1) for row in range(60)))
        turns = (setting.turn(row, "Done.<|im_end|>") for row in range(60))
        last = [each for each in await asyncio.gather(*turns) if each.ends_run]
        assert last
        assert all("environment.max_failure_rate" in each.error for each in last)


async def test_a_data_row_gets_to_its_environment_as_user_code_gets_it(tmp_path: Path) -> None:
    async with playing(tmp_path) as setting:
        begun = await setting.begin(1, start=5, when=datetime.date(2026, 1, 2), text="é" * 40_000)
        assert begun.state is EpisodeState.GOES_ON


RAISING = """
import asyncio

class Env:
    def reset(self, **row):
        self.told = 0.0

    async def inner(self) -> str:
        '''Exits in a task of its own.'''
        async def leaving():
            raise SystemExit(2)
        await asyncio.gather(leaving())

    async def later(self) -> str:
        '''Exits after its answer.'''
        async def leaving():
            raise KeyboardInterrupt
        asyncio.ensure_future(leaving())
        asyncio.get_running_loop().stop()
        return "soon"

    def leave(self) -> str:
        '''Exits.'''
        raise SystemExit("no more")

    def much(self) -> str:
        '''Says more than an answer may have.'''
        return "x" * 2_000_000

    def get_reward(self):
        return 1.0

environment = Env
"""


async def test_what_user_code_raises_or_returns_costs_no_other_episode(tmp_path: Path) -> None:
    async with playing(tmp_path, task=RAISING, timeout_s=20.0) as setting:
        tools = ("inner", "later", "leave", "much", "inner", "leave")
        await asyncio.gather(*(setting.begin(row) for row in range(len(tools) + 2)))
        turns = [setting.turn(row, call(tool)) for row, tool in enumerate(tools)]
        found = await asyncio.gather(*turns)
        said = [setting.tokenizer.decode_raw(each.observation) for each in found]
        for row in (0, 4):
            assert "{'error': 'SystemExit: 2'}" in said[row]
        assert "soon" in said[1]
        for row in (2, 5):
            assert "{'error': 'SystemExit: no more'}" in said[row]
        assert found[3].status is StageStatus.INVALID
        assert "at most 1000000 bytes" in found[3].error
        for row in (6, 7):
            done = await setting.turn(row, "So.<|im_end|>")
            assert (done.state, done.reward) == (EpisodeState.DONE, 1.0)


ODD_STEPS = """
class Env:
    def reset(self, **row): ...
    def step(self, messages):
        return {"role": "user", "content": "x", "odd": {1, 2}}
environment = Env
"""


async def test_a_message_that_is_no_json_fails_its_episode(tmp_path: Path) -> None:
    async with playing(tmp_path, task=ODD_STEPS, timeout_s=20.0) as setting:
        await asyncio.gather(setting.begin(1), setting.begin(2))
        for row in (1, 2):
            found = await setting.turn(row, "hi<|im_end|>")
            assert found.status is StageStatus.INVALID
            assert "what it returns must be JSON, got TypeError" in found.error


HALF = """
class Env:
    def reset(self, fails=False, **row):
        if fails:
            raise ValueError("no \\ud800 here")
        return " more \\ud800"
    def echo(self, text: str) -> str:
        '''Says it again.

        Args:
            text: what
        '''
        return text
environment = Env
"""


async def test_half_a_character_in_what_an_environment_says_ends_nothing(tmp_path: Path) -> None:
    async with playing(tmp_path, task=HALF, timeout_s=20.0) as setting:
        begun = await setting.begin(1)
        shown = setting.tokenizer.encode("q more \ufffd<|im_end|>", special=False)
        assert begun.prompt_ids is not None
        assert str(shown)[1:-1] in str([*begun.prompt_ids])
        turn = await setting.turn(1, call("echo", r'{"text": "12\ud800"}'))
        expected = setting.tokenizer.encode("12\ufffd\n</tool_response>", special=False)
        assert str(expected)[1:-1] in str([*turn.observation])
        failed = await setting.begin(2, fails=True)
        assert failed.status is StageStatus.RAISED
        assert "no \ufffd here" in failed.error


READS = """
import json, pathlib

def episode_reward(prompt, messages, environment):
    found = {"messages": messages, "total": environment and environment.total}
    pathlib.Path(prompt.fields["to"]).write_text(json.dumps(found))
    return 0.25
"""
PLAIN = TASK.replace("environment = Env", "env = Env()\ntools = [env.add, env.say]\nenv.reset()")


def written(text: str, function: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


add = {"name": "add", "arguments": {"amount": 2}}
FIRST = {"role": "user", "content": "q"}
NO_JSON = "Hm <tool_call>no</tool_call>"
TURNS: dict[str, tuple[EpisodeState, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a turn without a call": (
        EpisodeState.DONE,
        [{"text": "Seven.<|im_end|>"}],
        [{"role": "assistant", "content": "Seven."}],
    ),
    "the last turn": (
        EpisodeState.LIMIT,
        [{"text": NO_JSON + "<|im_end|>"}, {"text": "More. " + ADD}],
        [
            {"role": "assistant", "content": NO_JSON},
            {"role": "tool", "name": "", "content": str({"error": "a call must be JSON"})},
            written("More.", add),
        ],
    ),
    "a turn that was cut": (
        EpisodeState.LIMIT,
        [{"text": "cut o", "is_cut": True}],
        [{"role": "assistant", "content": "cut o"}],
    ),
    "an observation that does not fit": (
        EpisodeState.LIMIT,
        [{"text": call("say", '{"text": "long"}'), "room": 1}],
        [
            written("", {"name": "say", "arguments": {"text": "long"}}),
            {"role": "tool", "name": "say", "content": "long"},
        ],
    ),
}


@pytest.mark.parametrize("end", TURNS)
@pytest.mark.parametrize("task", [TASK, PLAIN], ids=["class", "tools"])
async def test_a_reward_reads_every_turn_however_the_episode_ends(
    tmp_path: Path, task: str, end: str
) -> None:
    async with playing(tmp_path, task=task + READS, max_turns=3) as setting:
        state, turns, messages = TURNS[end]
        to, has_instance = tmp_path / "read.json", task is TASK
        await setting.begin(1, start=5, to=str(to), more=" Go." if has_instance else "")
        assert (await setting.turn(1, "so " + ADD)).state is EpisodeState.GOES_ON
        for turn in turns:
            last = await setting.turn(1, **turn)
        assert (last.state, last.status, last.error) == (state, StageStatus.OK, "")
        assert last.reward == (7.25 if has_instance else 0.25)
        found = json.loads(to.read_text())
        assert found["total"] == (7 if has_instance else None)
        first = {**FIRST, "content": "q Go."} if has_instance else FIRST
        content = "7" if has_instance else "2"
        result = {"role": "tool", "name": "add", "content": content}
        assert found["messages"] == [first, written("so", add), result, *messages]


async def test_a_reward_reads_the_turns_of_an_environment_with_steps(tmp_path: Path) -> None:
    steps = """
class Env:
    total = 1
    def reset(self, **row): ...
    def step(self, messages):
        return (None if messages[-1]["content"] == "end" else "more"), 0.5
environment = Env
"""

    async with playing(tmp_path, task=steps + READS, max_turns=3) as setting:
        ends = [{"text": "cut o", "is_cut": True}, {"text": "end"}, {"text": "third"}]
        seen = [["cut o"], ["end"], ["third", "more"]]
        for row, end in enumerate(ends):
            to = tmp_path / str(row)
            await setting.begin(row, to=str(to))
            for text in ("one", "two"):
                assert (await setting.turn(row, text)).state is EpisodeState.GOES_ON
            last = await setting.turn(row, **end)
            assert last.reward == (1.25 if row == 0 else 1.75)
            contents = [each["content"] for each in json.loads(to.read_text())["messages"]]
            assert contents == ["q", "one", "more", "two", "more", *seen[row]]
