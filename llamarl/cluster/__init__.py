"""Processes: the only code that knows how executors are started, called and stopped.

Owns: the choice of backend. Does not own: what executors do, or which of them a run needs.
Invariant: importing this loads neither monarch nor torch; `inline` never does.
"""

from __future__ import annotations

from llamarl.cluster.errors import GroupLost, RemoteError
from llamarl.cluster.group import Cluster, ExecutorGroup, process_name
from llamarl.cluster.inline import InlineCluster
from llamarl.config import ClusterConfig

__all__ = [
    "Cluster",
    "ExecutorGroup",
    "GroupLost",
    "RemoteError",
    "make_cluster",
    "process_name",
]


def make_cluster(config: ClusterConfig, *, spans_folder: str | None, logs_folder: str) -> Cluster:
    """The cluster that `config.backend` names; nothing starts before the first `spawn`.

    Every executor process records spans into `spans_folder` (None records nothing) and logs into
    `logs_folder`.
    """
    if config.backend == "inline":
        return InlineCluster(spans_folder=spans_folder)
    from llamarl.cluster.actors import MonarchCluster  # the only way to monarch

    return MonarchCluster(config, spans_folder=spans_folder, logs_folder=logs_folder)
