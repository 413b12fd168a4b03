"""`llamarl plan` needs no checkpoint, leaves no folder, and says what it found in three forms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.core.config import PlanConfig
from llamarl.planner.forecast import (
    Advice,
    BestSplit,
    Decomposition,
    Forecast,
    MemoryForecast,
    PublishForecast,
    RankMemory,
    Split,
    StepForecast,
    Variant,
)
from llamarl.planner.memory.ranks import forecast_memory
from llamarl.planner.report.published import PUBLISHED
from llamarl.planner.report.recipe import figures
from llamarl.planner.report.text import WIDTH, assumptions, render_page, render_report
from llamarl.planner.simulation.workload import with_lengths
from llamarl.recipe.inputs import read_planned_architecture
from llamarl.recipe.prompt_inputs import with_measured_prompts
from tests.places import ROOT
from tests.unit.composing import compose_recipe
from tests.unit.pages import blocks

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
    flags = ["--json", "plan.json", "--config-dir", str(RECIPE), "--html=plan.html"]
    done = plan(tmp_path, "plan", *flags, "plan.num_steps=4", "trainer.lr=1e-5")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "monarch loaded: False"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] is True
    assert found["num_gpus"] == 1
    assert 20 * GIB < found["peak_bytes"] < found["gpu_bytes"] < 80 * GIB
    assert 0 < found["step_async_s"] < found["step_sync_s"]
    assert 0 < found["publish_s"] < 1
    assert f"{found['peak_bytes'] / GIB:.1f}" in done.stdout
    assert "1 x H100-80GB (1 host): fits" in done.stdout
    ElementTree.parse(tmp_path / "plan.html")


def step(step_s: float, **values: object) -> StepForecast:
    plain = StepForecast(
        step_s=step_s,
        busy_shares={"trainer": 0.6, "generator": 0.9},
        wait_shares={"trainer batch": 0.4, "generator requests": 0.004},
        mean_staleness=0.9,
        max_staleness=1,
        trained_tokens_per_s=12345.6,
        publish_s=2.0,
    )
    return replace(plain, **values)  # type: ignore[arg-type]


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
    config = compose_recipe(RECIPE, [])
    baseline = Variant(words="synchronous and colocated", config=config, step=step(120.0))
    stages = {
        name: Variant(words=f"with {name}", config=config, step=step(seconds))
        for name, seconds in (("overlap", 80.0), ("batch_and_degree", 50.0), ("precision", 40.0))
    }
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
            num_copies=9_000_000,
            num_groups=32,
            lower_bound_s=2.03,
            seconds=7.53,
        ),
        step=step(40.0, divisor=16),
        variants={"sync": step(110.0), "sync, colocated": step(120.0)},
        decomposition=Decomposition(baseline=baseline, stages=stages),
        split=BestSplit(
            best_share=0.5,
            candidates=(
                Split(num_trainer_ranks=288, num_replicas=28, step_s=38.0),
                Split(num_trainer_ranks=256, num_replicas=32, step_s=40.0),
            ),
            step=step(38.0),
        ),
        best_share=0.45,
        own_share=0.5,
        next=Variant(words="trainer.compile=inductor", config=config, step=step(32.0)),
        unstated=(Variant(words="static batches", config=config, step=step(480.0)),),
    )


def test_the_report_says_what_does_not_fit_and_what_the_gain_is_made_of() -> None:
    text = render_report(compose_recipe(RECIPE, []), forecast(), PUBLISHED[128256, 16384, 126])
    words = " ".join(text.split())
    for said in (
        "512 x H100-80GB (64 hosts): does not fit",
        "12% too much 25% free",
        "to change: trainer.activation_checkpointing=full: fits",
        "in host memory - 94.0",
        "waits as planned: trainer batch 40%",
        "simulated: 1/16 of the cluster with 1/16 of the rollouts",
        "best 288 28 38.0",
        "our reconstruction",
        "3.00x = overlap 1.50 x batch sizes and parallel degree 1.60 x precision 1.25",
        "speed-up 10.7x 3.00x",
        "baseline step 635.8 s 120.0 s",
        "publish 2.00 s 7.53 s",
        "does not publish its batch sizes",
        "band: a step as planned takes 35.2 to 66 s: nine of ten public measurements of its sides, "
        "and 4 of whole steps, are as far off their forecasts",
        "bottleneck: the generators, which work",
        "45% of the GPUs are best for the trainer; it has 50%, 5 points away",
        "next best change: trainer.compile=inductor: 32.0 s a step, 1.25x",
        "GPU hours: 5.69 a step, ",
        "the speed-up is 3.00x to 12.00x; its 10.7x lies inside, at 92% of the width in logarithms",
    ):
        assert said in words, text
    assert max(map(len, text.splitlines())) <= WIDTH
    measured = replace(forecast(), measured_step_s=41.0)  # times of a run, not of the law
    assert "band:" not in render_report(compose_recipe(RECIPE, []), measured, None)


def test_json_holds_the_figures_of_the_report() -> None:
    found = json.loads(json.dumps(figures(compose_recipe(RECIPE, []), forecast())))
    assert found["fits"] is False
    assert (found["peak_bytes"], found["gpu_bytes"]) == (90 * GIB, 80 * GIB)
    assert (found["step_async_s"], found["step_sync_s"]) == (40.0, 110.0)
    assert found["publish_s"] == 7.53
    assert found["speedup"] == pytest.approx(3.0)


def bars(page: str) -> dict[str, list[tuple[str, float, float, str]]]:
    """Executor -> (kind, left edge, right edge in percent of the row, colour) of each of its bars;
    the limit of the device has no kind."""
    found = {}
    for row in ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter("div"):
        drawn = []
        for bar in row.iter("i"):
            style = dict(part.split(": ") for part in bar.get("style", "").split("; "))
            left = float(style["left"].removesuffix("%"))
            right = left + float(style.get("width", "0%").removesuffix("%"))
            drawn.append((bar.text or "", left, right, style.get("background", "")))
        found[row.findtext("b") or ""] = drawn
    return found


def test_a_device_that_is_too_small_ends_before_its_bars() -> None:
    drawn = bars(render_page("a", "b", [], forecast().memory))
    assert [*drawn] == ["trainer", "generator"]
    (*kinds, limit), (*_, other) = drawn.values()
    assert [(kind, left, right) for kind, left, right, _ in kinds] == [
        ("weights", 0.0, pytest.approx(22.2, abs=0.1)),
        ("activations", pytest.approx(22.2, abs=0.1), pytest.approx(100.0, abs=0.1)),
    ]
    assert limit[1] == other[1] == pytest.approx(88.9, abs=0.1)


def test_the_page_is_one_file_of_well_formed_xml() -> None:
    page = render_page("a & b", "2 < 3\n", ["Prompts have 3 < 4 tokens."], forecast().memory)
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert not any(word in page for word in ("http", "src=", "url(", "<script"))
    assert [element.text for element in root.iter("h1")] == ["a & b"]
    assert [element.text for element in root.iter("pre")] == ["2 < 3\n"]
    assert [element.text for element in root.iter("p")] == [
        "Prompts have 3 < 4 tokens.",
        "90.0 GiB from edge to edge.",
    ]
    assert "generator: kv_cache 10.0 GiB" in [each.get("title") for each in root.iter("i")]


@pytest.mark.parametrize("name", ["quickstart", "gsm8k_llama32_1b_1gpu", "llama31_8b_math"])
def test_no_two_kinds_of_a_recipes_memory_share_a_colour(name: str) -> None:
    config = replace(compose_recipe(RECIPES / name, []), recipe_dir=str(RECIPES / name))
    memory = forecast_memory(config, read_planned_architecture(config))
    kinds = {kind for rank in memory.ranks for kind in rank.bytes_by_kind}
    drawn = bars(render_page("a", "b", [], memory))
    colours = {(kind, colour) for each in drawn.values() for kind, _, _, colour in each if kind}
    assert len(colours) == len({colour for _, colour in colours}) == len(kinds)


@pytest.mark.long
def test_a_teacher_counts_in_memory_and_other_stages_are_said_to_be_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "task.py").write_text(
        "from llamarl.scoring.stages import Column, FrozenModel, Stage\n"
        f"teacher = FrozenModel({str(RECIPES / 'quickstart' / 'checkpoint')!r})\n"
        "column = Column('teacher_logprobs', 'float32', 'response')\n"
        "def brief(completion): pass\n"
        "def loss(inputs): return -inputs.trainer_logprobs\n"
        "stages = [Stage('brief', brief, reads=['completion']),\n"
        "          Stage('teacher', teacher, writes=[column])]\n"
    )
    (tmp_path / "run.yaml").write_text(
        "defaults: [config, {override /algorithm: task}, _self_]\n"
        "num_steps: 2\n"
        f"model: {{checkpoint: {RECIPES / 'quickstart' / 'checkpoint'}}}\n"
        f"data: {{prompts: {RECIPES / 'quickstart' / 'prompts.jsonl'}}}\n"
        "sampling: {max_tokens: 96}\n"
        "generator: {max_model_len: 128}\n"
        "plan: {prompt_tokens: 20, median_tokens: 40, num_steps: 4}\n"
        "experience: {stages: [brief, teacher]}\n"
        "algorithm: {loss_columns: [teacher_logprobs]}\n"
    )
    done = plan(tmp_path, "plan", f"--config-dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *stage teacher +0\.\d", done.stdout, re.MULTILINE)
    words = (
        "Stages of the recipe's own (brief, teacher) are left out, but for the memory of teacher."
    )
    assert words in done.stdout


@pytest.mark.long
def test_the_readmes_own_recipe_plans_with_lengths_that_it_has_room_for(tmp_path: Path) -> None:
    """Its prompts are there, so their mean is measured; half of its max_tokens is the median."""
    text = blocks((ROOT / "README.md").read_text(), "yaml")[0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "quickstart").symlink_to(RECIPES / "quickstart")
    (tmp_path / "mine" / "run.yaml").write_text(text)
    folder = tmp_path / "mine"
    (folder / "task.py").write_text("def reward(prompt, completion): return 1.0\n")
    done = plan(tmp_path, "plan", "--config-dir", "mine", "plan.num_steps=4")
    assert done.returncode == 0, done.stderr
    config = compose_recipe(folder, [f"recipe_dir='{folder}'"])
    found = with_lengths(with_measured_prompts(config)).plan
    assert (found.prompt_tokens, found.median_tokens) == (12, 48)
    missing = replace(config, data=replace(config.data, prompts="later.jsonl"))
    assert with_lengths(with_measured_prompts(missing)).plan.prompt_tokens == 128 - 96
    asked = replace(
        config,
        plan=PlanConfig(prompt_tokens=3, median_tokens=5, num_turns=2, observation_tokens=7),
    )
    assert with_lengths(with_measured_prompts(asked)) == asked


def test_assumptions_say_what_lengths_and_times_rest_on() -> None:
    config = compose_recipe(RECIPE, ["plan.median_tokens=321"])
    words = " ".join(assumptions(config, forecast()))
    assert "below 321 tokens" in words
    assert "the hardware's published peaks say, times the share" in words
    measured = " ".join(assumptions(config, replace(forecast(), measured_step_s=41.0)))
    assert "as in the run that was given" in measured
    assert "published peaks" not in measured
