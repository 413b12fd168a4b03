"""What a choice of a group sets, against the recipe's file, and what is written of the choices."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llamarl.core.config import Config
from llamarl.recipe.choices import CHOICES, set_by
from llamarl.recipe.composition import compose, to_config, to_yaml
from tests.places import RECIPE

FILE = """
defaults: [config, {override /algorithm: grpo}, _self_]
model: {checkpoint: x}
data: {prompts: x.jsonl}
reward: {functions: [task, format], weights: [1, 0.5]}
algorithm: {clip_high: 0.28, entropy_coefficient: 0.01}
cluster: {backend: inline}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(FILE)
    return tmp_path


def composed(folder: Path, *arguments: str) -> Config:
    return to_config(compose(folder, arguments))


def test_a_choice_of_the_command_line_wins_against_the_recipes_file(recipe: Path) -> None:
    assert composed(recipe, "reward=exact", "reward.weights=[1]").reward.functions == ["exact"]
    own = set_by("algorithm", "gspo", "grpo")
    assert own["clip_high"] != 0.28
    config = composed(recipe, "algorithm=gspo")
    assert config.algorithm.clip_high == own["clip_high"]
    assert config.algorithm.entropy_coefficient == 0.01, "0 is the default of both"
    assert composed(recipe, "cluster=monarch").cluster.backend == "monarch"
    assert composed(RECIPE, "reward=math").reward.functions == ["math"]


def test_what_it_leaves_open_and_a_value_beside_it_stay(recipe: Path) -> None:
    assert composed(recipe, "algorithm=grpo").algorithm.clip_high == 0.28
    assert composed(recipe, "algorithm=gspo", "algorithm.clip_high=0.1").algorithm.clip_high == 0.1
    assert composed(recipe, "trainer=transformers").reward.functions == ["task", "format"]
    assert composed(recipe).cluster.backend == "inline"


def test_a_recipe_that_begins_with_another_file_has_that_ones_choices(recipe: Path) -> None:
    """Its own choice, given again, changes nothing."""
    (recipe / "run.yaml").rename(recipe / "base.yaml")
    (recipe / "run.yaml").write_text("defaults: [base, _self_]\nnum_steps: 7\n")
    config = composed(recipe, "algorithm=grpo")
    assert (config.algorithm.clip_high, config.num_steps) == (0.28, 7)


def test_a_choice_whose_values_do_not_fit_the_file_is_one_line(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"^reward\.weights must have one weight per function"):
        composed(recipe, "reward=exact")


@pytest.mark.parametrize("group", CHOICES)
def test_every_choice_is_found_in_what_it_composes(group: str) -> None:
    for choice in CHOICES[group]:
        written = yaml.safe_load(to_yaml(compose(RECIPE, [f"{group}={choice}"])))
        assert {f"override /{group}": choice} in written["defaults"]


def test_the_written_recipe_composes_to_itself(recipe: Path, tmp_path: Path) -> None:
    first = compose(recipe, ["algorithm=cispo", "weights=collective", "data.system='1e3'"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(to_yaml(first))
    again = compose(folder, [])
    assert to_yaml(again) == to_yaml(first)
    names = yaml.safe_load(to_yaml(first))["defaults"]
    assert {"override /algorithm": "cispo"} in names
    assert {"override /weights": "collective"} in names
    assert not any("override /reward" in each for each in names), "two functions are no choice"
