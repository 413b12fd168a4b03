"""Decode steps of a training step: what the order of its rollouts changes.

Seconds also depend on what else the processors do in these. Invariant: with S = 0 a training step's
rollouts are decoded between the end of the step before and its own.
"""

from __future__ import annotations

from bisect import bisect_right

from staging_bench.exposure import Spans


def decode_steps(spans: Spans) -> list[int]:
    """Of each training step of a run with S = 0, on the replica that makes most."""
    ends_ns = sorted(each.end_ns for each in spans["controller"] if each.name == "step")
    counts = []
    for name, each in spans.items():
        if name.startswith("generator-"):
            counts.append([0] * (len(ends_ns) + 1))
            for span in each:
                if span.name == "decode":
                    counts[-1][bisect_right(ends_ns, span.start_ns)] += 1
    return [max(step) for step in zip(*counts, strict=True)][: len(ends_ns)]
