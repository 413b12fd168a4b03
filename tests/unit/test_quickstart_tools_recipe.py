"""The shipped quickstart with a tool: its files are those of its tool and fit together."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from llamarl.model.tokenizer import load_tokenizer
from tests.json_lines import read_lines
from tests.places import ROOT
from tests.places import TOOLS_RECIPE as RECIPE

sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("make_quickstart_tools")


def numbers_of(text: str) -> tuple[int, ...]:
    """Another order is the same question."""
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


@pytest.mark.parametrize("name", ["held_out", "prompts"])
def test_question_files_are_the_ones_the_tool_writes(tool: ModuleType, name: str) -> None:
    assert read_lines(RECIPE / f"{name}.jsonl") == tool.rows_of(name, seed=0)


def test_questions_are_in_one_set_only(tool: ModuleType) -> None:
    drawn = itertools.islice(tool.draw_demonstrations(0, are_mixed=True), 20_000)
    shown = {numbers_of(turns[0][1]) for turns in drawn}
    sets = [
        {numbers_of(row["question"]) for row in read_lines(RECIPE / f"{name}.jsonl")}
        for name in ("held_out", "prompts")
    ]
    assert [len(each) for each in sets] == [999, 3300]
    assert not sets[0] & sets[1]
    assert not (sets[0] | sets[1]) & shown


def test_sft_takes_each_patient_demonstration_once(tool: ModuleType) -> None:
    sft = yaml.safe_load((RECIPE / "sft.yaml").read_text())
    assert sft["num_steps"] * sft["trainer"]["groups_per_step"] == tool.NUM_PATIENT


def test_the_written_tokenizer_is_the_shipped_one(tool: ModuleType, tmp_path: Path) -> None:
    tool.write_tokenizer(tmp_path, 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (RECIPE / "checkpoint" / name).read_text()


def test_calls_and_answers_keep_their_text(tool: ModuleType) -> None:
    tokenizer = load_tokenizer(RECIPE / "checkpoint")
    (first, *_, last) = tool.patient_answer((12, 34, 56))
    assert first == ("assistant", "<calculator>12*34</calculator>")
    assert last == ("assistant", "Answer: 22848")
    for text in (first[1], last[1]):
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_the_rule_names_every_miss(tool: ModuleType) -> None:
    good = {"accuracy": 0.4, "made_to_call_accuracy": 0.98}
    assert tool.misses(good) == []
    assert len(tool.misses({"accuracy": 0.1, "made_to_call_accuracy": 0.0})) == 2
