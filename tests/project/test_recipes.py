"""Every recipe composes and fits its GPUs, and its page shows what the planner prints today."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from math import prod
from pathlib import Path

import pytest

from llamarl.controller.memory import forecast_memory
from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import assign
from llamarl.model.inventory import parameter_shapes
from llamarl.planner.publish import forecast_publish
from llamarl.planner.recipe import forecast_recipe
from llamarl.planner.report import render_report
from llamarl.recipe.inputs import read_planned_architecture
from tests.places import ROOT
from tests.project.pages import blocks
from tests.recipe.composing import compose_recipe

GIB = 2**30
RECIPES = {  # the most GPUs, and the number of parameters as the model's card rounds it
    "gsm8k_llama32_1b_1gpu": (1, 1.24e9),
    "qwen25_7b_math": (16, 7.62e9),
    "qwen25_72b_math": (64, 72.7e9),
    "llama31_8b_lora_1gpu": (1, 8.03e9),
    "llama31_8b_math": (16, 8.03e9),
    "llama31_8b_math_python": (16, 8.03e9),
    "qwen3_30b_a3b_math": (16, 30.5e9),
    "qwen3_235b_a22b_math": (768, 235.1e9),
    "llama31_70b_math": (256, 70.6e9),
    "llama31_405b_math": (1024, 405.9e9),
}
LEAST_FREE = 0.05  # of a GPU's memory
PAGES = [ROOT / "recipes" / name / "README.md" for name in RECIPES]


@lru_cache
def config_of(name: str, *overrides: str) -> Config:
    folder = ROOT / "recipes" / name
    return compose_recipe(folder, [f"recipe_dir='{folder}'", *overrides])


@lru_cache
def report_of(name: str) -> str:
    """What `llamarl plan` prints."""
    config = config_of(name)
    architecture = read_planned_architecture(config)
    return render_report(config, forecast_recipe(config, architecture))


def shown(page: Path) -> dict[str, list[str]]:
    """Recipe -> the lines that the page shows as the output of `llamarl plan`, but for "..."."""
    found = {}
    for body in blocks(page.read_text(), "console"):
        command, _, output = body.partition("\n")
        if command.startswith("$ llamarl plan ") and output and not output.startswith("$ "):
            words = shlex.split(command)
            assert words[3] == "--config-dir"
            assert len(words) == 5, "the planner's own answer, without overrides"
            found[Path(words[4]).name] = [line for line in output.splitlines() if line != "..."]
    return found


def test_every_planned_recipe_is_asked_here() -> None:
    planned = {path.parent.name for path in ROOT.glob("recipes/*/architecture")}
    assert planned == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_gpus(name: str) -> None:
    config = config_of(name)
    architecture = read_planned_architecture(config)
    most_gpus, num_parameters = RECIPES[name]
    number = sum(map(prod, parameter_shapes(architecture).values()))
    assert number == pytest.approx(num_parameters, rel=0.005)
    devices = {device for places in assign(config).values() for device in places}
    assert len(devices) <= most_gpus
    assert all(device.gpu is not None for device in devices)
    assert len({device.host for device in devices}) == config.cluster.size, (
        "no host is paid for idle"
    )
    memory = forecast_memory(config, architecture)
    for rank in memory.ranks:
        assert rank.total_bytes < (1 - LEAST_FREE) * rank.device_bytes, rank
    shows = "\n".join(shown(ROOT / "recipes" / name / "README.md")[name])
    for what in ("total", "of"):
        (cells,) = re.findall(rf"^{what} +(.*)$", shows, re.MULTILINE)
        values = [r.total_bytes if what == "total" else r.device_bytes for r in memory.ranks]
        assert cells.split() == [f"{value / GIB:.1f}" for value in values]


@pytest.mark.parametrize(
    ("name", "overrides", "most_s"),
    [
        ("llama31_70b_math", (), 1.0),
        ("llama31_405b_math", (), 3.0),
        ("llama31_405b_math", ("cluster.gpu=H200-141GB", "weights.staging=double_buffer"), 2.0),
    ],
)
def test_a_version_spreads_in_seconds(name: str, overrides: tuple[str, ...], most_s: float) -> None:
    """LlamaRL publishes 405B in two seconds."""
    config = config_of(name, *overrides)
    architecture = read_planned_architecture(config)
    assert forecast_memory(config, architecture).fits
    assert forecast_publish(config, architecture).seconds <= most_s


def test_the_405b_generator_is_fp8_and_no_replica_leaves_its_host() -> None:
    assert config_of("llama31_405b_math").generator.quantization == "fp8"
    for name in RECIPES:
        places = assign(config_of(name))
        replicas = [devices for executor, devices in places.items() if executor.startswith("gen")]
        assert all(len({device.host for device in devices}) == 1 for devices in replicas), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "name"),
    [
        pytest.param(page, name, marks=[] if "1gpu" in name else pytest.mark.slow, id=f"{i}-{name}")
        for i, page in enumerate(PAGES)
        for name in shown(page)
    ],
)
def test_a_page_shows_what_the_planner_prints_today(page: Path, name: str) -> None:
    printed = report_of(name).splitlines()
    at = 0
    for line in shown(page)[name]:
        assert line in printed[at:], (
            f"{page.parent.name} shows {line!r}, which the planner does not print today: run "
            f"tools/write_recipe_pages.py {name}\n" + "\n".join(printed)
        )
        at = printed.index(line, at) + 1
