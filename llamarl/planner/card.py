"""The GPU of this machine.

Owns: asking NVIDIA's tool which cards are here, and their kind. Does not own: what a kind can do
(`hardware.py`). Invariant: no CUDA context comes up in this process, and without the tool there is
no answer.
"""

import logging
import os
import shutil
import subprocess
from dataclasses import replace

from llamarl.config import Config
from llamarl.config.cluster import AUTO
from llamarl.models.gpu_kind import is_kind
from llamarl.planner.hardware import CPU, GPUS

log = logging.getLogger(__name__)

TOOL = "nvidia-smi"
QUERY = ("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
TIMEOUT_S = 30.0
FIRST_WITH_BFLOAT16 = 8.0  # compute capability


def on_this_card(config: Config) -> Config:
    """The recipe with the kind of this machine's GPU for `cluster.gpu=auto`; as it is if that names
    a kind, if the run has hosts elsewhere, or if no card answers."""
    if config.cluster.gpu != AUTO or config.cluster.hosts or config.cluster.size > 1:
        return config
    kind = kind_here()
    return replace(config, cluster=replace(config.cluster, gpu=kind)) if kind else config


def kind_here() -> str:
    """The kind of the card with the least memory of those that this process may use: one that the
    planner knows, else its size, such as 25.3GB. "" if there is none, or the tool does not say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    which = [f"--id={visible}"] if visible else []
    if shutil.which(TOOL) is None:
        return ""
    command = [TOOL, *QUERY, *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.strip()]
        cards = [(int(mib) * 2**20, name, float(number)) for name, mib, number in rows]
    except (OSError, subprocess.TimeoutExpired, ValueError):  # another tool, or a sick driver
        return ""
    if done.returncode or not cards:
        return ""
    num_bytes, name, capability = min(cards)
    known = [kind for kind in GPUS if kind != CPU and is_kind(kind, name, num_bytes)]
    if known:
        return max(known, key=len)
    kind = f"{num_bytes / 1e9:.1f}GB"
    log.info("cluster.gpu: a %s of %s, of which no time is forecast", name, kind)
    if capability < FIRST_WITH_BFLOAT16:
        log.warning("a %s has no arithmetic in bfloat16: set float32 as dtypes", name)
    return kind
