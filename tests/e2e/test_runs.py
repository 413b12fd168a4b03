"""Whole runs of the shipped recipe, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llamarl.metrics.summary import summarize
from tests.e2e.commands import (
    KEEPING,
    RECIPE,
    finish,
    newest_state,
    read_archive,
    read_rollouts,
    reward_workers,
    train,
    wait_for_step,
)
from tests.json_lines import read_lines

# Amid a reward, and between two.
WORKER_LOST = r"the reward process ended by itself|reward worker \d+ ended, or wrote unasked"


@dataclass
class Ended:
    """A command that was ended on purpose; `state` is the checkpoint that it leaves."""

    code: int
    err: str
    family: list[int]
    left: list[int]
    state: dict[str, Any]


@pytest.fixture(scope="module")
def interrupted(run_dir: Path) -> Ended:
    """A run over Monarch that lost a reward process, and later is killed."""
    command = train(run_dir, *KEEPING, "num_steps=400")
    wait_for_step(command, run_dir, 2)
    family = command.family()
    (worker,) = reward_workers(family)
    os.kill(worker, signal.SIGKILL)
    wait_for_step(command, run_dir, 5)
    command.process.send_signal(signal.SIGKILL)
    code, _, err = finish(command)
    return Ended(code, err, family, command.wait_until_gone(5.0), newest_state(run_dir))


@pytest.fixture(scope="module")
def finished(run_dir: Path, interrupted: Ended) -> Path:
    """The folder of the run, resumed and finished: with two trainer ranks that send their weights
    as messages, two storage units, two replicas."""
    command = train(
        run_dir,
        *KEEPING,
        f"num_steps={interrupted.state['version'] + 2}",
        "checkpoint.resume=auto",
        "trainer.num_ranks=2",
        "experience.units_per_host=2",
        "generator.num_replicas=2",
        "weights=collective",
    )
    code, out, err = finish(command)
    assert code == 0, err + out
    assert "held-out accuracy" in out
    assert "try next" in out
    assert command.wait_until_gone(5.0) == []
    return run_dir


@pytest.mark.long
def test_a_run_spares_a_reward_process_and_leaves_none_when_it_is_killed(
    interrupted: Ended,
) -> None:
    assert interrupted.code == -signal.SIGKILL
    assert len(interrupted.family) >= 6  # controller, 4 executors, a reward worker
    assert re.search(WORKER_LOST, interrupted.err)
    assert "Traceback" not in interrupted.err
    assert interrupted.left == []


def prompts_trained(run_dir: Path, first_row: int) -> list[list[int]]:
    """Prompt ids of the groups trained from row `first_row` on, in the order of admission."""
    lines = [
        line
        for line in read_rollouts(run_dir)
        if line["outcome"] == "trained" and line["row_id"] >= first_row
    ]
    lines.sort(key=lambda line: line["row_id"])
    groups = [lines[start : start + 8] for start in range(0, len(lines), 8)]
    assert all(len({str(line["prompt_ids"]) for line in group}) == 1 for group in groups)
    return [group[0]["prompt_ids"] for group in groups]


def prompts_open(state: dict[str, Any]) -> list[list[int]]:
    """Prompt ids of what a checkpoint says was admitted or drawn, and not trained."""
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "checkpoint")
    rows = (RECIPE / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(rows[number - 1])["question"] for _, number in state["pending"]]
    return [tokenizer(text).input_ids for text in texts]


def test_a_run_that_was_killed_goes_on_where_it_was(interrupted: Ended, finished: Path) -> None:
    """What was open at the checkpoint is asked first, in its order; then the stream goes on."""
    state = interrupted.state
    num_open = len(state["pending"])
    assert 8 <= num_open <= 16, "the groups of one step, and of another that was under way"
    assert prompts_trained(finished, state["next_row_id"])[:num_open] == prompts_open(state)
    steps = [
        line["step"] for line in read_lines(finished / "metrics.jsonl") if "reward/mean" in line
    ]
    assert steps == list(range(1, state["version"] + 3)), "of steps that were lost nothing is left"


def test_a_run_leaves_everything_it_promises(
    finished: Path, interrupted: Ended, tmp_path: Path
) -> None:
    num_steps = interrupted.state["version"] + 2
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) == set(summarize(tmp_path)), "a run that stored nothing has all of them"
    assert summary["steps"] == num_steps
    assert summary["rollouts_trained"] == num_steps * 8 * 8
    assert summary["staleness_max"] <= 1
    assert 0.9 < summary["ratio_mean"] < 1.1
    assert set(summary["executors"]) >= {"generator", "trainer", "scorer", "storage"}
    assert "reference" not in summary["executors"], "AIPO has no KL term: nothing to refer to"
    for name in ("config.yaml", "command.txt", "environment.json", "trace.json", "metrics.jsonl"):
        assert (finished / name).stat().st_size > 0
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"]
    assert list((finished / "tensorboard").iterdir())
    names = {path.name for path in (finished / "checkpoints").iterdir()}
    due = (num_steps - 1) // 2 * 2  # the last before the end
    assert names == {f"step-{number:08d}" for number in (due, num_steps)}
    assert [path.name for path in finished.glob(".*")] == [".lock"], "where ranks met is gone"


def test_other_users_can_read_no_file_of_a_run(finished: Path) -> None:
    paths = [path for path in (finished, *finished.rglob("*")) if not path.is_symlink()]
    modes = {path: path.stat().st_mode for path in paths}  # a link has no mode of its own
    assert len(modes) > 30
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o027} == {}


def test_every_rollout_has_exactly_one_outcome(finished: Path) -> None:
    lines = read_archive(finished)
    ids = [line["row_id"] for line in lines]
    assert len(ids) == len(set(ids))
    outcomes = {line["outcome"] for line in lines}
    assert {"trained", "evaluated", "logprob_check"} <= outcomes
    assert outcomes <= {"trained", "evaluated", "logprob_check", "dropped", "unused"}
    for line in lines:
        assert sum(count for _, count in line["spans"]) == line["num_tokens"]
        if line["outcome"] == "trained":
            assert line["sampling"]["temperature"] == 1.0
            assert 0 <= line["version"] - line["spans"][0][0] <= 1


def test_both_storage_units_hold_rows(finished: Path) -> None:
    sizes = [path.stat().st_size for path in (finished / "archive").glob("rollouts-*.jsonl")]
    assert len(sizes) == 2
    assert min(sizes) > 0


def test_metrics_have_the_tags_to_watch(finished: Path) -> None:
    tags = {tag for line in read_lines(finished / "metrics.jsonl") for tag in line}
    assert {
        "reward/mean",
        "trained/ratio_mean",
        "trained/clipped_share",
        "trained/kl_generator",
        "trained/entropy",
        "length/mean",
        "length/truncated_share",
        "tokens/per_s",
        "time/publish_s",
        "staleness/max",
        "evaluation/accuracy",
        "logprob_check/difference",
        "logprob_check/tolerance",
    } <= tags
    # The slower side, as the machine has it, may never have waited.
    assert {"wait/trainer", "wait/generator"} & tags


def test_the_trace_is_one_timeline_of_all_processes(finished: Path) -> None:
    events = json.loads((finished / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
    expected = {"controller", "generator-0", "generator-1", "trainer-0", "trainer-1", "scorer-0"}
    assert expected <= names
    assert {"decode", "accumulate", "publish", "score"} <= {e["name"] for e in events}


def test_the_export_answers_in_transformers_as_it_did_in_the_run(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    lines = (RECIPE / "held_out.jsonl").read_text().splitlines()[:16]
    num_right = 0
    for line in lines:
        row = json.loads(line)
        ids = tokenizer(row["question"], return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=96, do_sample=False, pad_token_id=0)[0]
        text = tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True)
        has_stopped = out[-1].item() == tokenizer.eos_token_id
        num_right += has_stopped and text.endswith(f"Answer: {row['answer']}")
    after = json.loads((finished / "summary.json").read_text())["accuracy_after"]
    assert num_right / 16 == pytest.approx(after, abs=1e-9)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")
