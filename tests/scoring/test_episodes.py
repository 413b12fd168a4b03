"""What a task.py defines for episodes, and playing them: classes as they are written for TRL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest

from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring import episodes as playing
from llamarl.scoring.definition import describe, find_defined, kind_of, schemas_of
from llamarl.scoring.episodes import UNKNOWN, Episodes, load
from tests.places import ROOT

# Forms that TRL's own documentation shows for `tools` and `environment_factory`.
TRL = '''
import asyncio

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    async def read(self) -> int:
        """Reads the counter."""
        return self.counter

    def _private(self): ...

    def get_reward(self) -> float:
        return float(self.counter)

class EchoEnv:
    def __init__(self):
        self.log = []

    def reset(self, **row) -> str:
        self.log.clear()
        return " Say " + row["word"] + "."

    def echo(self, text: str) -> str:
        """Echoes.

        Args:
            text: what to echo
        """
        self.log.append(text)
        return text

class Guess:
    def reset(self, secret=3, **row):
        self.secret = secret

    def step(self, messages):
        guess = messages[-1]["content"]
        if guess == str(self.secret):
            return None, 1.0
        if guess == "two":
            return ["One.", {"role": "user", "content": "And another."}]
        return "No.", -0.25
'''


def task(*lines: str) -> ModuleType:
    module = ModuleType("task")
    exec(compile("\n".join([TRL, *lines]), "task.py", "exec"), module.__dict__)
    return module


def names(kinds: dict[str, Any], kind: str = "") -> list[str]:
    return [schema["function"]["name"] for schema in kinds[kind].schemas]


def prompt(**fields: Any) -> Prompt:
    return Prompt(prompt_id=1, text="", token_ids=(1,), fields=fields)


def test_plain_functions_are_tools_with_the_schema_of_their_signature_and_docstring() -> None:
    kinds = describe(task("tools = [multiply, async_add]"))
    assert names(kinds) == ["multiply", "async_add"]
    function = kinds[""].schemas[0]["function"]
    assert function["description"] == "Multiplies two integers."
    assert function["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first integer.",
    }
    assert not kinds[""].has_instance


def test_describing_tools_does_not_import_torch() -> None:
    """Each start of a run does it in a process of its own, and torch takes seconds there."""
    code = (
        "import sys\n"
        "from tests.scoring.test_episodes import describe, task\n"
        "assert describe(task('tools = [multiply]'))[''].schemas\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_methods_are_tools_beside_the_plain_ones() -> None:
    kinds = describe(task("tools = [multiply]", "environment = IncrementEnv"))
    assert names(kinds) == ["multiply", "increment", "read"]
    assert (kinds[""].has_reward, kinds[""].has_step) == (True, False)


def test_a_property_that_needs_reset_is_not_asked_for_when_tools_are_looked_up() -> None:
    lines = ["class E(IncrementEnv):", "  words = None", "  @property", "  def left(self):"]
    kinds = describe(task(*lines, "    return len(self.words)", "environment = E"))
    assert names(kinds) == ["increment", "read"]


def test_the_row_selects_among_several_environments() -> None:
    kinds = describe(task("environment = {'a': IncrementEnv, 'b': EchoEnv}"))
    assert {name: kind.has_reward for name, kind in kinds.items()} == {"a": True, "b": False}
    (echo,) = schemas_of({"environment": "b"}, kinds)
    assert echo["function"]["name"] == "echo"
    with pytest.raises(ValueError, match=r"'environment' must be one of a, b, got None"):
        kind_of({}, kinds)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["tools = multiply"], "tools must be a list of functions"),
        (["tools = [multiply, multiply]"], "must have a name of its own, got 'multiply'"),
        (["x = 1"], "must define tools or environment for environment.tools=[task], got neither"),
        (["environment = 3"], "environment must be a class, or a dictionary"),
        (["environment = {}"], "environment must be a class, or a dictionary"),
        (["def f(a): 'x'", "tools = [f]"], "tool f must have a type for each argument"),
        (["def f(a: int): 'x'", "tools = [f]"], "a docstring that describes each under Args:"),
        (["def f(a: int):\n  yield a", "tools = [f]"], "must return what the model is told, got"),
        (["async def f(a: int):\n  yield a", "tools = [f]"], "must return what the model is told"),
        (["def f(a: int, /): 'x'", "tools = [f]"], "take its arguments by their names, got a"),
        (["def f(*a: int): 'x'", "tools = [f]"], "take its arguments by their names, got *a"),
        (["tools = [len]"], "tool len must take its arguments by their names, got obj"),
        (["class E:\n  pass", "environment = E"], "must have a method reset(**row), got none"),
        (["class E:\n  def reset(self): ...", "environment = E"], "step(messages), got neither"),
        (["tools = [multiply]", "environment = Guess"], "or else step(messages), got both"),
        (
            ["class E(IncrementEnv):\n  def __init__(self, x): ...", "environment = E"],
            "must be made without arguments, got TypeError",
        ),
        (
            [
                "def increment(a: int) -> int:\n  '''I.\n\n  Args:\n    a: x\n  '''\n  return a",
                "tools, environment = [increment], IncrementEnv",
            ],
            "must have tools of different names, got increment twice",
        ),
    ],
)
def test_what_a_model_could_not_call_is_one_line(lines: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=r"task\.py") as caught:
        describe(task(*lines))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def play(*lines: str) -> Episodes:
    return Episodes(find_defined(task(*lines)))


async def test_an_episode_has_its_own_state_and_its_reward_at_the_end() -> None:
    episodes = play("environment = IncrementEnv")
    for row in (1, 2):
        assert await episodes.begin(prompt(), row, []) == {"messages": None, "schemas": None}
    calls = [["increment", {"step": 5}, ""], ["read", {}, ""], ["increment", {"step": 1}, ""]]
    answer = await episodes.take_turn(1, "", calls)
    assert [m["role"] for m in answer["messages"]] == ["tool"] * 3
    assert [m["name"] for m in answer["messages"]] == ["increment", "read", "increment"]
    assert [m["content"] for m in answer["messages"]][::2] == ["5", "6"], "functions in order"
    assert await episodes.finish(1) == {"reward": 6.0}
    assert await episodes.finish(2) == {"reward": 0.0}
    assert await episodes.finish(1) == UNKNOWN
    assert await episodes.take_turn(1, "", calls) == UNKNOWN


async def test_an_instance_is_used_again_after_its_reset() -> None:
    episodes = play("environment = EchoEnv")
    asked = [{"role": "user", "content": "Please."}]
    longer = [{"role": "user", "content": "Please. Say hi."}]
    found = await episodes.begin(prompt(word="hi"), 1, asked)
    assert found == {"messages": longer, "schemas": None}
    await episodes.take_turn(1, "", [["echo", {"text": "hi"}, ""]])
    first = episodes._playing[1].instance
    assert await episodes.finish(1) == {"reward": None}
    await episodes.begin(prompt(word="ho"), 2, asked)
    assert (episodes._playing[2].instance, first.log) == (first, [])
    await episodes.forget([2])
    await episodes.begin(prompt(word="ho"), 3, asked)
    assert episodes._playing[3].instance is not first, "a call in it may be under way"


async def test_what_a_tool_does_wrong_is_told_to_the_model() -> None:
    episodes = play("tools = [multiply, async_add]")
    calls = [
        ["multiply", {"a": 2, "b": 3}, ""],
        ["divide", {}, ""],
        ["multiply", {"a": 2}, ""],
        ["async_add", {"a": 1, "b": "x"}, ""],
        ["", {}, "a call must be JSON"],
    ]
    answer = await episodes.take_turn(7, "", calls)
    contents = [message["content"] for message in answer["messages"]]
    assert contents[0] == "6"
    assert contents[1] == str({"error": "Tool divide not found."})
    assert "missing 1 required positional argument: 'b'" in contents[2]
    assert contents[3].startswith("{'error':")
    assert contents[4] == str({"error": "a call must be JSON"})
    assert [failed for *_, failed in answer["calls"]] == [False, True, True, True, True]


async def test_an_environment_without_tools_gets_texts_and_sums_the_rewards_of_turns() -> None:
    episodes = play("environment = Guess")
    question = [{"role": "user", "content": "Guess."}]
    await episodes.begin(prompt(secret=2), 1, question)
    said = await episodes.take_turn(1, "7", [])
    assert said["messages"] == [{"role": "user", "content": "No."}]
    said = await episodes.take_turn(1, "two", [])
    assert [m["content"] for m in said["messages"]] == ["One.", "And another."]
    seen = [message["content"] for message in episodes._playing[1].messages]
    assert seen == ["Guess.", "7", "No.", "two", "One.", "And another."]
    assert (await episodes.take_turn(1, "2", []))["messages"] == []
    assert await episodes.finish(1) == {"reward": 0.75}


WRONG = """
class Wrong:
    def reset(self, what="", **row):
        self.what = what
        if what == "reset": return 3
        if what == "raises": raise OSError("no server")
    def step(self, messages):
        found = {"step": 3, "list": [{"role": "user"}], "three": ("a", 1.0, 2), "text": ("a", "1")}
        return ("a", float("nan")) if self.what == "nan" else found.get(self.what)
    def get_reward(self):
        return "good"
environment = Wrong
"""


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("reset", StageStatus.INVALID, "be None or a text for reset, got 3"),
        ("raises", StageStatus.RAISED, "OSError: no server"),
        ("step", StageStatus.INVALID, "be a text, messages or None for step, got 3"),
        ("list", StageStatus.INVALID, "have a role and content for each message of step"),
        ("three", StageStatus.INVALID, "be (messages, reward) for step"),
        ("nan", StageStatus.INVALID, "be a finite number for step"),
        ("text", StageStatus.INVALID, "be a finite number for step"),
        ("", StageStatus.INVALID, "be a finite number for get_reward, at most 1e+09 either way"),
    ],
)
async def test_what_an_environment_does_wrong_is_a_failure_and_no_reward(
    what: str, status: StageStatus, words: str
) -> None:
    serve = load({"task_source": {"task.py": WRONG}, "tools": ["task"], "limits": {}})
    found = await serve(prompt(what=what), "begin", [1, []])
    if "error" not in found:
        found = await serve(None, "take_turn", [1, "x", []])
    if "error" not in found:
        found = await serve(None, "finish", [1])
    found = found
    assert found["status"] == status
    assert words in found["error"]


SLOW = """
import threading
go = threading.Event()
def wait() -> str:
    "Waits."
    go.wait()
    return "waited"
async def quick() -> str:
    "Is quick."
    return "done"
def count() -> str:
    "Counts."
    return "one"
tools = [wait, quick, count]
"""


async def test_a_slow_function_holds_up_its_own_episode_only() -> None:
    module = ModuleType("task")
    exec(SLOW, module.__dict__)
    episodes = Episodes(find_defined(module))
    slow = asyncio.create_task(episodes.take_turn(1, "", [["wait", {}, ""], ["count", {}, ""]]))
    start_s = time.monotonic()
    for row in range(2, 52):
        answer = await episodes.take_turn(row, "", [["count", {}, ""], ["quick", {}, ""]])
        assert [m["content"] for m in answer["messages"]] == ["one", "done"]
    assert not slow.done()
    module.go.set()
    assert [m["content"] for m in (await slow)["messages"]] == ["waited", "one"]
    assert time.monotonic() - start_s < 60


async def test_calls_that_never_end_are_left_behind_until_the_process_is_spent() -> None:
    module = ModuleType("task")
    exec(SLOW, module.__dict__)
    episodes = Episodes(find_defined(module))
    for row in range(playing.MAX_LEFT):
        assert not episodes.is_spent
        call = asyncio.create_task(episodes.take_turn(row, "", [["wait", {}, ""]]))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert episodes.is_spent
    module.go.set()
    while episodes.is_spent:
        await asyncio.sleep(0.01)
    assert threading.active_count() > 1
