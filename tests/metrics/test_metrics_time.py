"""Spans, interval sets, busy and wait shares, and the trace: all against hand-worked times."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.metrics.estimates import intersect, length, overlaps, subtract, union
from llamarl.metrics.shares import MAX_FILES, Exposure, RecentSpans, by_executor, read_timeline
from llamarl.metrics.span import FLUSH_SPANS, Span, SpanReader, Spans
from llamarl.metrics.summary import TraceFile
from llamarl.scoring.stage_worker import WorkSpans
from tests.json_lines import read_lines

S = 10**9
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=8)


def as_array(intervals: list[list[int]]) -> np.ndarray:
    return np.array(intervals, dtype=np.int64).reshape(-1, 2)


def as_set(intervals: np.ndarray) -> set[int]:
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(INTERVALS, INTERVALS, INTERVALS)
def test_interval_algebra_equals_sets_of_moments(a, b, spans):
    left, right = union(as_array(a)), union(as_array(b))
    assert as_set(left) == as_set(as_array(a))
    assert as_set(intersect(left, right)) == as_set(left) & as_set(right)
    assert as_set(subtract(left, right)) == as_set(left) - as_set(right)
    assert length(left) == len(as_set(left))
    for result in (left, intersect(left, right), subtract(left, right)):
        assert (result[:, 1] > result[:, 0]).all()
        assert (result[1:, 0] > result[:-1, 1]).all(), "touching intervals are merged"
    expected = [len(as_set(left) & set(range(*span))) for span in spans]
    assert overlaps(left, as_array(spans)).tolist() == expected


def write_spans(
    folder: Path, process: str, spans: list[tuple], *, offset_ns: int = 0, end: str = "\n"
) -> None:
    """Append one session: (name, cat, start_s, end_s[, tokens])."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"process": process, "unix_minus_monotonic_ns": offset_ns}]
    for name, cat, start_s, end_s, *tokens in spans:
        times = {"start_ns": round(start_s * S), "end_ns": round(end_s * S)}
        lines.append(
            {"name": name, "cat": cat, **times, **({"tokens": tokens[0]} if tokens else {})}
        )
    with (folder / f"{process}.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, lines)) + end)


def write_trace(folder: Path, out: Path) -> int:
    """The way a run ends."""
    with TraceFile(folder, out) as trace:
        read_timeline(folder, trace.add)
    return trace.num_spans


@pytest.fixture
def run_spans(tmp_path):
    """Ten seconds of steps. The trainer's clock is 100 s behind that of the others."""
    write_spans(
        tmp_path,
        "controller",
        [("step", "mark", 100, 104), ("publish", "publish", 103, 105), ("step", "mark", 104, 110)],
    )
    write_spans(
        tmp_path,
        "generator-0",
        [
            ("decode", "busy", 98, 102, 40),
            ("requests", "wait", 102, 104),
            ("decode", "busy", 104, 106, 60),
        ],
    )
    write_spans(tmp_path, "generator-1", [("decode", "busy", 101, 103, 10)])
    write_spans(
        tmp_path,
        "trainer-0",
        [
            ("optimizer_step", "busy", -1, 0),
            ("batch", "wait", 0, 2),
            ("accumulate", "busy", 2, 5),
            ("write", "publish", 3, 5),
        ],
        offset_ns=100 * S,
    )
    return tmp_path


def test_shares_and_overlap_equal_the_hand_worked_ones(run_spans):
    timeline = read_timeline(run_spans)
    assert timeline.steps.tolist() == [[100 * S, 110 * S]]
    assert timeline.sessions.tolist() == [[98 * S, 110 * S]]
    shares = timeline.shares()
    assert shares["generator-0"].busy == pytest.approx(0.4)
    assert shares["generator-0"].waits == {"requests": pytest.approx(0.2)}
    assert shares["trainer-0"].busy == pytest.approx(0.3)
    assert shares["trainer-0"].waits == {"batch": pytest.approx(0.2)}
    # Generators are busy in 98-103 and 104-106, the trainer in 99-100 (too early) and 102-105.
    assert timeline.both_busy_share() == pytest.approx(0.2)
    generator = by_executor(shares)["generator"]
    assert generator.busy == pytest.approx((0.4 + 0.2) / 2)
    assert generator.waits == {"requests": pytest.approx(0.1)}


def test_tokens_of_a_decode_partly_inside_a_publish_count_partly(run_spans):
    # 103-105 covers half of the second decode (60 tokens) and nothing of the others.
    assert read_timeline(run_spans).tokens_during_publish() == 30


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["busy", "wait"]),
            st.integers(0, 30),
            st.integers(0, 30),
        ),
        max_size=12,
    )
)
def test_busy_and_waits_never_sum_to_more_than_one(tmp_path_factory, spans):
    folder = tmp_path_factory.mktemp("spans")
    ordered = [(name, cat, min(s, e), max(s, e)) for name, cat, s, e in spans]
    write_spans(folder, "trainer-0", [*ordered, ("step", "mark", 5, 25)])
    shares = read_timeline(folder).shares()["trainer-0"]
    moments = {
        cat: {m for _, c, s, e in ordered if c == cat for m in range(s, e)} & set(range(5, 25))
        for cat in ("busy", "wait")
    }
    assert shares.busy == pytest.approx(len(moments["busy"]) / 20)
    waiting = moments["wait"] - moments["busy"]
    assert sum(shares.waits.values()) == pytest.approx(len(waiting) / 20)


def test_a_resumed_run_counts_its_sessions_without_the_pause(tmp_path):
    write_spans(tmp_path, "controller", [("step", "mark", 0, 4)])
    write_spans(tmp_path, "controller", [("step", "mark", 1, 3)], offset_ns=100 * S)
    timeline = read_timeline(tmp_path)
    assert timeline.steps.tolist() == [[0, 4 * S], [101 * S, 103 * S]]


def test_a_new_session_survives_the_unfinished_line_of_the_one_before(tmp_path):
    write_spans(tmp_path, "controller", [("step", "mark", 0, 4)], end='\n{"name": "st')
    Spans("controller", tmp_path).close()
    spans = list(SpanReader(tmp_path / "controller.jsonl").read())
    assert [(span.session, span.name) for span in spans] == [(0, "step"), (1, "start")]
    assert abs(spans[1].start_ns - time.time_ns()) < 60 * S


def test_an_empty_folder_gives_an_empty_timeline(tmp_path):
    timeline = read_timeline(tmp_path)
    assert timeline.both_busy_share() == 0.0
    assert timeline.tokens_during_publish() == 0
    assert timeline.shares() == {}


def test_a_rare_span_is_on_disk_at_once(tmp_path):
    spans = Spans("trainer-0", tmp_path)
    now_ns = time.monotonic_ns()
    spans.record("batch", now_ns, now_ns + 2 * S, "wait")
    assert [span.name for span in SpanReader(tmp_path / "trainer-0.jsonl").read()][1:] == ["batch"]


def test_a_kill_costs_no_more_than_the_last_spans(tmp_path):
    spans = Spans("generator-0", tmp_path)
    for _ in range(3 * FLUSH_SPANS):
        with spans.span("decode"):
            pass
    assert len([*SpanReader(tmp_path / "generator-0.jsonl").read()]) > 2 * FLUSH_SPANS


def test_a_span_is_recorded_when_its_block_raises(tmp_path):
    spans = Spans("scorer-0", tmp_path)
    with pytest.raises(KeyError), spans.span("score", num_rows=3):
        raise KeyError
    spans.close()
    start, score = SpanReader(tmp_path / "scorer-0.jsonl").read()
    assert (start.name, start.cat, score.name, score.cat) == ("start", "mark", "score", "busy")
    assert score.args == {"num_rows": 3}


def test_a_reader_continues_where_it_stopped_and_leaves_unfinished_lines(tmp_path):
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 1, 2)], offset_ns=S, end='\n{"na')
    reader = SpanReader(tmp_path / "trainer-0.jsonl")
    assert [span.start_ns for span in reader.read()] == [2 * S]
    assert list(reader.read()) == []
    with reader.path.open("a") as file:
        file.write(f'me": "step", "cat": "mark", "start_ns": {5 * S}, "end_ns": {6 * S}}}\n')
    assert [(s.name, s.start_ns) for s in reader.read()] == [("step", 6 * S)]


def test_recent_shares_cover_the_last_ten_seconds_and_each_wait_counts_once(tmp_path):
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 0, 50), ("batch", "wait", 50, 52)])
    write_spans(tmp_path, "trainer-1", [("batch", "wait", 48, 52)])
    now_s = 52
    times = RecentSpans(tmp_path, since_ns=0, clock_ns=lambda: now_s * S)
    polled = times.shares()["trainer"]
    assert (polled.busy, polled.waits) == (pytest.approx(0.4), {"batch": pytest.approx(0.3)})
    assert times.take_seconds() == {"wait/trainer": pytest.approx(3.0)}
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 52, 60)])
    write_spans(tmp_path, "trainer-1", [("accumulate", "busy", 52, 60)])
    now_s = 60
    assert times.shares()["trainer"].busy == pytest.approx(0.8)
    assert times.take_seconds() == {"wait/trainer": 0.0}


def test_the_window_of_recent_shares_ends_now_amid_a_long_wait_or_long_work(tmp_path):
    now_s = 0.0
    times = RecentSpans(tmp_path, since_ns=0, clock_ns=lambda: round(now_s * S))
    write_spans(tmp_path, "trainer-0", [("batch", "wait", 0, 15), ("accumulate", "busy", 15, 16)])
    now_s = 16.5
    assert times.shares()["trainer"].busy == pytest.approx(0.1, abs=0.01)
    now_s = 21.0
    share = times.shares()["trainer"]
    assert (share.busy, share.waits) == (pytest.approx(0.1), {"batch": pytest.approx(0.9)})
    now_s = 61.0
    assert times.shares()["trainer"].busy == 0, "45 s in the next wait"
    write_spans(tmp_path, "trainer-0", [("batch", "wait", 16, 61)])
    now_s = 66.0
    assert times.shares()["trainer"].busy == pytest.approx(0.5), "a long pass, not yet ended"


def test_recent_shares_leave_out_an_earlier_session(tmp_path):
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 0, 50)])
    assert RecentSpans(tmp_path).shares() == {}


def test_recent_waits_are_read_from_a_limited_number_of_files_per_executor(tmp_path):
    for index in range(3 * MAX_FILES):
        write_spans(tmp_path, f"generator-{index}", [("requests", "wait", 0, 1 + index % 2)])
    write_spans(tmp_path, "trainer-0", [("batch", "wait", 0, 5)])
    times = RecentSpans(tmp_path, since_ns=0)
    first = times.take_seconds()
    assert first["wait/trainer"] == 5.0
    assert 1.0 <= first["wait/generator"] <= 2.0
    write_spans(tmp_path, "generator-0-late", [("requests", "wait", 0, 9)])
    write_spans(tmp_path, "generator-0", [("requests", "wait", 2, 66)])
    expected = {"wait/trainer": 0.0, "wait/generator": pytest.approx(64 / MAX_FILES)}
    assert times.take_seconds() == expected, "the same files"


def test_the_trace_is_valid_and_aligns_the_clocks(run_spans, tmp_path):
    with (run_spans / "trainer-0.jsonl").open("a") as file:
        file.write('{"name": "accu')
    out = tmp_path / "trace.json"
    num_spans = write_trace(run_spans, out)
    events = json.loads(out.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == num_spans == 11
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all(span["ts"] >= 0 <= span["dur"] for span in spans)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["controller", "generator-0", "generator-1", "trainer-0"]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans} == threads
    (accumulate,) = [span for span in spans if span["name"] == "accumulate"]
    # 102 s on the common clock; the first span of all begins at 98 s.
    assert accumulate["ts"] == pytest.approx(4e6)
    assert accumulate["dur"] == pytest.approx(3e6)
    decode = [span for span in spans if span["name"] == "decode"]
    assert [span["args"] for span in decode] == [{"tokens": 40}, {"tokens": 60}, {"tokens": 10}]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=15))
def test_spans_on_one_track_never_overlap(tmp_path_factory, times):
    folder = tmp_path_factory.mktemp("spans")
    write_spans(folder, "scorer-0", [("score", "busy", min(t), max(t)) for t in times])
    write_trace(folder, folder / "trace.json")
    tracks: dict[int, set[int]] = {}
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            moments = set(
                range(round(event["ts"] / 1e6), round((event["ts"] + event["dur"]) / 1e6))
            )
            assert not moments & tracks.setdefault(event["tid"], set())
            tracks[event["tid"]] |= moments
    assert sum(map(len, tracks.values())) == sum(max(t) - min(t) for t in times)


def span_of(name: str, cat: str, start_s: float, end_s: float, **args: int) -> Span:
    return Span(
        session=0, name=name, cat=cat, start_ns=int(start_s * S), end_ns=int(end_s * S), args=args
    )


def exposure_of_a_begun_run() -> Exposure:
    """The publish that a run starts with has ended."""
    exposure = Exposure()
    end_publishes(exposure, (-9, 0))
    exposure.add("generator-0", span_of("requests", "wait", -9, 0))
    return exposure


def end_publishes(exposure: Exposure, *publishes: tuple[float, float]) -> None:
    for start_s, end_s in publishes:
        exposure.add("controller-0", span_of("publish", "publish", start_s, end_s, version=1))
        exposure.add("controller-0", span_of("publish", "publish", start_s, end_s, replica=0))


def test_nothing_is_said_before_a_second_publish_has_ended() -> None:
    exposure = exposure_of_a_begun_run()
    assert exposure.take() == {}
    end_publishes(exposure, (1, 2))
    assert exposure.take() == {}


def test_a_publish_beside_decoding_and_training_exposes_its_commit_only() -> None:
    exposure = exposure_of_a_begun_run()
    end_publishes(exposure, (1, 2), (11, 12))
    exposure.add("generator-0", span_of("decode", "busy", 0, 1.9, tokens=8))
    exposure.add("generator-0", span_of("commit", "busy", 1.9, 1.92, version=1))
    exposure.add("generator-0", span_of("requests", "wait", 5, 8))  # no version was on its way
    found = exposure.take()
    assert found.pop("exposed_s") == pytest.approx(0.02)
    assert found == pytest.approx({"trainer_s": 0.0, "commit_s": 0.02, "starved_s": 0.0})


def test_waits_are_means_over_replicas_and_per_publish_and_count_once() -> None:
    exposure = exposure_of_a_begun_run()
    end_publishes(exposure, (1, 2), (11, 12), (21, 22))
    exposure.add("generator-0", span_of("requests", "wait", 0, 1.5))
    exposure.add("generator-1", span_of("requests", "wait", 1.25, 11.5))
    exposure.add("generator-1", span_of("commit", "busy", 11.6, 11.8))
    exposure.add("trainer-0", span_of("publish", "wait", 11, 11.4, version=1))
    exposure.add("trainer-1", span_of("publish", "wait", 11, 11.2, version=1))
    exposure.add("controller-0", span_of("last_publish", "wait", 11.5, 12))
    exposure.add("generator-0", span_of("requests", "wait", 21, 21.75))
    # Starved: 0.5 s and 1.25 s in two publishes; trainer: 0.3 s as a mean of ranks, and 0.5 s.
    expected = {"trainer_s": 0.4, "commit_s": 0.05, "starved_s": 0.4375, "exposed_s": 0.8875}
    assert exposure.take() == pytest.approx(expected)
    assert exposure.take() == {}
    end_publishes(exposure, (31, 32))
    exposure.add("generator-1", span_of("decode", "busy", 21, 22, tokens=8))
    expected = {"trainer_s": 0.0, "commit_s": 0.0, "starved_s": 0.375, "exposed_s": 0.375}
    assert exposure.take() == pytest.approx(expected)


def test_an_executor_that_is_never_idle_has_a_busy_span_for_each_call(tmp_path: Path) -> None:
    spans = Spans("judge-0", tmp_path)
    work = WorkSpans(spans, "judge")
    work.start()
    first, second, third = work.working(1), work.working(2), work.working(3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    third.__enter__()
    second.__exit__(None, None, None)
    spans.close()
    lines = read_lines(tmp_path / "judge-0.jsonl")[2:]
    assert [(line["name"], line["cat"], line.get("rows")) for line in lines] == [
        ("rollouts", "wait", None),
        ("judge", "busy", 1),
        ("judge", "busy", 2),
    ]
    assert all(a["end_ns"] == b["start_ns"] for a, b in pairwise(lines))
    third.__exit__(None, None, None)
