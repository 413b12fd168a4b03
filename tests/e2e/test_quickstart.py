"""The promise of `make quickstart`, over seeds, and the controls that show RL did it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.json_lines import read_lines
from tests.places import RECIPE

pytestmark = pytest.mark.slow


def quickstart(run_dir: Path, *overrides: str, recipe: Path = RECIPE) -> dict[str, float]:
    command = [sys.executable, "-m", "llamarl", "train", f"--config-dir={recipe}"]
    done = subprocess.run(
        [*command, f"run_dir={run_dir}", *overrides],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    summary: dict[str, float] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns_asynchronously_for_every_seed(seed: int, tmp_path: Path) -> None:
    summary = quickstart(tmp_path, f"seed={seed}")
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.93
    assert summary["both_busy_share"] >= 0.5
    assert summary["mixed_version_share"] > 0
    assert summary["staleness_max"] <= 1
    assert summary["tokens_during_publish"] > 0
    assert attestation_share(tmp_path) < 0.02
    if seed == 0:
        accuracy = greedy_accuracy(tmp_path / "export")
        assert accuracy == pytest.approx(summary["accuracy_after"], abs=0.002)


@pytest.mark.parametrize(
    "overrides",
    [
        ["generator.quantization=int8"],
        ["placement=colocated"],
        ["weights=collective", "generator.num_replicas=2", "trainer.num_ranks=2"],
    ],
    ids=["int8", "colocated", "collective"],
)
def test_the_quickstart_learns_as_much_in_other_shapes(
    overrides: list[str], tmp_path: Path
) -> None:
    summary = quickstart(tmp_path, *overrides)
    assert summary["accuracy_after"] >= 0.93
    assert summary["staleness_max"] <= 1


def test_nothing_is_learnt_without_a_learning_rate(tmp_path: Path) -> None:
    summary = quickstart(tmp_path, "trainer.lr=0", "num_steps=10")
    assert summary["accuracy_after"] == pytest.approx(summary["accuracy_before"], abs=0.03)


def test_nothing_is_learnt_from_shuffled_rewards(tmp_path: Path) -> None:
    """In ten steps; in more of them such rewards move the policy at random."""
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    rows = read_lines(recipe / "prompts.jsonl")
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    shuffled = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in shuffled)
    (recipe / "prompts.jsonl").write_text(text)
    summary = quickstart(tmp_path / "shuffled", "num_steps=10", recipe=recipe)
    assert summary["accuracy_after"] == pytest.approx(summary["accuracy_before"], abs=0.03)
    assert quickstart(tmp_path / "right", "num_steps=10")["accuracy_after"] > 0.75


def attestation_share(run_dir: Path) -> float:
    """Share of the steps' time, counted on the safe side: the whole write, whose fingerprint is
    computed on the way, and as if nothing ran beside anything else."""
    seconds: Counter[str] = Counter()
    for event in json.loads((run_dir / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            seconds[event["name"]] += event["dur"] / 1e6
    parts = [seconds[name] for name in ("verify", "process_weights", "write", "infer")]
    assert all(parts), seconds
    return sum(parts) / seconds["step"]


def greedy_accuracy(folder: Path) -> float:
    """Held-out accuracy of an exported checkpoint by transformers' own greedy `generate`."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = read_lines(RECIPE / "held_out.jsonl")
    num_right = 0
    for first in range(0, len(rows), 100):
        part = rows[first : first + 100]
        batch = tokenizer([row["question"] for row in part], return_tensors="pt", padding=True)
        out = model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=96,
            do_sample=False,
            pad_token_id=0,
        )
        for row, ids in zip(part, out[:, batch.input_ids.shape[1] :], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            has_stopped = tokenizer.eos_token_id in ids.tolist()
            num_right += has_stopped and text.endswith(f"Answer: {row['answer']}")
    return num_right / len(rows)
