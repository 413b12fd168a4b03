"""What pip installs is whole: what llamarl imports is declared, and a wheel runs by itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.places import ROOT
from tests.test_house import FILES, TREES, imported_modules

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
DECLARED = {
    requirement.name: requirement.specifier
    for requirement in map(Requirement, PROJECT["dependencies"])
}
OPTIONAL = {"openai", "vllm", "wandb", "mlflow", "trackio", "sandlock", "triton"}


def test_what_is_imported_is_declared() -> None:
    modules = {name.split(".")[0] for path in FILES for name in imported_modules(TREES[path])}
    third_party = modules - sys.stdlib_module_names - {"llamarl"} - OPTIONAL
    distributions = packages_distributions()
    assert len(third_party) > 8
    for module in third_party:
        names = {canonicalize_name(name) for name in distributions[module]}
        assert names & DECLARED.keys(), f"{module} comes from {names}"


def test_what_is_pinned_lies_within_what_is_declared() -> None:
    names = ("requirements.txt", "requirements/kernels.txt")
    text = "".join((ROOT / name).read_text() for name in names)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.M))
    for name, allowed in DECLARED.items():
        assert allowed.contains(pins[name]), name
    extras = PROJECT["optional-dependencies"]
    listed = [each for name in ("dev", "docs", "code", "judge") for each in extras[name]]
    for requirement in map(Requirement, listed):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
    (vllm,) = PROJECT["optional-dependencies"]["vllm"]
    assert f"\n{vllm} " in (ROOT / "requirements/vllm.txt").read_text()


def test_a_wheel_carries_every_file_that_is_no_module() -> None:
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["llamarl"]
    found = [path for folder in ("llamarl", "conf") for path in (ROOT / folder).rglob("*")]
    names = {
        str(path.relative_to(ROOT)).removeprefix("llamarl/") for path in found if path.is_file()
    }
    data = {name for name in names if not name.endswith((".py", ".pyc"))}
    assert {"conf/config.yaml", "cluster/slurm.sbatch"} <= data
    for name in data:
        assert any(PurePosixPath(name).match(pattern) for pattern in patterns), name


METRICS = sorted(path.stem for path in (ROOT / "llamarl" / "metrics").glob("[a-z]*.py"))
LIGHT = [  # the last ones are what a forecast and the check for vLLM run
    *(f"import llamarl.metrics.{name}" for name in METRICS),
    "import llamarl.controller.wiring, llamarl.publish.publisher",
    "from tests.planner.planner_recipes import LLAMA, make_recipe",
    "from llamarl.controller.fit import check_fit; check_fit(make_recipe(), LLAMA)",
    "import llamarl.generator.vllm.limits as limits, contextlib",
    "with contextlib.suppress(ValueError): limits.check_installed()",
]


def test_what_measures_wires_publishes_and_checks_a_run_loads_nothing_heavy() -> None:
    program = f"""
import sys
for line in {LIGHT!r}:
    exec(line)
    heavy = {{"torch", "vllm", "tensorflow"}}
    heavy |= {{"monarch", "hydra"}} if "metrics" in line else set()
    assert not heavy & sys.modules.keys(), line
"""
    assert len(METRICS) > 5
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_generator_loads_neither_distributed_tensors_nor_torchs_compiler() -> None:
    """Each takes a second of a process's start, and it needs none."""
    program = """
import sys
import llamarl.generator.worker
assert not {"torch.distributed.tensor", "torch._dynamo", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def in_folder(folder: Path, *command: str | Path, **variables: str) -> str:
    """What `command` prints when it is run in `folder`, out of reach of the repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_works_in_a_fresh_environment_in_another_folder(tmp_path: Path) -> None:
    """Takes minutes: pip fetches everything from its index or its cache."""
    source, fresh, workplace = (tmp_path / name for name in ("source", "fresh", "workplace"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("llamarl", "conf"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "recipes" / "quickstart", workplace / "recipe")
    pins, _, _ = (ROOT / "requirements.txt").read_text().partition("# What those bring in.")
    (tmp_path / "pins.txt").write_text(pins)
    in_folder(tmp_path, sys.executable, "-m", "venv", fresh)
    pip = [fresh / "bin" / "pip", "--quiet", "--disable-pip-version-check"]
    in_folder(tmp_path, *pip, "wheel", "--no-deps", "-w", tmp_path, source)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")
    in_folder(tmp_path, *pip, "install", "-c", tmp_path / "pins.txt", f"{wheel}[trackers]")

    (installed,) = fresh.glob("lib/python*/site-packages/llamarl")
    found = {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert found == {path.relative_to(ROOT / "llamarl") for path in FILES}

    def llamarl(*arguments: str, **variables: str) -> str:
        return in_folder(workplace, fresh / "bin" / "llamarl", *arguments, **variables)

    assert re.fullmatch(r"llamarl \d+\.\d+\.\d+\n", llamarl("--version"))
    assert "commands:" in llamarl("--help")
    assert "Peak learning rate." in llamarl("config", "trainer.lr")
    recipe = ("--config-dir", "recipe")
    assert "1 host): fits" in llamarl("plan", *recipe, "plan.num_steps=4")
    hosts = ("cluster.num_hosts=2", "cluster.data_interface=eth0", "weights=collective")
    assert "#SBATCH --nodes=2\n" in llamarl("launch", *recipe, "cluster=slurm", *hosts)
    assert "kind: Job\n" in llamarl("launch", *recipe, "cluster=kubernetes", *hosts)
    for num_steps in (1, 2):  # the second one resumes
        llamarl(
            *("train", *recipe, f"num_steps={num_steps}", "run_dir=run"),
            *("evaluation.max_prompts=8", "checkpoint.every_steps=1", "checkpoint.resume=auto"),
            "metrics.trackers=[tensorboard,wandb,mlflow,trackio]",
            *("metrics.project=wheel", "metrics.run_name=whole", "metrics.tags=[wheel]"),
            WANDB_MODE="offline",
            MLFLOW_TRACKING_URI=(workplace / "mlruns").as_uri(),
            MLFLOW_ALLOW_FILE_STORE="true",
            TRACKIO_DIR=str(workplace / "trackio"),
        )
    assert list((workplace / "run" / "tensorboard").iterdir())
    ids = json.loads((workplace / "run" / "trackers.json").read_text())
    offline = [*(workplace / "run" / "wandb").glob("offline-run-*/*.wandb")]
    assert {path.stem for path in offline} == {f"run-{ids['wandb']}"}
    (losses,) = (workplace / "mlruns").glob("*/*/metrics/trainer/loss")
    assert [line.split()[2] for line in losses.read_text().splitlines()] == ["1", "2"]
    assert list((workplace / "trackio").glob("wheel.*"))
    export = f"model.checkpoint={workplace / 'run' / 'export'}"
    assert "accuracy" in llamarl("evaluate", *recipe, export, "evaluation.max_prompts=8")
