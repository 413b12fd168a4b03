"""The tracker `tensorboard`: event files in the run's folder, written by TensorBoard's own writer.

Owns: how values become TensorBoard's records. Does not own: which values (`step_metrics.py`), or
sections and descriptions of charts (`charts.py`). Invariant: when `log` returns, its values are on
disk.

The writer is that of the tensorboard package. Those of torch and tensorboardX load torch into the
controller (2.2 s at the start instead of 0.2 s), and a flush of tensorboardX returns before its
queue is written.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
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
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from llamarl.metrics.charts import chart_tag, description
from llamarl.metrics.step_metrics import Histograms, Scalars, Texts

TENSORBOARD_FOLDER = "tensorboard"
MOST_BUCKETS = 64
JUDGED_BY = (  # what the table of hyper-parameters shows of each run: the last values
    "evaluation/accuracy",
    "evaluation/reward",
    "accuracy/train",
    "reward/mean",
    "tokens/per_s",
)


class TensorBoardTracker:
    """One event file in `run_dir/tensorboard`.

    TensorBoard forgets what an earlier session of the run logged from `first_step` on.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, object], first_step: int) -> None:
        self._writer = EventFileWriter(str(run_dir / TENSORBOARD_FOLDER))
        self._described: set[str] = set()
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        values = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in config.items()
        }
        self._write(Event(summary=_experiment(values)))
        self._write(Event(summary=hparams_pb(values)))

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """Write one event with everything the step brought."""
        summary = Summary(value=[self._scalar(tag, value) for tag, value in scalars.items()])
        summary.value.extend(
            _histogram(tag, counts) for tag, counts in histograms.items() if counts
        )
        for tag, text in texts.items():
            summary.MergeFrom(text_pb(chart_tag(tag), text, description(tag)))
        self._write(Event(step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _scalar(self, tag: str, value: float) -> Summary.Value:
        """TensorBoard takes a tag's description from its first value."""
        scalar = Summary.Value(tag=chart_tag(tag), simple_value=value)
        if tag not in self._described:
            self._described.add(tag)
            scalar.metadata.summary_description = description(tag)
        return scalar

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
        self._writer.flush()


def _histogram(tag: str, counts: Mapping[float, int]) -> Summary.Value:
    """Equal buckets around the values, from the smallest to the largest."""
    values = np.array(sorted(counts), dtype=np.float64)
    gap = float(np.diff(values).min()) if len(values) > 1 else max(1.0, abs(values[0]) / 2**20)
    width = max(gap, float(values[-1] - values[0]) / MOST_BUCKETS)
    num_buckets = round((values[-1] - values[0]) / width) + 1
    first = values[0] - width / 2
    amounts, edges = np.histogram(
        values,
        bins=num_buckets,
        range=(first, max(first + num_buckets * width, values[-1])),
        weights=[counts[value] for value in values.tolist()],
    )
    tensor = make_tensor_proto(np.stack([edges[:-1], edges[1:], amounts], axis=1))
    metadata = histogram_metadata(None, description(tag))
    return Summary.Value(tag=chart_tag(tag), metadata=metadata, tensor=tensor)


def _experiment(values: Mapping[str, bool | float | str]) -> Summary:
    """Which columns the HPARAMS tab has, and of which type; metrics are existing charts."""
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
