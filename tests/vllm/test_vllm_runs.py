"""Whole runs of the shipped recipe with vLLM, started as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.commands import Command, executors, finish, train, wait_for_restart
from tests.e2e.test_library_page import LOOPS
from tests.e2e.test_quickstart import RECIPE, quickstart

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_S = 300.0  # vLLM's import, in every rank, on busy cores
GIVEN_UP_S = 60.0
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 16,  # shorter than a rollout
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "olmo2": {},
    "phi3": {},
}
"""Families that only transformers and vLLM know, and what each needs beside SIZES."""
TASK = """
def reward(prompt, completion):
    return sum(each.isdigit() for each in completion) / 40
"""
RECIPE_OF_A_FAMILY = """
defaults:
- config
- {override /reward: task}
- {override /trainer: transformers}
- {override /generator: vllm}
- _self_
num_steps: 12
model: {checkpoint: checkpoint}
data: {prompts: prompts.jsonl}
sampling: {max_tokens: 40, rollouts_per_prompt: 8}
generator: {max_num_seqs: 64, max_model_len: 96, kv_cache_bytes: 100000000}
trainer: {groups_per_step: 8, lr: 5.0e-3}
"""


def test_vllm_writes_with_the_weights_of_a_loop_of_the_caller_s_own(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    overrides = ["generator=vllm", f"run_dir={tmp_path}/run"]
    script.write_text(LOOPS["own trainer"].replace("list[str] = []", f"list[str] = {overrides}"))
    done = subprocess.run(
        [sys.executable, script],
        cwd=RECIPE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()[-4:]]
    assert rewards[-1] > rewards[0] + 0.1, done.stdout


def test_the_quickstart_learns_with_vllm(tmp_path: Path) -> None:
    summary = quickstart(tmp_path, "generator=vllm")
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.93
    assert summary["staleness_max"] <= 1
    assert summary["tokens_during_publish"] > 0


def test_the_quickstart_learns_with_vllm_and_the_code_of_transformers(tmp_path: Path) -> None:
    summary = quickstart(tmp_path, "generator=vllm", "trainer=transformers")
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.93


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_without_code_of_ours_learns_to_write_digits(tmp_path: Path, family: str) -> None:
    write_recipe(tmp_path, family)
    quickstart(tmp_path / "run", recipe=tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "reward/mean" in step]
    rewards = [step["reward/mean"] for step in steps]
    assert rewards[0] < 0.2 < 0.4 < rewards[-1], rewards
    assert max(step.get("logprob_check/difference", 0) for step in steps) < 1e-4
    assert any(step.get("logprob_check/rows") for step in steps)
    folder = tmp_path / "run" / "export"
    exported, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    for name, tensor in exported.state_dict().items():
        assert tensor.shape == start[name].shape
        assert not tensor.equal(start[name]), f"{name} was not trained"


def write_recipe(folder: Path, family: str) -> None:
    """Random weights of `family` with the quickstart's tokenizer; digits are rewarded."""
    shutil.copytree(RECIPE / "checkpoint", folder / "checkpoint")
    config = AutoConfig.for_model(family, **(SIZES | UNKNOWN[family]))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")
    shutil.copy(RECIPE / "prompts.jsonl", folder)
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(RECIPE_OF_A_FAMILY)


def kill_a_rank(command: Command, run_dir: Path) -> list[int]:
    """Kill the second rank of generator 0 once two steps are done; the pids of its ranks."""
    end_s = time.monotonic() + START_S
    while '"step": 2,' not in read(run_dir / "metrics.jsonl"):
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.1)
    ranks = executors(command, "generator-0")
    log = run_dir / "logs" / "generator-0-1.log"
    second = [pid for pid in ranks if os.path.samefile(f"/proc/{pid}/fd/1", log)]
    os.kill(min(second), signal.SIGKILL)  # the others are its children
    return ranks


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_run_goes_on_while_a_replica_that_lost_a_rank_is_started_again(tmp_path: Path) -> None:
    command = train(
        tmp_path, "num_steps=60", "generator=vllm", "generator.num_ranks=2",
        "generator.num_replicas=2",
    )  # fmt: skip
    ranks, killed_s = kill_a_rank(command, tmp_path), time.monotonic()
    while set(ranks) & {*executors(command, "generator-0")}:  # one may wait for the dead one
        assert time.monotonic() < killed_s + GIVEN_UP_S
        time.sleep(0.1)
    code, out, err = finish(command, START_S)
    assert code == 0, err + out
    assert "lost" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 60
    assert command.wait_until_gone(5.0) == []


def test_the_only_replica_is_started_again_when_it_lost_a_rank(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400", "generator=vllm", "generator.num_ranks=2")
    ranks = kill_a_rank(command, tmp_path)
    wait_for_restart(command, tmp_path, "generator-0")
    assert not set(ranks) & {*executors(command, "generator-0")}
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command)
    assert code == 75, err
    assert command.wait_until_gone(5.0) == []


def test_a_run_without_restarts_ends_with_the_name_of_its_only_replica(tmp_path: Path) -> None:
    options = ["generator=vllm", "generator.num_ranks=2", "generator.max_restarts=0"]
    command = train(tmp_path, "num_steps=400", *options)
    kill_a_rank(command, tmp_path)
    code, _, err = finish(command, GIVEN_UP_S)
    assert code == 1
    assert "lost executor generator-0" in err
    assert command.wait_until_gone(5.0) == []
