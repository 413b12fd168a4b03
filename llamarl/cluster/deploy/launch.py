"""What starts a run on a cluster's scheduler: an sbatch file, or Kubernetes manifests.

Owns: the text. Does not own: submitting it, or daemons (`worker.py`). Invariant: pure; every host
gets one worker daemon, the controller runs in the same allocation, and nothing talks without TLS.

Monarch's own jobs (monarch.job: SlurmJob, KubernetesJob) start daemons on plain tcp://, without
certificates, and submit by themselves: SlurmJob from a Python process that must stay, KubernetesJob
through an operator and a resource type of its own. These need only what every such cluster has.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from llamarl.config import Config

PORT = 24440
FIRST_PORT, NUM_PORTS = 20000, 10000  # below those that connections take
NAME = "llamarl"
RESUME = "checkpoint.resume=auto"
CERTIFICATES = "/etc/llamarl"
RESUMABLE = os.EX_TEMPFAIL  # 75: exit code of a run that SIGTERM ended; the same command goes on
SAVE_S = 120  # for the save after checkpoint.grace_s, until the scheduler kills
PEM = ("ca", "certificate", "private_key")


def render(config: Config, command: list[str]) -> str:
    """The text for cluster.scheduler; `command` is what follows `llamarl train` in it.

    ValueError if the config names no scheduler, hosts that are there already, or no network for
    tensors between hosts.
    """
    if config.cluster.hosts or config.cluster.scheduler not in SCHEDULERS:
        raise ValueError(
            f"cluster.scheduler must be one of {', '.join(SCHEDULERS)}, without cluster.hosts, to "
            f"launch a run, got {config.cluster.scheduler} with {len(config.cluster.hosts)} hosts"
        )
    if config.cluster.size > 1 and not config.cluster.data_interface:
        raise ValueError(
            "cluster.data_interface must name the network interface of tensor traffic, which is "
            f"not encrypted, between {config.cluster.size} hosts, got none"
        )
    return SCHEDULERS[config.cluster.scheduler](config, command)


def sbatch(config: Config, command: list[str]) -> str:
    """A file for `sbatch`; partition, account and time can be given on its command line.

    Certificates are made for the job's nodes, in a folder that only their owner can read, and the
    port is the job's: a daemon of an earlier job never answers. Before its time is over the run
    saves itself, and the job is queued again under its own number and goes on from there.
    """
    needs_gpu = uses_gpus(config)
    directives = [
        f"--job-name={NAME}",
        f"--nodes={config.cluster.size}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",  # all of it
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{time_to_end_s(config)}",
        *([f"--gpus-per-node={config.cluster.num_gpus_per_host}"] if needs_gpu else []),
    ]
    worker = " ".join(f'--{name.replace("_", "-")} "$certificates/{name}.pem"' for name in PEM)
    controller = " ".join(f'cluster.{name}="$certificates/{name}.pem"' for name in PEM)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {directive}" for directive in directives),
            "set -euo pipefail",
            "# The folder of submission must be on a file system that all nodes see.",
            f"certificates=$PWD/.{NAME}-$SLURM_JOB_ID",
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'rm -rf "$certificates"  # of a start that was killed',
            'python -m llamarl.cluster.deploy.certificates "$certificates" $nodes',
            "export certificates port",
            "# Unbound: a daemon, and all that it starts, would else be given one core.",
            "srun --kill-on-bad-exit=1 --cpu-bind=none bash -c \\",
            f"  'exec llamarl worker --address \"tls://$SLURMD_NODENAME:$port\" {worker}' &",
            "worker=$!",
            'trap \'kill "$worker" 2> /dev/null || true; rm -rf "$certificates"\' EXIT',
            'hosts=$(for node in $nodes; do printf \'"tls://%s:%s",\' "$node" "$port"; done)',
            "# The controller waits for the daemons; arguments of sbatch come last, so they win.",
            f'llamarl train "run_dir=$PWD/runs/$SLURM_JOB_ID" {RESUME} {shlex.join(command)} \\',
            f'  "cluster.hosts=[${{hosts%,}}]" {controller} "$@" &',
            "controller=$!",
            "trap 'kill -TERM \"$controller\" 2> /dev/null || true' TERM",
            "code=0",
            'until wait "$controller"; do  # a signal ends a wait too',
            "  code=$?",
            '  kill -0 "$controller" 2> /dev/null || break',
            "  code=0",
            "done",
            f'if [ "$code" = {RESUMABLE} ] || [ "$code" = 143 ]; then  # 143: ended as it started',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def manifests(config: Config, command: list[str]) -> str:
    """For `kubectl apply -f`: a headless service, a StatefulSet of workers, a Job that trains.

    They want an image with llamarl, a volume claim and a secret, all named llamarl; the text's
    first lines say how to make the secret.
    """
    num_hosts = config.cluster.size
    names = [f"{NAME}-{index}.{NAME}" for index in range(num_hosts)]
    hosts = json.dumps([f"tls://{name}:{PORT}" for name in names])
    controller_name = f"{NAME}-controller.{NAME}"
    pem = {name: f"{CERTIFICATES}/{name}.pem" for name in PEM}
    options = [f"--{name.replace('_', '-')}={path}" for name, path in pem.items()]
    worker = ["llamarl", "worker", f"--address=tls://$(HOSTNAME).{NAME}:{PORT}", *options]
    fields = [f"cluster.{name}={path}" for name, path in pem.items()]
    run_dir = f"run_dir=runs/{NAME}"
    train = ["llamarl", "train", run_dir, RESUME, *command, f"cluster.hosts={hosts}", *fields]
    gpus = {"nvidia.com/gpu": config.cluster.num_gpus_per_host} if uses_gpus(config) else {}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": NAME},
        },
    }
    workers = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": NAME},
        "spec": {
            "serviceName": NAME,
            "replicas": num_hosts,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": NAME, "role": "worker"}},
            "template": _pod("worker", worker, gpus),
        },
    }
    job = _job(_pod("controller", train, {}), time_to_end_s(config))
    notes = [
        "# Before: python -m llamarl.cluster.deploy.certificates certificates \\",
        *(f"#   {name} \\" for name in names),
        f"#   {controller_name}",
        f"# kubectl create secret generic {NAME} --from-file=certificates",
        f"# Image {NAME}: put yours, with llamarl and what its GPUs need.",
        f"# Recipe, run_dir: on volume claim {NAME} (ReadWriteMany). Pods talk on any TCP port.",
        "# After: kubectl delete -f FILE; until then the workers keep their GPUs.",
    ]
    return "\n".join(notes) + "\n" + yaml.safe_dump_all([service, workers, job], sort_keys=False)


def time_to_end_s(config: Config) -> int:
    """Seconds from SIGTERM until the scheduler may kill the run: the step under way, the save."""
    return math.ceil(config.checkpoint.grace_s) + SAVE_S


def uses_gpus(config: Config) -> bool:
    """Whether the recipe computes on GPUs."""
    return "cuda" in (config.trainer.device, config.generator.device)


def _job(template: dict[str, Any], end_s: int) -> dict[str, Any]:
    """The run: its pod is replaced if it was asked to end, and then goes on where it was."""
    template["spec"] |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": end_s,
        "hostname": f"{NAME}-controller",
        "subdomain": NAME,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME},
        "spec": {
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [_ignore(_SAVED), _ignore(_DISRUPTED)]},
            "template": template,
        },
    }


_SAVED = {
    "onExitCodes": {"containerName": "controller", "operator": "In", "values": [RESUMABLE]},
}
_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _ignore(rule: dict[str, Any]) -> dict[str, Any]:
    """A pod that ended so is replaced, and its run goes on."""
    return {"action": "Ignore", **rule}


def _pod(role: str, command: list[str], gpus: dict[str, int]) -> dict[str, Any]:
    container = {
        "name": role,
        "image": NAME,
        "command": command,
        "workingDir": f"/{NAME}",
        "env": [
            {"name": "HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "resources": {"limits": gpus},
        "volumeMounts": [
            {"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True},
            {"name": "work", "mountPath": f"/{NAME}"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "certificates", "secret": {"secretName": NAME}},
        {"name": "work", "persistentVolumeClaim": {"claimName": NAME}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "metadata": {"labels": {"app": NAME, "role": role}},
        # As process 1 the program would ignore SIGTERM, and its orphans would stay as zombies.
        "spec": {"shareProcessNamespace": True, "containers": [container], "volumes": volumes},
    }


SCHEDULERS: dict[str, Callable[[Config, list[str]], str]] = {
    "slurm": sbatch,
    "kubernetes": manifests,
}
