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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.signals import hear_ctrl_c

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
SMALL = [
    "trainer.groups_per_step=8",
    "trainer.groups_per_part=4",
    "trainer.lr=5e-4",
    "trainer.warmup_steps=0",
    "evaluation.max_prompts=16",
    "evaluation.every_steps=0",
]
SUMMARY_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "reward_before",
    "reward_after",
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
        preexec_fn=hear_ctrl_c,
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


# Amid a reward, and between two.
WORKER_LOST = r"the reward process ended by itself|reward worker \d+ ended, or wrote unasked"
KEEPING = ["checkpoint.every_steps=2", "experience.archive_tokens=true"]


@dataclass
class Ended:
    """A command that was ended on purpose; `state` is the checkpoint that it leaves."""

    code: int
    out: str
    err: str
    family: list[int]
    left: list[int]
    state: dict[str, Any]


def last_due(state: dict[str, Any]) -> int:
    """The last version of every second one that is saved, whenever this state was."""
    version: int = state["version"]
    return version // 2 * 2


def end(command: Command, family: list[int], run_dir: Path) -> Ended:
    code, out, err = finish(command, 30.0)
    return Ended(code, out, err, family, command.wait_until_gone(5.0), newest_state(run_dir))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def interrupted(run_dir: Path) -> Ended:
    """A run over Monarch that lost a replica and a reward process, and later gets ctrl-c."""
    command = train(run_dir, *KEEPING, "num_steps=400", "generator.num_replicas=2")
    wait_for_step(command, run_dir, 2)
    family = command.family()
    (worker,) = reward_workers(family)
    os.kill(worker, signal.SIGKILL)
    os.kill(executors(command, "generator-0")[0], signal.SIGKILL)
    wait_for_step(command, run_dir, 5)
    command.process.send_signal(signal.SIGINT)
    return end(command, family, run_dir)


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
        "experience.num_storage_units=2",
        "generator.num_replicas=2",
        "weights=collective",
    )
    code, out, err = finish(command)
    assert code == 0, err + out
    assert "held-out accuracy" in out
    assert "try next" in out
    assert command.wait_until_gone(5.0) == []
    return run_dir


def saved_words(end: str, run_dir: Path) -> list[str]:
    """What a run that was ended says on standard error before the command that goes on."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    version = newest_state(run_dir)["version"]
    return [f"llamarl: {end}", f"llamarl: version {version} is saved in {newest}"]


def test_a_run_spares_a_replica_and_a_reward_process_and_ctrl_c_ends_it(
    interrupted: Ended, run_dir: Path
) -> None:
    assert interrupted.code == 130
    assert len(interrupted.family) >= 7  # controller, 5 executors, a reward worker
    assert re.search(WORKER_LOST, interrupted.err)
    assert "lost executor generator-0" in interrupted.out
    assert interrupted.err.splitlines()[-3:-1] == saved_words("interrupted", run_dir)
    assert "Traceback" not in interrupted.err
    assert interrupted.left == []


@pytest.mark.slow
def test_a_run_without_its_trainer_ends_with_its_name_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-c, then the death of the resumed run's trainer in the midst of the second save."""
    command = train(tmp_path, *KEEPING, "num_steps=400")
    wait_for_step(command, tmp_path, 3)
    command.process.send_signal(signal.SIGINT)
    first = end(command, [], tmp_path).state
    command = train(tmp_path, *KEEPING, "num_steps=400", "checkpoint.resume=auto")
    wait_for_step(command, tmp_path, last_due(first) + 2)
    (trainer,) = executors(command, "trainer")
    wait_for_save(command, tmp_path, last_due(first) + 4)
    os.kill(trainer, signal.SIGKILL)
    without_trainer = end(command, [trainer], tmp_path)
    assert without_trainer.code == 1
    assert "lost executor trainer" in without_trainer.err
    version = without_trainer.state["version"]
    assert f"llamarl: version {version} is saved in " in without_trainer.err
    assert without_trainer.err.endswith(f"run_dir={tmp_path} checkpoint.resume=auto\n")
    assert re.search(r"version \d+ could not be saved: lost", " ".join(without_trainer.out.split()))
    assert "ExceptionGroup" not in without_trainer.err
    assert without_trainer.left == []
    num_steps = f"num_steps={version + 2}"
    code, out, err = finish(train(tmp_path, *KEEPING, num_steps, "checkpoint.resume=auto"))
    assert code == 0, err + out
    goes_on(tmp_path, first, without_trainer.state)


def test_a_run_that_was_ended_goes_on_where_it_was(interrupted: Ended, finished: Path) -> None:
    goes_on(finished, interrupted.state)


def test_a_run_leaves_everything_it_promises(finished: Path, interrupted: Ended) -> None:
    num_steps = interrupted.state["version"] + 2
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
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


def test_every_rollout_has_exactly_one_fate(finished: Path) -> None:
    lines = [
        json.loads(line)
        for path in (finished / "archive").glob("rollouts-*.jsonl")
        for line in path.read_text().splitlines()
    ]
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
    tags: set[str] = set()
    for line in (finished / "metrics.jsonl").read_text().splitlines():
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
        "logprob_check/difference",
        "logprob_check/tolerance",
    } <= tags


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


def read_archive(run_dir: Path) -> list[dict[str, Any]]:
    files = (run_dir / "archive").glob("rollouts-*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def prompts_trained(run_dir: Path, first_row: int) -> list[list[int]]:
    """Prompt ids of the groups trained from row `first_row` on, in the order of admission."""
    lines = [
        line
        for line in read_archive(run_dir)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["ctrl-c", "killed"]
)
def test_ended_runs_leave_no_process_and_go_on_where_they_were(
    number: int, code: int, tmp_path: Path
) -> None:
    """A signal in the midst of a run, then kill -9 of the resumed run in the midst of a save."""
    command = train(tmp_path, *KEEPING, "num_steps=400")
    wait_for_step(command, tmp_path, 3)
    assert len(command.family()) >= 6  # controller, 4 executors, a reward worker
    command.process.send_signal(number)
    got, _, err = finish(command, 30.0)
    assert got == code
    assert len(err.splitlines()) == (3 if number == signal.SIGINT else 0), err
    assert command.wait_until_gone(10.0) == []
    first = newest_state(tmp_path)
    command = train(tmp_path, *KEEPING, "num_steps=400", "checkpoint.resume=auto")
    wait_for_save(command, tmp_path, last_due(first) + 4)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    assert command.wait_until_gone(10.0) == []
    second = newest_state(tmp_path)
    num_steps = second["version"] + 2
    command = train(tmp_path, *KEEPING, f"num_steps={num_steps}", "checkpoint.resume=auto")
    code, out, err = finish(command)
    assert code == 0, err + out
    goes_on(tmp_path, first, second)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollouts_trained"] == num_steps * 8 * 8


def goes_on(run_dir: Path, *ended: dict[str, Any]) -> None:
    """Asserts that a run ended after each of these checkpoints, then finished two steps after the
    last one, did nothing twice."""
    for first, second in pairwise(ended):
        assert second["version"] == last_due(first) + 2
    # What was open at a checkpoint is asked first, in its order; then the stream goes on.
    for state in ended:
        num_open = len(state["pending"])
        assert 8 <= num_open <= 16, "the groups of one step, and of another that was under way"
        assert prompts_trained(run_dir, state["next_row_id"])[:num_open] == prompts_open(state)
    # Of steps that were lost nothing is left: every step, row and line stands there once.
    ids = [line["row_id"] for line in read_archive(run_dir)]
    assert len(ids) == len(set(ids))
    metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in metrics if "reward/mean" in line]
    assert steps == list(range(1, ended[-1]["version"] + 3))


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
    assert code == 75
    assert err.splitlines()[:-1] == saved_words("terminated", tmp_path)
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
    assert err == f"llamarl: interrupted\nllamarl: no version is saved in {tmp_path}\n"
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize(
    "num_processes", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4, 6))]
)
def test_a_run_killed_during_its_start_leaves_no_process_and_can_be_repeated_at_once(
    num_processes: int, tmp_path: Path
) -> None:
    command = train(tmp_path, "num_steps=2")
    end_s = time.monotonic() + 60
    while not (tmp_path / "config.yaml").exists() or len(command.family()) < num_processes:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    again = train(tmp_path, "num_steps=2", "checkpoint.resume=auto") if num_processes > 2 else None
    assert command.wait_until_gone(5.0) == []
    if again is not None:
        code, out, err = finish(again)
        assert code == 0, err + out
        ids = [line["row_id"] for line in read_archive(tmp_path)]
        assert len(ids) == len(set(ids))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silence"),
    [
        (signal.SIGKILL, "cluster.liveness_timeout_s=60"),
        (signal.SIGSTOP, "cluster.liveness_timeout_s=3"),
    ],
    ids=["killed", "stopped"],
)
def test_the_run_goes_on_without_a_lost_replica_and_a_lost_reward_process(
    number: int, silence: str, tmp_path: Path
) -> None:
    command = train(tmp_path, "num_steps=12", "generator.num_replicas=2", silence)
    wait_for_step(command, tmp_path, 2)
    (worker,) = reward_workers(command.family())
    os.kill(worker, signal.SIGKILL)
    os.kill(executors(command, "generator-0")[0], number)
    code, out, err = finish(command)
    assert code == 0, err + out
    assert re.search(WORKER_LOST, err)
    assert "lost" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["staleness_max"] <= 1
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["host", "bucket"])
def test_a_run_over_rdma_ends_without_a_complaint(staging: str, tmp_path: Path) -> None:
    overrides = ["weights=rdma", f"weights.staging={staging}", "weights.bucket_bytes=500000"]
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
    rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == 25 * 8 * 8
    assert command.wait_until_gone(5.0) == []


def executors(command: Command, role: str) -> list[int]:
    """Pids of a role's processes, without those they started."""
    mark = re.compile(rf"LLAMARL_GROUP=[^\0]*/{role}(\0|$)")
    pids = [pid for pid in command.family() if mark.search(told_of(pid, "environ"))]
    return [pid for pid in pids if not is_reward_worker(pid)]


def reward_workers(family: list[int]) -> list[int]:
    """Those that run reward code: each is the child of one that supervises it."""
    pids = [pid for pid in family if is_reward_worker(pid)]
    return [pid for pid in pids if parent_of(pid) in pids]


def parent_of(pid: int) -> int:
    return int(told_of(pid, "stat").rpartition(")")[2].split()[1])


def is_reward_worker(pid: int) -> bool:
    return "llamarl.environments.rewards.worker" in told_of(pid, "cmdline")


def told_of(pid: int, file: str) -> str:
    """What /proc says of a process; nothing if it has ended meanwhile, as short-lived ones do."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""
