"""Whatever user code raises is what became of its call or episode, and where few files are open its
process works too."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import ModuleType

import pytest

from llamarl.core.records import StageStatus
from llamarl.scoring.definition import find_defined
from llamarl.scoring.episodes import Episodes, load
from tests.scoring.test_episodes import prompt

RAISING = """
import asyncio
class Own(BaseException): pass
class Mute(Exception):
    def __str__(self): raise SystemExit(4)
KINDS = {
    "exit": lambda: SystemExit(2), "interrupt": KeyboardInterrupt, "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError, "stop": StopIteration, "own": lambda: Own("odd"),
    "mute": Mute, "end": StopAsyncIteration,
}
class Odd:
    def __str__(self): raise SystemExit("no text")
def plain(kind: str) -> str:
    '''Raises.

    Args:
        kind: what
    '''
    raise KINDS[kind]()
async def soft(kind: str) -> str:
    '''Raises.

    Args:
        kind: what
    '''
    await asyncio.sleep(0)
    raise KINDS[kind]()
async def cancels(kind: str) -> str:
    '''Cancels itself.

    Args:
        kind: what
    '''
    asyncio.current_task().cancel()
    await asyncio.sleep(1)
def odd() -> str:
    'Returns what has no text.'
    return Odd()
class Steps:
    def reset(self, at, kind, **row):
        self.at, self.kind = at, kind
        if at == "reset": plain(kind)
        self.is_soft = at == "soft"
    def step(self, messages):
        if self.at == "step": plain(self.kind)
        if self.is_soft: return soft(self.kind)
    def get_reward(self):
        if self.at == "reward": plain(self.kind)
        return 1.0
"""
RAISED_KINDS = ["exit", "interrupt", "generator", "cancelled", "stop", "own", "mute", "end"]


@pytest.mark.parametrize("kind", RAISED_KINDS)
async def test_whatever_a_tool_raises_is_told_to_the_model(kind: str) -> None:
    module = ModuleType("task")
    exec(RAISING + "tools = [plain, soft, cancels, odd]", module.__dict__)
    episodes = Episodes(find_defined(module))
    names = ["plain", "soft", "cancels"]
    calls = [[name, {"kind": kind}, ""] for name in names] + [["odd", {}, ""]]
    answer = await asyncio.wait_for(episodes.take_turn(1, "", calls), 20)
    said = [message["content"] for message in answer["messages"]]
    plain = type(module.KINDS[kind]()).__name__  # type: ignore[operator]
    shown = {"exit": "SystemExit: 2", "own": "Own: odd"}.get(kind, plain)
    assert said[0] == str({"error": shown})
    assert said[1].startswith("{'error': ")
    if kind not in ("stop", "end"):  # Python itself makes a RuntimeError of these
        assert said[1] == said[0]
    assert said[2:] == [str({"error": "CancelledError"}), str({"error": "SystemExit: no text"})]
    assert [failed for *_, failed in answer["calls"]] == [True] * 4


@pytest.mark.parametrize("kind", RAISED_KINDS)
@pytest.mark.parametrize("at", ["reset", "step", "soft", "reward"])
async def test_whatever_an_environment_raises_fails_its_episode(at: str, kind: str) -> None:
    source = RAISING + "environment = Steps"
    serve = load({"task_source": {"task.py": source}, "tools": ["task"], "limits": {}})
    found = await serve(prompt(at=at, kind=kind), "begin", [1, []])
    if "error" not in found:
        found = await serve(None, "take_turn", [1, "x", []])
    if "error" not in found:
        found = await serve(None, "finish", [1])
    assert found["status"] == StageStatus.RAISED
    assert 'File "task.py"' in found["error"], "it shows the user's own lines"


PROMISES = """
async def inner(): return 7
async def soft(): return inner()
def plain(): return inner()
def twice(): return soft()
def some(): return (i for i in range(3))
async def others():
    async def each(): yield 1
    return each()
tools = [soft, plain, twice, some, others]
"""


def test_a_tool_that_returns_a_coroutine_says_what_that_returns() -> None:
    module = ModuleType("task")
    exec(PROMISES, module.__dict__)
    episodes = Episodes(find_defined(module))
    calls = [[tool.__name__, {}, ""] for tool in module.tools]
    answer = asyncio.run(episodes.take_turn(1, "", calls))
    said = [message["content"] for message in answer["messages"]]
    assert said[:3] == ["7"] * 3
    wrong = str({"error": "a tool must return what it says, got a generator"})
    assert said[3:] == [wrong] * 2


@pytest.mark.parametrize("most", [48, 256])
def test_a_reward_process_finds_room_for_its_channel_where_few_files_may_be_open(most: int) -> None:
    code = (
        "import os, resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))\n"
        "from llamarl.scoring.user_code.worker import _move\n"
        "for _ in range(40):\n"
        "    own = os.open(os.devnull, os.O_RDONLY)\n"
        "    os.close(_move(own, os.O_RDONLY))\n"
        "    os.close(own)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
