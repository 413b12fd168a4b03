"""Where the numbers of a run are written: metrics.jsonl and TensorBoard.

Owns: both files' formats. Does not own: which numbers (`record.py`). Invariant: what one `log`
call was given is on disk, in both, when it returns.

TensorBoard's record format is written with the `tensorboard` package alone; torch's own writer
would load torch into the controller.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram.metadata import create_summary_metadata as histogram_metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DataType,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, NULL_TENSOR
from tensorboard.plugins.hparams.metadata import create_summary_metadata as hparams_metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from llamarl.json_file import parse
from llamarl.metrics.charts import chart_tag, description
from llamarl.metrics.record import Histograms, Scalars, Texts

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MOST_BUCKETS = 64
JUDGED_BY = (  # what TensorBoard's table of hyper-parameters shows of each run: the last values
    "evaluation/accuracy",
    "evaluation/reward",
    "accuracy/train",
    "reward/mean",
    "tokens/per_s",
)


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl` and, if asked, to event files in `run_dir/tensorboard`.

    Each JSON line is {"step": int, "unix_s": float, <tag>: float, ...} plus "histograms" and
    "texts" where there are any; NaN and infinities are null. A step may have several lines
    (training, evaluation) and after a resume repeats: the last value of a tag counts, see
    `read_metrics`. `first_step` is the one that a resumed run does next: TensorBoard forgets what
    an earlier session logged from there on.
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool, first_step: int = 0) -> None:
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_bytes() if path.exists() else b""
        unfinished = bool(written) and not written.endswith(b"\n")
        self._jsonl = path.open("a")
        if unfinished:
            self._jsonl.write("\n")
        folder = Path(run_dir) / TENSORBOARD_FOLDER
        self._events = EventFile(folder, first_step) if tensorboard else None

    def log(
        self,
        step: int,
        scalars: Scalars,
        histograms: Histograms | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Write what `step` (optimizer steps completed) brought."""
        line: dict[str, Any] = {"step": step, "unix_s": time.time()}
        line |= {tag: _finite(value) for tag, value in scalars.items()}
        if histograms:
            line["histograms"] = histograms
        if texts:
            line["texts"] = texts
        self._write_line(line)
        if self._events is not None:
            self._events.log(step, scalars, histograms or {}, texts or {})

    def log_hyperparameters(self, flat_config: Mapping[str, object]) -> None:
        """Dotted config key -> value, for TensorBoard's table; config.yaml has them too."""
        if self._events is not None:
            self._events.log_hyperparameters(flat_config)

    def close(self) -> None:
        """Close both files."""
        self._jsonl.close()
        if self._events is not None:
            self._events.close()

    def _write_line(self, line: dict[str, Any]) -> None:
        self._jsonl.write(json.dumps(line, default=str) + "\n")
        self._jsonl.flush()


def read_metrics(path: str | Path) -> dict[int, dict[str, Any]]:
    """Step -> merged line of a metrics.jsonl, later lines winning; unfinished and damaged ones are
    skipped."""
    steps: dict[int, dict[str, Any]] = {}
    for text in Path(path).read_bytes().splitlines():
        try:
            line = parse(text)
        except ValueError:
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            steps.setdefault(line["step"], {}).update(line)
    return dict(sorted(steps.items()))


class EventFile:
    """One TensorBoard event file, flushed after every write."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._described: set[str] = set()
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """One event with everything the step brought."""
        values = [self._scalar(tag, value) for tag, value in scalars.items()]
        values += [_histogram(tag, counts) for tag, counts in histograms.items() if counts]
        values += [_text(tag, text) for tag, text in texts.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _scalar(self, tag: str, value: float) -> Summary.Value:
        """TensorBoard takes a tag's description from the first value that it meets."""
        scalar = Summary.Value(tag=chart_tag(tag), simple_value=value)
        if tag not in self._described:
            self._described.add(tag)
            scalar.metadata.summary_description = description(tag)
        return scalar

    def log_hyperparameters(self, flat_config: Mapping[str, object]) -> None:
        """For the HPARAMS tab; runs with other values of the same keys are compared there."""
        values = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flat_config.items()
        }
        self._add(Event(summary=_experiment(values)))
        self._add(Event(summary=hparams_pb(values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def _histogram(tag: str, counts: Mapping[float, int]) -> Summary.Value:
    """Equal buckets around the values, from the smallest to the largest."""
    values = np.array(sorted(counts), dtype=np.float64)
    gap = float(np.diff(values).min()) if len(values) > 1 else 1.0
    width = max(gap, float(values[-1] - values[0]) / MOST_BUCKETS)
    num_buckets = round((values[-1] - values[0]) / width) + 1
    edges = values[0] - width / 2 + width * np.arange(num_buckets + 1)
    weights = [counts[value] for value in values.tolist()]
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, num_buckets - 1)
    amounts = np.bincount(places, weights=weights, minlength=num_buckets)
    tensor = make_tensor_proto(np.stack([edges[:-1], edges[1:], amounts], axis=1))
    metadata = histogram_metadata(None, description(tag))
    return Summary.Value(tag=chart_tag(tag), metadata=metadata, tensor=tensor)


def _experiment(values: Mapping[str, bool | float | str]) -> Summary:
    """Which columns the HPARAMS tab has, and of which type; metrics are charts that there are."""
    kinds = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}
    columns = [
        HParamInfo(name=key, type=DataType.Value(kinds.get(type(value), "DATA_TYPE_FLOAT64")))
        for key, value in sorted(values.items())
    ]
    metrics = [
        MetricInfo(name=MetricName(tag=chart_tag(tag)), display_name=tag) for tag in JUDGED_BY
    ]
    experiment = Experiment(hparam_infos=columns, metric_infos=metrics)
    metadata = hparams_metadata(HParamsPluginData(experiment=experiment))
    value = Summary.Value(tag=EXPERIMENT_TAG, metadata=metadata, tensor=NULL_TENSOR)
    return Summary(value=[value])


def _text(tag: str, text: str) -> Summary.Value:
    metadata: SummaryMetadata = text_metadata(None, description(tag))
    tensor = make_tensor_proto(np.array([text.encode()], dtype=object))
    return Summary.Value(tag=chart_tag(tag), metadata=metadata, tensor=tensor)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
