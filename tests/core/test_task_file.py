"""What a recipe's own task.py must look like is said before it runs; the prompts that it makes."""

from __future__ import annotations

import linecache
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import Config
from llamarl.core.errors import TaskError
from llamarl.core.extensions import FORMS, load, neighbours
from llamarl.prompts.rows import load as load_prompts
from llamarl.prompts.rows import make_rows
from llamarl.recipe.inputs import read_inputs
from llamarl.recipe.prompt_inputs import with_measured_prompts
from tests.places import RECIPE
from tests.recipe.composing import compose_recipe

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def reward(:\n", "reward", "got SyntaxError: invalid syntax (task.py, line 1)"),
        ("x = '\0'\n", "reward", "must load, got SyntaxError: source code string cannot contain"),
        ("x = " + "[" * 9999, "reward", "task.py must load, got "),
        ("import nowhere", "drop", "must load, got ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)", "drop", "task.py must load, got SystemExit: 3 (task.py, line"),
        ("raise GeneratorExit", "drop", "must load, got GeneratorExit (task.py, line 1: raise "),
        (
            "import os\ndef score(p, c):\n    reward = 1\n",
            "reward",
            "must define reward(prompt: Prompt, completion: str) -> float, got os, score",
        ),
        ("", "drop", "must define drop(group: ScoredGroup) -> str | None, got no name at all"),
        ("drop = 3", "drop", "must define drop(group: ScoredGroup) -> str | None, got 3"),
        ("\ndef reward(completion, prompt): return 1", "reward", "task.py:2: reward must be"),
        ("def reward(prompt): return 1", "reward", "got reward(prompt): too many positional"),
        ("from math import cos as reward", "reward", "task.py: reward must be reward(prompt"),
        ("drop = lambda: 3", "drop", "task.py:1: drop must be drop(group: ScoredGroup)"),
        ("def loss(inputs, rho): return 1", "loss", "got loss(inputs, rho): missing"),
        ("def loss(*, inputs): return 1", "loss", "got loss(*, inputs)"),
        ("def loss(inputs, *, rho): return 1", "loss", "got loss(inputs, *, rho)"),
        ("async def drop(group): return", "drop", "got async drop(group)"),
        (
            "def episode_reward(messages, environment): return 1",
            "episode_reward",
            "task.py:1: episode_reward must be episode_reward(prompt: Prompt, "
            "messages: list[dict[str, Any]], environment: Any) -> float, "
            "got episode_reward(messages, environment): too many positional arguments",
        ),
        ("def episode_reward(prompt, messages, env): ...", "episode_reward", "messages, env)"),
        (
            "def group_reward(prompt, completion): return 1",
            "group_reward",
            "task.py:1: group_reward must be group_reward(prompt: Prompt, completions: list[str]) "
            "-> Sequence[float], got group_reward(prompt, completion)",
        ),
        ("episode_reward = 3", "episode_reward", "must define episode_reward(prompt: Prompt, "),
        ("def drop(group) -> bool: return", "drop", "got drop(group) -> bool"),
        (
            "def advantages(rewards: list[int]): return rewards",
            "advantages",
            "task.py:1: advantages must be advantages(rewards: Sequence[float]) -> "
            "Sequence[float], got advantages(rewards: list[int])",
        ),
    ],
)
def test_a_function_of_another_form_is_refused(source: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load({"task.py": source}, [name])
    assert str(error.value).startswith("task.py")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def reward(prompt, completion): return 1", "reward"),
        ("async def reward(prompt, completion): return 1", "reward"),
        ("def reward(_prompt, completion, scale=2): return 1", "reward"),
        (
            "class Game: ...\n"
            "async def episode_reward(prompt, messages: list, environment: Game | None): return 1",
            "episode_reward",
        ),
        ("import torch\ndef loss(inputs) -> torch.Tensor: return 1", "loss"),
        (
            "from __future__ import annotations\n"
            "def loss(inputs: 'LossInputs') -> tuple[torch.Tensor, torch.Tensor]: return",
            "loss",
        ),
        ("import typing\ndef drop(group) -> typing.Optional[str]: return", "drop"),
        ("from typing import Any\ndef drop(group: Any) -> None | str: return", "drop"),
        ("def advantages(rewards: list[float]) -> list[float]: return rewards", "advantages"),
        (
            "from collections.abc import Sequence\n"
            "def advantages(rewards: Sequence[float]) -> Sequence[float]: return rewards",
            "advantages",
        ),
        ("def reward(prompt): return 1\ndef reward(prompt, completion): return 1", "reward"),
        ("from operator import eq as reward", "reward"),
        ("from operator import *\nreward = eq", "reward"),
        ("reward = lambda p, c: 1", "reward"),
        ("if 1:\n  def reward(prompt, completion): return 1", "reward"),
        ("class reward:\n  def __init__(self, prompt, completion): pass", "reward"),
        ("(reward := print)", "reward"),
        ("globals()['rew' + 'ard'] = print", "reward"),
    ],
)
def test_a_function_that_fits_is_found_however_it_is_bound(source: str, name: str) -> None:
    assert callable(load({"task.py": source}, [name])[name])


@settings(max_examples=40)
@given(st.text(st.characters(codec=None)) | st.binary().map(lambda data: data.decode("latin-1")))
def test_whatever_text_a_task_is_it_is_refused_in_one_line(source: str) -> None:
    with pytest.raises(ValueError, match=r"^task\.py must ") as error:
        load({"task.py": source}, [*FORMS])
    assert len(str(error.value).splitlines()) == 1


def test_a_function_that_raises_is_named_with_its_line() -> None:
    source = "def helper(x):\n    return 1 / x\n\ndef drop(group):\n    return helper(0)\n"
    drop = load({"task.py": source}, ["drop"])["drop"]
    with pytest.raises(TaskError) as error:
        drop(None)
    assert str(error.value) == (
        "drop of task.py must not raise, got ZeroDivisionError: division by zero "
        "(task.py, line 2: return 1 / x)"
    )
    assert sys.modules["task"].__file__ == "task.py"


@pytest.mark.parametrize("raised", ["SystemExit", "GeneratorExit", "asyncio.CancelledError"])
def test_whatever_a_function_raises_is_named_but_ctrl_c_is_ctrl_c(raised: str) -> None:
    source = {"task.py": f"import asyncio\ndef drop(group):\n    raise {raised}\n"}
    with pytest.raises(TaskError, match=f"got .*{raised.removeprefix('asyncio.')} "):
        load(source, ["drop"])["drop"](None)
    stopping = {"task.py": "def drop(group):\n    raise KeyboardInterrupt\n"}
    with pytest.raises(KeyboardInterrupt):
        load(stopping, ["drop"])["drop"](None)


def folder_of(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_modules_of_the_recipes_folder_travel_with_what_they_import(tmp_path: Path) -> None:
    """And no others; elsewhere, where the folder is not, they are imported by content."""
    text = "import json\nfrom own_scores.parts import part\ndef drop(group): return part(2)\n"
    folder = folder_of(
        tmp_path / "recipe",
        unused="raise 1",
        json="raise 1",
        base_score="def base(x):\n    return x / 0\n",
    )
    package = tmp_path / "recipe" / "own_scores"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("from base_score import base\nfrom .more import times\n")
    (package / "more.py").write_text("def times(x): return x\n")
    (package / "parts.py").open("a").write("def part(x): return base(times(x))\n")
    source = {"task.py": text, **neighbours(text, folder)}
    assert {*source} == {
        "task.py",
        "base_score.py",
        *(f"own_scores/{name}.py" for name in ("__init__", "parts", "more")),
    }
    shutil.rmtree(folder)
    drop = load(source, ["drop"])["drop"]
    with pytest.raises(TaskError, match=r"ZeroDivisionError.*\(task\.py, line 3: def drop"):
        drop(None)
    assert linecache.getline("base_score.py", 2, sys.modules["base_score"].__dict__)
    other = {"task.py": "from base_score import base as drop", "base_score.py": "base = print"}
    assert load(other, ["drop"])
    assert sys.modules["base_score"].base is print
    with pytest.raises(ValueError, match="No module named 'base_score'"):
        load({"task.py": "import base_score"}, [])


def test_a_neighbour_that_does_not_compile_or_hides_a_package_is_named(tmp_path: Path) -> None:
    text = "import broken_one"
    source = {"task.py": text, **neighbours(text, folder_of(tmp_path, broken_one="\nx = ("))}
    with pytest.raises(ValueError, match=r"'\(' was never closed \(broken_one\.py, line 2\)"):
        load(source, [])
    folder = folder_of(tmp_path, numpy="x = 1")
    with pytest.raises(ValueError, match=r"numpy\.py must not have the name of an installed"):
        neighbours("import numpy", folder)


SUMS = """
def prompts(held_out, largest, names=("a", "b")):
    if largest < 1:
        raise ValueError(f"data.options.largest must be at least 1,\\ngot {largest}")
    for number in range(1, largest + 1):
        total = number + (100 if held_out else 1)
        yield {"question": f"What is {number}+{total - number}?", "answer": str(total)}
"""


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (SUMS, {"largest": 0}, "task.py: data.options.largest must be at least 1, got 0"),
        (SUMS, {"larges": 3}, "task.py: data.options must be what prompts(held_out, largest,"),
        ("def prompts(held_out):\n    return 1 / 0", {}, "prompts of task.py must not raise, got"),
        ("def prompts(held_out): return [{}, 3]", {}, "task.py: prompts:2: the row must be a"),
        ("def prompts(held_out): yield {'answer': {1}}", {}, "task.py: prompts:1: the row must"),
    ],
)
def test_wrong_options_are_one_line(source: str, options: dict[str, object], message: str) -> None:
    found = load_prompts({"task_source": {"task.py": source}})(None, False, options)
    assert message in found["mistake"]
    if source is SUMS:
        with pytest.raises(ValueError, match=r"^task\.py: data\.options") as raised:
            make_rows({"task.py": source}, options, held_out=False)
        assert "\n" not in str(raised.value)


def test_a_function_without_held_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts must be prompts\(held_out: bool, \.\.\.\) -> "):
        load_prompts({"task_source": {"task.py": "def prompts(largest): return []"}})


def test_two_starts_make_the_same_rows_of_a_set() -> None:
    source = "def prompts(held_out): return [{'q': word} for word in set('abcdefghijklmnop')]"
    assert make_rows({"task.py": source}, {}, held_out=False) == make_rows(
        {"task.py": source}, {}, held_out=False
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("*.jsonl"))
    (folder / "task.py").write_text(SUMS)
    return folder


OWN = ["data.prompts=task", "data.held_out=task", "data.options.largest=3"]


def compose(recipe: Path, *overrides: str) -> Config:
    return compose_recipe(recipe, [f"recipe_dir={recipe}", *OWN, *overrides])


def test_a_run_reads_the_prompts_that_the_task_makes(recipe: Path) -> None:
    inputs = read_inputs(compose(recipe))
    asked = [(prompt.prompt_id, prompt.text, prompt.is_held_out) for prompt in inputs.prompts]
    assert asked == [(number, f"What is {number}+1?", False) for number in (1, 2, 3)]
    assert [prompt.fields["answer"] for prompt in inputs.held_out] == ["101", "102", "103"]
    assert all(prompt.is_held_out for prompt in inputs.held_out)


@pytest.mark.long
def test_a_plan_measures_the_prompts_that_the_task_makes(recipe: Path) -> None:
    config = compose(recipe, "plan.prompt_tokens=0")
    lengths = [len(prompt.token_ids) for prompt in read_inputs(config).prompts]
    assert with_measured_prompts(config).plan.prompt_tokens == round(sum(lengths) / 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def prompts(held_out, largest): return []", "prompts must hold at least one prompt, got"),
        ("def prompts(held_out, largest): yield {'q': 1}", "prompts:1: the row must have the"),
        (
            "def prompts(held_out, largest): yield {'question': 'What is 1+1?'}",
            "prompts:1: the row must have the field 'answer' (reward.answer_field)",
        ),
        ("prompts = 3", "task.py must define prompts(held_out: bool, ...) -> "),
    ],
)
def test_rows_that_are_no_prompts_are_named(recipe: Path, source: str, message: str) -> None:
    (recipe / "task.py").write_text(source)
    with pytest.raises(ValueError, match="task") as raised:
        read_inputs(compose(recipe))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_without_a_task_that_reads_them_are_refused() -> None:
    must = "data.options must stay empty unless data.prompts or data.held_out is task"
    with pytest.raises(ValueError, match=must):
        compose_recipe(RECIPE, ["data.options.largest=3"])


def test_a_recipe_without_a_task_file_cannot_ask_it_for_prompts(recipe: Path) -> None:
    (recipe / "task.py").unlink()
    must = r"the recipe must have a .*task\.py, as it names task for prompts, got no such file"
    with pytest.raises(ValueError, match=must):
        read_inputs(compose(recipe))
