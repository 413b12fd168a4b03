"""Runs with several optimizer steps per batch: what they learn, and what they leave behind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from llamarl.view.compare import compare
from tests.e2e import test_variants as variants
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.e2e.test_learning import SHORT, fours
from tests.json_lines import read_lines


@pytest.mark.full
def test_half_as_many_rollouts_in_two_passes_of_two_mini_batches_learn(
    forks: Forks, tmp_path: Path
) -> None:
    several = [
        *("trainer.groups_per_step=6", "trainer.num_mini_batches=2", "trainer.num_passes=2"),
        *("num_steps=12", "staleness.max_staleness=3", "evaluation.every_steps=0"),
        *("algorithm=ppo", "algorithm.filters=[equal_rewards]", "algorithm.proximal=recompute"),
        "checkpoint.every_steps=7",
    ]
    run_dir = tmp_path / "run"
    command = ["train", f"--config-dir={fours(tmp_path)}", *SHORT, *several, f"run_dir={run_dir}"]
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] > 0.5  # three seeds: 0.80 to 0.91
    assert summary["steps"] == 12
    assert summary["staleness_max"] <= 3
    told = compare([str(run_dir), str(run_dir), "--output", str(tmp_path / "c.svg")])
    assert f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}" in told
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "trainer/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 13)]
    first_steps = [line["trained/clipped_share"] for line in steps[::4]]
    assert first_steps == [0, 0, 0], "before the first step of a batch pi is prox"
    assert max(line["trained/clipped_share"] for line in steps) > 0
    trained = [row for row in read_rollouts(run_dir) if row["outcome"] == "trained"]
    assert {row["num_uses"] for row in trained} == {2}
    by_version = Counter(row["version"] for row in trained)
    # The last of the two uses; 6 groups each.
    assert [*by_version] == [2, 3, 6, 7, 10, 11]
    assert len({*by_version.values()}) == 1
    # 7 is due amid a batch.
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    assert len(saved) == 2
    assert "8" in saved[0]
    assert "12" in saved[1]


@pytest.mark.full
def test_losses_of_mini_batches_are_those_around_the_policy_before_the_first(
    forks: Forks, tmp_path: Path
) -> None:
    run = variants.train(
        forks,
        tmp_path,
        *("num_steps=6", "trainer.num_mini_batches=3", "staleness.max_staleness=4"),
        *("algorithm=ppo", "algorithm.proximal=recompute", "trainer.lr=1e-3"),
    )
    assert len(run.trained) == 6 * variants.GROUPS * variants.SIZE
    variants.assert_losses(run, "ppo", 1e-4, is_decoupled=True)
    passed = [row for row in run.trained if "trainer_logprobs" in row]
    assert {row["version"] for row in passed if "proximal_logprobs" in row} == {1, 2, 4, 5}
    with pytest.raises(AssertionError):
        variants.assert_losses(run, "ppo", 1e-4)


@pytest.mark.long
def test_a_run_that_ended_amid_a_batch_goes_on_with_a_new_one(forks: Forks, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    several = [
        *("trainer.groups_per_step=4", "trainer.num_mini_batches=2", "trainer.num_passes=2"),
        *("staleness.max_staleness=3", "evaluation.max_prompts=16", f"run_dir={run_dir}"),
        *("algorithm=ppo", "algorithm.proximal=recompute", "checkpoint.resume=auto"),
        "checkpoint.every_steps=3",
    ]
    recipe = fours(tmp_path)
    for num_steps, last_uses in ((5, [2, 3, 4]), (10, [2, 3, 4, 7, 8, 9])):
        more = [*SHORT, *several, f"num_steps={num_steps}"]
        done = forks.run("train", f"--config-dir={recipe}", *more)
        assert done.returncode == 0, done.stderr + done.stdout
        rows = read_rollouts(run_dir)
        assert len({row["row_id"] for row in rows}) == len(rows)
        trained = [row for row in rows if row["outcome"] == "trained"]
        by_version = Counter(row["version"] for row in trained)
        assert by_version == dict.fromkeys(last_uses, 4 * 8)
        # After step 5 the run ended: what it used has had one pass.
        once = {row["version"] for row in trained if row.get("num_uses", 1) == 1}
        assert once == {version for version in last_uses if version in (4, 9)}
