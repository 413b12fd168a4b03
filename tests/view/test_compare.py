"""What `llamarl compare` says of runs, and which folders it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from llamarl.view.compare import chart, compare, picture, round_up

STEP = {"reward/mean": 0.25, "time/step_s": 2.0, "tokens/per_s": 100.0, "tokens/trained": 150}
STALE = {"staleness/mean": 0.5, "staleness/max": 2}


def write_run(folder: Path, lines: list[dict[str, Any]], config: str = "num_steps: 3\n") -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text(config)
    return folder


def evaluated(step: int, accuracy: float, name: str = "accuracy") -> dict[str, float]:
    tag = f"evaluation/{name}"
    return {
        "step": step,
        tag: accuracy,
        f"{tag}_low": accuracy - 0.1,
        f"{tag}_high": accuracy + 0.1,
    }


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = [
        {"step": 1, **STEP, **STALE, "length/mean": 4.0},
        {"step": 2, **STEP, "reward/mean": -0.5, "tokens/per_s": 300.0, "time/step_s": 6.0},
        evaluated(0, 0.25),
        evaluated(2, 0.5),
        evaluated(2, 0.75, "gsm8k/pass_at_4"),
    ]
    second = [{"step": 1, **STEP, "histograms": {"reward/values": {"1": 2}}}]
    texts = "run_dir: {}\ntrainer: {{lr: {}, parts: dynamic}}\nsame: [1, 2]\n{}"
    return [
        write_run(tmp_path / "first", first, texts.format("a", "0.1", "data: {options: {}}\n")),
        write_run(tmp_path / "second", second, texts.format("b", "0.2", "")),
    ]


def table_of(said: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in said.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_the_table_has_what_each_run_reached_and_what_differs(
    runs: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "runs.svg"
    said = compare([*map(str, runs), "--output", str(output)])
    table = table_of(said)
    assert table["steps"] == ["2", "1"]
    assert table["time of the steps"] == ["0:08", "0:02"]
    assert table["held-out accuracy"] == ["50.0% (40.0% to 60.0%) at step 2", "-"]
    assert table["held-out gsm8k pass@4"] == ["75.0% (65.0% to 85.0%) at step 2", "-"]
    assert table["training reward"] == ["-0.500", "0.250"]
    assert table["tokens/s trained"] == ["250", "100"]
    assert table["token staleness"] == ["mean 0.50, max 2", "-"]
    assert table["trainer.lr"] == ["0.1", "0.2"]
    assert table["data.options"] == ["{}", "-"]
    assert "same" not in table
    assert "run_dir" not in table
    assert said.endswith(f"{output}\n")
    words = [
        each.firstChild.data for each in minidom.parse(str(output)).getElementsByTagName("text")
    ]
    assert words[:2] == ["first", "second"]
    assert "held-out accuracy, %" in words


def test_runs_of_demonstrations_are_compared_by_their_losses(
    runs: list[Path], tmp_path: Path
) -> None:
    step = {"time/step_s": 2.0, "tokens/per_s": 50.0, "length/mean": 90.0}
    lines = [{"step": n, "loss/train": 3.0 - n, **step} for n in (1, 2)]
    folders = [
        write_run(tmp_path / name, [*lines, {"step": 2, "loss/held_out": loss}])
        for name, loss in (("sft_a", 1.25), ("sft_b", 0.5))
    ]
    output = tmp_path / "c.svg"
    found = table_of(compare([*map(str, folders), "--output", str(output)]))
    assert found["held-out loss"] == ["1.2500", "0.5000"]
    assert found["training loss"] == ["1.0000", "1.0000"]
    assert found["tokens/s trained"] == ["50", "50"]
    assert "training reward" not in found
    assert "answer length" not in found
    words = output.read_text()
    assert ">held-out loss<" in words
    assert ">training reward<" not in words
    mixed = table_of(compare([str(runs[0]), str(folders[0]), "--output", str(output)]))
    assert (mixed["training reward"], mixed["training loss"]) == (["-0.500", "-"], ["-", "1.0000"])
    assert mixed["answer length"] == ["4.0", "-"]


def test_equal_configs_and_equal_names_are_told(runs: list[Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "x" / "first", [{"step": 1, **STEP}], "num_steps: 3\n")
    again = write_run(tmp_path / "y" / "first", [{"step": 1, **STEP}], "num_steps: 3\n")
    said = compare([str(other), str(again), "--output", str(tmp_path / "c.svg")])
    assert "their configs are equal" in said
    assert str(other) in said.splitlines()[0], "of runs with one name the folder"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", None, "without metrics.jsonl"),
        ("config.yaml", None, "without config.yaml"),
        ("config.yaml", b"a: [1", "that can be read, got"),
        ("config.yaml", b"\xff\xfe\x00", "that can be read, got"),
        ("config.yaml", b"- 1\n", "must hold keys with their values, got list"),
        ("config.yaml", b"[" * 5000, "that can be read, got"),
        ("config.yaml", b"a: &x {b: *x}\n", "that can be read, got"),
        ("config.yaml", b"a: &x [*x]\n", "that can be read, got"),
        ("config.yaml", b"a: [{2026-01-01: 1}]\n", "that can be read, got"),
        ("metrics.jsonl", b"", "that has trained a step"),
        ("metrics.jsonl", b"\x00\xff{{{\n[]\n", "that has trained a step"),
        ("metrics.jsonl", b'{"step": 1, "reward/mean": "x"}\n', "trained a step"),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(
    name: str, content: bytes | None, words: str, runs: list[Path], tmp_path: Path
) -> None:
    (runs[1] / name).unlink()
    if content is not None:
        (runs[1] / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"RUN must|must hold keys") as caught:
        compare([*map(str, runs), "--output", str(tmp_path / "c.svg")])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "c.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "must be followed by the folders of two or more runs, got 'none'"),
        (["a"], "two or more runs, got 'a'"),
        (["/nowhere", "/nowhere"], "RUN must be the folder of a run, got /nowhere"),
        (["a", "b", "--tag"], "the arguments of compare must be RUN RUN and --output FILE"),
        (["a", "b", "--output"], "the arguments of compare must be as --help says"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        compare(arguments)
    assert words in str(caught.value)


def test_numbers_and_names_of_any_kind_give_a_picture_and_lines(tmp_path: Path) -> None:
    lines = [
        {"step": 1, **STEP, "reward/mean": 1e308, "length/mean": None},
        {"step": 2**60, **STEP, "tokens/per_s": "many", "reward/mean": True},
        {"step": -1, **STEP, **evaluated(-1, 2.0), "evaluation/accuracy_low": "low"},
        {"step": 3, **STEP, "reward/mean": float("nan")},
    ]
    lines += [{"step": step, **STEP, "time/step_s": 1e308} for step in (4, 5)]
    config = 'a: "\\e[31m\\n"\n"\\e[31mb": 1\ndefaults: [config, {"": 1}, {3: null}]\n'
    first = write_run(tmp_path / "<script>&'\"\x1b", lines, config)
    second = write_run(tmp_path / "b", [{"step": 5, "reward/mean": 0}], "a: 2026-01-02\n")
    said = compare([str(first), str(second), "--output", str(tmp_path / "c.svg")])
    assert "\x1b" not in said
    minidom.parse(str(tmp_path / "c.svg"))
    assert "<script>" not in (tmp_path / "c.svg").read_text()


def test_ticks_are_round() -> None:
    assert [round_up(x) for x in (0.78, 17.47, 100, 3, 0)] == [0.8, 20, 100, 4, 1]
    for last, labels in ((30, ["0", "10"]), (7, ["0", "2"]), (10_000, ["0", "2000"])):
        text = picture([chart("a", 1.0, [("", [(0, 0.0), (last, 1.0)], "red")])])
        words = [e.firstChild.data for e in minidom.parseString(text).getElementsByTagName("text")]
        assert words[6:8] == labels
