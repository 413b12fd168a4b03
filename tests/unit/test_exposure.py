"""What publishes cost generators and trainer during a run, on spans written by hand."""

from __future__ import annotations

import pytest

from llamarl.metrics.recent_spans import Exposure
from llamarl.metrics.span import Span

S = 10**9


def span(name: str, cat: str, start_s: float, end_s: float, **args: int) -> Span:
    return Span(
        session=0, name=name, cat=cat, start_ns=int(start_s * S), end_ns=int(end_s * S), args=args
    )


def make() -> Exposure:
    """The publish that a run starts with has ended."""
    exposure = Exposure()
    feed(exposure, (-9, 0))
    exposure.add("generator-0", span("requests", "wait", -9, 0))
    return exposure


def feed(exposure: Exposure, *publishes: tuple[float, float]) -> None:
    for start_s, end_s in publishes:
        exposure.add("controller-0", span("publish", "publish", start_s, end_s, version=1))
        exposure.add("controller-0", span("publish", "publish", start_s, end_s, replica=0))


def test_nothing_is_said_before_a_second_publish_has_ended() -> None:
    exposure = make()
    assert exposure.take() == {}
    feed(exposure, (1, 2))
    assert exposure.take() == {}


def test_a_publish_beside_decoding_and_training_exposes_its_commit_only() -> None:
    exposure = make()
    feed(exposure, (1, 2), (11, 12))
    exposure.add("generator-0", span("decode", "busy", 0, 1.9, tokens=8))
    exposure.add("generator-0", span("commit", "busy", 1.9, 1.92, version=1))
    exposure.add("generator-0", span("requests", "wait", 5, 8))  # no version was on its way
    found = exposure.take()
    assert found.pop("exposed_s") == pytest.approx(0.02)
    assert found == pytest.approx({"trainer_s": 0.0, "commit_s": 0.02, "starved_s": 0.0})


def test_waits_are_means_over_replicas_and_per_publish_and_count_once() -> None:
    exposure = make()
    feed(exposure, (1, 2), (11, 12), (21, 22))
    exposure.add("generator-0", span("requests", "wait", 0, 1.5))
    exposure.add("generator-1", span("requests", "wait", 1.25, 11.5))
    exposure.add("generator-1", span("buckets", "wait", 11.6, 11.8))
    exposure.add("trainer-0", span("publish", "wait", 11, 11.4, version=1))
    exposure.add("trainer-1", span("publish", "wait", 11, 11.2, version=1))
    exposure.add("controller-0", span("last_publish", "wait", 11.5, 12))
    exposure.add("generator-0", span("requests", "wait", 21, 21.75))
    # Starved: 0.5 s and 1.25 s in two publishes; trainer: 0.3 s as a mean of ranks, and 0.5 s.
    expected = {"trainer_s": 0.4, "commit_s": 0.05, "starved_s": 0.4375, "exposed_s": 0.8875}
    assert exposure.take() == pytest.approx(expected)
    assert exposure.take() == {}
    feed(exposure, (31, 32))
    exposure.add("generator-1", span("decode", "busy", 21, 22, tokens=8))
    expected = {"trainer_s": 0.0, "commit_s": 0.0, "starved_s": 0.375, "exposed_s": 0.375}
    assert exposure.take() == pytest.approx(expected)
