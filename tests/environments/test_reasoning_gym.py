"""All tasks of reasoning-gym by name: prompts, and rewards in processes of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from llamarl.prompts.rows import make_rows
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.places import ROOT
from tests.scoring.reward_pool import Completion, RewardPool

pytestmark = pytest.mark.environments

RECIPE = ROOT / "recipes" / "reasoning_gym"
SOURCE = (RECIPE / "task.py").read_text()
OPTIONS = {"config": {}, "num_prompts": 2, "num_held_out": 0, "seed": 0}
NAMES = sorted(DATASETS.keys() - {"composite"})
# Many answers are right, and the package states none; it scores what a model found.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}

LENIENT = {"game_of_life_halting"}  # takes whatever is not True for False


def make(**options: object) -> list[dict]:
    return make_rows({"task.py": SOURCE}, {**OPTIONS, **options}, held_out=False)


def score(rows: list[dict], completions: list[str]) -> list[float]:
    """Of the recipe's own reward, in a process that has not made the rows."""

    async def run() -> list[float]:
        pool = RewardPool(RewardConfig(functions=["task"], timeout_s=60.0), SOURCE)
        await pool.start()
        items = [
            Completion(
                number,
                Prompt(prompt_id=number, text=row["question"], token_ids=(1,), fields=row),
                text,
            )
            for number, (row, text) in enumerate(zip(rows, completions, strict=True))
        ]
        try:
            results = await pool.score(items)
        finally:
            pool.close()
        assert not [result.error for result in results if result.error]
        return [result.numbers["reward"] for result in results]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Two prompts of each task."""
    return make(tasks=NAMES, num_prompts=2 * len(NAMES))


def test_every_task_gives_prompts(rows: list[dict]) -> None:
    assert len(NAMES) == 105
    assert [row["task"] for row in rows] == NAMES * 2
    assert all(isinstance(row["question"], str) and row["question"].strip() for row in rows)
    assert {row["task"] for row in rows if row["answer"] is None} == WITHOUT_ANSWER


def test_every_tasks_own_answer_is_correct(rows: list[dict]) -> None:
    answered = [row for row in rows if row["task"] not in WITHOUT_ANSWER]
    found = score(answered, [f"So <answer>{row['answer']}</answer>" for row in answered])
    assert {row["task"]: mark for row, mark in zip(answered, found, strict=True) if mark != 1} == {}


def test_nonsense_is_not_correct_but_in_one_task_and_no_answer_gets_none(
    rows: list[dict],
) -> None:
    nonsense = score(rows, ["<answer>@nonsense@</answer>"] * len(rows))
    assert {row["task"] for row, mark in zip(rows, nonsense, strict=True) if mark >= 1} == LENIENT
    assert set(score(rows, [str(row["answer"]) for row in rows])) == {0.0}


def test_a_solution_is_scored_where_the_package_states_no_answer() -> None:
    (row,) = make(tasks=["graph_color"], num_prompts=1)
    puzzle = create_dataset("graph_color", **row["config"])[row["index"]]["metadata"]["puzzle"]
    colours: dict[int, int] = {}
    for vertex in puzzle["vertices"]:
        near = {other for edge in puzzle["edges"] if vertex in edge for other in edge}
        used = {colours.get(other) for other in near}
        colours[vertex] = min(c for c in puzzle["color_options"] if c not in used)
    assert score([row], [f"<answer>{json.dumps(colours)}</answer>"]) == [1.0]


def test_names_take_turns_and_the_config_is_each_tasks_own() -> None:
    config = {"chain_sum": {"min_terms": 7, "max_terms": 7, "seed": 3}}
    found = make(tasks=["chain_sum", "leg_counting"], config=config, num_prompts=6)
    assert [row["task"] for row in found] == ["chain_sum", "leg_counting"] * 3
    sums = [row["question"] for row in found if row["task"] == "chain_sum"]
    assert all(question.count(" + ") + question.count(" - ") == 6 for question in sums)
    assert found != make(tasks=["chain_sum", "leg_counting"], config=config, num_prompts=6, seed=1)


def test_no_question_that_is_held_out_is_trained_on() -> None:
    options = {**OPTIONS, "tasks": ["coin_flip"], "num_prompts": 90, "num_held_out": 10}
    options["config"] = {"coin_flip": {"min_trials": 3, "max_trials": 5}}
    held_out = {row["question"] for row in make_rows({"task.py": SOURCE}, options, held_out=True)}
    trained = {row["question"] for row in make_rows({"task.py": SOURCE}, options, held_out=False)}
    assert len(held_out) <= 10 <= len(trained) < 90, "no question came twice"
    assert not held_out & trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tasks": ["chain_sun"]},
            "data.options.tasks must name tasks of reasoning-gym (106 are there), got 'chain_sun' "
            "(did you mean chain_sum",
        ),
        ({"tasks": []}, "data.options.tasks must name at least one task, got none"),
        (
            {"tasks": ["composite"]},
            "data.options.tasks must name the tasks themselves, got 'composite'",
        ),
        (
            {"tasks": ["gcd"], "config": {"lcm": {}}},
            "data.options.config must be of data.options.tasks (gcd), got lcm",
        ),
        (
            {"tasks": ["gcd"], "config": {"gcd": {"min_number": 3}}},
            "data.options.config.gcd must have keys of min_numbers, ",
        ),
        (
            {"tasks": ["gcd"], "config": {"gcd": {"min_numbers": 30}}},
            "data.options.config.gcd must be what reasoning-gym takes, got {'seed': 0, 'size': 2, ",
        ),
    ],
)
def test_what_is_wrong_with_the_options_is_one_line(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^task\.py: data\.options") as raised:
        make(**options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_run_is_scored_by_the_tasks_it_names(forks: Forks, tmp_path: Path) -> None:
    """With the shipped checkpoint of the quickstart, whose tokenizer has no `<`."""
    small = ["--config-name=cpu", "cluster=inline", "experience.keep_rollouts=1"]
    done = forks.run("train", f"--config-dir={RECIPE}", *small, f"run_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    lines = read_rollouts(tmp_path)
    assert {line["outcome"] for line in lines} >= {"trained", "evaluated"}
    assert all("arithmetic problem" in line["prompt"] for line in lines if "prompt" in line)
