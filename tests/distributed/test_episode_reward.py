"""What a reward of the whole episode reads, with the executor that answers its turns."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.records import EpisodeState, StageStatus
from tests.distributed.played import ADD, TASK, call, playing

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


async def test_an_episode_that_a_reward_reads_begins_again_when_its_process_is_lost(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, task=PLAIN + READS) as setting:
        to = tmp_path / "read.json"
        await setting.begin(1, to=str(to))
        await setting.turn(1, ADD)
        os.kill(setting.executor._pools[0].pids[0], signal.SIGKILL)
        assert (await setting.turn(1, "So.<|im_end|>")).state is EpisodeState.LOST
        await setting.begin(1, attempt=1, to=str(to))
        assert (await setting.turn(1, "So.<|im_end|>", attempt=1)).reward == 0.25
        assert [each["role"] for each in json.loads(to.read_text())["messages"]] == [
            "user",
            "assistant",
        ]


async def test_plain_tools_without_such_a_reward_are_asked_for_calls_only(tmp_path: Path) -> None:
    async with playing(tmp_path, task=PLAIN) as setting:
        assert "environment_s" not in (await setting.begin(1)).numbers
        done = await setting.turn(1, "So.<|im_end|>")
        assert (done.state, done.reward) == (EpisodeState.DONE, None)
        assert "environment_s" not in done.numbers
