"""Whole runs of the shipped recipe, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
SMALL = [
    "trainer.groups_per_step=8",
    "trainer.groups_per_part=4",
    "trainer.lr=5e-4",
    "trainer.warmup_steps=0",
    "evaluation.max_prompts=48",
    "evaluation.every_steps=0",
]
SUMMARY_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "steps",
    "wall_s",
    "tokens_per_s",
    "rollouts_trained",
    "groups_dropped",
    "staleness_mean",
    "staleness_max",
    "both_busy_share",
    "mixed_version_share",
    "tokens_during_publish",
    "ratio_mean",
    "ratio_clipped_share",
    "executors",
}


@dataclass
class Command:
    """A `llamarl` process whose descendants can be recognised by a variable they inherit."""

    process: subprocess.Popen[str]
    mark: str

    def family(self) -> list[int]:
        """Pids of every process, however orphaned, that inherited the mark."""
        pids = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    environment = (folder / "environ").read_bytes()
                    is_zombie = ") Z " in (folder / "stat").read_text()
                except (OSError, ProcessLookupError):
                    continue
                if self.mark.encode() in environment and not is_zombie:
                    pids.append(int(folder.name))
        return pids

    def wait_until_gone(self, limit_s: float) -> list[int]:
        end_s = time.monotonic() + limit_s
        while self.family() and time.monotonic() < end_s:
            time.sleep(0.1)
        return self.family()


def start(*arguments: str) -> Command:
    mark = f"LLAMARL_TEST_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"},
    )
    return Command(process, mark)


def train(run_dir: Path, *overrides: str) -> Command:
    return start("train", f"--config-dir={RECIPE}", f"run_dir={run_dir}", *SMALL, *overrides)


def finish(command: Command, limit_s: float = 120.0) -> tuple[int, str, str]:
    out, err = command.process.communicate(timeout=limit_s)
    return command.process.returncode, out, err


def wait_for_step(command: Command, run_dir: Path, step: int, limit_s: float = 90.0) -> None:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        assert command.process.poll() is None, command.process.communicate()
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run over Monarch: two trainer ranks that send their weights as messages, two
    storage units, two replicas."""
    folder = tmp_path_factory.mktemp("run")
    command = train(
        folder,
        "num_steps=6",
        "trainer.num_ranks=2",
        "experience.num_storage_units=2",
        "generator.num_replicas=2",
        "weights=collective",
        "checkpoint.every_steps=3",
        "experience.archive_tokens=true",
    )
    code, out, err = finish(command)
    assert code == 0, err + out
    assert "held-out accuracy" in out
    assert "try next" in out
    assert command.wait_until_gone(5.0) == []
    return folder


def test_a_run_leaves_everything_it_promises(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["steps"] == 6
    assert summary["rollouts_trained"] == 6 * 8 * 8
    assert summary["staleness_max"] <= 1
    assert 0.9 < summary["ratio_mean"] < 1.1
    assert set(summary["executors"]) >= {"generator", "trainer", "scorer", "storage"}
    assert "reference" not in summary["executors"], "AIPO has no KL term: nothing to refer to"
    for name in ("config.yaml", "command.txt", "environment.json", "trace.json", "metrics.jsonl"):
        assert (run_dir / name).stat().st_size > 0
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["torch"]
    assert list((run_dir / "tensorboard").iterdir())
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-00000003", "step-00000006"}
    assert [path.name for path in run_dir.glob(".*")] == [".lock"], "where ranks met is gone"


def test_every_rollout_has_exactly_one_fate(run_dir: Path) -> None:
    lines = [
        json.loads(line)
        for path in (run_dir / "archive").glob("rollouts-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    ids = [line["row_id"] for line in lines]
    assert len(ids) == len(set(ids))
    fates = {line["fate"] for line in lines}
    assert {"trained", "evaluated", "canary"} <= fates
    assert fates <= {"trained", "evaluated", "canary", "dropped", "unused"}
    for line in lines:
        assert sum(count for _, count in line["spans"]) == line["num_tokens"]
        if line["fate"] == "trained":
            assert line["sampling"]["temperature"] == 1.0
            assert 0 <= line["version"] - line["spans"][0][0] <= 1


def test_both_storage_units_hold_rows(run_dir: Path) -> None:
    sizes = [path.stat().st_size for path in (run_dir / "archive").glob("rollouts-*.jsonl")]
    assert len(sizes) == 2
    assert min(sizes) > 0


def test_metrics_name_what_the_readme_names(run_dir: Path) -> None:
    tags: set[str] = set()
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        tags |= set(json.loads(line))
    assert {
        "reward/mean",
        "ratio/mean",
        "ratio/clipped_share",
        "kl/generator_trainer",
        "policy/entropy",
        "length/mean",
        "length/truncated_share",
        "tokens/per_s",
        "time/publish_s",
        "staleness/max",
        "evaluation/accuracy",
        "wait/trainer",
        "wait/generator",
        "canary/difference",
        "canary/tolerance",
    } <= tags


def test_the_trace_is_one_timeline_of_all_processes(run_dir: Path) -> None:
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
    expected = {"controller", "generator-0", "generator-1", "trainer-0", "trainer-1", "scorer-0"}
    assert expected <= names
    assert {"decode", "accumulate", "publish", "score"} <= {e["name"] for e in events}


def test_the_export_answers_in_transformers_as_it_did_in_the_run(run_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    lines = (RECIPE / "held_out.jsonl").read_text().splitlines()[:48]
    num_right = 0
    for line in lines:
        row = json.loads(line)
        ids = tokenizer(row["question"], return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=96, do_sample=False, pad_token_id=0)[0]
        text = tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True)
        has_stopped = out[-1].item() == tokenizer.eos_token_id
        num_right += has_stopped and text.endswith(f"Answer: {row['answer']}")
    after = json.loads((run_dir / "summary.json").read_text())["accuracy_after"]
    assert num_right / 48 == pytest.approx(after, abs=1e-9)


def read_archive(run_dir: Path) -> list[dict[str, Any]]:
    files = (run_dir / "archive").glob("rollouts-*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def prompts_trained(run_dir: Path, first_row: int) -> list[list[int]]:
    """Prompt ids of the groups trained from row `first_row` on, in the order of admission."""
    lines = [
        line
        for line in read_archive(run_dir)
        if line["fate"] == "trained" and line["row_id"] >= first_row
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


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
    ids=["ctrl-c", "killed"],
)
def test_ended_runs_leave_no_process_and_go_on_where_they_were(
    number: int, code: int, tmp_path: Path
) -> None:
    """A signal in the midst of a run, then kill -9 of the resumed run in the midst of a save."""
    overrides = ["checkpoint.every_steps=2", "experience.archive_tokens=true"]
    command = train(tmp_path, *overrides, "num_steps=400")
    wait_for_step(command, tmp_path, 3)
    assert len(command.family()) >= 6  # controller, 4 executors, a reward worker
    command.process.send_signal(number)
    got, _, err = finish(command, 30.0)
    assert got == code
    assert len(err.splitlines()) == (number == signal.SIGINT), err
    assert command.wait_until_gone(10.0) == []
    first = newest_state(tmp_path)
    command = train(tmp_path, *overrides, "num_steps=400", "checkpoint.resume=auto")
    wait_for_save(command, tmp_path, first["version"] + 4)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    assert command.wait_until_gone(10.0) == []
    second = newest_state(tmp_path)
    assert second["version"] == first["version"] + 2
    num_steps = second["version"] + 2
    command = train(tmp_path, *overrides, f"num_steps={num_steps}", "checkpoint.resume=auto")
    code, out, err = finish(command)
    assert code == 0, err + out
    # What was open at a checkpoint is asked first, in its order; then the stream goes on.
    for state in (first, second):
        assert len(state["pending"]) == 8, "the groups of one step were open"
        assert prompts_trained(tmp_path, state["next_row_id"])[:8] == prompts_open(state)
    # Of steps that were lost nothing is left: every step, row and line stands there once.
    ids = [line["row_id"] for line in read_archive(tmp_path)]
    assert len(ids) == len(set(ids))
    metrics = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in metrics if "reward/mean" in line]
    assert steps == list(range(1, num_steps + 1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollouts_trained"] == num_steps * 8 * 8


def newest_state(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    state: dict[str, Any] = json.loads((newest / "controller.json").read_text())
    return state


def wait_for_save(command: Command, run_dir: Path, version: int, limit_s: float = 90.0) -> None:
    """Until the save of `version` has begun and is not committed."""
    folder = run_dir / "checkpoints" / f"unfinished-step-{version:08d}"
    end_s = time.monotonic() + limit_s
    while not folder.exists():
        assert time.monotonic() < end_s
        assert command.process.poll() is None, command.process.communicate()
        time.sleep(0.0005)


@pytest.mark.slow
def test_sigterm_ends_everything(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    wait_for_step(command, tmp_path, 2)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command, 30.0)
    assert code == 143
    assert len(err.splitlines()) == 1, err
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 1.0, 2.0, 3.0])
def test_a_signal_during_the_start_ends_everything(delay_s: float, tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    end_s = time.monotonic() + 60
    while not (tmp_path / "config.yaml").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(delay_s)
    command.process.send_signal(signal.SIGINT)
    code, _, err = finish(command, 30.0)
    assert code == 130
    assert len(err.splitlines()) == 1, err
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scorer", "storage-0", "generator-0"])
def test_a_dead_executor_ends_the_run_with_its_name(role: str, tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    wait_for_step(command, tmp_path, 2)
    os.kill(executors(command, role)[0], signal.SIGKILL)
    code, _, err = finish(command, 30.0)
    assert code == 1
    assert f"lost executor {role}" in err
    assert "ExceptionGroup" not in err
    assert command.wait_until_gone(5.0) == []


def test_a_run_spares_a_replica_and_a_reward_process_but_not_its_trainer(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400", "generator.num_replicas=2")
    wait_for_step(command, tmp_path, 2)
    (worker,) = [pid for pid in command.family() if is_reward_worker(pid)]
    os.kill(worker, signal.SIGKILL)
    os.kill(executors(command, "generator-0")[0], signal.SIGKILL)
    wait_for_step(command, tmp_path, 7)
    os.kill(executors(command, "trainer")[0], signal.SIGKILL)
    code, out, err = finish(command, 30.0)
    assert code == 1
    assert "the reward process ended by itself (signal SIGKILL)" in err
    assert "lost executor generator-0" in out
    assert "lost executor trainer" in err
    assert "ExceptionGroup" not in err
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silence"),
    [(signal.SIGKILL, "cluster.silence_s=60"), (signal.SIGSTOP, "cluster.silence_s=3")],
    ids=["killed", "stopped"],
)
def test_the_run_goes_on_without_a_lost_replica_and_a_lost_reward_process(
    number: int, silence: str, tmp_path: Path
) -> None:
    command = train(tmp_path, "num_steps=12", "generator.num_replicas=2", silence)
    wait_for_step(command, tmp_path, 2)
    (worker,) = [pid for pid in command.family() if is_reward_worker(pid)]
    os.kill(worker, signal.SIGKILL)
    os.kill(executors(command, "generator-0")[0], number)
    code, out, err = finish(command)
    assert code == 0, err + out
    assert "the reward process ended by itself (signal SIGKILL)" in err
    assert "lost" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["staleness_max"] <= 1
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("shadow", ["host", "bucket"])
def test_a_run_over_rdma_ends_without_a_complaint(shadow: str, tmp_path: Path) -> None:
    overrides = ["weights=rdma", f"weights.shadow={shadow}", "weights.bucket_bytes=500000"]
    command = train(tmp_path, "num_steps=4", "generator.num_replicas=2", *overrides)
    code, out, err = finish(command)
    assert code == 0, err + out
    complaints = "Traceback|Error|WARNING|Monarch internal logs"  # the last: of a second client
    for log in (tmp_path / "logs").iterdir():
        assert not re.search(complaints, log.read_text()), log.read_text()
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["weights.timeout_s=60", "weights.timeout_s=2"])
def test_the_run_goes_on_after_a_replica_stood_still_for_a_while(
    limit: str, tmp_path: Path
) -> None:
    """It comes back, or a publish has given it up by then."""
    command = train(tmp_path, "num_steps=25", "generator.num_replicas=2", limit)
    wait_for_step(command, tmp_path, 2)
    (victim,) = executors(command, "generator-1")
    os.kill(victim, signal.SIGSTOP)
    time.sleep(6)
    os.kill(victim, signal.SIGCONT)
    code, out, err = finish(command)
    assert code == 0, err + out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 25
    assert summary["staleness_max"] <= 1
    rows = [row for row in read_archive(tmp_path) if row["fate"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == 25 * 8 * 8
    assert command.wait_until_gone(5.0) == []


def test_a_finished_run_is_not_run_over(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != ".lock"}
    code, _, err = finish(train(run_dir, "num_steps=2"))
    assert code == 2
    assert "run_dir must be a new folder" in err
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != ".lock"}
    assert after == before


def executors(command: Command, role: str) -> list[int]:
    """Pids of a role's processes, without those they started."""
    mark = re.compile(rf"LLAMARL_GROUP=[^\0]*/{role}(\0|$)")
    pids = [pid for pid in command.family() if mark.search(environ(pid))]
    return [pid for pid in pids if not is_reward_worker(pid)]


def is_reward_worker(pid: int) -> bool:
    return b"llamarl.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace")
