"""Whole runs on demonstrations: what they learn, keep, export and refuse."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import RECIPE

CHECKPOINT = RECIPE / "checkpoint"
INLINE = ["cluster=inline", "metrics.trackers=[]"]


def write_recipe(folder: Path, num_rows: int = 48, num_steps: int = 6) -> Path:
    """Questions that are answered with themselves, which the quickstart's checkpoint never does."""
    rows = [
        {"question": row["question"], "completion": row["question"]}
        for row in read_lines(RECIPE / "prompts.jsonl")
    ]
    folder.mkdir()
    for name, some in (("train", rows[:num_rows]), ("held_out", rows[-16:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "run.yaml").write_text(
        f"""
defaults: [config, _self_]
num_steps: {num_steps}
model: {{checkpoint: {CHECKPOINT}}}
data: {{prompts: train.jsonl, held_out: held_out.jsonl, max_prompt_tokens: 200}}
trainer: {{groups_per_step: 16, lr: 1.0e-3, tokens_per_micro_batch: 256}}
checkpoint: {{every_steps: 3, keep: 0}}
"""
    )
    return folder


def sft(forks: Forks, recipe: Path, run_dir: Path, *overrides: str) -> Path:
    done = forks.run("sft", f"--config-dir={recipe}", f"run_dir={run_dir}", *overrides)
    assert done.returncode == 0, done.stderr
    return run_dir


def metrics(run_dir: Path, tag: str) -> dict[int, float]:
    return {
        line["step"]: line[tag] for line in read_lines(run_dir / "metrics.jsonl") if tag in line
    }


def loss_by_transformers(folder: Path, rows: list[dict[str, Any]]) -> float:
    """The mean over the answers' tokens, the end of sequence included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    total, num_tokens = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["question"]).input_ids
        answer = tokenizer(row["completion"], add_special_tokens=False).input_ids
        answer.append(tokenizer.eos_token_id)
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
        total -= logprobs[places, torch.tensor(answer)].sum().item()
        num_tokens += len(answer)
    return total / num_tokens


@pytest.mark.full
def test_sft_learns_demonstrations_and_its_held_out_loss_is_that_of_transformers(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    run_dir = sft(forks, recipe, tmp_path / "run", *INLINE)
    held_out, losses = read_lines(recipe / "held_out.jsonl"), metrics(run_dir, "loss/held_out")
    assert [*losses] == [0, 6]
    assert losses[0] == pytest.approx(loss_by_transformers(CHECKPOINT, held_out), rel=1e-5)
    assert losses[6] == pytest.approx(loss_by_transformers(run_dir / "export", held_out), rel=1e-5)
    assert losses[6] < 0.7 * losses[0]
    assert metrics(run_dir, "perplexity/held_out")[6] == pytest.approx(math.exp(losses[6]))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["loss_before"], summary["loss_after"]) == (losses[0], losses[6])
    assert summary["rollouts_trained"] == 6 * 16
    assert {path.stem for path in (run_dir / "spans").iterdir()} >= {"trainer-0", "controller"}
    assert not [*(run_dir / "spans").glob("generator*"), *(run_dir / "spans").glob("scorer*")]


def test_each_demonstration_comes_once_an_epoch_and_a_run_of_epochs_ends_with_them(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe", num_rows=34)
    run_dir = sft(forks, recipe, tmp_path / "run", *INLINE, "num_epochs=2")
    assert [*metrics(run_dir, "loss/train")] == [1, 2, 3, 4], "a fifth step would not be whole"
    assert [*metrics(run_dir, "loss/held_out")] == [0, 4]
    assert (run_dir / "export").is_dir()
    lines = read_lines(run_dir / "archive" / "rollouts-0.jsonl")
    trained = sorted((r for r in lines if r["outcome"] == "trained"), key=lambda r: r["version"])
    assert {span[0] for line in trained for span in line["spans"]} == {0, 1, 2, 3}
    times = Counter(line["prompt_id"] for line in trained)
    assert set(times) == {*range(1, 35)}
    assert set(times.values()) <= {1, 2}
    first, second = ([r["prompt_id"] for r in trained[start : start + 32]] for start in (0, 32))
    assert first != second, "epochs are shuffled"


@pytest.mark.long
def test_a_resumed_run_of_demonstrations_goes_on_as_if_it_had_not_stopped(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe", num_steps=3)
    same = [*INLINE, "trainer.lora.rank=4", "trainer.lora.dropout=0.1", "data.held_out=null"]
    same += ["checkpoint.every_steps=1"]
    whole = sft(forks, recipe, tmp_path / "whole", *same)
    sft(forks, recipe, tmp_path / "cut", *same, "num_steps=1", "checkpoint.export=false")
    cut = sft(forks, recipe, tmp_path / "cut", *same, "checkpoint.resume=auto")
    for tag in ("loss/train", "policy/grad_norm"):
        assert metrics(cut, tag) == metrics(whole, tag), tag
    name = "adapter_model.safetensors"
    found = [load_file(each / "export" / name) for each in (whole, cut)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


ANSWERED = [{"question": "What is 1+2?", "completion": "Answer: 3"}]


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        ([{"question": "What is 1+2?"}], [], "train.jsonl:1: the row must have the field 'compl"),
        ([], [], "train.jsonl must hold at least one demonstration, got none"),
        (ANSWERED, ["data.max_prompt_tokens=5"], "a demonstration must have at most 5 tokens"),
        (ANSWERED, ["data.chat=true"], "data.chat must be false for a tokenizer without a chat"),
        (ANSWERED, ["algorithm=grpo"], "algorithm must be sft with llamarl sft, got 'GRPOConfig'"),
        (ANSWERED, ["trainer.num_passes=2", "staleness.max_staleness=1"], "must be 1 with llamarl"),
    ],
)
def test_what_sft_refuses_it_refuses_in_one_line(
    forks: Forks, tmp_path: Path, rows: list[Any], overrides: list[str], words: str
) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    (recipe / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = forks.run("sft", f"--config-dir={recipe}", f"run_dir={tmp_path / 'run'}", *overrides)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[0]
    assert not (tmp_path / "run" / "logs").exists(), "no process was started"


def test_train_refuses_demonstrations(forks: Forks, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    arguments = [f"--config-dir={recipe}", f"run_dir={tmp_path / 'run'}", "algorithm=sft"]
    done = forks.run("train", *arguments)
    assert done.returncode == 2
    assert "algorithm must not be sft with llamarl train" in done.stderr


@pytest.mark.long
def test_two_trainer_ranks_learn_what_one_does(forks: Forks, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe", num_steps=3)
    one = sft(forks, recipe, tmp_path / "one", *INLINE, "checkpoint.export=false")
    two = sft(forks, recipe, tmp_path / "two", "trainer.num_ranks=2", "metrics.trackers=[]")
    for tag in ("loss/train", "loss/held_out"):
        found = metrics(two, tag)
        assert found == pytest.approx(metrics(one, tag), rel=1e-3), tag
