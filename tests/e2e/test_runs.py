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
    """A finished run over Monarch: two trainer ranks, two storage units, two replicas."""
    folder = tmp_path_factory.mktemp("run")
    command = train(
        folder,
        "num_steps=6",
        "trainer.num_ranks=2",
        "experience.num_storage_units=2",
        "generator.num_replicas=2",
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
    for name in ("config.yaml", "command.txt", "environment.json", "trace.json", "metrics.jsonl"):
        assert (run_dir / name).stat().st_size > 0
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["torch"]
    assert list((run_dir / "tensorboard").iterdir())
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-00000003", "step-00000006"}


def test_every_rollout_has_exactly_one_fate(run_dir: Path) -> None:
    lines = [
        json.loads(line)
        for path in (run_dir / "archive").glob("rollouts-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    ids = [line["row_id"] for line in lines]
    assert len(ids) == len(set(ids))
    fates = {line["fate"] for line in lines}
    assert {"trained", "evaluated"} <= fates <= {"trained", "evaluated", "dropped", "unused"}
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


def test_a_killed_run_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path) -> None:
    overrides = ["checkpoint.every_steps=2", "num_steps=400", "checkpoint.keep=0"]
    command = train(tmp_path, *overrides)
    wait_for_step(command, tmp_path, 5)
    assert len(command.family()) >= 6  # controller, 4 executors, a reward worker
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    assert command.wait_until_gone(10.0) == []
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    state = json.loads((newest / "controller.json").read_text())
    again = train(tmp_path, "checkpoint.resume=auto", f"num_steps={state['version'] + 3}")
    code, out, err = finish(again)
    assert code == 0, err + out
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        if "loss" in line
    ]
    assert steps[-3:] == [state["version"] + i for i in (1, 2, 3)]
    # What was open at the checkpoint is asked again first, before the stream goes on.
    assert state["pending"], "nothing was open: the test would not see a lost prompt"


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    wait_for_step(command, tmp_path, 2)
    command.process.send_signal(signal.SIGINT)
    code, _, err = finish(command, 30.0)
    assert code == 130
    assert "Traceback" not in err
    assert command.wait_until_gone(5.0) == []


def test_a_dead_trainer_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    wait_for_step(command, tmp_path, 2)
    victims = [
        pid for pid in command.family() if re.search("LLAMARL_GROUP=[^\\0]*trainer", environ(pid))
    ]
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    code, _, err = finish(command, 30.0)
    assert code == 1
    assert "trainer" in err
    assert command.wait_until_gone(5.0) == []


def environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace")
