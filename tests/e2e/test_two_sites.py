"""A whole run with replicas at a second site, behind a link of 200 Mbit/s and 30 ms."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_two_hosts import options, worker
from live_run import RECIPE, LiveRun, command, environment

from llamarl.cluster.certificates import make_certificates
from llamarl.metrics.span import Span, SpanReader
from tests.links import Host, Link, network, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"namespaces of Linux: {WHY_NOT}"),
]

BREAK_S, BREAK_STEP = 10.0, 10
NEAR, HEAD, SIBLING = range(3)  # replicas: the trainer's site's, and those of the other


def test_a_run_at_two_sites_learns_as_ever_and_a_break_of_ten_seconds_loses_nothing(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    train(tmp_path, run_dir)
    summary = LiveRun(run_dir).summary
    assert summary["accuracy_after"] >= 0.9
    assert summary["rollouts_trained"] == 30 * 64 * 8
    assert summary["staleness_max"] <= 1
    archive = [json.loads(line) for line in (run_dir / "archive/rollouts-0.jsonl").open()]
    assert not [row for row in archive if row["outcome"] == "lost"]
    generators = [spans_of(run_dir, f"generator-{replica}") for replica in (NEAR, HEAD, SIBLING)]
    written = [span for each in generators[HEAD:] for span in each if span.name == "put"]
    assert sum(span.args["rows"] for span in written) > 1000
    far_s = [
        seconds(span)
        for span in spans_of(run_dir, "controller")
        if span.name == "publish" and span.args.get("replica") == HEAD
    ]
    assert max(far_s) >= BREAK_S / 2, "the break met a publish, which went on"
    # Neither decoding nor the trainer stood still for a version on its way.
    commits_s = [seconds(span) for each in generators for span in each if span.name == "commit"]
    assert max(commits_s) < 0.1 < sorted(far_s)[len(far_s) // 2]
    waits_s = [seconds(s) for s in spans_of(run_dir, "trainer-0") if s.name == "publish"]
    assert max(waits_s, default=0.0) < 0.1
    assert "Traceback" not in (run_dir / "logs" / "generator-1.log").read_text()


def train(folder: Path, run_dir: Path) -> None:
    """The quickstart with two of its three replicas in a namespace whose link breaks once."""
    with ExitStack() as stack:
        hosts = stack.enter_context(network([Link(200e6, delay_s=0.03)]))
        make_certificates(str(folder), [host.address for host in hosts])
        daemons = [
            stack.enter_context(worker(folder, address=host.address, within=host.command()))[0]
            for host in hosts
        ]
        words = command(
            RECIPE,
            run_dir,
            *(f"cluster.hosts={json.dumps(daemons)}", "cluster.sites=[here,there]"),
            *(f"cluster.data_interface={hosts[0].interface}", "weights=collective"),
            *("generator.num_replicas=3", "metrics.live=false", *options(folder, "cluster.{}=")),
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, text=True, env=environment()) as process:
            assert process.stdout is not None
            break_link(process.stdout, hosts[1])
        assert process.returncode == 0


def break_link(lines: Iterable[str], far: Host) -> None:
    """Lose every packet for some seconds after a step, while the run goes on."""

    def lose_packets() -> None:
        with far.broken():
            time.sleep(BREAK_S)

    breaking = threading.Thread(target=lose_packets)
    for line in lines:
        words = line.split()
        number = words[words.index("step") + 1].partition("/")[0] if "step" in words else ""
        if number.isdigit() and int(number) >= BREAK_STEP and breaking.ident is None:
            breaking.start()
    assert breaking.ident is not None
    breaking.join()


def spans_of(run_dir: Path, process: str) -> list[Span]:
    return list(SpanReader(run_dir / "spans" / f"{process}.jsonl").read())


def seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e9
