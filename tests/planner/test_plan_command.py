"""`llamarl plan` needs no checkpoint, leaves no folder, and says what it found in two forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.controller.memory import Advice, MemoryForecast, RankMemory
from llamarl.planner.forecast import Forecast, NextChange, PublishForecast, Split, StepForecast
from llamarl.planner.report import WIDTH, figures, render_report
from tests.places import ROOT
from tests.recipe.composing import compose_recipe

RECIPES = ROOT / "recipes"
RECIPE = RECIPES / "gsm8k_llama32_1b_1gpu"
GIB = 2**30
# The command line as `llamarl` has it, then what the process has loaded by then.
SCRIPT = """
import sys
from llamarl.cli.main import main
main()
sys.stderr.write(f"monarch loaded: {'monarch' in sys.modules}")
"""


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.full
def test_a_plan_needs_no_checkpoint_and_leaves_only_what_it_was_asked_for(tmp_path: Path) -> None:
    flags = ["--json", "plan.json", "--config-dir", str(RECIPE)]
    small = ["plan.num_steps=4", "trainer.groups_per_step=16", "sampling.rollouts_per_prompt=4"]
    done = plan(tmp_path, "plan", *flags, *small, "trainer.lr=1e-5")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "monarch loaded: False"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] is True
    assert found["num_gpus"] == 1
    assert 20 * GIB < found["peak_bytes"] < found["gpu_bytes"] < 80 * GIB
    assert 0 < found["steps"]["async"]["step_s"] < found["step_s"]
    assert 0 < found["publish_s"] < 1
    assert f"{found['peak_bytes'] / GIB:.1f}" in done.stdout
    assert "1 x H100-80GB (1 host): fits" in done.stdout


def step(step_s: float) -> StepForecast:
    return StepForecast(
        step_s=step_s,
        busy_shares={"trainer": 0.6, "generator": 0.9},
        wait_shares={"trainer batch": 0.4, "generator requests": 0.004},
        mean_staleness=0.9,
        max_staleness=1,
        trained_tokens_per_s=12345.6,
        publish_s=2.0,
    )


def forecast() -> Forecast:
    ranks = (
        RankMemory(
            executor="trainer",
            num_ranks=256,
            device_bytes=80 * GIB,
            bytes_by_kind={"weights": 20 * GIB, "activations": 70 * GIB},
        ),
        RankMemory(
            executor="generator",
            num_ranks=256,
            device_bytes=80 * GIB,
            bytes_by_kind={"weights": 50 * GIB, "kv_cache": 10 * GIB},
            host_bytes_by_kind={"staging": 94 * GIB},
        ),
    )
    return Forecast(
        num_hosts=64,
        num_gpus=512,
        memory=MemoryForecast(
            ranks=ranks, advice=(Advice("trainer.activation_checkpointing=full: fits", True),)
        ),
        publish=PublishForecast(
            total_bytes=26 * 10**12,
            max_bytes_out=10**11,
            max_bytes_in=10**11,
            max_card_bytes_out=10**11,
            max_card_bytes_in=10**11,
            lower_bound_s=2.03,
            seconds=7.53,
            pool_stages_s={"generator": {"transfer": 7.53}},
        ),
        steps={"planned": step(40.0), "sync": step(110.0)},
        splits=(
            Split(num_trainer_ranks=288, num_replicas=28, step_s=38.0),
            Split(num_trainer_ranks=256, num_replicas=32, step_s=40.0),
        ),
        next=NextChange(words="trainer.compile=inductor", step=step(32.0)),
    )


def test_the_report_says_what_does_not_fit_and_what_could_be_changed() -> None:
    config = compose_recipe(RECIPE, [])
    text = render_report(config, forecast())
    words = " ".join(text.split())
    for said in (
        "512 x H100-80GB (64 hosts): does not fit",
        "12% too much 25% free",
        "to change: trainer.activation_checkpointing=full: fits",
        "in host memory - 94.0",
        "publish: 7.53 s (2.03 s if links ran at full speed); 26,000.0 GB to all replicas",
        "sync, colocated 110.0 12,346 60% 90% 0.90, max 1",
        "waits as planned: trainer batch 40%",
        "best 288 28 38.0",
        "band: a step as planned takes 35.2 to 66 s: nine of ten public measurements of its sides, "
        "and 4 of whole steps, are as far off their forecasts",
        "bottleneck: the generators, which work 90% of the step (trainer 60%)",
        "next best change: trainer.compile=inductor: 32 s a step, 1.25x",
        "GPU hours: 5.69 a step, ",
    ):
        assert said in words, text
    assert max(map(len, text.splitlines())) <= WIDTH
    own = replace(config, experience=replace(config.experience, stages=["brief"]))
    assert "Stages of the recipe's own (brief) are left out." in render_report(own, forecast())
    measured = replace(forecast(), measured_step_s=41.0)  # times of a run, not of the law
    assert "band:" not in render_report(config, measured)


def test_json_holds_the_figures_of_the_report() -> None:
    found = json.loads(json.dumps(figures(compose_recipe(RECIPE, []), forecast())))
    assert found["fits"] is False
    assert (found["peak_bytes"], found["gpu_bytes"]) == (90 * GIB, 80 * GIB)
    assert (found["step_s"], found["steps"]["sync"]["step_s"]) == (40.0, 110.0)
    assert found["publish_s"] == 7.53
    assert [split["step_s"] for split in found["splits"]] == [38.0, 40.0]
