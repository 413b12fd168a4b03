"""The bench of publishes: what it makes of spans, and its two forms that no setting has."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.metrics.span import Span

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from staging_bench.exposure import measure
from staging_bench.variants import Together

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench_staging.py"
MS = 10**6


def span(name, start_ms, end_ms, cat="busy", **args):
    return Span(0, name, cat, start_ms * MS, end_ms * MS, args)


def publish(version, start_ms, end_ms, **args):
    return span("publish", start_ms, end_ms, "publish", version=version, **args)


def spans(generators, trainer=()):
    """A run whose versions 3, 4 and 5 are made at 200, 300 and 400 ms; version 3 is published from
    200 to 240 ms."""
    steps = [span("step", v * 100 - 200, v * 100 - 100, "mark", version=v) for v in (2, 3, 4, 5)]
    publishes = [publish(1, 50, 70), publish(3, 200, 240), publish(3, 200, 219, replica=0)]
    controller = [*steps, *publishes, publish(5, 400, 430)]
    return {"controller": controller, "trainer-0": list(trainer)} | {
        f"generator-{i}": each for i, each in enumerate(generators)
    }


def generator(verified_ms, commit_ms, *rest):
    verify = span("verify", verified_ms - 10, verified_ms, "publish", version=3)
    return [verify, span("commit", *commit_ms, version=3), *rest]


FIRST = generator(
    215,
    (216, 218),
    span("decode", 100, 190, tokens=8, version=2),
    span("requests", 190, 216, "wait"),
    span("decode", 218, 230, tokens=10, version=3),
    span("decode", 230, 400, tokens=3, version=3),
)
SECOND = generator(
    235,
    (236, 240),
    span("decode", 100, 210, tokens=8, version=2),
    span("requests", 210, 236, "wait"),
    span("prefill", 240, 242, tokens=7, version=3),
    span("decode", 242, 400, tokens=7, version=3),
)


def test_a_wait_counts_from_the_version_on_and_a_commit_wherever_it_is() -> None:
    found = measure(spans([FIRST, SECOND]), first_version=2)
    assert found.num_publishes == 1, "neither before the window nor after it"
    assert found.interrupted_s == pytest.approx((0.002 + 0.004) / 2)
    assert found.starved_s == pytest.approx((0.016 + 0.026) / 2)
    assert found.exposed_s == pytest.approx(0.024)
    assert found.all_stopped_s == pytest.approx(0.008), "from 210 to 218 ms"
    assert found.idle_share == pytest.approx((28 + 30) / 2 / 300)
    assert found.publish_s == pytest.approx(0.040)


def test_the_lead_is_what_the_first_replica_writes_before_the_last_one_has_committed() -> None:
    found = measure(spans([FIRST, SECOND]), first_version=2)
    assert found.lead_s == pytest.approx(0.022)
    assert found.lead_tokens == 13
    assert found.early_share == 1
    verified_before = generator(216, (236, 240), *SECOND[2:])
    assert measure(spans([FIRST, verified_before]), first_version=2).early_share == 0


def test_a_replica_that_has_nothing_to_do_after_its_commit_was_not_starved() -> None:
    late = [each for each in FIRST if each.name != "decode"]
    found = measure(
        spans([[*late, span("decode", 269, 400, tokens=3, version=3)], SECOND]), first_version=2
    )
    assert found.starved_s == pytest.approx(0.026 / 2)
    assert found.interrupted_s == pytest.approx((0.002 + 0.004) / 2)


def test_a_replica_that_was_made_to_stand_still_was_interrupted_not_starved() -> None:
    stopped = [*FIRST[:2], span("phase", 201, 219, "wait"), span("decode", 219, 400, version=3)]
    found = measure(spans([stopped, stopped]), first_version=2)
    assert found.interrupted_s == pytest.approx(0.018)
    assert found.starved_s == 0


def test_the_trainer_waits_where_it_keeps_weights_or_does_not_begin_a_batch() -> None:
    trainer = [
        span("publish", 220, 222, "wait", version=3),
        span("optimizer_step", 222, 230, version=3),
        span("batch", 230, 260, "wait", version=4),
    ]
    found = measure(spans([FIRST, SECOND], trainer), first_version=2)
    assert found.trainer_s == pytest.approx(0.012), "2 ms kept, 10 ms until the publish had ended"


def test_a_version_that_a_replica_never_took_is_not_counted() -> None:
    behind = [each for each in SECOND if each.name != "commit"]
    with pytest.raises(ValueError, match="must reach all replicas"):
        measure(spans([FIRST, behind]), first_version=2)


async def commit_both() -> list[str]:
    """What two replicas do, the second 10 ms later."""
    together, done = Together(0.0, num_replicas=2), []

    async def commit(replica, delay_s):
        await asyncio.sleep(delay_s)
        done.append(f"{replica} verified")
        async with together.alone():
            done.append(f"{replica} commits")
            await asyncio.sleep(0.01)

    for _ in range(2):
        await asyncio.gather(commit("first", 0.0), commit("second", 0.01))
        done.append("both have it")
    return done


def test_replicas_that_commit_together_wait_until_the_last_one_is_verified() -> None:
    done = asyncio.run(commit_both())
    assert len(done) == 10
    for half in done[:5], done[5:]:
        assert half[:2] == ["first verified", "second verified"]
        assert sorted(half[2:4]) == ["first commits", "second commits"]


@pytest.mark.slow
def test_every_form_keeps_the_bound_and_only_a_blocking_publish_stops_decoding_for_long(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(BENCH), "--quick", "--json=figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    medians = json.loads((tmp_path / "figures.json").read_text())["medians"]
    for name, figures in medians.items():
        assert figures["num_publishes"] >= 2, name
        assert 0 < figures["staleness_max"] <= (2 if "staleness 2" in name else 1), name
        assert figures["early_share"] == ("staggered" in name), name
        assert figures["publish_s"] > figures["lead_s"] > 0, name
    interrupted = {name: figures["interrupted_s"] for name, figures in medians.items()}
    beside = max(interrupted[f"double_buffer, {commits}"] for commits in ("staggered", "together"))
    for name in ("blocking, together", "blocking, staggered", "bucket, staggered"):
        assert interrupted[name] > 10 * beside, name
