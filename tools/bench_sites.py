"""Two sites: the quickstart with two of its three replicas behind a slow link.

    python tools/bench_sites.py [--json FILE] [--rate 200e6] [--delay 0.03] [--break-s 0]
        [--break-step 10] [--run-dir FOLDER] [OVERRIDE ...]

The trainer's site is this machine; the other one a network namespace (`links.py`) whose link
carries `--rate` bits per second each way, `--delay` seconds late. Each has a `llamarl worker`
daemon. After step `--break-step` the link loses every packet for `--break-s` seconds. Needs root.

`models_per_publish`: bytes that the far site's interface received while a version was on its way
to the replica there that is fed over the link, over the bytes of the model, median of all publishes
but those that met the break. Headers of packets, 4.6 %, and all other traffic are counted with it.
`models_received_per_version`: of the whole training, so with the requests to both far replicas.
`far_publish_s` is the median time of such a publish, `near_publish_s` that of the near replica's.
`standstill_s`: the longest that one commit held up decoding, per replica; `trainer_wait_s`: the
trainer's longest wait for a publish. `sent_share`: bytes that the far site sent in all, calls and
acknowledgements of the weights too, over those of the rollouts it wrote. `num_lost`: rollouts that
started again because a replica was lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from demo_two_hosts import options, worker
from harness import Bench
from links import Host, Link, network, why_not
from live_run import RECIPE, LiveRun, command, environment

from llamarl.cluster.deploy.certificates import make_certificates
from llamarl.metrics.span import Span, SpanReader

MODEL_BYTES = 570_240 * 4  # of the quickstart's weights in the generators' float32
NEAR, HEAD, SIBLING = range(3)  # replicas: the trainer's site's, and those of the other
SAMPLE_S = 0.05


@dataclass
class Watch:
    """Counts what the interface of a host received and sent, from the start until `end`."""

    host: Host
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(Unix time in ns, bytes received, bytes sent)"""
    has_ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def end(self) -> None:
        """Stop counting."""
        self.has_ended.set()
        self._thread.join()

    def received(self, start_ns: float, end_ns: float) -> float:
        """Bytes received between two times."""
        times, counts, _ = zip(*self.samples, strict=True)
        first, last = np.interp([start_ns, end_ns], times, counts)
        return float(last - first)

    def _count(self) -> None:
        while not self.has_ended.wait(SAMPLE_S):
            self.samples.append((time.time_ns(), *self.host.num_bytes()))


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole run; its figures."""
    with ExitStack() as stack:
        hosts = stack.enter_context(network([Link(arguments.rate, arguments.delay)]))
        make_certificates(str(folder), [host.address for host in hosts])
        daemons = [
            stack.enter_context(worker(folder, address=host.address, within=host.command()))[0]
            for host in hosts
        ]
        run_dir = arguments.run_dir or folder / "run"
        watch = Watch(hosts[1])
        stack.callback(watch.end)
        words = command(
            RECIPE,
            run_dir,
            *(f"cluster.hosts={json.dumps(daemons)}", "cluster.sites=[here,there]"),
            *(f"cluster.data_interface={hosts[0].interface}", "weights=collective"),
            *("generator.num_replicas=3", "metrics.live=false", *options(folder, "cluster.{}=")),
            *arguments.overrides,
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, text=True, env=environment()) as process:
            assert process.stdout is not None
            broken = follow(process.stdout, hosts[1], arguments)
        if process.returncode:
            sys.exit(f"bench_sites: the run ended with exit code {process.returncode}")
        return figures(run_dir, watch, broken)


def follow(lines: Iterator[str], far: Host, arguments: argparse.Namespace) -> tuple[int, int]:
    """Pass on what the run says, and break the link; from when to when, in ns of Unix time."""
    breaking, broken = None, [0, 0]

    def lose_packets() -> None:
        broken[0] = time.time_ns()
        with far.broken():
            time.sleep(arguments.break_s)
        broken[1] = time.time_ns()

    for line in lines:
        print(line, end="", flush=True)
        words = line.split()
        number = words[words.index("step") + 1].partition("/")[0] if "step" in words else ""
        is_due = number.isdigit() and int(number) >= arguments.break_step
        if is_due and arguments.break_s and breaking is None:
            breaking = threading.Thread(target=lose_packets)
            breaking.start()
    if breaking is not None:
        breaking.join()
    return broken[0], broken[1]


def figures(run_dir: Path, watch: Watch, broken: tuple[int, int]) -> dict[str, Any]:
    """Of a finished run."""
    controller, trainer = spans_of(run_dir, "controller"), spans_of(run_dir, "trainer-0")
    generators = [spans_of(run_dir, f"generator-{replica}") for replica in (NEAR, HEAD, SIBLING)]
    published = {
        replica: [s for s in controller if s.name == "publish" and s.args.get("replica") == replica]
        for replica in (NEAR, HEAD, SIBLING)
    }
    head = published[HEAD]
    whole = [s for s in head if s.end_ns < broken[0] or s.start_ns > broken[1] or not broken[1]]
    during = [watch.received(s.start_ns, s.end_ns) / MODEL_BYTES for s in whole]
    in_all = watch.received(head[0].start_ns, head[-1].end_ns) / MODEL_BYTES
    written = [s for each in generators[HEAD:] for s in each if s.name == "put"]
    (_, _, first), (_, _, last) = watch.samples[0], watch.samples[-1]
    summary = LiveRun(run_dir).summary
    archive = [json.loads(line) for line in (run_dir / "archive/rollouts-0.jsonl").open()]
    return {
        "accuracy_after": summary["accuracy_after"],
        "steps": summary["steps"],
        "models_per_publish": statistics.median(during),
        "models_received_per_version": in_all / len(head),
        "num_versions": [len(spans) for spans in published.values()],
        "far_publish_s": statistics.median(map(seconds, whole)),
        "longest_far_publish_s": max(map(seconds, head)),
        "near_publish_s": statistics.median(map(seconds, published[NEAR])),
        "standstill_s": [longest(each, "commit") for each in generators],
        "trainer_wait_s": longest(trainer, "publish"),
        "sent_share": (last - first) / sum(sum(s.args["bytes"].values()) for s in written),
        "far_rollouts": sum(s.args["rows"] for s in written),
        "num_lost": sum(row["outcome"] == "lost" for row in archive),
        "rollouts_trained": summary["rollouts_trained"],
        "staleness_max": summary["staleness_max"],
        "break_s": (broken[1] - broken[0]) / 1e9,
        "tokens_per_s": summary["tokens_per_s"],
    }


def spans_of(run_dir: Path, process: str) -> list[Span]:
    """Of one process; their times are Unix time."""
    return list(SpanReader(run_dir / "spans" / f"{process}.jsonl").read())


def seconds(span: Span) -> float:
    """How long it took."""
    return (span.end_ns - span.start_ns) / 1e9


def longest(spans: Sequence[Span], name: str) -> float:
    """The longest span with this name."""
    return max((seconds(span) for span in spans if span.name == name), default=0.0)


def main() -> None:
    """Measure."""
    bench = Bench(__doc__, {"models_per_publish": "<= 1.05"})
    bench.option("--rate", type=float, default=200e6, help="bits per second of the link")
    bench.option("--delay", type=float, default=0.03, help="seconds of the link, each way")
    bench.option("--break-s", type=float, default=0.0, help="how long the link is broken")
    bench.option("--break-step", type=int, default=10, help="after which step")
    bench.option("--run-dir", type=Path, help="keep the run's folder here")
    bench.option("overrides", nargs="*", help="of the recipe")
    arguments = bench.parse()
    if reason := why_not():
        sys.exit(f"bench_sites: {reason}")
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        bench.add_all(run(arguments, Path(folder)))
    bench.write()


if __name__ == "__main__":
    main()
