"""The summary of a run and its timeline, computed from the run folder alone (archive of retired
rollouts, spans, metrics.jsonl). No file of spans is ever whole in memory."""

import json
import logging
import os
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from llamarl.core.files import parse, write_object
from llamarl.metrics.estimates import length, share_of
from llamarl.metrics.held_out import ACCURACY, ENDS, EVALUATION
from llamarl.metrics.shares import by_executor, read_timeline
from llamarl.metrics.span import Span, SpanReader, executor_of, span_files
from llamarl.metrics.step_metrics import (
    SOURCE_TAGS,
    STEP_S,
    TOKENS_PER_S,
    TRAINED_TOKENS,
    sum_sources,
    tokens_per_s,
)
from llamarl.metrics.trackers import METRICS_FILE, read_metrics

LOGGER = logging.getLogger(__name__)
SUMMARY_FILE = "summary.json"
SPANS_FOLDER = "spans"
TRACE_FILE = "trace.json"
ARCHIVE_FOLDER = "archive"
ARCHIVE_FILES = "rollouts-*.jsonl"
LOSS = "loss/train"
REWARD, STALENESS = "reward/mean", "staleness/mean"
RATIO_MEAN, RATIO_CLIPPED = "trained/ratio_mean", "trained/clipped_share"
READ_TAGS = [LOSS, REWARD, STALENESS, RATIO_MEAN, RATIO_CLIPPED, TRAINED_TOKENS, EVALUATION]
READ_TAGS += [TOKENS_PER_S, STEP_S, *SOURCE_TAGS]
TRACKS = ("work", "publish", "mark")  # busy and wait spans share a track: they alternate
TRACK_OF = {"busy": 0, "wait": 0, "publish": 1}  # by category; any other is a mark
MAX_LANES = 1000
PROCESS_ORDER = ("controller", "generator", "trainer", "scorer", "reference", "storage")

Summary = dict[str, Any]


def summarize(run_dir: str | Path, ended_by: str = "") -> Summary:
    """Compute the summary, write it to `run_dir/summary.json` in one move and return it.

    `trace.json` is written beside it from the same spans, which are read once.

    A figure is null where nothing was stored for it. accuracy_*: share that is correct by the first
    reward function among the held-out rollouts (a failed reward counts as wrong), before (version
    0) and after (version_after, the last one evaluated), with its 95 % interval_* and mean
    reward_*. held_out_shares: by name, pass_at_k, maj_at_k and those of named sets, with the ends
    of their intervals. training_reward, training_loss: means of the first step and of the last one.
    steps: versions trained, also if a storage unit that was lost had all rollouts of one. wall_s:
    from the first process's start to the last span, summed over sessions of a resumed run.
    tokens_per_s: over the steps' own seconds, as their lines have it. staleness_mean, ratio_*: over
    trained tokens, once for each step that used them.
    staleness_max: without tokens masked as too old. groups_dropped: reason -> groups of which
    nothing was trained. sources: as `step_metrics.sum_sources` says. both_busy_share and executors
    (means over their processes) are shares of the time from the first step's start to the last
    one's end; tokens_during_publish and both_busy_share are over the part of the run whose spans
    are kept one by one. ended_by is what the caller knows: which limit ended the run.
    """
    run_dir = Path(run_dir)
    with TraceFile(run_dir / SPANS_FOLDER, run_dir / TRACE_FILE) as trace:
        timeline = read_timeline(run_dir / SPANS_FOLDER, trace.add)
    rollouts = _read_archive(run_dir / ARCHIVE_FOLDER)
    path = run_dir / METRICS_FILE
    steps = read_metrics(path, READ_TAGS) if path.exists() else {}
    steps_s = length(timeline.steps) / 1e9
    rewards, losses = ([s[tag] for s in steps.values() if tag in s] for tag in (REWARD, LOSS))
    summary = {
        **(held_out := rollouts.held_out()),
        "held_out_shares": _shares(steps, held_out["version_after"]),
        "training_reward": [rewards[0], rewards[-1]] if rewards else None,
        "training_loss": [losses[0], losses[-1]] if losses else None,
        "steps": max(len(rollouts.versions), len(rewards), len(losses)),
        "ended_by": ended_by,
        "wall_s": length(timeline.sessions) / 1e9,
        "tokens_per_s": tokens_per_s(steps.values()),
        "rollouts_trained": rollouts.num_trained,
        "groups_dropped": {reason: len(ids) for reason, ids in sorted(rollouts.dropped.items())},
        "sources": sum_sources([*steps.values()]),
        "staleness_mean": _mean_over_tokens(steps, STALENESS),
        "staleness_max": max(rollouts.ages, default=None),
        "both_busy_share": timeline.both_busy_share() if steps_s else None,
        "mixed_version_share": _ratio(rollouts.num_mixed, rollouts.num_trained),
        "tokens_during_publish": timeline.tokens_during_publish(),
        "ratio_mean": _mean_over_tokens(steps, RATIO_MEAN),
        "ratio_clipped_share": _mean_over_tokens(steps, RATIO_CLIPPED),
        "executors": {
            name: {"busy": shares.busy, "wait": shares.waits}
            for name, shares in by_executor(timeline.shares() if steps_s else {}).items()
        },
    }
    write_object(run_dir / SUMMARY_FILE, summary)
    return summary


@dataclass
class ArchivedRollouts:
    """Running sums over the archive's lines."""

    versions: set[int] = field(default_factory=set)
    num_trained: int = 0
    num_mixed: int = 0
    ages: set[int] = field(default_factory=set)  # of trained tokens
    dropped: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    # (correct, reward) of the rollouts, by evaluated version and prompt
    evaluated: dict[int, dict[Any, list[Any]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    losses: dict[int, float] = field(default_factory=dict)  # of held-out demonstrations, the same

    def add(self, line: dict[str, Any]) -> None:
        """Count one retired rollout; of a further conversation of an episode, the versions and ages
        of its tokens alone."""
        is_first = "conversation" not in line
        if line["outcome"] == "trained":
            self.versions.add(line["version"])
            self.num_trained += is_first
            versions = {version for version, _ in line["spans"]}
            self.num_mixed += len(versions) > 1 and is_first
            self.ages |= {line["version"] - v for v in versions if v >= line["oldest_version"]}
        elif line["outcome"] == "dropped" and not line.get("left_out"):
            self.dropped[line["reason"]].add(line["group_id"])  # the rest of which was not trained
        elif line["outcome"] == "evaluated" and "loss" in line:
            self.losses[line["version"]] = float(line["loss"])
        elif line["outcome"] == "evaluated" and is_first:
            reward = line["reward"] or 0.0  # null: it failed
            correct = line.get("correct", reward >= 1.0)
            prompt = line.get("held_out"), line["prompt_id"]
            self.evaluated[line["version"]][prompt].append((bool(correct), reward))

    def held_out(self) -> dict[str, Any]:
        """Return the figures of evaluations for summary.json."""
        last = max(self.evaluated, default=0) or None
        found: dict[str, Any] = {"version_after": last, "held_out_prompts": None}
        for name, version in (("before", 0), ("after", last)):
            prompts = {} if version is None else self.evaluated.get(version, {})
            pairs = [pair for of_prompt in prompts.values() for pair in of_prompt]
            accuracy, reward = np.mean(pairs, axis=0).tolist() if pairs else (None, None)
            found[f"accuracy_{name}"], found[f"reward_{name}"] = accuracy, reward
            found[f"interval_{name}"] = None
            if prompts:
                sums = [sum(correct for correct, _ in each) for each in prompts.values()]
                found[f"interval_{name}"] = [*share_of(sums, [*map(len, prompts.values())])][1:]
                found["held_out_prompts"] = len(prompts)
        found["loss_before"] = self.losses.get(0)
        found["loss_after"] = self.losses[max(self.losses)] if self.losses else None
        return found


def _shares(steps: dict[int, dict[str, Any]], last: int | None) -> dict[str, dict[str, Any]]:
    """Return every share but the accuracy of all prompts, of the first and the last version
    evaluated."""
    found: dict[str, dict[str, Any]] = {}
    for when, version in (("before", 0), ("after", last)):
        line = {} if version is None else steps.get(version, {})
        for tag in line:
            share, name = [line.get(f"{tag}{end}") for end in ENDS], tag.removeprefix(EVALUATION)
            is_share = tag != name and all(isinstance(each, int | float) for each in share)
            if is_share and name != ACCURACY:
                found.setdefault(name, {})[when] = share
    return found


def _read_archive(folder: Path) -> ArchivedRollouts:
    """Return the sums over all rollouts. It skips the line that a killed process left unfinished,
    and, with a warning, damaged ones."""
    rollouts = ArchivedRollouts()
    for path in sorted(folder.glob(ARCHIVE_FILES)):
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                try:
                    rollouts.add(parse(text))
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    if text.endswith(b"\n"):
                        LOGGER.warning("%s:%d is not counted: %r", path, number, error)
    return rollouts


def _mean_over_tokens(steps: dict[int, dict[str, Any]], tag: str) -> float | None:
    """Return the mean of what each step reported under `tag`, weighted by its trained tokens."""
    pairs: list[Any] = [(step.get(tag), step.get(TRAINED_TOKENS)) for step in steps.values()]
    sound = [pair for pair in pairs if all(isinstance(each, int | float) for each in pair)]
    whole = sum(weight for _, weight in sound)
    return _ratio(sum(value * weight for value, weight in sound), whole)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class TraceFile:
    """Writes one trace; use it as a context manager, and `add` the spans process by process.

    Times are microseconds since the first span of the run. It replaces `out_path` in one move, once
    the block has ended without an error."""

    def __init__(self, spans_folder: str | Path, out_path: str | Path) -> None:
        self.num_spans = 0
        paths = sorted(span_files(spans_folder), key=_order)
        self._pids = {path.stem: pid for pid, path in enumerate(paths, start=1)}
        # The first span of a process is its start.
        firsts = (next(SpanReader(path).read(), None) for path in paths)
        self._zero_ns = min((span.start_ns for span in firsts if span is not None), default=0)
        self._out_path = out_path
        self._unfinished = Path(f"{out_path}.tmp")
        self._lane_ends_ns: dict[tuple[str, int], list[int]] = defaultdict(list)  # by track
        self._cut_ns: dict[str, int] = {}  # by process: before this, its spans are sums

    def __enter__(self) -> Self:
        self._file = self._unfinished.open("w")
        self._separator = ""
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for process, pid in self._pids.items():
            self._write("M", "process_name", pid, 0, args={"name": process})
            self._write("M", "process_sort_index", pid, 0, args={"sort_index": pid})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        at = {name: datetime.fromtimestamp(ns / 1e9, UTC) for name, ns in self._cut_ns.items()}
        cut = {name: f"from {time.isoformat(timespec='seconds')} on" for name, time in at.items()}
        other_data = f', "otherData": {json.dumps({"cut": cut})}' if cut else ""
        self._file.write(f"\n]{other_data}}}\n")
        self._file.close()
        if kind is None:
            os.replace(self._unfinished, self._out_path)

    def add(self, process: str, span: Span) -> None:
        """Write `span`; a sum of spans only adds a note that the trace of `process` is cut."""
        if span.is_sum:
            self._cut_ns[process] = max(self._cut_ns.get(process, 0), span.end_ns)
            return
        self.num_spans += 1
        pid, tid = self._pids[process], self._place(process, span)
        start_us = (span.start_ns - self._zero_ns) / 1e3
        times_us = {"ts": start_us, "dur": (span.end_ns - span.start_ns) / 1e3}
        self._write("X", span.name, pid, tid, cat=span.cat, **times_us, args=span.args)

    def _place(self, process: str, span: Span) -> int:
        """Return the thread id of the first lane of the span's track that is free at its start."""
        track = TRACK_OF.get(span.cat, len(TRACKS) - 1)
        ends_ns = self._lane_ends_ns[process, track]
        lane = next((i for i, end in enumerate(ends_ns) if end <= span.start_ns), len(ends_ns))
        tid = track * MAX_LANES + lane + 1
        if lane == len(ends_ns):
            ends_ns.append(0)
            name = f"{TRACKS[track]} {lane + 1}" if lane else TRACKS[track]
            self._write("M", "thread_name", self._pids[process], tid, args={"name": name})
        ends_ns[lane] = span.end_ns
        return tid

    def _write(self, phase: str, name: str, pid: int, tid: int, **more: Any) -> None:
        event = {"ph": phase, "name": name, "pid": pid, "tid": tid, **more}
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"


def _order(path: Path) -> tuple[int, str]:
    executor = executor_of(path.stem)
    return [*PROCESS_ORDER, executor].index(executor), path.stem
