"""Losses of whole runs, worked out again from the archived tokens by formulas of their own; the
option pairs do so with every algorithm."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.loss_formulas import Sampled, advantages, step
from tests.places import RECIPE

GROUPS, SIZE, MAX_TOKENS = 4, 8, 96
SMALL = [
    *("cluster=inline", "experience.keep_rollouts=1", "checkpoint.export=false"),
    *(f"trainer.groups_per_step={GROUPS}", "trainer.warmup_steps=0"),
    *("evaluation.max_prompts=4", "evaluation.every_steps=0"),
]
Line = dict[str, Any]


class Ended:
    """A run's folder: its archive, spans and metrics."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.summary = json.loads((run_dir / "summary.json").read_text())
        self.steps = [
            line for line in read_lines(run_dir / "metrics.jsonl") if "trainer/loss" in line
        ]
        self.rows = read_rollouts(run_dir)
        self.trained = [row for row in self.rows if row["outcome"] == "trained"]

    def spans(self, process: str, name: str) -> list[Line]:
        path = self._run_dir / "spans" / f"{process}.jsonl"
        return [span for span in read_lines(path) if span.get("name") == name]


def train(forks: Forks, run_dir: Path, *overrides: str) -> Ended:
    command = ["train", f"--config-dir={RECIPE}", *SMALL, *overrides, f"run_dir={run_dir}"]
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    return Ended(run_dir)


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
    is_decoupled: bool = False,
    **fields: Any,
) -> None:
    """The loss of every step is that of its archived rows by `algorithm`'s formula."""
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
                rollout = Sampled(*columns, weights, advantage, log_prox)
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
