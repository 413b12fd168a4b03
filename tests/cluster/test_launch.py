"""What `llamarl launch` prints: files that their readers accept, for the right number of hosts."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from llamarl.cluster.launch import render
from llamarl.core.config import Config
from tests.recipe.test_config import MINIMUM, make_config

COMMAND = ["--config-dir", "recipes/a b", "trainer.lr=1e-4"]
NODES = ("node7", "node8", "node9")
FAKES = {
    "scontrol": f"""
        if [ $1 = requeue ]; then echo $2 > said-requeue; exit; fi
        printf '%s\\n' {" ".join(NODES)}""",
    "srun": 'shift 2; SLURMD_NODENAME=node8 exec "$@"',
    "python": 'mkdir "$3"; printf "%s\\n" "${@:2}" > said-python',
    "llamarl": """
        printf '%s\\n' "$@" > part-$1; mv part-$1 said-$1
        until [ -e said-worker ]; do sleep 0.01; done""",
}


def config(scheduler: str, device: str = "cuda") -> Config:
    return make_config(
        *MINIMUM,
        f"cluster={scheduler}",
        "cluster.num_hosts=3",
        "cluster.data_interface=eth0",
        "weights=collective",
        f"trainer.device={device}",
        f"generator.device={device}",
    )


def prepare(tmp_path: Path, text: str, fakes: dict[str, str]) -> dict[str, str]:
    """Write the file and programs that only write down how they were called; the environment."""
    for name, body in fakes.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "job.sh").write_text(text)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "20011",
        "SLURM_JOB_NODELIST": "node[7-9]",
    }


def test_the_sbatch_file_starts_a_daemon_on_each_node_and_trains_on_all(tmp_path: Path) -> None:
    """It runs here, for real, against programs that only write down how they were called."""
    text = render(config("slurm"), COMMAND)
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "gpus" not in render(config("slurm", "cpu"), COMMAND)
    environment = prepare(tmp_path, text, FAKES)
    done = subprocess.run(
        ["bash", "job.sh", "seed=3"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    python, worker, train = (
        (tmp_path / f"said-{name}").read_text().splitlines()
        for name in ("python", "worker", "train")
    )
    certificates = f"{tmp_path}/.llamarl-20011"
    assert python == ["llamarl.cluster.certificates", certificates, *NODES]
    assert worker[:4] == ["worker", "--address", "tls://node8:20011", "--ca"]
    assert train[:3] == ["train", f"run_dir={tmp_path}/runs/20011", "checkpoint.resume=auto"]
    assert train[3:6] == COMMAND
    hosts = yaml.safe_load(train[6].removeprefix("cluster.hosts="))
    assert hosts == [f"tls://{node}:20011" for node in NODES]
    assert f"cluster.private_key={certificates}/private_key.pem" in train
    assert train[-1] == "seed=3"
    assert not Path(certificates).exists()  # the keys go with the job
    assert not (tmp_path / "said-requeue").exists()


@pytest.mark.parametrize(
    ("end", "code", "is_requeued"),
    [
        ("trap 'sleep 0.3; exit 75' TERM", 75, True),  # saved at the end of its step
        (":", 143, True),  # it was still starting
        ("trap 'exit 0' TERM", 0, False),  # it came to its end meanwhile
        ("trap 'exit 1' TERM", 1, False),
    ],
)
def test_a_job_that_slurm_terminates_lets_the_run_end_and_is_queued_again(
    end: str, code: int, is_requeued: bool, tmp_path: Path
) -> None:
    text = render(config("slurm"), COMMAND)
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:TERM@135\n" in text
    train = f"""
        if [ $1 = worker ]; then exec sleep 60; fi
        {end}
        touch said-start
        while true; do sleep 0.01; done"""
    environment = prepare(tmp_path, text, FAKES | {"llamarl": train})
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment)
    limit_s = time.monotonic() + 30
    while not (tmp_path / "said-start").exists():
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    job.terminate()
    assert job.wait(30) == code
    assert (tmp_path / "said-requeue").exists() == is_requeued
    assert not (tmp_path / ".llamarl-20011").exists()


def test_the_manifests_make_one_pod_per_host_and_one_that_trains() -> None:
    service, workers, job = yaml.safe_load_all(render(config("kubernetes"), COMMAND))
    assert (service["kind"], workers["kind"], job["kind"]) == ("Service", "StatefulSet", "Job")
    assert workers["spec"]["replicas"] == 3
    pod = workers["spec"]["template"]["spec"]["containers"][0]
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": 8}
    address = next(word for word in pod["command"] if word.startswith("--address="))
    port = address.rpartition(":")[2]
    train = job["spec"]["template"]["spec"]["containers"][0]["command"]
    hosts = next(word for word in train if word.startswith("cluster.hosts="))
    assert yaml.safe_load(hosts.removeprefix("cluster.hosts=")) == [
        f"tls://llamarl-{index}.llamarl:{port}" for index in range(3)
    ]
    assert train[:4] == ["llamarl", "train", "run_dir=runs/llamarl", "checkpoint.resume=auto"]
    assert train[4:7] == COMMAND
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 135
    saved, disrupted = job["spec"]["podFailurePolicy"]["rules"]
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])
    assert saved["onExitCodes"]["containerName"] == "controller"
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    for template in (workers["spec"]["template"], job["spec"]["template"]):
        labels = template["metadata"]["labels"]
        assert labels.items() >= service["spec"]["selector"].items()
    labels = workers["spec"]["template"]["metadata"]["labels"]
    assert workers["spec"]["selector"]["matchLabels"] == labels
    assert "resources: {}" not in render(config("kubernetes", "cpu"), COMMAND)
