"""Costs and workload of a finished run, from the times in its spans and the lengths in its archive.

Spans are wall times: the time that processes took from each other by sharing processors is
estimated from where their spans overlap, and taken out."""

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from llamarl.core.config import Config
from llamarl.metrics.estimates import Intervals, overlaps, union
from llamarl.metrics.span import Span, SpanReader, executor_of, span_files
from llamarl.metrics.summary import ARCHIVE_FILES, ARCHIVE_FOLDER, SPANS_FOLDER
from llamarl.model.architecture import Architecture
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.workload import Workload, make_workload
from llamarl.trainer.advantages import EQUAL_REWARDS

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
Processes = dict[str, list[Span]]
"""The spans by process."""

COMPUTING = {  # spans in which a process computes by itself, by executor
    "generator": ("decode", "prefill"),
    "trainer": ("accumulate", "optimizer_step"),
    "scorer": ("score",),
}
SETTLING_STEPS = 2  # of a run's start that no figure is taken from
OVERHEAD_STEPS = 12  # simulated at most for each value of `row_s` tried
OVERHEAD_HALVINGS = 7  # of the range in which `row_s` is searched
NUM_CALLS = 4  # of one publish to one replica: prepare, write, verify, commit
SLOWDOWNS = np.linspace(0.0, 1.5, 31)  # tried for a process beside which another one computes


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The costs of a finished run, and the rollouts that it trained on.

    `lengths` are response tokens, `prompt_tokens` is their prompts' mean; `rewards` are by group.
    `step_s` is the mean of its steps without the first `SETTLING_STEPS`.
    """

    costs: Costs
    lengths: tuple[int, ...]
    prompt_tokens: int
    rewards: tuple[tuple[float, ...], ...]
    step_s: float

    def equal_share(self, size: int) -> float:
        """Return the share of groups of `size` rollouts that would all have one reward: `size`
        rollouts are drawn from each group of the run (or all of it, if it is smaller)."""
        shares = []
        for group in self.rewards:
            drawn = min(size, len(group))
            ways = sum(math.comb(number, drawn) for number in Counter(group).values())
            shares.append(ways / math.comb(len(group), drawn))
        return sum(shares) / len(shares)

    def workload(self, config: Config) -> Workload:
        """Return rollouts like the run's, with the prompts of `config`."""
        share = self.equal_share(config.sampling.rollouts_per_prompt)
        return make_workload(config, lengths=self.lengths, equal_share=share)


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The spans of one name, [n] each: seconds, tokens (or rollouts), how many other processes
    computed meanwhile, and the weights' versions."""

    seconds: Floats
    amount: Floats
    others: Floats
    version: npt.NDArray[np.int64]


def calibrate(run_dir: str, config: Config, architecture: Architecture) -> Trace:
    """Return costs and workload of the run in `run_dir`, of the recipe `config`. Costs that no span
    shows are chosen so that a simulation gives the run's own step time."""
    own = run_config(run_dir, config)
    trace = read_trace(run_dir, own.sampling.rollouts_per_prompt)
    return fit_overhead(trace, with_workload(own, trace), architecture)


def with_workload(config: Config, trace: Trace) -> Config:
    """Return the recipe with the log-normal that is nearest to the lengths a run wrote."""
    plan = replace(
        config.plan,
        prompt_tokens=trace.prompt_tokens,
        median_tokens=max(1, round(statistics.median(trace.lengths))),
        spread=statistics.pstdev(math.log(max(1, length)) for length in trace.lengths),
    )
    return replace(config, plan=plan)


def check_rewards(config: Config, trace: Trace) -> None:
    """Raise ValueError if no step would end, as every group is dropped."""
    if EQUAL_REWARDS not in config.algorithm.filters:
        return
    if trace.equal_share(config.sampling.rollouts_per_prompt) == 1:
        raise ValueError(
            f"--trace must name a run with rewards that differ within a group (or set "
            f"algorithm.filters=[]), got {len(trace.rewards)} groups without"
        )


def run_config(run_dir: str, config: Config) -> Config:
    """Return the config that the run in `run_dir` was started with; its sections are of the kinds
    that `config` has.

    ValueError if the folder is no run's, or a section is of another kind.
    """
    path = Path(run_dir, "config.yaml")
    if not path.is_file():
        raise ValueError(f"--trace must name a run's folder, got {run_dir!r} without config.yaml")
    written = yaml.safe_load(path.read_text())
    try:
        written.pop("defaults", None)  # the choices, which the kinds of the sections say
        return _renewed(config, written)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"--trace must name a run of this recipe, with the same engine and algorithm, got "
            f"{run_dir!r}: {error}"
        ) from error


def _renewed(section: T, written: Mapping[str, Any]) -> T:
    """Return a section with these values, and likewise the sections in it."""
    values = {
        name: _renewed(own, value) if is_dataclass(own := getattr(section, name)) else value
        for name, value in written.items()
    }
    return replace(section, **values)  # type: ignore[type-var]


def read_trace(
    run_dir: str | Path, rollouts_per_prompt: int, *, num_cores: int | None = None
) -> Trace:
    """Return costs and workload of a finished run on `num_cores` processors (default: those that
    this process may use); ValueError if it has trained nothing, or if spans are missing. Costs that
    spans do not show stay 0: `row_s`, the time of the controller and messages."""
    files = sorted(Path(run_dir, ARCHIVE_FOLDER).glob(ARCHIVE_FILES))
    texts = (text for path in files for text in path.read_text().splitlines())
    rows = [row for row in map(json.loads, texts) if row["outcome"] == "trained"]
    if not rows:
        raise ValueError(f"the run must have trained rollouts, got none in {run_dir}")
    spans = read_spans(Path(run_dir) / SPANS_FOLDER)
    settled = _settled(spans)
    for executor, name in (("generator", "decode"), ("trainer", "accumulate")):
        if not _of(settled, executor, name):
            raise ValueError(f"the run must have recorded {name} spans, got none in {run_dir}")
    return Trace(
        costs=_fit_costs(settled, rows, num_cores or len(os.sched_getaffinity(0))),
        lengths=tuple(row["num_tokens"] for row in rows),
        prompt_tokens=max(1, round(sum(row["num_prompt_tokens"] for row in rows) / len(rows))),
        rewards=_groups(rows, rollouts_per_prompt),
        step_s=step_seconds(spans),
    )


def _fit_costs(spans: Processes, rows: list[dict[str, Any]], num_cores: int) -> Costs:
    busy = {
        name: _busy(spans, executor, name)
        for executor, names in COMPUTING.items()
        for name in names
    }
    slowdown = _fit_slowdown(busy["decode"], num_cores)
    free = {
        name: each.seconds / _slowness(each.others, slowdown, num_cores)
        for name, each in busy.items()
    }
    decode_step_s, decode_row_s = _line(busy["decode"].amount, free["decode"])
    prefill_call_s, prefill_token_s = _line(busy["prefill"].amount, free["prefill"])
    part_s, token_s = _training(busy["accumulate"], free["accumulate"], rows)
    score_call_s, score_row_s = _line(busy["score"].amount, free["score"])
    calls = _publish_costs(
        spans, decode_step_s + decode_row_s * float(busy["decode"].amount.mean())
    )
    store_row_s, turnaround_s = _store_row_s(spans), _turnaround_s(spans)
    num_rows = len(rows) / len({row["version"] for row in rows})
    return Costs(
        decode_step_s=decode_step_s,
        decode_row_s=decode_row_s,
        prefill_call_s=prefill_call_s,
        prefill_token_s=prefill_token_s,
        part_s=part_s,
        token_s=token_s,
        optimizer_s=_mean(free["optimizer_step"]),
        score_call_s=score_call_s,
        score_row_s=score_row_s,
        store_row_s=store_row_s,
        turnaround_s=max(0.0, turnaround_s - 2 * calls["message_s"] - num_rows * store_row_s),
        **calls,
        num_cores=num_cores,
        shared_speed=1 / (1 + slowdown),
    )


def fit_overhead(trace: Trace, config: Config, architecture: Architecture) -> Trace:
    """Return the trace with `row_s`, which no span shows: chosen so that a simulation of the run
    itself, whose `config` this is, takes as long as the run did; 0 if it already does."""
    num_rollouts = config.trainer.groups_per_step * config.sampling.rollouts_per_prompt
    num_steps = max(len(trace.lengths) // num_rollouts, SETTLING_STEPS + 1)

    def excess_s(row_s: float) -> float:
        step = simulate(
            config,
            architecture,
            replace(trace.costs, row_s=row_s),
            workload=trace.workload(config),
            num_steps=min(num_steps, OVERHEAD_STEPS),
            num_skipped=SETTLING_STEPS,
        )
        return step.step_s - trace.step_s

    low, high = 0.0, trace.step_s * trace.costs.num_cores / num_rollouts  # all there is
    if excess_s(low) >= 0:
        return trace
    for _ in range(OVERHEAD_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess_s(middle) >= 0 else (middle, high)
    return replace(trace, costs=replace(trace.costs, row_s=low))


def step_seconds(spans: Processes) -> float:
    """Return the mean of a run's steps without the first SETTLING_STEPS."""
    steps = _steps(spans)
    return _mean(np.array([_seconds(step) for step in steps[SETTLING_STEPS:] or steps]))


def _steps(spans: Processes) -> list[Span]:
    marks = (s for each in spans.values() for s in each if (s.cat, s.name) == ("mark", "step"))
    return sorted(marks, key=lambda step: step.end_ns)


def _settled(spans: Processes) -> Processes:
    """Return the spans without the first steps, in which memory is first touched and code first
    runs."""
    steps = _steps(spans)
    if len(steps) <= SETTLING_STEPS:
        return spans
    start_ns = steps[SETTLING_STEPS - 1].end_ns
    return {name: [s for s in each if s.start_ns >= start_ns] for name, each in spans.items()}


def read_spans(folder: Path) -> Processes:
    """Return the spans by process, without sums of old ones, which do not show what one call
    takes."""
    readers = [SpanReader(path) for path in span_files(folder)]
    if not readers:
        raise ValueError(f"the run must have recorded spans, got none in {folder}")
    return {r.process: [span for span in r.read() if not span.is_sum] for r in readers}


def _of(spans: Processes, executor: str, name: str = "") -> list[Span]:
    """Return the spans of all processes of an executor, of this name unless it is empty."""
    chosen = (each for process, each in spans.items() if executor_of(process) == executor)
    return [span for each in chosen for span in each if name in ("", span.name)]


def _times(spans: Iterable[Span]) -> Intervals:
    times = [(span.start_ns, span.end_ns) for span in spans]
    return np.array(times, dtype=np.int64).reshape(-1, 2)


def _busy(spans: Processes, executor: str, name: str) -> Busy:
    """Return the spans of this name of all processes of an executor."""
    computing = {}
    for process, each in spans.items():
        names = COMPUTING.get(executor_of(process), ())
        computing[process] = union(_times(span for span in each if span.name in names))
    seconds, others = [np.zeros(0)], [np.zeros(0)]
    for process, each in spans.items():
        if executor_of(process) == executor:
            own = _times(span for span in each if span.name == name)
            beside = np.zeros(len(own), dtype=np.int64)
            for other, held in computing.items():
                beside += overlaps(held, own) if other != process else 0
            duration_ns = own[:, 1] - own[:, 0]
            seconds.append(duration_ns / 1e9)
            others.append(beside / np.maximum(duration_ns, 1))
    args = [span.args for span in _of(spans, executor, name)]
    return Busy(
        seconds=np.concatenate(seconds),
        amount=np.array([each.get("tokens", each.get("rows", 0)) for each in args], float),
        others=np.concatenate(others),
        version=np.array([each.get("version", 0) for each in args], np.int64),
    )


def _slowness(others: Floats, slowdown: float, num_cores: int) -> Floats:
    """Return wall time over free time with this many others at work: the inverse of `Cores`'
    speed."""
    if num_cores == 1:
        return 1 + others
    return (1 + slowdown * np.minimum(others, 1)) * np.maximum(1, (1 + others) / num_cores)


def _fit_slowdown(decode: Busy, num_cores: int) -> float:
    """Return how much longer a decode step takes beside another process: the value under which
    steps of equal batch size, with and without others, take most nearly the same free time."""
    if num_cores == 1 or np.ptp(decode.others) < 0.5:
        return 0.0
    errors = []
    for slowdown in SLOWDOWNS:
        slowness = _slowness(decode.others, slowdown, num_cores)
        design = np.stack([slowness, slowness * decode.amount], axis=1)
        solution, *_ = np.linalg.lstsq(design, decode.seconds, rcond=None)
        errors.append(float(np.square(decode.seconds - design @ solution).sum()))
    return float(SLOWDOWNS[int(np.argmin(errors))])


def _line(amount: Floats, seconds: Floats) -> tuple[float, float]:
    """Return (a, b) of seconds = a + b * amount, least squares, neither below 0; (0, 0) without
    spans."""
    if not len(seconds):
        return 0.0, 0.0
    if np.ptp(amount) > 0:
        slope, start = np.polyfit(amount, seconds, 1)
        if start >= 0 and slope >= 0:
            return float(start), float(slope)
        if slope < 0:
            return _mean(seconds), 0.0
    total = float(amount.sum())
    return (0.0, float(seconds.sum()) / total) if total else (_mean(seconds), 0.0)


def _publish_costs(spans: Processes, step_s: float) -> dict[str, Any]:
    """Return the costs of writing, checking and committing one replica, and the rest of a publish
    per call."""

    def median_s(executor: str, name: str, default_s: float = 0.0) -> float:
        chosen = _of(spans, executor, name)
        if name == "publish":  # else of all replicas together
            chosen = [span for span in chosen if "replica" in span.args]
        return float(np.median([_seconds(span) for span in chosen])) if chosen else default_s

    write_s = median_s("trainer", "write")
    check_s = median_s("generator", "verify") + median_s("generator", "process_weights")
    commit_s = median_s("generator", "commit")
    known_s = write_s + check_s + commit_s + step_s / 2  # a commit waits for half a step
    rest_s = median_s("controller", "publish", known_s) - known_s
    return {
        "write_s": write_s,
        "relay_s": median_s("generator", "write", write_s),
        "check_s": check_s,
        "commit_s": commit_s,
        "message_s": max(0.0, rest_s / NUM_CALLS),
    }


def _turnaround_s(spans: Processes) -> float:
    """Return the seconds from one step's end to the next one's first pass, without the wait for
    groups."""
    # The controller's wait for groups; the trainer's own says its version too.
    waits = union(
        _times(
            span
            for each in spans.values()
            for span in each
            if (span.cat, span.name) == ("wait", "batch") and "version" not in span.args
        )
    )
    found = []
    for process, each in spans.items():
        if executor_of(process) == "trainer":
            passes = sorted(s.start_ns for s in each if s.name == "accumulate")
            for end_ns in (s.end_ns for s in each if s.name == "optimizer_step"):
                start_ns = next((begun for begun in passes if begun >= end_ns), None)
                if start_ns is not None:
                    gap = np.array([[end_ns, start_ns]], dtype=np.int64)
                    found.append((start_ns - end_ns - int(overlaps(waits, gap)[0])) / 1e9)
    return _mean(np.array(found))


def _store_row_s(spans: Processes) -> float:
    """Return storage's seconds per row and call."""
    served = _of(spans, "storage")
    rows = sum(span.args.get("rows", 0) for span in served)
    return sum(_seconds(span) for span in served) / rows if rows else 0.0


def _training(accumulate: Busy, free_s: Floats, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return (a, b) of seconds = a per call + b per token, prompt included: each version's calls
    together against its rows in the archive, for spans do not say which call had which rows."""
    design, seconds = [], []
    for version in np.unique(accumulate.version):
        chosen = accumulate.version == version
        response = sum(row["num_tokens"] for row in rows if row["version"] == version)
        prompt = sum(row["num_prompt_tokens"] for row in rows if row["version"] == version)
        if response:  # spans count what had a gradient: prompts in proportion
            packed = float(accumulate.amount[chosen].sum()) * (1 + prompt / response)
            design.append((float(chosen.sum()), packed))
            seconds.append(float(free_s[chosen].sum()))
    if not design:
        return 0.0, 0.0
    solution, *_ = np.linalg.lstsq(np.array(design), np.array(seconds), rcond=None)
    if solution.min() >= 0:
        return float(solution[0]), float(solution[1])
    return 0.0, sum(seconds) / sum(packed for _, packed in design)


def _groups(rows: list[dict[str, Any]], size: int) -> tuple[tuple[float, ...], ...]:
    """Return the rewards by group; the rows of a group have neighbouring numbers, a version whole
    groups."""
    found = []
    for version in sorted({row["version"] for row in rows}):
        members = sorted((r for r in rows if r["version"] == version), key=lambda r: r["row_id"])
        rewards = [row["reward"] for row in members]
        found += [tuple(rewards[i : i + size]) for i in range(0, len(rewards), size)]
    return tuple(found)


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
