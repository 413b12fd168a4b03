"""Variants of the recipe in one process: each option shows in what the run leaves behind.

Every loss is worked out again from the archived tokens by formulas of its own.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.loss_formulas import Sampled, advantages, step
from tests.places import RECIPE
from tests.unit.test_rollout_mask import masked
from tests.unit.test_transformers_model import write_family

GROUPS, SIZE, MAX_TOKENS = 4, 8, 96
SMALL = [
    *("cluster=inline", "experience.keep_rollouts=1", "checkpoint.export=false"),
    *(f"trainer.groups_per_step={GROUPS}", "trainer.warmup_steps=0"),
    *("evaluation.max_prompts=4", "evaluation.every_steps=0"),
]
Line = dict[str, Any]


class Ended:
    """A run's folder: its archive, spans and metrics."""

    def __init__(self, run_dir: Path, output: str) -> None:
        self._run_dir = run_dir
        self.said = " ".join(output.split())
        self.summary = json.loads((run_dir / "summary.json").read_text())
        self.steps = [
            line for line in read_lines(run_dir / "metrics.jsonl") if "trainer/loss" in line
        ]
        self.rows = read_rollouts(run_dir)
        self.trained = [row for row in self.rows if row["outcome"] == "trained"]

    def spans(self, process: str, name: str) -> list[Line]:
        path = self._run_dir / "spans" / f"{process}.jsonl"
        return [span for span in read_lines(path) if span.get("name") == name]


def train(forks: Forks, run_dir: Path, *overrides: str, recipe: Path = RECIPE) -> Ended:
    command = ["train", f"--config-dir={recipe}", *SMALL, *overrides, f"run_dir={run_dir}"]
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    return Ended(run_dir, done.stdout + done.stderr)


def versions(row: Line) -> list[int]:
    """Which version wrote each token."""
    return [version for version, length in row["spans"] for _ in range(length)]


def differences(rows: list[Line]) -> list[tuple[int, float]]:
    """(staleness, |log pi - log mu|) of every token of the rows that had a forward pass."""
    return [
        (row["version"] - version, abs(pi - mu))
        for row in rows
        if "trainer_logprobs" in row
        for version, pi, mu in zip(
            versions(row), row["trainer_logprobs"], row["generator_logprobs"], strict=True
        )
    ]


def assert_losses(
    run: Ended,
    algorithm: str,
    tolerance: float,
    *,
    mask: Callable[[Sampled], Sampled] = lambda rollout: rollout,
    is_decoupled: bool = False,
    **fields: Any,
) -> None:
    """The loss of every step is that of its archived rows by `algorithm`'s formula; `mask` takes
    the weights of rollouts that are masked as a whole."""
    groups: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for row in run.trained:
        groups[row["version"], str(row["prompt_ids"])].append(row)
    for version, record in enumerate(run.steps):
        rollouts = []
        for rows in [rows for (at, _), rows in groups.items() if at == version]:
            assert len(rows) == SIZE
            worth = advantages(algorithm, [row["reward"] for row in rows])
            for row, advantage in zip(rows, worth, strict=True):
                log_mu = row["generator_logprobs"]  # without a forward pass: no part in the loss
                log_pi = row.get("trainer_logprobs", log_mu)
                weights = [int(v >= row["oldest_version"]) for v in versions(row)]
                log_ref = row.get("ref_logprobs", log_pi)
                log_prox = row.get("proximal_logprobs", log_pi) if is_decoupled else None
                blank = [0.0] * len(log_mu)
                columns = log_pi, log_mu, log_ref, blank
                rollout = mask(Sampled(*columns, weights, advantage, log_prox))
                rollouts.append(rollout)
                assert row.get("loss_weights", rollout.weights) == rollout.weights
        assert len(rollouts) == GROUPS * SIZE
        assert_clipped(run, version, record)
        want, _, _ = step(algorithm, rollouts, max_tokens=MAX_TOKENS, **fields)
        assert record["trainer/loss"] == pytest.approx(want, rel=tolerance, abs=tolerance), version


def assert_clipped(run: Ended, version: int, record: Line) -> None:
    """The tokens that are marked in the archive are those that the step's metrics count."""
    rows = [row for row in run.trained if row["version"] == version and "clipped" in row]
    num_tokens = sum(sum(row["loss_weights"]) for row in rows)
    assert num_tokens == record["tokens/trained"]
    share = sum(sum(row["clipped"]) for row in rows) / max(1, num_tokens)
    assert share == pytest.approx(record["trained/clipped_share"], abs=1e-6)


def test_grpo_with_a_reference_and_recomputed_keys(forks: Forks, tmp_path: Path) -> None:
    for attempt in range(3):  # unless the machine is so busy that the generator waits for it
        run = train(
            forks,
            tmp_path / str(attempt),
            "num_steps=4",
            "algorithm=grpo",
            "trainer.lr=1e-3",
            "generator.max_num_seqs=4",  # a step's rollouts take longer than its training
            "generator.kv_after_commit=recompute",
        )
        renewed = [row for row in run.trained if len(row["spans"]) > 1]
        if any(age == 0 for age, _ in differences(renewed)):
            break
    assert run.summary["steps"] == 4
    assert len(run.trained) == 4 * GROUPS * SIZE
    assert_losses(run, "grpo", 1e-4)
    first, *later = run.steps
    assert (
        abs(first["trained/kl_reference"])
        < 1e-6
        < min(record["trained/kl_reference"] for record in later)
    )
    assert all(len(row["ref_logprobs"]) == row["num_tokens"] for row in run.trained)
    assert max(span["tokens"] for span in run.spans("generator-0", "decode")) == 4
    # What a version wrote, it says again in a pass of its own, also in rollouts that another began:
    # keys and values of that other one would show.
    assert any(age == 0 for age, _ in differences(renewed)), "no rollout met a new version"
    assert max(apart for age, apart in differences(run.trained) if age == 0) < 1e-4
    assert max(apart for age, apart in differences(run.trained) if age > 0) > 1e-2


@pytest.mark.full
def test_losses_of_mini_batches_are_those_around_the_policy_before_the_first(
    forks: Forks, tmp_path: Path
) -> None:
    run = train(
        forks,
        tmp_path,
        *("num_steps=6", "trainer.num_mini_batches=3", "staleness.max_staleness=4"),
        *("algorithm=ppo", "algorithm.proximal=recompute", "trainer.lr=1e-3"),
    )
    assert len(run.trained) == 6 * GROUPS * SIZE
    assert_losses(run, "ppo", 1e-4, is_decoupled=True)
    passed = [row for row in run.trained if "trainer_logprobs" in row]
    assert {row["version"] for row in passed if "proximal_logprobs" in row} == {1, 2, 4, 5}
    with pytest.raises(AssertionError):
        assert_losses(run, "ppo", 1e-4)


TEACHER = """
from llamarl.scoring.stages import Column, FrozenModel, Stage
def loss(inputs):
    return inputs.columns["teacher"] + 0 * inputs.trainer_logprobs
stages = [Stage("old", FrozenModel("teacher"), writes=[Column("teacher", "float32", "response")])]
"""


@pytest.mark.long
def test_a_teacher_may_be_of_a_family_that_only_transformers_knows(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    (recipe / "task.py").write_text(TEACHER)
    teacher = write_family(recipe / "teacher", "phi3")
    run = train(
        forks,
        tmp_path / "run",
        *("num_steps=1", "trainer=transformers", "algorithm=task", "experience.stages=[old]"),
        *(
            "algorithm.loss_columns=[teacher]",
            "generator.max_model_len=64",
            "sampling.max_tokens=40",
        ),
        recipe=recipe,
    )
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    logprobs = []
    for row in run.trained:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            wanted = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        logprobs.append(wanted[-row["num_tokens"] :, 0])
    (record,) = run.steps
    assert record["trainer/loss"] == pytest.approx(float(torch.cat(logprobs).mean()), rel=1e-4)


@pytest.mark.long
def test_sapo_without_the_rollouts_that_have_drifted(forks: Forks, tmp_path: Path) -> None:
    run = train(
        forks,
        tmp_path,
        *("num_steps=4", "algorithm=sapo", "trainer.lr=2e-3", "staleness.max_staleness=2"),
        *(
            "algorithm.mask_rollouts=product",
            "algorithm.mask_below=0.7",
            "algorithm.mask_above=1.4",
        ),
    )
    assert run.summary["steps"] == 4
    mask = partial(masked, kind="product", low=0.7, high=1.4, negative_only=False)
    assert_losses(run, "sapo", 1e-4, mask=mask)
    drifted = [record["tokens/drifted"] for record in run.steps]
    assert drifted[0] == 0 < max(drifted)
    assert [record["tokens/masked"] for record in run.steps] == drifted


LATE = """
import os, pathlib, time

HERE = pathlib.Path({folder!r})
METRICS = HERE / "run" / "metrics.jsonl"
SCORED = HERE / "scored"

def num_versions():
    return METRICS.read_text().count("trainer/loss") if METRICS.exists() else 0

def reward(prompt, completion):
    try:  # the first call of all waits until others have made three versions
        os.close(os.open(HERE / "waits", os.O_CREAT | os.O_EXCL))
        while num_versions() < 3:
            time.sleep(0.01)
        SCORED.touch()
        return 5.0  # no other of its group has that, so the group is not dropped
    except FileExistsError:
        while num_versions() >= 3 and not SCORED.exists():  # the run does not end without it
            time.sleep(0.01)
        return float(len(completion) % 3)
"""


@pytest.mark.long
def test_a_late_group_is_overtaken_and_its_old_tokens_masked(forks: Forks, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    (recipe / "task.py").write_text(LATE.format(folder=str(tmp_path)))
    run = train(
        forks,
        tmp_path / "run",
        "num_steps=8",
        "staleness.late=mask",
        "reward.functions=[task]",
        "reward.num_workers=2",
        "reward.timeout_s=100",  # for the call that waits
        "generator.max_num_seqs=8",  # so that few are scored together with the one that waits
        "data.held_out=null",
        recipe=recipe,
    )
    assert run.summary["steps"] == 8
    assert len(run.trained) == 8 * GROUPS * SIZE
    assert_losses(run, "aipo", 1e-4)
    assert all(row["oldest_version"] == row["version"] - 1 for row in run.trained)
    is_old = [[v < row["oldest_version"] for v in versions(row)] for row in run.trained]
    late = [row for row, old in zip(run.trained, is_old, strict=True) if any(old)]
    assert late
    assert min(row["version"] for row in late) >= 3
    masked = sum(record["tokens/masked"] for record in run.steps)  # of rows with a forward pass
    pairs = zip(run.trained, is_old, strict=True)
    assert masked == sum(sum(old) for row, old in pairs if "trainer_logprobs" in row)
