"""Costs read off a run folder: those that its spans were made with come out again."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.workload import make_workload
from llamarl.planner.trace import Trace, fit_overhead, read_trace, run_config
from llamarl.trainer.losses.reinforce import ReinforceConfig
from tests.planner.test_planner_step import TINY, make_config

SHARED_SPEED = 0.8
KNOWN = Costs(
    decode_step_s=2e-3,
    decode_row_s=5e-5,
    prefill_call_s=1e-3,
    prefill_token_s=2e-5,
    part_s=0.02,
    token_s=1e-4,
    optimizer_s=0.03,
    score_call_s=2e-3,
    score_row_s=1e-4,
    write_s=0.01,
    check_s=0.02,
    commit_s=1e-4,
    message_s=3e-3,
    turnaround_s=0.05,
    store_row_s=1e-5,
    num_cores=2,
    shared_speed=SHARED_SPEED,
)
PROMPT_TOKENS, ROLLOUTS, GROUPS, STEPS = 10, 4, 8, 12
STEP_S = 1.0


def span(name: str, cat: str, start_s: float, seconds: float, **args: Any) -> dict[str, Any]:
    start_ns = round(start_s * 1e9)
    return {
        "name": name,
        "cat": cat,
        "start_ns": start_ns,
        "end_ns": start_ns + round(seconds * 1e9),
        **args,
    }


def write_run(folder: Path, rng: random.Random) -> list[dict[str, Any]]:
    """A run of KNOWN costs: in each second the trainer works at first, the generator always."""
    rows: list[dict[str, Any]] = []
    files: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("controller", "generator-0", "trainer-0", "scorer-0", "storage-0")
    }
    for step in range(STEPS):
        start_s = step * STEP_S
        lengths = [rng.randint(10, 60) for _ in range(GROUPS * ROLLOUTS)]
        for place, length in enumerate(lengths):
            group = place // ROLLOUTS
            rows.append(
                {
                    "row_id": len(rows),
                    "outcome": "trained",
                    "version": step,
                    "num_tokens": length,
                    "num_prompt_tokens": PROMPT_TOKENS,
                    "reward": float(place % 2) if group % 4 else 1.0,
                }
            )
        packed = sum(lengths) + PROMPT_TOKENS * len(lengths)
        train_s = (KNOWN.part_s + packed * KNOWN.token_s) / SHARED_SPEED
        trainer = files["trainer-0"]
        work = {"tokens": sum(lengths), "version": step}
        trainer.append(span("accumulate", "busy", start_s, train_s, **work))
        trainer.append(span("optimizer_step", "busy", start_s + 0.6, KNOWN.optimizer_s))
        trainer.append(span("write", "publish", start_s + 0.7, KNOWN.write_s))
        generator, now_s = files["generator-0"], start_s
        while now_s < start_s + 0.55:
            size = rng.randint(1, 64)
            free_s = KNOWN.decode_step_s + size * KNOWN.decode_row_s
            is_shared = now_s + free_s / SHARED_SPEED < start_s + train_s
            seconds = free_s / SHARED_SPEED if is_shared else free_s
            now_s = now_s if is_shared else max(now_s, start_s + train_s)
            generator.append(span("decode", "busy", now_s, seconds, tokens=size))
            now_s += seconds
        for number in range(4):
            tokens = rng.randint(10, 100)
            prefill_s = KNOWN.prefill_s([tokens])
            generator.append(
                span("prefill", "busy", start_s + 0.8 + number / 100, prefill_s, tokens=tokens)
            )
        generator.append(span("verify", "publish", start_s + 0.72, KNOWN.check_s / 2))
        generator.append(span("process_weights", "publish", start_s + 0.74, KNOWN.check_s / 2))
        generator.append(span("commit", "busy", start_s + 0.76, KNOWN.commit_s))
        score_s = KNOWN.score_call_s + (step + 1) * KNOWN.score_row_s
        files["scorer-0"].append(span("score", "busy", start_s + 0.9, score_s, rows=step + 1))
        store_s = 5 * KNOWN.store_row_s
        files["storage-0"].append(span("write_rows", "busy", start_s + 0.95, store_s, rows=5))
        files["controller"].append(span("step", "mark", start_s, STEP_S, version=step + 1))
        begin_s = KNOWN.turnaround_s + 2 * KNOWN.message_s
        begin_s += GROUPS * ROLLOUTS * KNOWN.store_row_s
        wait_s = 0.4 - KNOWN.optimizer_s - begin_s
        files["controller"].append(span("batch", "wait", start_s + 0.65, wait_s))
    sizes = [s["tokens"] for s in files["generator-0"] if s["name"] == "decode"]
    wait_s = (KNOWN.decode_step_s + KNOWN.decode_row_s * sum(sizes) / len(sizes)) / 2
    publish_s = KNOWN.write_s + KNOWN.check_s + KNOWN.commit_s + 4 * KNOWN.message_s + wait_s
    files["controller"] += [
        span("publish", "publish", i * STEP_S + 0.7, publish_s, replica=0) for i in range(STEPS)
    ]
    (folder / "spans").mkdir(parents=True)
    (folder / "archive").mkdir()
    origin = {"unix_minus_monotonic_ns": 0}
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in [{"process": name, **origin}, *lines])
        (folder / "spans" / f"{name}.jsonl").write_text(text)
    archive = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "archive" / "rollouts-0.jsonl").write_text(archive)
    return rows


def test_known_costs_come_out_of_a_run_again(tmp_path: Path) -> None:
    rows = write_run(tmp_path, random.Random(0))
    trace = read_trace(tmp_path, ROLLOUTS, num_cores=2)
    found = trace.costs
    assert found.shared_speed == pytest.approx(SHARED_SPEED, rel=0.03)
    for name, known in vars(KNOWN).items():
        # Beside the trainer the generator leaves gaps of up to a decode step.
        slack_s = 0.004 if name == "part_s" else 0.0
        if isinstance(known, float) and name not in ("forward_share", "relay_s"):
            assert getattr(found, name) == pytest.approx(known, rel=0.1, abs=slack_s), name
    assert trace.step_s == pytest.approx(STEP_S)
    assert trace.lengths == tuple(row["num_tokens"] for row in rows)
    assert trace.prompt_tokens == PROMPT_TOKENS
    assert trace.equal_share(ROLLOUTS) == pytest.approx(1 / 4)


def test_smaller_groups_are_equal_more_often() -> None:
    rewards = ((1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
    trace = Trace(costs=KNOWN, lengths=(1,), prompt_tokens=1, rewards=rewards, step_s=1.0)
    assert trace.equal_share(4) == pytest.approx(1 / 2)
    assert trace.equal_share(2) == pytest.approx((1 / 3 + 1) / 2)


def test_work_without_a_span_comes_out_of_the_step_time() -> None:
    config = make_config(num_replicas=2)
    lengths = (20,) * GROUPS * ROLLOUTS * 5
    costs = Costs(decode_row_s=1e-3, token_s=2e-4, num_cores=2)
    known = replace(costs, row_s=5e-3)
    workload = make_workload(config, lengths=lengths)
    step_s = simulate(config, TINY, known, workload=workload, num_steps=5, num_skipped=2).step_s
    rewards = ((0.0, 1.0, 0.0, 1.0),)
    trace = Trace(costs=costs, lengths=lengths, prompt_tokens=10, rewards=rewards, step_s=step_s)
    assert fit_overhead(trace, config, TINY).costs.row_s == pytest.approx(5e-3, rel=0.1)
    quick = replace(trace, step_s=step_s / 10)
    assert fit_overhead(quick, config, TINY).costs.row_s == 0


def test_a_run_without_spans_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, random.Random(0))
    (tmp_path / "spans" / "trainer-0.jsonl").unlink()
    with pytest.raises(ValueError, match="must have recorded accumulate spans"):
        read_trace(tmp_path, ROLLOUTS)
    shutil.rmtree(tmp_path / "spans")
    with pytest.raises(ValueError, match="must have recorded spans"):
        read_trace(tmp_path, ROLLOUTS)


def test_a_run_is_simulated_as_it_was_whatever_is_asked_now(tmp_path: Path) -> None:
    own = make_config(num_replicas=2, max_staleness=3)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(own)))
    assert run_config(str(tmp_path), make_config(num_replicas=1)) == own
    other = replace(own, algorithm=ReinforceConfig())
    with pytest.raises(ValueError, match="with the same engine and algorithm"):
        run_config(str(tmp_path), other)
