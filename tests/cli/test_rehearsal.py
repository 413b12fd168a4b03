"""Whatever trains can be planned and checked: both leave parts of a recipe out, and what is left is
a recipe."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from llamarl.cli.check_trial import tiny_config
from llamarl.cli.reports import plan
from llamarl.core.config import Config
from llamarl.planner.simulation.workload import make_workload, shrunk_guesses, with_lengths
from llamarl.recipe.composition import compose, to_config
from llamarl.recipe.rules import (
    with_processes,
    without_evaluation,
    without_own_stages,
    without_rewards,
)
from tests.e2e.test_option_pairs import COMMON, cases, overrides
from tests.places import RECIPE, ROOT, TOOLS_RECIPE
from tests.recipe.composing import compose_recipe

pytestmark = pytest.mark.full

BEST = ["evaluation.every_steps=5", "checkpoint.best=accuracy", "evaluation.patience=3"]
SETS = ["data.held_out=null", "evaluation.sets={easy: held_out.jsonl, hard: held_out.jsonl}"]
SMALL = ["plan.num_steps=3", "trainer.groups_per_step=2", "sampling.rollouts_per_prompt=2"]
VARIANTS: dict[str, list[str]] = {
    "best": BEST,
    "best of a set": [*SETS, *BEST[::2], "checkpoint.best=hard/accuracy"],
    "adapters": ["trainer.lora.rank=4"],
    "steps per batch": ["trainer.num_mini_batches=2", "trainer.num_passes=2"]
    + ["staleness.max_staleness=3"],
    "inline": ["cluster=inline", "generator.num_replicas=2"],
    "colocated": ["placement=colocated"],
    "elastic": ["generator.elastic=[1,2]"],
}
ENVIRONMENT = '''
class Guess:
    def reset(self, target=0, **row):
        self.target = int(target)
        return "Guess."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: the guess
        """
        return "right" if number == self.target else "wrong"

    def get_reward(self) -> float:
        return 1.0

environment = Guess
'''


def write_environment_recipe(folder: Path) -> Path:
    """As somebody who comes from TRL would have it: rows with a prompt; completions are too short
    for the turns that a plan usually assumes."""
    shutil.copytree(TOOLS_RECIPE, folder)
    (folder / "task.py").write_text(ENVIRONMENT)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"question"', '"prompt"'))
    text = (folder / "run.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("plan:")]
    text = "\n".join(lines).replace("[exact]", "[environment]")
    (folder / "run.yaml").write_text(text.replace("max_tokens: 128", "max_tokens: 96"))
    return folder


def recipe_files() -> Iterator[Path]:
    """Every file of recipes/ that `llamarl train` takes."""
    for path in sorted(ROOT.glob("recipes/*/*.yaml")):
        if path.stem != "sft":
            yield path


def variants(folder: Path, start: int) -> Iterator[Config]:
    """What the tests of whole runs train: a third of the pairs of options."""
    shutil.copytree(RECIPE, folder / "pairs")
    (folder / "pairs" / "task.py").touch()
    for case in cases()[0][start::3]:
        yield compose_recipe(folder / "pairs", [*COMMON, *overrides(case)])
    for values in VARIANTS.values():
        yield compose_recipe(RECIPE, values)
    environment = write_environment_recipe(folder / "environment")
    yield compose_recipe(environment, [])
    yield compose_recipe(environment, [*BEST[::2], "checkpoint.best=reward"])


def rehearse(config: Config) -> None:
    """What plan and check make of a recipe, or a ValueError."""
    for part in (without_evaluation, without_own_stages, without_rewards, with_processes):
        part(config)
    tiny = tiny_config(config, "checkpoint", "tokenizer")
    assert not tiny.held_out_sets
    assert not tiny.environment.is_used
    assert not tiny.experience.stages
    make_workload(config)


@pytest.mark.parametrize(
    "path", [*recipe_files()], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_each_recipe_here_can_be_rehearsed(path: Path) -> None:
    rehearse(compose_recipe(path.parent, [], path.stem))


@pytest.mark.parametrize("start", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))])
def test_whatever_is_trained_can_be_rehearsed(start: int, tmp_path: Path) -> None:
    for config in variants(tmp_path, start):
        rehearse(config)


def planned(folder: Path, *values: str) -> str:
    """What `llamarl plan` says, from the recipe as the command line composes it."""
    config = to_config(compose(folder, values))
    file = io.StringIO()
    options = {"json": None, "trace": None}
    plan(config, Console(file=file, width=100), **options, sweep=False)
    return file.getvalue()


@pytest.mark.long
def test_environments_are_planned_to_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_environment_recipe(tmp_path / "recipe")
    assert "fits" in planned(folder, *SMALL)
    assert "assumed: plan.observation_tokens=16, which sampling.max_tokens" in caplog.text


def test_guesses_of_turns_always_leave_the_model_a_token_of_each() -> None:
    base = ["generator.max_model_len=160", "plan.prompt_tokens=1", "plan.median_tokens=1"]
    for max_tokens in (1, 2, 3, 5, 8, 13, 96, 128):
        for more in ([], ["plan.observation_tokens=7"], ["environment.max_turns=1"]):
            given = [f"sampling.max_tokens={max_tokens}", *base, "plan.num_turns=0"]
            config = compose_recipe(TOOLS_RECIPE, [*given, "plan.observation_tokens=0", *more])
            found = make_workload(config)
            in_answers = (found.num_turns - 1) * found.observation_tokens
            assert found.num_turns <= max_tokens - in_answers
            assert found.num_turns <= config.environment.max_turns


def test_what_the_recipe_says_of_turns_is_taken_as_it_is() -> None:
    config = compose_recipe(TOOLS_RECIPE, [])
    found = with_lengths(config).plan
    assert (found.num_turns, found.observation_tokens) == (3, 9)
    assert shrunk_guesses(config) is None
    with pytest.raises(ValueError, match="must leave room for plan"):
        make_workload(compose_recipe(TOOLS_RECIPE, ["plan.observation_tokens=120"]))
