"""Whole runs on two worker daemons, as on two hosts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llamarl.cluster.certificates import make_certificates
from llamarl.cluster.os_process import is_alive
from llamarl.controller.control import ask, scale

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_two_hosts import LLAMARL, ROOT, children, options, worker

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
END_LIMIT_S = 20.0  # on idle cores it is 3


def train(certificates: Path, hosts: list[str], run_dir: Path) -> list[str]:
    return [
        *(*LLAMARL, "train", "--config-dir", str(ROOT / "recipes/quickstart")),
        *(f"cluster.hosts={json.dumps(hosts)}", "weights=collective", f"run_dir={run_dir}"),
        *("metrics.live=false", *options(certificates, "cluster.{}=")),
    ]


def test_two_hosts_learn_what_one_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/demo_two_hosts.py", f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] >= 0.9
    left = [path.name for path in (tmp_path / "run").glob(".*")]
    assert left == [".lock"]  # no rendezvous, no probe


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_host_ends_the_run_with_one_reason(tmp_path: Path, victim: int) -> None:
    """Of the first, with the trainer; of the second, with the only generator."""
    make_certificates(str(tmp_path), ["127.0.0.1"])
    with worker(tmp_path) as (one, first), worker(tmp_path) as (two, second):
        command = train(tmp_path, [one, two], tmp_path / "run")
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        assert run.stdout is not None
        assert any(" step 1/30 " in line for line in run.stdout)
        started = children(first.pid) | children(second.pid)
        assert len(started) >= 5
        (first, second)[victim].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        output = " ".join(run.stdout.read().split())  # log lines are broken into several
        assert run.wait() == 1
        assert time.monotonic() - killed_s < END_LIMIT_S
        assert f"host {(one, two)[victim]} is lost: its worker daemon does not answer" in output
        assert not [pid for pid in started if is_alive(pid)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_host_that_joins_late_takes_a_replica_until_it_is_removed_or_lost(
    tmp_path: Path, is_lost: bool
) -> None:
    make_certificates(str(tmp_path), ["127.0.0.1"])
    run_dir = tmp_path / "run"
    with worker(tmp_path) as (one, _):
        run = subprocess.Popen(
            [*train(tmp_path, [one], run_dir), "num_steps=100"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        assert run.stdout is not None
        assert any(" step 1/100 " in line for line in run.stdout)
        with pytest.raises(ValueError, match=r"got no answer from tls://127\.0\.0\.1:1 "):
            scale([str(run_dir), "generators=2", "host=tls://127.0.0.1:1"])
        with worker(tmp_path) as (two, second):
            assert scale([str(run_dir), "generators=2", f"host={two}"]) == "generators: 1 -> 2\n"
            end_s = time.monotonic() + LIMIT_S
            while (row := replica(run_dir, "generator-1")) is None or row["version"] < 3:
                assert time.monotonic() < end_s
                time.sleep(0.2)
            assert children(second.pid), "it runs there"
            if is_lost:
                second.kill()
                while replica(run_dir, "generator-1") is not None:
                    assert time.monotonic() < end_s
                    time.sleep(0.2)
                assert scale([str(run_dir), "generators=2"]) == "generators: 1 -> 2\n"
                while (row := replica(run_dir, "generator-2")) is None or row["version"] < 3:
                    assert time.monotonic() < end_s, "another number, on the host that is left"
                    time.sleep(0.2)
            else:
                assert scale([str(run_dir), "generators=1"]) == "generators: 2 -> 1\n"
            version = trained_version(run_dir)
            while trained_version(run_dir) < version + 5:
                assert time.monotonic() < end_s
                time.sleep(0.2)
            run.send_signal(signal.SIGTERM)
            output = " ".join(run.stdout.read().split())  # log lines are broken into several
            assert run.wait() == 75, output
            assert is_lost == ("generator 1 is not started again, the others go on" in output)
            assert not [pid for pid in children(second.pid) if is_alive(pid)]


def trained_version(run_dir: Path) -> int:
    version: int = ask(str(run_dir), {"ask": "status"})["version"]
    return version


def replica(run_dir: Path, name: str) -> dict[str, Any] | None:
    rows = ask(str(run_dir), {"ask": "status"})["executors"]
    return next((row for row in rows if row["executor"] == name), None)
