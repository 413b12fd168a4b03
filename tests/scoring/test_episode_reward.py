"""A reward that reads the whole episode, and the environment that it was played in."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamarl.core.records import Prompt, StageStatus
from llamarl.recipe.inputs import read_inputs
from llamarl.scoring.agent import AgentEnvironment
from llamarl.scoring.definition import describe, find_defined
from llamarl.scoring.episodes import UNKNOWN, Episodes, load
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.tool_calls import READY
from tests.places import TOOLS_RECIPE
from tests.recipe.composing import compose_recipe
from tests.scoring.test_agent import post

pytestmark = pytest.mark.full

# What reward functions of TRL's own examples read of `environments` and `completions`.
TASK = '''
import asyncio

def look(place: str) -> str:
    """Looks.

    Args:
        place: where
    """
    return "nothing"

class Game:
    def reset(self, **row):
        self.board, self.done, self.reward = ["_", "_"], False, 0.0

    def mark(self, at: int) -> str:
        """Marks a field.

        Args:
            at: which
        """
        self.board[at] = "x"
        self.done = "_" not in self.board
        self.reward = 1.0 if self.done else 0.0
        return " ".join(self.board)

class Scored(Game):
    def get_reward(self):
        return 10.0

class Steps:
    def reset(self, **row):
        self.num_steps = 0

    def step(self, messages):
        self.num_steps += 1
        return "Go on.", 0.5

def state(prompt, messages, environment):
    return environment.reward + 0.1 * environment.board.count("x")

async def num_calls(prompt, messages, environment):
    await asyncio.sleep(0)
    return sum(len(each.get("tool_calls", ())) for each in messages)

def answer(prompt, messages, environment):
    is_last = messages[-1]["role"] == "assistant"
    return is_last and messages[-1]["content"] == prompt.fields["answer"]

def kind(prompt, messages, environment):
    return getattr(environment, "num_steps", 7)
'''
QUESTION = [{"role": "user", "content": "Play."}]


def task(*lines: str) -> ModuleType:
    module = ModuleType("task")
    exec(compile("\n".join([TASK, *lines]), "task.py", "exec"), module.__dict__)
    return module


def prompt(**fields: Any) -> Prompt:
    return Prompt(prompt_id=1, text="", token_ids=(1,), fields=fields)


def played(lines: list[str], turns: list[list[list[Any]]], last: str, **row: Any) -> float | None:
    """The reward of an episode in which the model makes the calls of these turns, then says
    `last`."""

    async def main() -> float | None:
        episodes = Episodes(find_defined(task(*lines)))
        await episodes.begin(prompt(**row), 1, QUESTION)
        for calls in turns:
            await episodes.take_turn(1, "", calls)
        found = await episodes.finish(1, last)
        assert await episodes.finish(1) == UNKNOWN, "nothing of it is left"
        reward: float | None = found["reward"]
        return reward

    return asyncio.run(main())


MARK = [["mark", {"at": 0}, ""]]
LOOK = [["look", {"place": "here"}, ""], ["look", {"place": "there"}, ""]]


@pytest.mark.parametrize(
    ("lines", "turns", "reward"),
    [
        (["environment, episode_reward = Game, state"], [MARK], 0.1),
        (["environment, episode_reward = Game, state"], [MARK, [["mark", {"at": 1}, ""]]], 1.2),
        (["environment, episode_reward = Scored, state"], [MARK], 10.1),
        (["environment, episode_reward = Scored, num_calls"], [MARK, MARK, MARK], 13),
        (["environment, episode_reward = Game, num_calls"], [[["", {}, "no JSON"]]], 0),
        (["tools, episode_reward = [look], num_calls"], [LOOK, LOOK], 4),
        (["tools, episode_reward = [look], num_calls"], [], 0),
        (["tools, episode_reward = [look], answer"], [LOOK], 1),
        (["environment, episode_reward = Steps, kind"], [[], []], 3),
        (["environment = {'a': Game, 'b': Steps}", "episode_reward = kind"], [MARK], 7),
        (["environment = {'b': Game, 'a': Steps}", "episode_reward = kind"], [[]], 1.5),
    ],
)
def test_its_number_is_added_to_what_the_environment_gives(
    lines: list[str], turns: list[list[list[Any]]], reward: float
) -> None:
    found = played(lines, turns, "Done.", answer="Done.", environment="a")
    assert found == pytest.approx(reward)


def test_several_functions_are_rewards_of_their_own_in_the_order_that_is_asked_for() -> None:
    lines = ["environment, episode_rewards = Scored, [state, num_calls]"]

    async def finish(rewards: list[str], *more: str) -> dict[str, Any]:
        episodes = Episodes(find_defined(task(*lines, *more)), rewards)
        await episodes.begin(prompt(), 1, QUESTION)
        await episodes.take_turn(1, "", MARK)
        return await episodes.finish(1, "Done.")

    alone = asyncio.run(finish([]))
    found = asyncio.run(finish(["num_calls", "state"]))
    assert found["rewards"] == [1.0, pytest.approx(0.1)]
    assert found["reward"] == alone["reward"] == 10.0, "they are no part of the environment's own"
    both = asyncio.run(finish(["num_calls"], "episode_reward = state"))
    assert both == {"reward": pytest.approx(10.1), "rewards": [1.0]}
    kind = describe(task(*lines))[""]
    assert kind.rewards == ("state", "num_calls")
    assert kind.is_read
    assert not kind.has_episode_reward


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("state", "episode_rewards must be a list of functions, got <function"),
        ("[state, 3]", "episode_rewards must be a list of functions"),
        ("[state, state]", "each of episode_rewards must have a name of its own"),
        ("[lambda *_: 1]", "each of episode_rewards must have a name of its own"),
        ("[look]", "look must be look(prompt: Prompt, messages"),
    ],
)
def test_a_list_of_something_else_is_refused_in_one_line(value: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        describe(task("environment = Game", f"episode_rewards = {value}"))
    assert "\n" not in str(raised.value)


async def test_each_episode_has_a_conversation_of_its_own() -> None:
    episodes = Episodes(find_defined(task("tools, episode_reward = [look], num_calls")))
    for row in (1, 2):
        await episodes.begin(prompt(), row, QUESTION)
    await episodes.take_turn(1, "", LOOK)
    assert await episodes.finish(2, "None.") == {"reward": 0.0}
    await episodes.begin(prompt(), 2, QUESTION)
    assert await episodes.finish(1, "Two.") == {"reward": 2.0}
    await episodes.forget([2])
    assert await episodes.take_turn(2, "", LOOK) == UNKNOWN


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("raise OSError('no judge')", StageStatus.RAISED, "OSError: no judge"),
        ("environment.no_field", StageStatus.RAISED, "has no attribute 'no_field'"),
        ("return 'good'", StageStatus.INVALID, "a finite number for episode_reward, at most 1e+09"),
        ("return float('nan')", StageStatus.INVALID, "for episode_reward"),
        ("return None", StageStatus.INVALID, "got None"),
        ("return [1.0]", StageStatus.INVALID, "got [1.0]"),
    ],
)
async def test_what_it_does_wrong_is_a_failure_and_no_reward(
    body: str, status: StageStatus, words: str
) -> None:
    for head, beside in (("def", "environment = Scored"), ("async def", "tools = [look]")):
        own = f"{head} episode_reward(prompt, messages, environment):\n    {body}"
        source = "\n".join([TASK, beside, own])
        serve = load({"task_source": {"task.py": source}, "tools": ["task"], "limits": {}})
        await serve(prompt(), "begin", [1, QUESTION])
        found = await serve(None, "finish", [1, "Done."])
        assert found["status"] == status
        assert words in found["error"]
        assert "reward" not in found


async def test_a_reward_beside_a_program_reads_the_whole_conversation() -> None:
    class Twice(AgentEnvironment):
        def play(self, url: str, **row: Any) -> float:
            messages = [*QUESTION]
            for _ in range(2):
                status, answer = post(url, {"messages": messages})
                if status != 200:
                    return 0.5
                said = answer["choices"][0]["message"]["content"]
                more = {"role": "user", "content": "Sure?"}
                messages += [{"role": "assistant", "content": said}, more]
            return 1.0

    seen = []

    def episode_reward(prompt: Prompt, messages: list, environment: Any) -> float:
        seen.append((type(environment), [(each["role"], each["content"]) for each in messages]))
        return 0.25

    own = {"environment": Twice, "episode_reward": staticmethod(episode_reward)}
    episodes = Episodes(find_defined(type("Task", (), own)))  # type: ignore[arg-type]
    for row, reward in ((1, 0.75), (2, 1.25)):
        await episodes.begin(Prompt(prompt_id=1, text="", token_ids=(1,)), row, [])
        await episodes.wait(row, 20.0)
        await episodes.reply(row, 0, {"text": "6?"})
        (event,) = (await episodes.wait(row, 20.0))["events"]
        assert event["messages"] == [{"role": "user", "content": "Sure?"}]
        if row == 2:
            await episodes.reply(row, 0, {"text": "Yes."})
            assert (await episodes.wait(row, 20.0))["events"] == [{"end": True}]
        found = await episodes.end(row, row == 1)
        assert found == {"reward": reward, "own_rewards": []}
    asked = [("user", QUESTION[0]["content"]), ("assistant", "6?"), ("user", "Sure?")]
    assert seen == [(Twice, asked), (Twice, [*asked, ("assistant", "Yes.")])]


@pytest.mark.parametrize(
    "beside", ["tools = [look]", "environment = Game", "environment = {'a': Game, 'b': Steps}"]
)
def test_with_it_each_kind_gives_a_reward(beside: str) -> None:
    for own, expected in (("", False), ("episode_reward = state", True)):
        kinds = describe(task(beside, own))
        for name, kind in kinds.items():
            assert kind.has_episode_reward == expected
            assert kind.is_kept == (expected or beside != "tools = [look]")
            assert kind.has_reward == (expected or name == "b"), "steps may have rewards"


def test_alone_it_makes_no_episodes() -> None:
    with pytest.raises(ValueError, match=r"must define tools or environment .*, got neither"):
        describe(task("episode_reward = state"))


def test_beside_a_ready_tool_it_needs_no_tools_of_its_own() -> None:
    ready = READY["python"](ProgramLimits())
    (kind,) = describe(task("episode_reward = state"), [ready]).values()
    assert (len(kind.schemas), kind.has_reward, kind.has_instance) == (1, True, False)


def test_a_recipe_with_plain_tools_may_name_it_once_it_has_the_right_form(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    text = (recipe / "task.py").read_text()
    config = compose_recipe(recipe, [f"recipe_dir={recipe}", "reward.functions=[environment]"])
    for own, words in {
        "": r"^reward\.functions must not name environment unless each [^\n]*$",
        "def episode_reward(prompt, completion): ...": r"must be episode_reward\(prompt: [^\n]*$",
    }.items():
        (recipe / "task.py").write_text(f"{text}\n\n{own}\n")
        with pytest.raises(ValueError, match=words):
            read_inputs(config)
    own = "def episode_reward(prompt, messages, environment): ..."
    (recipe / "task.py").write_text(f"{text}\n\n{own}\n")
    assert read_inputs(config).kinds[""].has_episode_reward
