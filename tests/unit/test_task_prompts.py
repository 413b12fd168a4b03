"""Prompts that a recipe's own task.py makes: what it gets, what it may give, and the same again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamarl.core.config import Config
from llamarl.prompts.rows import load, make_rows
from llamarl.recipe.inputs import read_inputs
from llamarl.recipe.prompt_inputs import with_measured_prompts
from tests.places import RECIPE
from tests.unit.composing import compose_recipe

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
def test_what_is_wrong_with_options_or_rows_is_one_line(
    source: str, options: dict[str, object], message: str
) -> None:
    found = load({"task_source": {"task.py": source}})(None, False, options)
    assert message in found["mistake"]
    if source is SUMS:
        with pytest.raises(ValueError, match=r"^task\.py: data\.options") as raised:
            make_rows({"task.py": source}, options, held_out=False)
        assert "\n" not in str(raised.value)


def test_a_function_without_held_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts must be prompts\(held_out: bool, \.\.\.\) -> "):
        load({"task_source": {"task.py": "def prompts(largest): return []"}})


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
def test_rows_that_are_no_prompts_are_named_before_the_run(
    recipe: Path, source: str, message: str
) -> None:
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
    with pytest.raises(ValueError, match="must not name task for prompts without a "):
        read_inputs(compose(recipe))
