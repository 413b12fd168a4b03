"""What is wrong with an environment is named by `llamarl rehearse`, and what is right is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forks import Forks
from tests.json_lines import write_lines
from tests.model import chat_templates
from tests.places import ROOT
from tests.rehearsal.seeded_faults import RIGHT, SEEDED, SEVERAL, seeded

TOOLS_RECIPE = ROOT / "recipes" / "quickstart_tools"
NEEDS_FAULTS = {"an episode does not begin anew"}
ROOMY = ["generator.max_model_len=2048", "sampling.max_tokens=512", "data.max_prompt_tokens=512"]
PROMPTS = 4


def write_recipe(folder: Path, text: str) -> Path:
    """A recipe with this task.py, a tokenizer of bytes, and a checkpoint without weights."""
    recipe = folder / "recipe"
    (recipe / "checkpoint").mkdir(parents=True)
    chat_templates.write_tokenizer(recipe / "checkpoint", chat_templates.QWEN)
    config = json.loads((TOOLS_RECIPE / "checkpoint" / "config.json").read_text())
    config |= {"max_position_embeddings": 4096}
    (recipe / "checkpoint" / "config.json").write_text(json.dumps(config))
    (folder / "marks").mkdir()
    rows = (
        {
            "question": f"where is it? there are {n} places",
            "answer": f"7{n}7",
            "folder": str(folder / "marks"),
        }
        for n in range(3, 3 + PROMPTS)
    )
    write_lines(recipe / "prompts.jsonl", rows)
    (recipe / "task.py").write_text(text)
    (recipe / "run.yaml").write_text((TOOLS_RECIPE / "run.yaml").read_text())
    return recipe


def rehearse(forks: Forks, folder: Path, text: str, *arguments: str) -> dict[str, Any]:
    """The figures of a rehearsal with this task.py."""
    recipe, found = write_recipe(folder, text), folder / "found.json"
    options = [
        "reward.functions=[task]",
        "data.held_out=null",
        *ROOMY,
        "environment.calls=hermes",
        f"--json={found}",
    ]
    done = forks.run("rehearse", f"--config-dir={recipe}", *options, *arguments)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(found.read_text())
    for finding in figures["findings"]:
        assert finding["name"] in done.stdout
    return figures


def names_of(figures: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in figures["findings"]]


@pytest.mark.full
def test_an_environment_without_faults_passes_and_several_are_named_at_once(
    forks: Forks, tmp_path: Path
) -> None:
    for name, text, expected in (("right", RIGHT, []), ("wrong", seeded(*SEVERAL), SEVERAL)):
        folder = tmp_path / name
        folder.mkdir()
        assert sorted(names_of(rehearse(forks, folder, text))) == sorted(expected)


@pytest.mark.long
@pytest.mark.parametrize("name", SEEDED)
def test_each_seeded_fault_is_named(forks: Forks, tmp_path: Path, name: str) -> None:
    faults = ["--faults=kill=0.3"] if name in NEEDS_FAULTS else ["--faults=none"]
    figures = rehearse(forks, tmp_path, seeded(name), *faults)
    assert name in names_of(figures), figures
    if name == "episodes never end by themselves":  # what is said last is not in the ids
        assert figures["sequences_compared"] > 0
        assert figures["sequences_that_differ"] == 0
