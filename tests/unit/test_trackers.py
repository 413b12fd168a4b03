"""Where numbers go beside metrics.jsonl: every tracker gets them, and none can end a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.metrics.trackers import (
    TRACKERS,
    MetricsLog,
    TrackerEntry,
    check_trackers,
    open_trackers,
    read_metrics,
)
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.unit.test_extending import block, write_recipe

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


def test_a_tracker_that_fails_ends_its_tracking_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_a_mistake_in_the_recipe_is_one_line(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"metrics.trackers {message}") as caught:
        check_trackers(names)
    assert "\n" not in str(caught.value)
    check_trackers(["tensorboard", "notes"])
    check_trackers([])


def test_a_tracker_that_cannot_open_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^metrics.trackers must open, got notes: no key$"):
        open_trackers(["notes"], tmp_path, {"broken": True}, 0)


LIBRARIES = {
    "wandb": """
        class Settings(dict): pass
        class Run:
            def define_metric(self, name, step_metric): say("define_metric", name, step_metric)
            def log(self, values): say("log", values)
            def finish(self): say("finish")
        def init(project, name, dir, config, settings):
            say("init", project, name, str(dir), config); return Run()""",
    "mlflow": """
        def set_experiment(name): say("set_experiment", name)
        def start_run(run_name): say("start_run", run_name)
        def log_params(values): say("log_params", values)
        def log_metrics(values, step): say("log_metrics", values, step)
        def end_run(): say("end_run")""",
    "trackio": """
        class Run:
            def log(self, values, step): say("log", values, step)
            def finish(self): say("finish")
        def init(project, name, config): say("init", project, name, config); return Run()""",
}
SAID = {
    "wandb": [
        ["init", "llamarl", "run from step 3", "{run}", CONFIG],
        ["define_metric", "*", "step"],
        ["log", {"reward/mean": 0.5, "step": 3}],
        ["finish"],
    ],
    "mlflow": [
        ["set_experiment", "llamarl"],
        ["start_run", "run from step 3"],
        ["log_params", CONFIG],
        ["log_metrics", {"reward/mean": 0.5}, 3],
        ["end_run"],
    ],
    "trackio": [
        ["init", "llamarl", "run from step 3", CONFIG],
        ["log", {"reward/mean": 0.5}, 3],
        ["finish"],
    ],
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_called_as_its_pages_say(name: str, tmp_path: Path) -> None:
    """The slow test of the wheel does the same with the libraries themselves."""
    body = "\n".join(line[8:] for line in LIBRARIES[name].splitlines())
    said = "import json\ndef say(*words):\n    open('said', 'a').write(json.dumps(words) + '\\n')\n"
    (tmp_path / f"{name}.py").write_text(said + body)
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from llamarl.metrics.trackers import open_trackers\n"
        f"tracker = open_trackers([{name!r}], Path('run').absolute(), {CONFIG!r}, 3)[{name!r}]\n"
        "tracker.log(3, {'reward/mean': 0.5}, {}, {}); tracker.close()\n"
        f"assert not {{'torch', 'tensorboard'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    lines = read_lines(tmp_path / "said")
    shown = json.loads(json.dumps(SAID[name]).replace("{run}", str(tmp_path / "run")))
    assert lines == shown


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
def test_a_run_logs_to_the_tracker_that_its_task_py_adds(
    reward: str, tmp_path: Path, forks: Forks
) -> None:
    """The text of the page, in a recipe that uses task.py for that alone or for the reward too."""
    task = "\n\n".join([block("tracker", "python"), REWARD])
    recipe = write_recipe(tmp_path, RUN.replace("REWARD", reward), task)
    command = ["train", f"--config-dir={recipe}", "cluster=inline", "run_dir=run"]
    done = forks.run(*command, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in (tmp_path / "run" / "metrics.csv").read_text()
