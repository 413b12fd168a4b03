"""Processes: the only code that knows how executors are started, called and stopped.

Owns: the choice of backend. Does not own: what executors do, or which of them a run needs.
Invariant: importing this loads neither monarch nor torch; `inline` never does.
"""

from __future__ import annotations

import os
from typing import Any

from llamarl.cluster.credentials import prepare
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
    "make_rdma",
    "process_name",
]

# Monarch reads it when it is imported; children inherit it. With the default, 10 s, a killed
# process would go unnoticed as long.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")


def make_cluster(config: ClusterConfig, *, spans_folder: str | None, logs_folder: str) -> Cluster:
    """The cluster that `config.backend` names; nothing starts before the first `spawn`.

    Every executor process records spans into `spans_folder` (None records nothing) and logs into
    `logs_folder`.
    """
    if config.backend == "inline":
        return InlineCluster(spans_folder=spans_folder)
    prepare(config)
    from llamarl.cluster.meshes import MonarchCluster  # the only way to monarch

    return MonarchCluster(config, spans_folder=spans_folder, logs_folder=logs_folder)


def make_rdma() -> Any:
    """What weights.transport=rdma works with (`weights.transport.Rdma`); it travels."""
    from llamarl.cluster.rdma import MonarchRdma

    return MonarchRdma()
