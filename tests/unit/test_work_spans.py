"""The busy and waiting times of an executor whose calls overlap."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from llamarl.metrics.span import Spans
from llamarl.scoring.stage_worker import WorkSpans
from tests.json_lines import read_lines


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
