"""The promise of `make quickstart`, over seeds; the control that must not learn is in
test_learning.py."""

from __future__ import annotations

import json
import os
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
        ["generator.pools=['max_num_seqs=128','quantization=int8 max_num_seqs=32']"],
    ],
    ids=["int8", "colocated", "collective", "pools"],
)
def test_the_quickstart_learns_as_much_in_other_shapes(
    overrides: list[str], tmp_path: Path
) -> None:
    summary = quickstart(tmp_path, *overrides)
    assert summary["accuracy_after"] >= 0.93
    assert summary["staleness_max"] <= 1


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
