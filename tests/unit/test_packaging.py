"""What pip installs is whole: what llamarl imports is declared, and a wheel runs by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_house import FILES, TREES, imported_modules

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {
    requirement.name: requirement.specifier
    for requirement in map(Requirement, PROJECT["dependencies"])
}
OPTIONAL = {"vllm", "wandb", "mlflow", "trackio"}


def test_what_is_imported_is_declared() -> None:
    modules = {name.split(".")[0] for path in FILES for name in imported_modules(TREES[path])}
    third_party = modules - sys.stdlib_module_names - {"llamarl"} - OPTIONAL
    distributions = packages_distributions()
    assert len(third_party) > 8
    for module in third_party:
        names = {canonicalize_name(name) for name in distributions[module]}
        assert names & DECLARED.keys(), f"{module} comes from {names}"


def test_what_is_pinned_lies_within_what_is_declared() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    for name, allowed in DECLARED.items():
        assert allowed.contains(pins[name]), name
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, [*extras["dev"], *extras["docs"]]):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
    (vllm,) = PROJECT["optional-dependencies"]["vllm"]
    assert f"\n{vllm} " in (ROOT / "requirements-vllm.txt").read_text()


@pytest.mark.slow
def test_a_wheel_runs_by_itself_in_another_folder(tmp_path: Path) -> None:
    source, target, workplace = (tmp_path / name for name in ("source", "target", "workplace"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("llamarl", "conf"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "recipes" / "gsm8k_llama32_1b_1gpu", workplace / "recipe")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    install = [*pip, "install", *offline, "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    shutil.rmtree(source)

    def llamarl(*arguments: str) -> str:
        program = (
            f"import llamarl.main as m; assert m.__file__.startswith({str(target)!r}); m.main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=workplace,
            env={**os.environ, "PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    installed = {path.relative_to(target) for path in (target / "llamarl").rglob("*.py")}
    assert installed == {path.relative_to(ROOT) for path in FILES}
    assert re.fullmatch(r"llamarl \d+\.\d+\.\d+\n", llamarl("--version"))
    assert "commands:" in llamarl("--help")
    assert "Peak learning rate." in llamarl("config", "trainer.lr")
    planned = llamarl("plan", "--config-dir", "recipe", "plan.num_steps=4", "algorithm=grpo")
    assert "1 x H100-80GB (1 host): fits" in planned
    scripts = [path.name for path in (target / "bin").iterdir()]
    assert "llamarl" in scripts
