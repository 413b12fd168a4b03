"""The places where the numbers of a run go: metrics.jsonl, and the trackers named by
`metrics.trackers`, whose packages are imported only for a recipe that names them, and load no torch
into the controller."""

import dataclasses
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from llamarl.core.extensions import load_extensions
from llamarl.core.fields import require, require_choice
from llamarl.core.files import parse, read_object, write_object
from llamarl.metrics.step_metrics import Histograms, Scalars, Texts

METRICS_FILE = "metrics.jsonl"
IDS_FILE = "trackers.json"
PROJECT = "llamarl"  # where runs are filed, unless recipe or a tracker's variables say otherwise
STEP = "step"


class Tracker(Protocol):
    """Takes the numbers of one run."""

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """Record values by tag for `step` (optimizer steps completed). A step may be logged again,
        even after later ones, because a version is evaluated while later ones are trained."""

    def close(self) -> None:
        """Write or send what is left."""


OpenTracker = Callable[[Path, Mapping[str, object], int], Tracker]
"""A function that opens a tracker for a run's folder, the recipe as dotted key -> value, and the
step that the run does next: above 0 if it is resumed."""


@dataclass(frozen=True)
class TrackerEntry:
    """One tracker: how it is opened, and the module that must be installed for it."""

    open: OpenTracker
    package: str


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError unless all these trackers are known, different and installed."""
    for name in names:
        require_choice("metrics.trackers", name, TRACKERS)
        require(names.count(name) == 1, "metrics.trackers", "name each tracker once", list(names))
        if find_spec(TRACKERS[name].package) is None:
            raise ValueError(
                f"metrics.trackers must be installed, got {name} without the package "
                f"{TRACKERS[name].package}: pip install 'llamarl[trackers]'"
            )


def open_trackers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, object], first_step: int
) -> dict[str, Tracker]:
    """Return the trackers of `names`, opened. Raises ValueError, which says which one cannot be,
    and why."""
    trackers = {}
    for name in names:
        try:
            trackers[name] = TRACKERS[name].open(run_dir, config, first_step)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - packages have errors of their own
            reason = " ".join(str(error).split())
            raise ValueError(f"metrics.trackers must open, got {name}: {reason}") from None
    return trackers


def flatten(section: object, prefix: str = "") -> dict[str, object]:
    """Return a config by dotted keys: `Config(trainer=TrainerConfig(lr=0.1))` -> {"trainer.lr":
    0.1, ...}."""
    assert dataclasses.is_dataclass(section)
    flat: dict[str, object] = {}
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        flat |= flatten(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return flat


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl`, on disk when `log` returns, and passes the same to
    `trackers` (by name).

    Each line is {"step": int, "unix_s": float, <tag>: float, ...} plus "histograms" and "texts"
    where there are any; NaN and infinities are null. A step may have several lines (training,
    evaluation) and repeats after a resume: the last value of a tag counts, see `read_metrics`. A
    tracker that fails gets nothing more; the run continues."""

    def __init__(self, run_dir: str | Path, trackers: Mapping[str, Tracker] | None = None) -> None:
        self.run_dir = Path(run_dir)
        path = self.run_dir / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._jsonl = path.open("a+")
        end = self._jsonl.tell()
        if end and os.pread(self._jsonl.fileno(), 1, end - 1) != b"\n":  # killed while writing
            self._jsonl.write("\n")
        self._trackers = dict(trackers or {})

    def log(
        self,
        step: int,
        scalars: Scalars,
        histograms: Histograms | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Write the values of `step` (optimizer steps completed)."""
        line: dict[str, Any] = {"step": step, "unix_s": time.time()}
        line |= {tag: v if math.isfinite(v) else None for tag, v in scalars.items()}
        if histograms:
            line["histograms"] = histograms
        if texts:
            line["texts"] = texts
        self._jsonl.write(json.dumps(line, default=str) + "\n")
        self._jsonl.flush()
        self._each(lambda tracker: tracker.log(step, scalars, histograms or {}, texts or {}))

    def close(self) -> None:
        self._jsonl.close()
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - another program's failure, not the run's
                del self._trackers[name]
                logging.warning("tracker %s failed and gets nothing more: %s", name, error)


def read_metrics(
    path: str | Path, tags: Collection[str] | None = None
) -> dict[int, dict[str, Any]]:
    """Return step -> merged line of a metrics.jsonl, later lines winning; unfinished and damaged
    ones are skipped. With `tags`, only these are kept of each line, so that its texts take no
    memory; a tag with a / at its end stands for all that begin so."""
    steps: dict[int, dict[str, Any]] = {}
    heads = tuple(tag for tag in tags or () if tag.endswith("/"))
    with Path(path).open("rb") as file:
        for text in file:
            try:
                line = parse(text)
            except ValueError:
                continue
            if isinstance(line, dict) and type(step := line.get("step")) is int:
                if tags is not None:
                    line = {t: v for t, v in line.items() if t in tags or t.startswith(heads)}
                steps.setdefault(step, {}).update(line)
    return dict(sorted(steps.items()))


@dataclass(frozen=True)
class ScalarTracker:
    """Passes the scalars of each step to another program, and says when the run has ended."""

    send: Callable[[int, Scalars], object]
    finish: Callable[[], object]

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        self.send(step, scalars)

    def close(self) -> None:
        self.finish()


@dataclass(frozen=True)
class RunIds:
    """The ids by which other programs know the run, in a file in its folder: so a run that resumes,
    or starts its executors again, goes on in the same run of theirs."""

    run_dir: Path

    def find(self, tracker: str) -> str | None:
        """Return the run's id; None if the tracker has had nothing of this run. Raises ValueError
        if the file is damaged."""
        path = self.run_dir / IDS_FILE
        found = read_object(path).get(tracker) if path.exists() else None
        if not isinstance(found, str | None):
            raise ValueError(f"{path} must hold texts, got {found!r} for {tracker}")
        return found

    def keep(self, tracker: str, run_id: str) -> None:
        """Write the run's id, beside those of other trackers."""
        path = self.run_dir / IDS_FILE
        ids = read_object(path) if path.exists() else {}
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_object(path, ids | {tracker: run_id})


def _names(config: Mapping[str, object]) -> tuple[str, str, list[str]]:
    """Return the recipe's project, name and tags for other programs; "" and [] where it says
    nothing."""
    keys = ("metrics.project", "metrics.run_name", "metrics.tags")
    project, run_name, tags = map(config.get, keys)
    words = [str(tag) for tag in tags] if isinstance(tags, list) else []
    return str(project or ""), str(run_name or ""), words


def _open_wandb(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """Open Weights & Biases. Its own variables hold: WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, and
    where the recipe names nothing WANDB_PROJECT, WANDB_NAME, WANDB_TAGS."""
    import wandb

    (project, run_name, tags), ids = _names(config), RunIds(run_dir)
    run_id = ids.find("wandb") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:16]
    run = wandb.init(
        project=project or os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_name or os.environ.get("WANDB_NAME") or run_dir.name,
        tags=tags or None,
        id=run_id,
        resume="allow",
        dir=run_dir,
        config=dict(config),
        settings=wandb.Settings(console="off"),  # capturing would tear the live display
    )
    ids.keep("wandb", run_id)
    run.define_metric("*", step_metric=STEP)  # W&B's own step cannot go back
    return ScalarTracker(lambda step, scalars: run.log({**scalars, STEP: step}), run.finish)


def _open_mlflow(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """Open MLflow. Its own variables hold: MLFLOW_TRACKING_URI, and MLFLOW_EXPERIMENT_NAME where
    the recipe names no project."""
    import mlflow

    (project, run_name, tags), ids = _names(config), RunIds(run_dir)
    mlflow.set_experiment(project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    if run_id := ids.find("mlflow"):  # whose parameters cannot change
        mlflow.start_run(run_id=run_id)
    else:
        marks = dict.fromkeys(tags, "true") or None
        run = mlflow.start_run(run_name=run_name or run_dir.name, tags=marks)
        ids.keep("mlflow", run.info.run_id)
        mlflow.log_params(dict(config))
    return ScalarTracker(lambda step, found: mlflow.log_metrics(found, step=step), mlflow.end_run)


def _open_trackio(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """Open Trackio, Hugging Face's local dashboard: `trackio show --project llamarl`. It knows a
    run by its name."""
    import trackio

    (project, run_name, _), ids = _names(config), RunIds(run_dir)
    earlier = ids.find("trackio")
    name, resume = earlier or run_name or run_dir.name, "allow" if earlier else "never"
    run = trackio.init(project=project or PROJECT, name=name, config=dict(config), resume=resume)
    ids.keep("trackio", name)
    return ScalarTracker(lambda step, scalars: run.log(scalars, step=step), run.finish)


def _open_tensorboard(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    from llamarl.metrics.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run_dir, config, first_step)


TRACKERS = {
    "tensorboard": TrackerEntry(_open_tensorboard, "tensorboard"),
    "wandb": TrackerEntry(_open_wandb, "wandb"),
    "mlflow": TrackerEntry(_open_mlflow, "mlflow"),
    "trackio": TrackerEntry(_open_trackio, "trackio"),
}

load_extensions("llamarl.trackers")
