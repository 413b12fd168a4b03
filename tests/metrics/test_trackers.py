"""Where numbers go beside metrics.jsonl: every tracker gets them, and none can end a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamarl.core.config import MetricsConfig
from llamarl.metrics.trackers import (
    TRACKERS,
    MetricsLog,
    RunIds,
    TrackerEntry,
    check_trackers,
    open_trackers,
    read_metrics,
)
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.project.test_extending import block, write_recipe

CONFIG = {"trainer.lr": 1e-4, "trainer.betas": [0.9, 0.95], "data.system": None}


class Notes:
    """A tracker that records its calls, and fails on request."""

    def __init__(self, run_dir, config, first_step):
        if "broken" in config:
            raise RuntimeError("no\nkey")
        self.notes = [("open", run_dir.name, dict(config), first_step)]

    def log(self, step, scalars, histograms, texts):
        if step == 13:
            raise ConnectionError("the server is gone")
        self.notes.append(("log", step, scalars, histograms, texts))

    def close(self):
        self.notes.append(("close",))


@pytest.fixture(autouse=True)
def _notes(monkeypatch):
    monkeypatch.setitem(TRACKERS, "notes", TrackerEntry(Notes, package="json"))
    monkeypatch.setitem(TRACKERS, "absent", TrackerEntry(Notes, package="no_such_module"))


def test_a_tracker_gets_the_recipe_and_every_step(tmp_path: Path) -> None:
    trackers = open_trackers(["notes"], tmp_path, CONFIG, 3)
    log = MetricsLog(tmp_path, trackers)
    log.log(3, {"reward/mean": 0.5}, {"reward/values": {0.0: 1, 1.0: 1}}, {"rollouts": "four"})
    log.log(2, {"evaluation/accuracy": 0.25})
    log.close()
    tracker = trackers["notes"]
    assert isinstance(tracker, Notes)
    assert tracker.notes == [
        ("open", tmp_path.name, CONFIG, 3),
        ("log", 3, {"reward/mean": 0.5}, {"reward/values": {0.0: 1, 1.0: 1}}, {"rollouts": "four"}),
        ("log", 2, {"evaluation/accuracy": 0.25}, {}, {}),
        ("close",),
    ]


def test_a_tracker_that_fails_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = open_trackers(["notes", "tensorboard"], tmp_path, {}, 0)
    log = MetricsLog(tmp_path, trackers)
    for step in (12, 13, 14):
        log.log(step, {"reward/mean": 0.5})
    log.close()
    (message,) = caplog.messages
    assert message == "tracker notes failed and gets nothing more: the server is gone"
    assert len(trackers["notes"].notes) == 2
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [12, 13, 14]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["absent"], r"must be installed, got absent without .* no_such_module: pip install 'llam"),
        (["tensorbord"], "must be one of tensorboard, wandb, mlflow, trackio.*, got 'tensorbord'"),
        (["notes", "notes"], "must name each tracker once"),
    ],
)
def test_a_mistake_is_one_line(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"metrics.trackers {message}") as caught:
        check_trackers(names)
    assert "\n" not in str(caught.value)
    check_trackers(["tensorboard", "notes"])
    check_trackers([])
    with pytest.raises(ValueError, match=r"^metrics.trackers must open, got notes: no key$"):
        open_trackers(["notes"], tmp_path, {"broken": True}, 0)


LIBRARIES = {
    "wandb": """
        class Settings(dict): pass
        class Run:
            def define_metric(self, name, step_metric): say("define_metric", name, step_metric)
            def log(self, values): say("log", values)
            def finish(self): say("finish")
        def init(project, name, tags, id, resume, dir, config, settings):
            say("init", project, name, tags, id, resume, str(dir), config); return Run()""",
    "mlflow": """
        from types import SimpleNamespace
        def set_experiment(name): say("set_experiment", name)
        def start_run(run_id=None, run_name=None, tags=None):
            say("start_run", run_id, run_name, tags)
            return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made there"))
        def log_params(values): say("log_params", values)
        def log_metrics(values, step): say("log_metrics", values, step)
        def end_run(): say("end_run")""",
    "trackio": """
        class Run:
            def log(self, values, step): say("log", values, step)
            def finish(self): say("finish")
        def init(project, name, config, resume):
            say("init", project, name, resume, config); return Run()""",
}
NAMED = {"metrics.project": "maths", "metrics.run_name": "first try", "metrics.tags": ["a", "b"]}


def open_twice(folder: Path, config: dict[str, object]) -> None:
    """Let the libraries hear of a run that logs a step, ends, resumes and logs another one."""
    for name, text in LIBRARIES.items():
        body = "\n".join(line[8:] for line in text.splitlines())
        writes = f"open({f'said by {name}'!r}, 'a').write(json.dumps(words) + '\\n')"
        (folder / f"{name}.py").write_text(f"import json\ndef say(*words):\n    {writes}\n{body}")
    program = f"""
import sys; from pathlib import Path; sys.path.insert(0, '.')
from llamarl.metrics.trackers import open_trackers
for step in (0, 3):
    opened = open_trackers({[*LIBRARIES]!r}, Path('run').absolute(), {config!r}, step)
    for tracker in opened.values():
        tracker.log(step, {{'reward/mean': 0.5}}, {{}}, {{}}); tracker.close()
assert not {{'torch', 'tensorboard'}} & sys.modules.keys()
"""
    variables = {key: value for key, value in os.environ.items() if "WANDB" not in key}
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, env=variables)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_library_hears_of_a_run_and_its_resume(is_named: bool, tmp_path: Path) -> None:
    """The slow test of the wheel calls the libraries themselves."""
    config = {**CONFIG, **(NAMED if is_named else {})}
    open_twice(tmp_path, config)
    project, run_name = ("maths", "first try") if is_named else ("llamarl", "run")
    tags = ["a", "b"] if is_named else None
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    assert len(run_id) == 16
    reward = {"reward/mean": 0.5}
    own_folder = str(tmp_path / "run")
    opened = ["init", project, run_name, tags, run_id, "allow", own_folder, config]
    expected: dict[str, list[list[object]]] = {"wandb": [], "mlflow": [], "trackio": []}
    for step, resume in ((0, "never"), (3, "allow")):
        expected["wandb"] += [opened, ["define_metric", "*", "step"]]
        expected["wandb"] += [["log", reward | {"step": step}], ["finish"]]
        begun = ["start_run", None, run_name, tags and dict.fromkeys(tags, "true")]
        again = ["start_run", "made there", None, None]
        expected["mlflow"] += [["set_experiment", project]]
        expected["mlflow"] += [begun, ["log_params", config]] if step == 0 else [again]
        expected["mlflow"] += [["log_metrics", reward, step], ["end_run"]]
        expected["trackio"] += [["init", project, run_name, resume, config]]
        expected["trackio"] += [["log", reward, step], ["finish"]]
    for name, lines in expected.items():
        assert read_lines(tmp_path / f"said by {name}") == lines, name


def test_variables_of_wandb_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, object]] = []

    class Run:
        def define_metric(self, name: str, step_metric: str) -> None: ...
        def log(self, values: object) -> None: ...
        def finish(self) -> None: ...

    def init(**given: object) -> Run:
        heard.append(given)
        return Run()

    fake = ModuleType("wandb")
    vars(fake).update(init=init, Settings=lambda console: console)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for variable, value in (("PROJECT", "theirs"), ("NAME", "named"), ("RUN_ID", "of-a-sweep")):
        monkeypatch.setenv(f"WANDB_{variable}", value)
    open_trackers(["wandb"], tmp_path, CONFIG, 0)
    open_trackers(["wandb"], tmp_path / "other", {**CONFIG, **NAMED}, 0)
    found = [[each[key] for key in ("project", "name", "id")] for each in heard]
    assert found == [["theirs", "named", "of-a-sweep"], ["maths", "first try", "of-a-sweep"]]


def test_a_damaged_file_of_ids_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("[")
    with pytest.raises(ValueError, match=r"trackers\.json must be JSON, got a damaged file"):
        RunIds(tmp_path).find("wandb")
    (tmp_path / "trackers.json").write_text('{"wandb": 3}')
    with pytest.raises(ValueError, match=r"trackers\.json must hold texts, got 3 for wandb"):
        RunIds(tmp_path).find("wandb")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"project": " "}, "metrics.project must be null or a name, got ' '"),
        ({"run_name": ""}, "metrics.run_name must not be empty, got ''"),
        ({"tags": ["a", "a"]}, "metrics.tags must be words of 1 to 64 characters, each once"),
        ({"tags": [" "]}, "metrics.tags must be words of 1 to 64 characters"),
        ({"tags": ["x" * 65]}, "metrics.tags must be words of 1 to 64 characters"),
    ],
)
def test_names_that_no_tracker_takes_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        MetricsConfig(**fields)


RUN = """
defaults: [config, {override /reward: REWARD}, _self_]
num_steps: 1
model: {checkpoint: ../quickstart/checkpoint}
data: {prompts: ../quickstart/prompts.jsonl}
sampling: {max_tokens: 96}
generator: {max_model_len: 128}
trainer: {groups_per_step: 2}
metrics: {trackers: [csv]}
"""
REWARD = "def reward(prompt, completion):\n    return len(completion)\n"


@pytest.mark.full
@pytest.mark.parametrize("reward", ["task", pytest.param("math", marks=pytest.mark.long)])
def test_a_run_logs_to_the_tracker_of_its_task(reward: str, tmp_path: Path, forks: Forks) -> None:
    """The text of the page, in a recipe that uses task.py for that alone or for the reward too."""
    task = "\n\n".join([block("tracker", "python"), REWARD])
    recipe = write_recipe(tmp_path, RUN.replace("REWARD", reward), task)
    command = ["train", f"--config-dir={recipe}", "cluster=inline", "run_dir=run"]
    done = forks.run(*command, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in (tmp_path / "run" / "metrics.csv").read_text()
