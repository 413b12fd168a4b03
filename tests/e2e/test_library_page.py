"""The loops of docs/library.md run and learn as they stand there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.json_lines import read_lines
from tests.places import RECIPE, ROOT

TEXT = (ROOT / "docs" / "library.md").read_text()
LOOPS = dict(re.findall(r"^<!-- loop: ([\w ]+) -->\n```python\n(.*?)^```", TEXT, re.M | re.S))
MOST_LINES = {"synchronous": 60, "asynchronous": 90, "own trainer": 60}
SMALL = [
    "cluster=inline",
    "trainer.groups_per_step=4",
    "sampling.max_tokens=24",
    "evaluation.max_prompts=8",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader, with the recipe where the page expects it."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart").symlink_to(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortened(name: str) -> str:
    code, none = LOOPS[name], "OVERRIDES: list[str] = []"
    assert none in code
    return re.sub(r"NUM_STEPS = \d+", "NUM_STEPS = 2", code.replace(none, f"OVERRIDES = {SMALL}"))


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_loop_of_the_page_runs(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(LOOPS[name].splitlines()) <= MOST_LINES[name]
    exec(shortened(name), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert re.findall(r"^(?:step|version) (\d):", said, re.M) == ["1", "2"]
    (run,) = (place / "runs").iterdir()
    if name != "own trainer":
        exported = load_file(run / "export" / "model.safetensors")
        before = load_file(RECIPE / "checkpoint" / "model.safetensors")
        assert any((exported[name] != before[name]).any() for name in before)


def test_the_colocated_loop_of_the_page_logs_evaluates_and_saves(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = shortened("colocated").replace(f"= {SMALL}", f"= {[*SMALL, 'num_steps=2']}")
    exec(code, {"__name__": "__main__"})
    assert re.search(r"^accuracy \d+\.\d%$", capsys.readouterr().out, re.M)
    (run,) = (place / "runs").iterdir()
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2]
    (evaluated,) = [line for line in lines if "evaluation/accuracy" in line]
    assert (evaluated["step"], evaluated["evaluation/prompts"]) == (2, 8)
    assert list((run / "checkpoints").glob("step-00000002"))


def test_the_first_lines_of_the_page_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)[0]
    exec(code.replace('["trainer.lr=1e-4"]', f"{SMALL}"), {"__name__": "__main__"})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 8


def test_the_table_of_calls_has_them_all() -> None:
    from llamarl.controller.library import LibraryEngines

    named = set(
        re.findall(r"`(?:engines\.)?(\w+)(?:\(.*?\))?`", TEXT[TEXT.index("## The calls") :])
    )
    public = {name for name in vars(LibraryEngines) if not name.startswith("_")} - {"running"}
    assert public <= named
