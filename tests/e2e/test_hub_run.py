"""A run whose model and prompts are names of the Hub, with the real client in its own process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import SMALL, finish, start
from tests.e2e.forks import Forks
from tests.hub_server import Hub, serving
from tests.places import CHECKPOINT, RECIPE

NAMED = {
    "model.checkpoint": "hf:org/tiny",
    "data.prompts": "hf:org/sums@v1",
    "data.held_out": "hf:org/sums/test@v1",
}


def saved_names(run_dir: Path) -> dict[str, str]:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    parts = {key: key.split(".") for key in NAMED}
    return {key: config[section][field] for key, (section, field) in parts.items()}


@pytest.mark.long
@pytest.mark.full
def test_a_run_by_names_saves_its_commits_and_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"train.jsonl": RECIPE / "prompts.jsonl", "test.jsonl": RECIPE / "held_out.jsonl"}
    files = {name: path.read_bytes() for name, path in rows.items()}
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        model = hub.add("models/org/tiny", CHECKPOINT)
        data = hub.add("datasets/org/sums", files, "v1")

        def run(*values: str) -> tuple[int, str, str]:
            named = [f"{key}={name}" for key, name in NAMED.items()]
            given = [*SMALL, *named, "cluster=inline", f"run_dir={tmp_path}/run", *values]
            return finish(start("train", f"--config-dir={RECIPE}", *given))

        code, _, err = run("num_steps=1")
        assert code == 0, err
        expected = {
            "model.checkpoint": f"hf:org/tiny@{model}",
            "data.prompts": f"hf:org/sums@{data}",
            "data.held_out": f"hf:org/sums/test@{data}",
        }
        assert saved_names(tmp_path / "run") == expected
        command = (tmp_path / "run" / "command.txt").read_text().split()
        assert {f"{key}={name}" for key, name in expected.items()} <= {*command}
        assert not {f"{key}={name}" for key, name in NAMED.items()} & {*command}
        hub.add("models/org/tiny", {"config.json": b"{}"})
        hub.add("datasets/org/sums", {"train.jsonl": b"", "test.jsonl": b""}, "v1")
        hub.asked.clear()
        code, _, err = run("num_steps=2", "checkpoint.resume=auto")
        assert code == 0, err
        assert saved_names(tmp_path / "run") == expected
        assert not hub.asked
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.full
def test_a_new_recipe_trains(forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    inputs = [f"--model={CHECKPOINT}", f"--data={RECIPE / 'prompts.jsonl'}"]
    inputs += [f"--held-out={RECIPE / 'held_out.jsonl'}", "--reward=task", "--device=cpu"]
    made = forks.run("new", str(folder), *inputs)
    assert made.returncode == 0, made.stderr
    said = made.stdout.splitlines()
    (command,) = [shlex.split(line) for line in said if line.startswith("try it:")]
    own = [f"run_dir={tmp_path}/run", *SMALL, "cluster=inline", "num_steps=1"]
    done = forks.run(*command[command.index("train") :], *own)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
