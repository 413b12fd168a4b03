"""`llamarl new` writes a recipe that composes, and says what it found."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.cli.new import REWARD_CHOICES, new
from llamarl.core.config import Config
from llamarl.recipe.composition import compose, to_config
from llamarl.recipe.inputs import read_inputs
from tests.json_lines import write_lines
from tests.places import CHECKPOINT, RECIPE

pytestmark = pytest.mark.full

MODEL, DATA = f"--model={CHECKPOINT}", f"--data={RECIPE / 'prompts.jsonl'}"


def recipe(folder: Path) -> Config:
    return to_config(compose(folder, []))


def rewarded(folder: Path, row: dict[str, object]) -> float:
    """What the task.py there gives for the answer 2."""
    scope: dict[str, Any] = {}
    exec((folder / "task.py").read_text(), scope)
    return scope["reward"](SimpleNamespace(fields=row), "= 2")


@pytest.mark.parametrize("reward", ["math", "task"])
def test_a_new_recipe_reads_its_inputs(tmp_path: Path, reward: str) -> None:
    folder = tmp_path / "my own"
    held_out = f"--held-out={RECIPE / 'held_out.jsonl'}"
    said = new([str(folder), MODEL, DATA, held_out, "--reward", reward, "--device=cpu"])
    assert len((folder / "run.yaml").read_text().splitlines()) <= 10
    small = ["trainer.groups_per_step=2", "algorithm.filters=[]", "sampling.max_tokens=32"]
    (line,) = [line for line in said.splitlines() if line.startswith("try it:")]
    train = ["llamarl", "train", "--config-dir", str(folder), "cluster=inline", "num_steps=2"]
    assert shlex.split(line)[2:][: len(train + small)] == train + small, "a shell reads it so"
    assert "'algorithm.filters=[]'" in line, "some take brackets for a pattern"
    inputs = read_inputs(recipe(folder))
    assert (len(inputs.prompts), len(inputs.held_out)) == (5000, 1000)
    assert (folder / "task.py").exists() == (reward == "task")


@pytest.mark.parametrize(
    ("reward", "device"), [*((each, "cpu") for each in REWARD_CHOICES), ("math", "cuda")]
)
def test_each_reward_and_device_composes(tmp_path: Path, reward: str, device: str) -> None:
    names = ["--model=hf:org/tiny", "--data=hf:org/sums/main"]
    said = new([str(tmp_path / "r"), *names, "--reward", reward, f"--device={device}", "--chat"])
    config = recipe(tmp_path / "r")
    assert config.data.chat
    assert config.reward.functions == [reward]
    assert (config.generator.device, config.trainer.device) == (device, device)
    assert "not here yet" in said


def test_the_fields_are_those_of_the_first_row_or_of_flags(tmp_path: Path) -> None:
    rows = [{"id": 1, "problem": "1+1?", "solution": "2", "level": "a"}]
    data = f"--data={write_lines(tmp_path / 'rows.jsonl', rows)}"
    new([str(tmp_path / "found"), MODEL, data])
    config = recipe(tmp_path / "found")
    assert (config.data.prompt_field, config.reward.answer_field) == ("problem", "solution")
    flags = ["--prompt-field=level", "--answer-field=id", "--reward=task"]
    new([str(tmp_path / "given"), MODEL, data, *flags])
    config = recipe(tmp_path / "given")
    assert (config.data.prompt_field, config.reward.answer_field) == ("level", "id")
    assert "prompt.fields['id']" in (tmp_path / "given" / "task.py").read_text()


VERL = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
FLAT = {"prompt": "1+1?", "reward_model.ground_truth": "2"}


@pytest.mark.parametrize("row", [VERL, FLAT])
def test_rows_made_for_verl_need_no_flags(row: dict[str, object], tmp_path: Path) -> None:
    """What they have is where `llamarl train` finds it too."""
    data = f"--data={write_lines(tmp_path / 'rows.jsonl', [row])}"
    said = new([str(tmp_path / "r"), MODEL, data, "--reward=task", "--chat"])
    assert "are in prompt and reward_model.ground_truth\n" in said
    config = recipe(tmp_path / "r")
    assert config.data.prompt_field == "question"
    assert rewarded(tmp_path / "r", row) == 1.0
    new([str(tmp_path / "m"), MODEL, data])
    new([str(tmp_path / "n"), MODEL, data, "--answer-field=reward_model.ground_truth"])
    assert recipe(tmp_path / "n").reward.answer_field == "reward_model.ground_truth"


@pytest.mark.parametrize(("column", "field"), [("messages", "messages"), ("prompt", "question")])
def test_a_column_of_messages_is_found(tmp_path: Path, column: str, field: str) -> None:
    rows = [{column: [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    data = f"--data={write_lines(tmp_path / 'rows.jsonl', rows)}"
    new([str(tmp_path / "r"), MODEL, data, "--chat"])
    config = recipe(tmp_path / "r").data
    assert (config.prompt_field, config.chat, config.system) == (field, True, None)


@pytest.mark.parametrize("row", [{"prompt": "1+1?"}, {"prompt": "1+1?", "completion": [1]}])
def test_prompts_without_answers_get_a_reward(row: dict[str, object], tmp_path: Path) -> None:
    """As TRL's do; a reward that compares answers needs one."""
    data = f"--data={write_lines(tmp_path / 'rows.jsonl', [row])}"
    said = new([str(tmp_path / "r"), MODEL, data, "--reward=task"])
    assert "question is in prompt\n" in said
    assert rewarded(tmp_path / "r", row) == 1.0
    with pytest.raises(ValueError, match="--answer-field must name a field"):
        new([str(tmp_path / "m"), MODEL, data])


def test_half_of_a_question_is_refused(tmp_path: Path) -> None:
    """As Alpaca's rows have it."""
    row = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    data = f"--data={write_lines(tmp_path / 'rows.jsonl', [row])}"
    with pytest.raises(ValueError, match="--prompt-field must name a field with the whole quest"):
        new([str(tmp_path / "r"), MODEL, data])
    new([str(tmp_path / "r"), MODEL, data, "--prompt-field=instruction"])
    whole = f"--data={write_lines(tmp_path / 'rows.jsonl', [row | {'input': ''}])}"
    new([str(tmp_path / "w"), MODEL, whole])
    assert recipe(tmp_path / "w").reward.answer_field == "output"


def test_a_model_with_a_chat_template_gets_chats(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(CHECKPOINT, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    new([str(tmp_path / "r"), f"--model={model}", DATA])
    config = recipe(tmp_path / "r")
    assert config.data.chat
    assert "boxed" in (config.data.system or "")


def test_relative_paths_are_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    write_lines(tmp_path / "rows.jsonl", [{"question": "1+1?", "answer": "2"}])
    monkeypatch.chdir(tmp_path)
    new(["a/b", "--model=model", "--data=rows.jsonl"])
    config = recipe(tmp_path / "a" / "b")
    assert config.model.checkpoint == "../../model"
    assert read_inputs(config).prompts[0].text == "1+1?"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "FOLDER must be given (llamarl new --help), got None"),
        (["r", DATA], "--model must be given"),
        (["r", MODEL], "--data must be given"),
        (["r", MODEL, "--data=none.jsonl"], "--data must exist, or be hf:ORG/NAME, got 'none"),
        (["r", "--model=none", DATA], "--model must exist, or be hf:ORG/NAME, got 'none'"),
        (["r", MODEL, DATA, "--held-out=none"], "--held-out must exist, or be hf:ORG/NAME"),
        (["r", MODEL, "--data=hf:sums"], "data.prompts must be hf:ORG/NAME, /SPLIT"),
        (["r", MODEL, DATA, "--reward=good"], "--reward must be one of math, exact, format, c"),
        (["r", MODEL, DATA, "--reward=exakt"], "got 'exakt' (did you mean exact?)"),
        (["r", MODEL, DATA, "--device=gpu"], "--device must be one of cpu, cuda, got 'gpu'"),
        (["r", MODEL, DATA, "--reward"], "--reward must have a value (llamarl new --help)"),
        (["r", MODEL, DATA, "--prompt-field=x"], "name a field of the rows, which have question"),
        (["r", MODEL, "--data=odd.jsonl"], "--prompt-field must name a field of the rows"),
        (["r", MODEL, "--data=bare.jsonl"], "--answer-field must name a field of the rows"),
        (["r", MODEL, DATA, "--colour=red"], "an option of `llamarl new` must be one of its help"),
        (["old", MODEL, DATA], "FOLDER must not hold a run.yaml, got 'old'"),
        (["old/run.yaml", MODEL, DATA], "FOLDER must be one that can be written to"),
    ],
)
def test_what_makes_no_recipe_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "odd.jsonl", [{"a": 1}])
    write_lines(tmp_path / "bare.jsonl", [{"prompt": "1+1?"}])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.yaml").write_text("num_steps: 1\n")
    with pytest.raises(ValueError, match=" must ") as caught:
        new(arguments)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "r" / "run.yaml").exists()
    assert (tmp_path / "old" / "run.yaml").read_text() == "num_steps: 1\n"
