"""The trackers that the numbers of a run go to beside metrics.jsonl, named by `metrics.trackers`.

Owns: what a tracker is, the table of them, and those that pass numbers to other programs. Does not
own: which numbers (`step_metrics.py`), TensorBoard's files (`tensorboard.py`) or metrics.jsonl
(`metrics_log.py`). Invariant: a tracker's package is imported only if the recipe names the tracker,
and none of them loads torch into the controller.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from llamarl.config.check import require, require_choice
from llamarl.extensions import load_extensions
from llamarl.metrics.step_metrics import Histograms, Scalars, Texts

PROJECT = "llamarl"  # where runs are filed, unless the tracker's own variables say otherwise
STEP = "step"


class Tracker(Protocol):
    """Takes the numbers of one run."""

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """Record values by tag for `step` (optimizer steps completed). A step may be logged again,
        even after later ones, because a version is evaluated while later ones are trained."""
        ...

    def close(self) -> None:
        """Write or send what is left."""
        ...


OpenTracker = Callable[[Path, Mapping[str, object], int], Tracker]
"""Opens a tracker for a run's folder, the recipe as dotted key -> value, and the step that the run
does next: above 0 if it is resumed."""


@dataclass(frozen=True)
class TrackerEntry:
    """One tracker: how it is opened, and the module that must be installed for it."""

    open: OpenTracker
    package: str


def check_trackers(names: Sequence[str]) -> None:
    """ValueError unless all these trackers are known, different and installed."""
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
    """The trackers of `names`, opened; ValueError says which one cannot be, and why."""
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


@dataclass(frozen=True)
class ScalarTracker:
    """Passes the scalars of each step to another program, and says when the run has ended."""

    send: Callable[[int, Scalars], object]
    finish: Callable[[], object]

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """Send the scalars."""
        self.send(step, scalars)

    def close(self) -> None:
        """Wait until all is sent."""
        self.finish()


def _open_wandb(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """Weights & Biases. Its own variables hold: WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=_run_name(run_dir, first_step),
        dir=run_dir,
        config=dict(config),
        settings=wandb.Settings(console="off"),  # capturing would tear the live display
    )
    run.define_metric("*", step_metric=STEP)  # W&B's own step cannot go back
    return ScalarTracker(lambda step, scalars: run.log({**scalars, STEP: step}), run.finish)


def _open_mlflow(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """MLflow. Its own variables hold: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=_run_name(run_dir, first_step))
    mlflow.log_params(dict(config))
    return ScalarTracker(
        lambda step, scalars: mlflow.log_metrics(scalars, step=step), mlflow.end_run
    )


def _open_trackio(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    """Trackio, Hugging Face's local dashboard: `trackio show --project llamarl`."""
    import trackio

    run = trackio.init(project=PROJECT, name=_run_name(run_dir, first_step), config=dict(config))
    return ScalarTracker(lambda step, scalars: run.log(scalars, step=step), run.finish)


def _open_tensorboard(run_dir: Path, config: Mapping[str, object], first_step: int) -> Tracker:
    from llamarl.metrics.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run_dir, config, first_step)


def _run_name(run_dir: Path, first_step: int) -> str:
    """A resumed run gets another name, as these trackers keep what the earlier one logged."""
    return f"{run_dir.name} from step {first_step}" if first_step else run_dir.name


TRACKERS = {
    "tensorboard": TrackerEntry(_open_tensorboard, "tensorboard"),
    "wandb": TrackerEntry(_open_wandb, "wandb"),
    "mlflow": TrackerEntry(_open_mlflow, "mlflow"),
    "trackio": TrackerEntry(_open_trackio, "trackio"),
}

load_extensions("llamarl.trackers")
