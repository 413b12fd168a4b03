"""Evaluations of several sets and several rollouts per prompt, the best checkpoint, and exports on
the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.core import checkpoint
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import RECIPE

SMALL = [
    f"--config-dir={RECIPE}",
    *("cluster=inline", "trainer.groups_per_step=4", "trainer.warmup_steps=0"),
    *("data.held_out=null", "evaluation.sets={sums: held_out.jsonl, drill: prompts.jsonl}"),
    *("evaluation.max_prompts=6", "evaluation.rollouts_per_prompt=4", "evaluation.temperature=1"),
]
RESUME = "checkpoint.resume=auto"


@pytest.mark.full
def test_each_set_has_its_accuracy_and_the_best_version_is_kept_and_exported(
    forks: Forks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ["num_steps=6", "evaluation.every_steps=2", "checkpoint.export_every_steps=2"]
    options += ["checkpoint.keep=1", "checkpoint.best=drill/pass_at_2", "evaluation.at_k=[2,4]"]
    done = forks.run("train", *SMALL, *options, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert "held-out drill accuracy" in done.stdout
    assert " of 6 x 4 (" in done.stdout
    metrics = read_lines(run_dir / "metrics.jsonl")
    found = {each["step"]: each for each in metrics if "evaluation/accuracy" in each}
    assert [*found] == [0, 2, 4, 6]
    lines = read_lines(run_dir / "evaluations.jsonl")
    for version, scalars in found.items():
        for name in ("sums", "drill"):
            of_set = [
                each for each in lines if (each["version"], each["held_out"]) == (version, name)
            ]
            assert [each["prompt_id"] for each in of_set] == [1, 2, 3, 4, 5, 6]
            for share in ("accuracy", "pass_at_2", "pass_at_4", "maj_at_2", "maj_at_4"):
                mean = sum(each[share] for each in of_set) / 6
                assert scalars[f"evaluation/{name}/{share}"] == pytest.approx(mean)
                assert scalars[f"evaluation/{name}/{share}_low"] <= mean
            right = sum(map(sum, (each["correct"] for each in of_set)))
            assert scalars[f"evaluation/{name}/accuracy"] == pytest.approx(right / 24)
    values = {version: each["evaluation/drill/pass_at_2"] for version, each in found.items()}
    best = max([2, 4, 6], key=lambda version: (values[version], -version))
    marked = checkpoint.marked_best(run_dir)
    assert marked is not None
    assert checkpoint.version_of(marked) == best
    versions = {checkpoint.version_of(path) for path in checkpoint.committed(run_dir)}
    assert versions == {best, 6}
    exports = {int(path.name[-1]): path for path in (run_dir / "exports").iterdir()}
    assert sorted(exports) == [2, 4, 6]
    for name, version in (("export", 6), ("export-best", best)):
        weights = (run_dir / name / "model.safetensors").read_bytes()
        same = [
            each
            for each, path in exports.items()
            if (path / "model.safetensors").read_bytes() == weights
        ]
        assert same == [version]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {*summary["held_out_shares"]} >= {"pass_at_2", "drill/accuracy", "sums/maj_at_4"}
    more = ["num_steps=6", "evaluation.every_steps=0", f"run_dir={tmp_path / 'again'}"]
    again = forks.run("train", *SMALL, *more, f"checkpoint.resume={run_dir}/checkpoints/best")
    assert again.returncode == 0, again.stderr


@pytest.mark.full
def test_evaluate_says_each_set_and_writes_each_prompt(forks: Forks, tmp_path: Path) -> None:
    done = forks.run("evaluate", *SMALL, f"run_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    all_, sums, drill, _ = done.stdout.splitlines()
    assert all_.startswith("accuracy ")
    assert " of 12 x 4 (" in all_
    assert "pass@4 " in all_
    assert "maj@4 " in all_
    assert sums.startswith("sums  accuracy ")
    assert drill.startswith("drill  accuracy ")
    assert len(read_lines(tmp_path / "evaluations.jsonl")) == 12
