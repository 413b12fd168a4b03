"""summary.json: what a run achieved, computed again from what it stored.

Owns: the keys of summary.json and how each is computed. Does not own: anything counted during
the run. Invariant: a function of the run folder alone (archive of retired rollouts, spans,
metrics.jsonl), independent of the loop's own counters.
"""

import json
import logging
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.json_file import parse
from llamarl.metrics.accuracy import interval
from llamarl.metrics.aggregate import by_executor, read_timeline
from llamarl.metrics.intervals import length
from llamarl.metrics.metrics_log import METRICS_FILE, read_metrics
from llamarl.metrics.step_metrics import TRAINED_TOKENS
from llamarl.metrics.trace import TraceFile

LOGGER = logging.getLogger(__name__)
SUMMARY_FILE = "summary.json"
SPANS_FOLDER = "spans"
TRACE_FILE = "trace.json"
ARCHIVE_FOLDER = "archive"
ARCHIVE_FILES = "rollouts-*.jsonl"
RATIO_MEAN, RATIO_CLIPPED = "ratio/mean", "ratio/clipped_share"  # tags of metrics.jsonl
SUMMED_TAGS = (RATIO_MEAN, RATIO_CLIPPED, TRAINED_TOKENS)

Summary = dict[str, Any]


def summarize(run_dir: str | Path) -> Summary:
    """Compute the summary, write it to `run_dir/summary.json` in one move and return it.

    `trace.json` is written beside it from the same spans, which are read once.

    accuracy_before, accuracy_after: share of full marks by the first reward function among the
    held-out rollouts, where a failed reward counts as wrong, of version 0 and of the last version
    evaluated, which is version_after; null where there was none. reward_before, reward_after: their
    mean reward; held_out_prompts: how many prompts; interval_before, interval_after: Wilson's 95 %
    interval of the accuracy. training_reward: mean reward of the groups scored for the first step
    and for the last one.
    steps: versions trained. wall_s: from the first process's start to the last span, summed over
    sessions of a resumed run. tokens_per_s: response tokens of the rollouts trained, per second of
    the steps' time. staleness_*: over trained tokens (those masked as too old are not trained).
    groups_dropped: reason -> groups of which nothing was trained. both_busy_share and executors
    (busy and wait shares, mean over the executor's processes): shares of the time from the first
    step's start to the last one's end.
    tokens_during_publish: tokens decoded during publishes. (Both it and both_busy_share: over the
    part of the run whose spans are kept one by one.) ratio_*: means over trained tokens, from
    metrics.jsonl. A figure is null where nothing was stored for it.
    """
    run_dir = Path(run_dir)
    with TraceFile(run_dir / SPANS_FOLDER, run_dir / TRACE_FILE) as trace:
        timeline = read_timeline(run_dir / SPANS_FOLDER, trace.add)
    rollouts = _read_archive(run_dir / ARCHIVE_FOLDER)
    metrics = run_dir / METRICS_FILE
    steps = read_metrics(metrics, SUMMED_TAGS) if metrics.exists() else {}
    steps_s = length(timeline.steps) / 1e9
    values = [step["reward/mean"] for _, step in sorted(steps.items()) if "reward/mean" in step]
    num_tokens = rollouts.staleness.total()
    total_staleness = sum(age * count for age, count in rollouts.staleness.items())
    summary = {
        **rollouts.held_out(),
        "training_reward": [values[0], values[-1]] if values else None,
        "steps": len(rollouts.versions),
        "wall_s": length(timeline.sessions) / 1e9,
        "tokens_per_s": rollouts.num_tokens / steps_s if steps_s else None,
        "rollouts_trained": rollouts.num_trained,
        "groups_dropped": {reason: len(ids) for reason, ids in sorted(rollouts.dropped.items())},
        "staleness_mean": total_staleness / num_tokens if num_tokens else None,
        "staleness_max": max(rollouts.staleness, default=None),
        "both_busy_share": timeline.both_busy_share() if steps_s else None,
        "mixed_version_share": rollouts.mixed_share(),
        "tokens_during_publish": timeline.tokens_during_publish(),
        "ratio_mean": _mean_over_tokens(steps, RATIO_MEAN),
        "ratio_clipped_share": _mean_over_tokens(steps, RATIO_CLIPPED),
        "executors": {
            executor: {"busy": shares.busy, "wait": shares.waits}
            for executor, shares in by_executor(timeline.shares()).items()
        },
    }
    _write_json(run_dir / SUMMARY_FILE, summary)
    return summary


@dataclass
class ArchivedRollouts:
    """Running sums over the archive's lines."""

    versions: set[int] = field(default_factory=set)
    num_trained: int = 0
    num_mixed: int = 0
    num_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # of trained tokens
    dropped: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    # Of each version evaluated: (full marks, reward) of its rollouts.
    evaluated: dict[int, list[tuple[bool, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, line: dict[str, Any]) -> None:
        """Count one retired rollout."""
        if line["outcome"] == "trained":
            self._add_trained(line)
        elif line["outcome"] == "dropped":
            if not line.get("left_out"):  # else the rest of its group was trained on
                self.dropped[line["reason"]].add(line["group_id"])
        elif line["outcome"] == "evaluated":
            reward = line["reward"] or 0.0  # null: it failed
            correct = line.get("correct", reward >= 1.0)
            self.evaluated[line["version"]].append((bool(correct), reward))

    def _add_trained(self, line: dict[str, Any]) -> None:
        self.versions.add(line["version"])
        self.num_trained += 1
        self.num_tokens += line["num_tokens"]
        self.num_mixed += len({version for version, _ in line["spans"]}) > 1
        for version, num_tokens in line["spans"]:
            if version >= line["oldest_version"]:
                self.staleness[line["version"] - version] += num_tokens

    def mixed_share(self) -> float | None:
        """Share of the trained rollouts that several versions wrote."""
        return self.num_mixed / self.num_trained if self.num_trained else None

    def held_out(self) -> dict[str, Any]:
        """What summary.json says of evaluations."""
        last = max(self.evaluated, default=0) or None
        found: dict[str, Any] = {"version_after": last, "held_out_prompts": None}
        for name, version in (("before", 0), ("after", last)):
            pairs = [] if version is None else self.evaluated.get(version, [])
            accuracy, reward = np.mean(pairs, axis=0).tolist() if pairs else (None, None)
            found[f"accuracy_{name}"], found[f"reward_{name}"] = accuracy, reward
            found[f"interval_{name}"] = None
            if accuracy is not None:
                found[f"interval_{name}"] = [*interval(accuracy, len(pairs))]
                found["held_out_prompts"] = len(pairs)
        return found


def _write_json(path: Path, value: object) -> None:
    """Replace `path` in one move."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def _read_archive(folder: Path) -> ArchivedRollouts:
    """All rollouts; skips the line that a killed process left unfinished, and damaged ones with a
    warning."""
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
    """Mean of what each step reported under `tag`, weighted by its trained tokens."""
    total = num_tokens = 0.0
    for step in steps.values():
        value, weight = step.get(tag), step.get(TRAINED_TOKENS)
        if isinstance(value, int | float) and isinstance(weight, int | float):
            total, num_tokens = total + value * weight, num_tokens + weight
    return total / num_tokens if num_tokens else None
