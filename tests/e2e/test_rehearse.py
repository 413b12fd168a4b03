"""`llamarl rehearse` as a command: its policies, its page, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import RECIPE, ROOT

TOOLS_RECIPE = ROOT / "recipes" / "quickstart_tools"
AGENT_RECIPE = ROOT / "recipes" / "quickstart_agent"
FEW = "--prompts=2"


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        (RECIPE, [], "environment.tools must name what rollouts take turns with"),
        (TOOLS_RECIPE, ["--policy=large"], "--policy must be one of scripted, tiny"),
        (TOOLS_RECIPE, ["--against=nothing"], "--against must name a recorded file or"),
        (TOOLS_RECIPE, ["--against=nothing", "--policy=tiny"], "--policy must be left out with"),
        (TOOLS_RECIPE, ["--against=http://127.0.0.1:9/v1"], "--against must name a recorded"),
        (TOOLS_RECIPE, ["--prompts=0"], "--prompts must be a number from 1 to 1000"),
        (TOOLS_RECIPE, ["--prompts=many"], "--prompts must be a number from 1 to 1000"),
        (TOOLS_RECIPE, ["--faults=storm=1"], "--faults must be one of slow"),
        (TOOLS_RECIPE, ["--json=nowhere/found.json"], "--json must name a file in a folder"),
        (TOOLS_RECIPE, ["algorithm=sft"], "llamarl rehearse"),
        (TOOLS_RECIPE, ["model.checkpoint=nowhere"], "nowhere"),
        (AGENT_RECIPE, ["environment.command=['{nothing}']"], "environment.command must name"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line(
    forks: Forks, tmp_path: Path, recipe: Path, arguments: list[str], words: str
) -> None:
    done = forks.run("rehearse", f"--config-dir={recipe}", *arguments, where=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert words in line
    assert not [*tmp_path.iterdir()], "nothing is left"


@pytest.mark.long
def test_a_run_s_archive_is_played_again(forks: Forks, tmp_path: Path) -> None:
    common = [f"--config-dir={TOOLS_RECIPE}", "cluster=inline"]
    small = ["num_steps=1", "trainer.groups_per_step=2", "evaluation.max_prompts=2"]
    run = tmp_path / "run"
    more = ["experience.keep_rollouts=1", "checkpoint.export=false"]
    done = forks.run("train", *common, *small, *more, f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    kept, found = run / "archive" / "kept-0.jsonl", tmp_path / "found.json"
    done = forks.run("rehearse", *common, f"--against={kept}", f"--json={found}")
    assert done.returncode == 0, done.stderr
    said = re.search(r"recorded observations: (\d+) of (\d+) were said again", done.stdout)
    assert said is not None
    assert said[1] == said[2] != "0", "the calculator says the same again"
    figures = json.loads(found.read_text())
    prompts = {line["fields"] for line in read_lines(kept)}
    assert figures["num_episodes"] == 4 * len(prompts)
    assert figures["policy"] == "recorded"


@pytest.mark.long
def test_a_tiny_policy_plays_without_the_recipe_s_weights(forks: Forks, tmp_path: Path) -> None:
    """A checkpoint of the Hub's layout, of which only the config and the tokenizer are here."""
    recipe, found = tmp_path / "recipe", tmp_path / "found.json"
    shutil.copytree(TOOLS_RECIPE, recipe)
    for path in (recipe / "checkpoint").glob("*.safetensors"):
        path.unlink()
    options = ["--policy=tiny", f"--json={found}", FEW, "--faults=none"]
    done = forks.run("rehearse", f"--config-dir={recipe}", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(found.read_text())
    assert figures["per_episode"]["tokens of the model"]["mean"] > 0
    assert figures["injected"] == {}
    assert "with faults" not in done.stdout


@pytest.mark.long
def test_an_agent_is_played_with_faults(forks: Forks, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    faults = "--faults=slow=0.2,fail=0.2,kill=0.1,drop=0.2,lose=0.1,commit=0.3"
    options = [f"--json={found}", FEW, faults]
    done = forks.run("rehearse", f"--config-dir={AGENT_RECIPE}", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(found.read_text())
    assert {"slow", "fail", "drop", "commit"} <= figures["injected"].keys()
    assert figures["failures"] == {}
    assert figures["failures_with_faults"].keys() <= {"raised"}
    assert figures["failures_read_as_zero"] == 0
    assert figures["sequences_compared"] > 0
    assert "a step of the recipe" in done.stdout
