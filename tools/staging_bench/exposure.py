"""What a publish costs generators and trainer, from the spans that a run recorded.

Times are nanoseconds, sets of time as in llamarl/metrics/intervals.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from llamarl.metrics.intervals import Intervals, intersect, length, subtract, union
from llamarl.metrics.span import Span, SpanReader, span_files

SOON_NS = 50_000_000  # work that waited for a commit begins within this time after it
Spans = dict[str, list[Span]]  # by process


@dataclass(frozen=True, slots=True)
class Exposure:
    """Figures of one run; seconds and tokens are per publish.

    Of each generator, the mean over them: `idle_share` (of the time, without prefill and decode),
    `interrupted_s` (its commits, the waits between a version's buckets, and those in which it was
    made to stand still), `starved_s` (else: it had nothing to decode but rollouts that waited for
    the version).
    `all_stopped_s`: all generators at once. `trainer_s`: the trainer waited for a publish.
    `publish_s`: from a version until the last replica has it. `lead_s`: from the first replica's
    commit to the last one's, and `lead_tokens` what the others wrote with the new weights by then.
    `early_share`: publishes in which a replica committed before the last one had received it.
    """

    num_publishes: int
    idle_share: float
    interrupted_s: float
    starved_s: float
    all_stopped_s: float
    trainer_s: float
    publish_s: float
    lead_s: float
    lead_tokens: float
    early_share: float

    @property
    def exposed_s(self) -> float:
        """A generator did not decode, and would have done without the publish."""
        return self.interrupted_s + self.starved_s


@dataclass(frozen=True, slots=True)
class Publish:
    """When a version was there, when the controller ended its publish, and by replica when the
    first bucket had been verified and when the commit began and ended."""

    version: int
    start_ns: int
    end_ns: int
    verified_ns: list[int]
    commits_ns: list[tuple[int, int]]


def read_spans(folder: Path) -> Spans:
    """All spans of a run."""
    return {path.stem: list(SpanReader(path).read()) for path in span_files(folder)}


def measure(spans: Spans, first_version: int) -> Exposure:
    """The figures of `first_version` and later ones, while the run still trained.

    ValueError if no such version reached all replicas.
    """
    steps = _named(spans["controller"], "step")
    window = _set(step for step in steps if step.args["version"] > first_version)
    generators = [each for name, each in spans.items() if name.startswith("generator-")]
    publishes = _publishes(spans["controller"], generators, window)
    if not publishes:
        raise ValueError(f"a version from {first_version} on must reach all replicas, got none")
    interrupted, starved, idle = [], [], []
    for replica, generator in enumerate(generators):
        decoding = [*_named(generator, "decode"), *_named(generator, "prefill")]
        idle.append(length(subtract(window, _set(decoding))))
        pauses = [(span.start_ns, span.end_ns) for span in _named(generator, "phase")]
        waits = []
        for publish in publishes:
            begin_ns, end_ns = publish.commits_ns[replica]
            pauses.append((begin_ns, end_ns))
            if any(0 <= span.start_ns - end_ns < SOON_NS for span in decoding):
                waits.append((publish.start_ns, begin_ns))
        stopped = _set(s for s in generator if s.cat == "wait" or s.name == "commit")
        stopped = intersect(stopped, _union([(publishes[0].start_ns, int(window[-1, 1]))]))
        interrupted.append(intersect(stopped, _union(pauses)))
        starved.append(intersect(stopped, subtract(_union(waits), _union(pauses))))
    exposed = [union(np.concatenate(pair)) for pair in zip(interrupted, starved, strict=True)]
    num, num_generators = len(publishes), len(generators)
    return Exposure(
        num_publishes=num,
        idle_share=sum(idle) / num_generators / length(window),
        interrupted_s=sum(map(length, interrupted)) / num_generators / num / 1e9,
        starved_s=sum(map(length, starved)) / num_generators / num / 1e9,
        all_stopped_s=length(reduce(intersect, exposed)) / num / 1e9,
        trainer_s=_trainer_ns(spans["trainer-0"], publishes) / num / 1e9,
        publish_s=sum(_last_ns(each) - each.start_ns for each in publishes) / num / 1e9,
        lead_s=sum(_last_ns(each) - _first_ns(each) for each in publishes) / num / 1e9,
        lead_tokens=sum(_lead_tokens(generators, each) for each in publishes) / num,
        early_share=sum(_is_early(each) for each in publishes) / num,
    )


def _publishes(
    controller: list[Span], generators: list[list[Span]], window: Intervals
) -> list[Publish]:
    """Those that began within the window and ended there, at every replica."""
    begin_ns, end_ns = int(window[0, 0]), int(window[-1, 1])
    publishes = []
    for span in _named(controller, "publish"):
        if "replica" in span.args or not begin_ns <= span.start_ns < span.end_ns <= end_ns:
            continue
        version = span.args["version"]
        found = [(_of(g, "verify", version), _of(g, "commit", version)) for g in generators]
        if all(verified and committed for verified, committed in found):
            verified_ns = [verified[0].end_ns for verified, _ in found]
            commits_ns = [(committed[0].start_ns, committed[-1].end_ns) for _, committed in found]
            publishes.append(Publish(version, span.start_ns, span.end_ns, verified_ns, commits_ns))
    return publishes


def _trainer_ns(trainer: list[Span], publishes: list[Publish]) -> int:
    """How long it kept its weights for a publish, or did not begin a batch because of one."""
    kept = _set(s for s in _named(trainer, "publish") if s.cat == "wait")
    waited = _set(_named(trainer, "batch"))
    stepped = {s.args["version"]: s.end_ns for s in _named(trainer, "optimizer_step")}
    total_ns = 0
    for publish in publishes:
        # The next step is computed beside the publish; the one after it begins when both are done.
        next_ns = stepped.get(publish.version, publish.end_ns)
        total_ns += length(intersect(kept, _union([(publish.start_ns, next_ns)])))
        total_ns += length(intersect(waited, _union([(next_ns, publish.end_ns)])))
    return total_ns


def _lead_tokens(generators: list[list[Span]], publish: Publish) -> int:
    """Tokens of decode steps with the new version that began before the last commit had ended."""
    steps = itertools.chain.from_iterable(_of(g, "decode", publish.version) for g in generators)
    return sum(step.args["tokens"] for step in steps if step.start_ns < _last_ns(publish))


def _is_early(publish: Publish) -> bool:
    return min(start_ns for start_ns, _ in publish.commits_ns) < max(publish.verified_ns)


def _first_ns(publish: Publish) -> int:
    return min(end_ns for _, end_ns in publish.commits_ns)


def _last_ns(publish: Publish) -> int:
    return max(end_ns for _, end_ns in publish.commits_ns)


def _named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def _of(spans: list[Span], name: str, version: int) -> list[Span]:
    """By their start."""
    each = (span for span in _named(spans, name) if span.args["version"] == version)
    return sorted(each, key=lambda span: span.start_ns)


def _set(spans: Iterable[Span]) -> Intervals:
    return _union([(span.start_ns, span.end_ns) for span in spans])


def _union(pairs: list[tuple[int, int]]) -> Intervals:
    """Pairs that end before they begin cover nothing."""
    return union(np.array(pairs, dtype=np.int64).reshape(-1, 2))
