"""The files that start a run on a cluster's scheduler: an sbatch file, or Kubernetes manifests.

Monarch's own jobs (monarch.job: SlurmJob, KubernetesJob) start daemons on plain tcp://, without
certificates, and submit by themselves: SlurmJob from a Python process that must stay, KubernetesJob
through an operator and a resource type of its own. These files need only what every such cluster
has. Every host gets one worker daemon, the controller runs in the same allocation, and every
control connection uses TLS."""

import json
import math
import os
import shlex
from functools import partial
from pathlib import Path

from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import needs_gpu

RESUMABLE = os.EX_TEMPFAIL  # 75: exit code of a run that SIGTERM ended; the same command goes on
SAVE_S = 120  # for the save after checkpoint.grace_s, until the scheduler kills
TEMPLATES = {"slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}


def render(config: Config, command: list[str]) -> str:
    """Return the text for cluster.scheduler; `command` is what follows `llamarl train` in it.

    ValueError if the config names no scheduler, hosts that are there already, or no network for
    tensors between hosts.
    """
    num_hosts = config.cluster.size
    if config.cluster.hosts or config.cluster.scheduler not in TEMPLATES:
        raise ValueError(
            f"cluster.scheduler must be one of {', '.join(TEMPLATES)}, without cluster.hosts, to "
            f"launch a run, got {config.cluster.scheduler} with {len(config.cluster.hosts)} hosts"
        )
    if num_hosts > 1 and not config.cluster.data_interface:
        raise ValueError(
            "cluster.data_interface must name the network interface of tensor traffic, which is "
            f"not encrypted, between {num_hosts} hosts, got none"
        )
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["shell_words"] = shlex.join
    templates.filters["json"] = partial(json.dumps, ensure_ascii=False)
    return templates.get_template(TEMPLATES[config.cluster.scheduler]).render(
        command=command,
        num_hosts=num_hosts,
        num_gpus=config.cluster.num_gpus_per_host if needs_gpu(config) else 0,
        # Seconds from SIGTERM until the scheduler may kill: the step under way, then the save.
        time_to_end_s=math.ceil(config.checkpoint.grace_s) + SAVE_S,
        resumable=RESUMABLE,
    )
