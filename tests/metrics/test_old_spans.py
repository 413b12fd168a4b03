"""Long runs: span files stay below their limit, and what is summed still adds up."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.cli.graph import read_flows
from llamarl.metrics.estimates import length
from llamarl.metrics.shares import Shares, read_timeline, shares_of, tracks_of
from llamarl.metrics.span import (
    KEPT_SHARE,
    Span,
    SpanReader,
    Spans,
    span_files,
    sum_old_spans,
    sums_of,
)
from tests.metrics.test_metrics_time import write_spans, write_trace

S = 10**9
LIMIT_BYTES = 200_000
NO_LIMIT = 2**40


def record_work(spans: Spans, num_steps: int, start_ns: int) -> int:
    """Decode steps of about 0.1 s with some waits between; returns when the last one ends."""
    rng = random.Random(0)
    now_ns = start_ns
    for step in range(num_steps):
        end_ns = now_ns + rng.randrange(S // 20, S // 5)
        spans.record("decode", now_ns, end_ns, tokens=step % 7, version=step // 100)
        now_ns = end_ns
        if step % 10 == 0:
            end_ns = now_ns + rng.randrange(S // 2)
            spans.record("requests", now_ns, end_ns, "wait")
            now_ns = end_ns
    return now_ns


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same work recorded with a limit and without one."""
    folders = tmp_path_factory.mktemp("limited"), tmp_path_factory.mktemp("whole")
    start_ns = time.monotonic_ns()
    for folder, limit_bytes in zip(folders, (LIMIT_BYTES, NO_LIMIT), strict=True):
        generator = Spans("generator-0", folder, limit_bytes)
        generator.record("requests", start_ns, start_ns + 30 * S, "wait")
        end_ns = record_work(generator, 5000, start_ns + 30 * S)
        generator.close()
        trainer = Spans("trainer-0", folder, limit_bytes)
        trainer.record("accumulate", start_ns, end_ns)
        trainer.close()
        controller = Spans("controller", folder, limit_bytes)
        controller.record("step", start_ns + 20 * S, end_ns - 10 * S, "mark")
        controller.close()
    return folders


def test_the_files_of_a_process_stay_below_the_limit_whatever_it_records(tmp_path):
    spans = Spans("generator-0", tmp_path, LIMIT_BYTES)
    now_ns, most_bytes = time.monotonic_ns(), 0
    for _ in range(100):
        now_ns = record_work(spans, 100, now_ns)
        with contextlib.suppress(FileNotFoundError):  # replaced just now: look later
            most_bytes = max(most_bytes, sum(path.stat().st_size for path in tmp_path.iterdir()))
    spans.close()
    assert 0 < most_bytes <= LIMIT_BYTES
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > LIMIT_BYTES * KEPT_SHARE


def test_shares_and_extent_of_a_limited_run_are_those_of_a_whole_one(long_run):
    limited, whole = map(read_timeline, long_run)
    assert limited.whole_ns > 0 == whole.whole_ns
    ours, theirs = limited.shares()["generator-0"], whole.shares()["generator-0"]
    assert ours.busy == pytest.approx(theirs.busy, abs=1e-6)
    assert ours.waits == {"requests": pytest.approx(theirs.waits["requests"], abs=1e-6)}
    assert length(limited.sessions) == pytest.approx(length(whole.sessions), abs=S)
    tokens = [sum(t.processes["generator-0"]["busy", "decode"][2::3]) for t in (limited, whole)]
    assert tokens[0] == tokens[1]
    # What needs two processes at one moment is taken from where both are known exactly.
    window = np.array([[limited.whole_ns, limited.steps[-1, 1]]])
    whole.steps = window
    assert limited.both_busy_share() == pytest.approx(whole.both_busy_share(), abs=1e-2)


def test_a_trace_that_is_cut_says_so(long_run, tmp_path):
    for folder, is_cut in zip(long_run, (True, False), strict=True):
        num_spans = write_trace(folder, tmp_path / "trace.json")
        trace = json.loads((tmp_path / "trace.json").read_text())
        cut = trace.get("otherData", {}).get("cut", {})
        assert list(cut) == (["generator-0"] if is_cut else [])
        assert num_spans == sum(event["ph"] == "X" for event in trace["traceEvents"])
        assert not any("spans" in event["args"] for event in trace["traceEvents"])


def test_a_calibration_takes_no_sum_for_a_call(long_run):
    from llamarl.planner.trace import read_spans

    spans = read_spans(long_run[0])["generator-0"]
    assert len(spans) > 300
    assert max(s.end_ns - s.start_ns for s in spans if s.name == "decode") <= S // 5


def test_a_reader_yields_each_span_once_while_old_ones_are_summed(tmp_path):
    spans = Spans("generator-0", tmp_path, LIMIT_BYTES)
    reader = SpanReader(tmp_path / "generator-0.jsonl")
    now_ns, seen = time.monotonic_ns(), []
    for number in range(3000):
        spans.record("decode", now_ns, now_ns + S, tokens=number)
        now_ns += S
        if number % 50 == 0:
            seen += [span.args["tokens"] for span in reader.read() if span.name == "decode"]
    spans.close()
    seen += [span.args["tokens"] for span in reader.read() if span.name == "decode"]
    assert seen == list(range(3000))
    assert next(SpanReader(tmp_path / "generator-0.jsonl").read()).is_sum


def test_a_reader_that_missed_spans_goes_on_with_those_that_are_kept(tmp_path):
    path = tmp_path / "trainer-0.jsonl"
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 1, 2)])
    reader = SpanReader(path)
    assert len(list(reader.read())) == 1
    work = [("accumulate", "busy", n, n + 1) for n in range(50)]
    write_spans(tmp_path, "trainer-0", work, offset_ns=100 * S)
    sum_old_spans(path, 2000)
    kept = list(reader.read())
    assert 1 < len(kept) < 50
    assert {(span.session, span.is_sum) for span in kept} == {(1, False)}
    assert [span.end_ns // S for span in kept] == [*range(151 - len(kept), 151)]
    assert list(reader.read()) == []


def test_a_process_killed_while_it_sums_leaves_its_file_as_it_was(tmp_path):
    path = tmp_path / "trainer-0.jsonl"
    for number in range(1, 5):
        write_spans(tmp_path, "trainer-0", [("accumulate", "busy", number, number + 1)])
    (tmp_path / "trainer-0.jsonl.tmp").write_text('{"summed_by')
    before = path.read_bytes()
    for _ in range(2):
        spans = [span for span in SpanReader(path).read() if span.name == "accumulate"]
        assert [span.start_ns // S for span in spans] == [1, 2, 3, 4]
        assert [span.session for span in spans] == [0, 1, 2, 3]
        assert span_files(tmp_path) == [path]
        sum_old_spans(path, 1000)
    assert path.read_bytes() != before
    assert list(tmp_path.iterdir()) == [path]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["busy", "wait"]),
            st.integers(0, 400),
            st.integers(0, 100),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_sums_keep_busy_and_wait_time_and_counts_however_often_they_are_summed(work):
    """In tenths of a second."""
    spans = [
        Span(0, name, cat, start * S // 10, (start + long) * S // 10, {"tokens": long})
        for name, cat, start, long in work
    ]
    whole = np.array([[-1000 * S, 1000 * S]])
    expected, found = _shares(spans, whole), spans
    for _ in range(2):
        found = list(sums_of(found))
        assert len(found) == len({(span.cat, span.name) for span in spans})
        assert sum(span.args["spans"] for span in found) == len(spans)
        assert sum(span.args["tokens"] for span in found) == sum(s.args["tokens"] for s in spans)
        shares = _shares(found, whole)
        assert shares.busy == pytest.approx(expected.busy)
        assert shares.waits == pytest.approx(expected.waits)
        assert max(span.end_ns for span in found) <= max(span.end_ns for span in spans)
        found.sort(key=lambda span: span.start_ns)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(found))


def _shares(spans: list[Span], window: np.ndarray) -> Shares:
    shares = shares_of(tracks_of(spans), window)
    return Shares(shares.busy, {name: share for name, share in shares.waits.items() if share})


@given(st.binary(max_size=40), st.integers(0, 1200), st.booleans())
def test_a_damaged_file_costs_its_damaged_lines_and_nothing_else(junk, place, is_summed):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trainer-0.jsonl")
        write_spans(Path(folder), "trainer-0", [("accumulate", "busy", n, n + 1) for n in range(9)])
        if is_summed:
            sum_old_spans(path, 1000)
        content = path.read_bytes()
        num_spans = len(list(SpanReader(path).read()))
        path.write_bytes(content[:place] + junk + content[place + len(junk) :])
        hit = content[place : place + len(junk)].count(b"\n") + junk.count(b"\n") + 1
        assert num_spans - hit - 1 <= len(list(SpanReader(path).read()))
        sum_old_spans(path, 1000)
        read_timeline(folder)


def test_rows_and_bytes_of_a_limited_run_are_those_of_a_whole_one(tmp_path):
    found, start_ns = [], time.monotonic_ns()
    for limit_bytes in (LIMIT_BYTES, NO_LIMIT):
        folder = tmp_path / str(limit_bytes)
        spans = Spans("trainer-0", folder / "spans", limit_bytes)
        for number in range(5000):
            sizes = {"prompt_ids": 4 * number, "response_ids": number % 11}
            for way, columns in (("get", sizes), ("put", {"trainer_logprobs": 7})):
                ends_ns = (start_ns + number * S // 7, start_ns + number * S // 7 + S // 20)
                spans.record(way, *ends_ns, "mark", rows=number % 5, bytes=columns)
        spans.close()
        assert next(SpanReader(folder / "spans" / "trainer-0.jsonl").read()).is_sum == (
            limit_bytes == LIMIT_BYTES
        )
        found.append(read_flows(str(folder)))
    limited, whole = found
    assert limited.exchanged == whole.exchanged
    assert limited.exchanged["trainer"].num_bytes["get"]["prompt_ids"] == 4 * sum(range(5000))
    assert limited.seconds == pytest.approx(whole.seconds, abs=2)
    folder = tmp_path / str(LIMIT_BYTES) / "spans"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT_BYTES


@pytest.mark.parametrize("damage", ['"tokens": "7x"', '"spans": 7.5', '"bytes": {"a": "7x"}'])
def test_a_damaged_count_costs_its_line(tmp_path, damage):
    path = tmp_path / "generator-0.jsonl"
    write_spans(tmp_path, "generator-0", [("decode", "busy", 1, 2, 7), ("decode", "busy", 2, 3, 8)])
    damaged = path.read_text().replace('"tokens": 7', damage)
    path.write_text(damaged * 4)
    sum_old_spans(path, 1000)
    timeline = read_timeline(tmp_path)
    assert sum(timeline.processes["generator-0"]["busy", "decode"][2::3]) == 4 * 8
