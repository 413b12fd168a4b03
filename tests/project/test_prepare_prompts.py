"""GSM8K and MATH, in the forms they are published in, become prompt files that a run reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from llamarl.core.config import DataConfig
from llamarl.model.tokenizer import load_tokenizer
from tests.prompt_files import read_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from prepare_prompts import convert, last_boxed, main

from tests.json_lines import read_lines, write_lines
from tests.places import CHECKPOINT

GSM8K = [
    {
        "question": "Natalia sold clips to 48 friends in April, half as many in May. How many?",
        "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = 72.\n#### 72",
    },
    {"question": "A house costs $80,000. How much are two?", "answer": "2*80\n#### 160,000"},
]
MATH = [
    {
        "problem": "What is half of one?",
        "level": "Level 2",
        "type": "Prealgebra",
        "solution": "First \\boxed{1}, then $\\boxed{\\frac{1}{2}}$.",
    },
    {
        "problem": "What is left?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "It is $\\boxed{???}$.",
    },
]


def test_every_form_gives_equal_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "MATH"
    for number, row in zip((10, 2), MATH, strict=True):
        (folder / "train" / "x").mkdir(parents=True, exist_ok=True)
        (folder / "train" / "x" / f"{number}.json").write_text(json.dumps(row))
    parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "gsm8k.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(MATH), tmp_path / "math.parquet")
    jsonl = [write_lines(tmp_path / "a.jsonl", GSM8K), write_lines(tmp_path / "b.jsonl", MATH)]
    columns = [tmp_path / "gsm8k.parquet", tmp_path / "math.parquet"]
    outputs = []
    for number, sources in enumerate((jsonl, columns, [tmp_path / "a.jsonl", folder])):
        output = tmp_path / f"prompts-{number}.jsonl"
        main([*map(str, sources), "--output", str(output)])
        outputs.append(read_lines(output))
    assert outputs[0] == outputs[1] == outputs[2]
    assert [row["answer"] for row in outputs[0]] == ["72", "160,000", "\\frac{1}{2}"]
    assert outputs[0][2]["level"] == "Level 2"
    assert outputs[0][2]["subject"] == "Prealgebra"
    said = capsys.readouterr().out
    assert said.count("3 prompts (left out: 1 with an answer that the math reward cannot") == 3


def test_a_run_reads_what_was_written_with_its_instruction(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "gsm8k.jsonl", GSM8K + GSM8K[:1])
    output = tmp_path / "prompts.jsonl"
    main([str(source), "--output", str(output), "--instruction", "Box the answer."])
    tokenizer = load_tokenizer(CHECKPOINT)
    prompts = read_prompts(output, DataConfig(prompts="prompts.jsonl"), tokenizer)
    assert len(prompts) == 2, "the question that came twice stands there once"
    assert all(prompt.text.endswith("\n\nBox the answer.") for prompt in prompts)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{\frac{1}{\sqrt{2}}} it is", r"\frac{1}{\sqrt{2}}"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} or \fbox{ 2 }", "2"),
    ],
)
def test_the_last_box_is_the_answer(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


nested = st.recursive(
    st.text("ab1+ \\", min_size=1).filter(lambda text: not text.endswith("\\")),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(
        lambda parts: "x".join("{" + part + "}" for part in parts)
    ),
    max_leaves=6,
)


@given(nested.filter(str.strip), st.text("ab }{", max_size=5))
def test_nested_braces_come_back_whole(content: str, after: str) -> None:
    assert last_boxed("\\boxed{" + content + "}" + after) == content.strip()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"question": "q", "answer": "42"}', ":1: 'answer' must end with '#### ' and a number"),
        ('{"problem": "p", "solution": "no box"}', ":1: 'solution' must hold \\boxed{...}"),
        ('{"problem": "p", "solution": "\\\\boxed{1"}', "must close every brace of its answer"),
        ('{"problem": "p", "solution": "\\\\boxed{}"}', "must hold an answer in \\boxed"),
        ('{"problem": "p"}', "'solution' must be text that is not blank, got None"),
        ('{"text": "t"}', "must have question and answer (GSM8K) or problem and solution (MATH)"),
        ("{broken", ":1: the line must be a JSON object"),
        ("", "must hold at least one usable row"),
    ],
)
def test_a_malformed_row_is_one_line(tmp_path: Path, rows: str, message: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(rows + "\n")
    output = tmp_path / "prompts.jsonl"
    with pytest.raises(SystemExit) as stop:
        main([str(source), "--output", str(output)])
    said = str(stop.value)
    assert message in said
    assert len(said.splitlines()) == 1
    assert not output.exists()


def test_math_500_brings_its_answer_along() -> None:
    row = {"problem": "p", "solution": "s", "answer": "\\sqrt{2}", "subject": "Algebra", "level": 3}
    assert convert(row) == {
        "question": "p",
        "answer": "\\sqrt{2}",
        "source": "math",
        "level": "3",
        "subject": "Algebra",
    }
