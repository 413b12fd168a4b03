"""Starts, calls and stops executors in processes.

Importing this loads neither monarch nor torch; `inline` never does."""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from llamarl.cluster.credentials import configure_monarch
from llamarl.cluster.executor import LOSS_GRACE_S, Cluster, Executor, process_name
from llamarl.cluster.inline import InlineCluster
from llamarl.core.config import ClusterConfig
from llamarl.core.errors import ExecutorLost, RemoteError
from llamarl.metrics.span import LIMIT_BYTES, Spans

# How long a process may take to start. Monarch's default, 30 s, is too short on a machine that is
# busy or reads torch from a cold network disk. With hosts, a dead one would be noticed later, too.
SPAWN, SPAWN_LIMIT = "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "120s"


def make_cluster(
    config: ClusterConfig,
    *,
    spans_folder: str | None,
    logs_folder: str,
    spans_bytes: int = LIMIT_BYTES,
) -> Cluster:
    """Return the cluster that `config.backend` names; nothing starts before the first `spawn`.

    Every executor process records spans into `spans_folder` (None records nothing), at most
    `spans_bytes` of them on disk, and logs into `logs_folder`.
    """
    make_spans = partial(Spans, folder=spans_folder, limit_bytes=spans_bytes)
    if config.backend == "inline":
        return InlineCluster(make_spans)
    configure_monarch(config)
    if not config.hosts:
        os.environ.setdefault(SPAWN, SPAWN_LIMIT)
    from llamarl.cluster.meshes import MonarchCluster  # here, for it imports monarch

    return MonarchCluster(config, make_spans, logs_folder=logs_folder)


@contextmanager
def exiting_process() -> Iterator[None]:
    """End the process with this block, which holds all that a program does, without Python's
    shutdown.

    That would wait for threads and exit handlers of a recipe's task.py; and Monarch's threads that
    still receive messages would call into Python meanwhile and abort the process, with another exit
    code.
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - shown as Python itself would
        traceback.print_exc()
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has closed it
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
