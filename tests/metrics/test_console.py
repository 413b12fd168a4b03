"""What a run shows on its way: the live display, what Ctrl-C does to it, a log file's lines,
samples, the interval of an accuracy."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from llamarl.cli import train
from llamarl.cluster.os_process import kept_log, show_warnings, take_any_letter
from llamarl.core.groups import Evaluation, Share
from llamarl.core.records import Prompt
from llamarl.metrics.console import Progress
from llamarl.metrics.estimates import interval, with_interval
from llamarl.metrics.provenance import write_provenance
from llamarl.metrics.rendering import resume_command, tokenizing_bar
from llamarl.metrics.shares import RecentSpans
from llamarl.model.architecture import read_architecture
from tests.metrics.test_metrics_time import write_spans
from tests.places import CHECKPOINT, RECIPE
from tests.recipe.test_config import MINIMUM, make_config
from tests.signals import restore_ctrl_c


def evaluated(version: int, accuracy: float, reward: float) -> Evaluation:
    return Evaluation(
        version=version,
        shares={"accuracy": Share(accuracy, *interval(accuracy, 100))},
        reward=reward,
        mean_tokens=4.0,
        truncated_share=0.0,
        num_prompts=100,
        num_rollouts=100,
        num_failed=0,
    )


def trained(accuracy: float) -> dict[str, float]:
    return {
        "accuracy/train": accuracy,
        "accuracy/train_low": accuracy - 0.05,
        "accuracy/train_high": accuracy + 0.025,
    }


def on_terminal(width: int = 80) -> Progress:
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    return Progress(3, live=True, console=console)


def drawn(progress: Progress) -> str:
    progress.console.print(progress._render())
    return progress.console.export_text()


def in_a_file(num_steps: int = 3, width: int = 80) -> Progress:
    return Progress(
        num_steps, live=True, console=Console(width=width, record=True, file=io.StringIO())
    )


def lines_of(progress: Progress) -> list[str]:
    """Without their times."""
    text = progress.console.export_text()
    return [line.partition("] ")[2] for line in text.splitlines()]


def show(draw) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    draw(console)
    return console.export_text()


@contextmanager
def own_handlers() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield root
    finally:
        root.handlers[:], root.level = before
        logging.raiseExceptions = True


def drive(progress: Progress) -> None:
    with progress:
        progress.show_phase("starting 4 processes")
        progress.start_training(0)
        progress.show_evaluation(evaluated(0, 0.48, 0.48))
        for step in (1, 2, 3):
            scalars = {"reward/mean": 0.5, "staleness/mean": 1.0, "staleness/max": 2}
            progress.show_step(step, scalars | trained(0.25 * step) | {"tokens/per_s": 1234.0})


def test_the_time_left_follows_the_recent_steps_and_a_present_one_that_takes_longer(monkeypatch):
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("llamarl.metrics.console.time", clock)
    progress = Progress(100, live=False, console=Console(file=io.StringIO()))
    progress.start_training(0)
    assert progress._left() == "-"
    for step in range(1, 51):  # of 1 s each
        now_s = float(step)
        progress.show_step(step, {})
    assert progress._left() == "0:50"
    now_s += 0.5
    assert progress._left() == "0:50", "half of the present step is over: 49.5 s"
    for step in range(51, 71):  # most groups are dropped: a minute each
        now_s += 60
        progress.show_step(step, {})
    assert progress._left() == "30:00"
    now_s += 600
    assert progress._left() == "52:44", "the present step took 10 minutes, and is not over"


def test_without_a_terminal_progress_is_whole_lines(tmp_path):
    write_spans(tmp_path, "trainer-0", [("accumulate", "busy", 4e9, 4e9 + 10)])  # in the future
    text = show(
        lambda c: drive(Progress(3, live=True, recent_spans=RecentSpans(tmp_path), console=c))
    )
    lines = text.splitlines()
    assert "starting 4 processes" in lines[0]
    assert "held-out accuracy 48.0% of 100 (38.5% to 57.7%) at version 0" in lines[1]
    assert [line.split("  ")[0].split("] ")[1] for line in lines[2:]] == [
        *("step 1/3", "step 2/3", "step 3/3")
    ]
    for words in ("accuracy 75.0% +-5.0", "tokens/s 1,234", "busy trainer 100%", "eta 0:00"):
        assert words in lines[4]


def test_of_many_steps_the_first_ones_and_the_last_have_lines_and_the_others_every_few_seconds(
    monkeypatch,
):
    now_s = 0.0
    monkeypatch.setattr("llamarl.metrics.console.time", SimpleNamespace(monotonic=lambda: now_s))
    progress = in_a_file(40)
    progress.start_training(7)
    for step in range(8, 41):
        now_s += 60 * (step == 20)
        progress.show_step(step, {"reward/mean": 0.5})
    shown = [line.split("  ")[0] for line in lines_of(progress)]
    assert shown == [f"step {step}/40" for step in (8, 9, 10, 11, 12, 20, 40)]


def test_a_line_has_what_is_watched_in_training_as_far_as_it_is_known():
    figures = {
        "length/mean": 123.4,
        "trained/entropy": 0.98765,
        "trained/kl_reference": 0.00123456,
        "policy/grad_norm": 1.23456,
        "trainer/lr": 2e-6,
    }
    progress = in_a_file()
    progress.show_step(1, {"reward/mean": 0.5} | trained(0.5) | figures)
    progress.show_step(2, figures | {"trained/kl_reference": 0.0})
    first, second = lines_of(progress)
    words = ("length 123", "entropy 0.988", "kl 0.00123", "grad norm 1.23", "lr 2e-06")
    assert all(f"  {each}  " in first for each in words), first
    assert "kl" not in second, "without a reference"


def test_a_warning_has_the_runs_time_and_is_never_wrapped():
    console = Console(width=80, record=True, file=io.StringIO())
    with own_handlers() as root:
        show_warnings(console, lambda: "0:08", shows_user_code=False)
        root.warning("a long word %s", "x" * 200)
        try:
            raise ValueError("y" * 200)
        except ValueError:
            root.exception("it broke")
        logging.getLogger("llamarl").info("not shown")
    lines = console.export_text().splitlines()
    assert lines[0] == f"[0:08] WARNING a long word {'x' * 200}"
    assert lines[1:3] == ["[0:08] ERROR it broke", "Traceback (most recent call last):"]
    assert lines[-1] == f"ValueError: {'y' * 200}"


def test_on_a_terminal_progress_is_a_display_that_fits():
    for width in (80, 100):
        progress = on_terminal(width)
        drive(progress)
        progress.console.export_text()
        text = drawn(progress)
        assert max(len(line) for line in text.splitlines()) == width
        for words in (
            "step 3/3",
            "75.0% +-5.0",
            "48.0% +-9.7 (v0)",
            "mean 1.00  max 2",
            "1,234 tok",
        ):
            assert words in text


def test_progress_shows_shaped_rewards_beside_the_accuracy():
    plain = in_a_file()
    plain.show_evaluation(evaluated(0, 0.0, 0.25))
    assert (
        "held-out reward 0.250, accuracy 0.0% of 100 (0.0% to 3.7%) at"
        in plain.console.export_text()
    )
    progress = on_terminal()
    progress.show_step(1, {"reward/mean": 0.125} | trained(0.0))
    progress.show_evaluation(evaluated(1, 0.0, 0.25))
    text = drawn(progress)
    for words in ("training reward", "0.125", "held-out reward    0.250 (v1)"):
        assert words in text


def test_named_sets_and_several_rollouts_have_rows_and_lines_of_their_own():
    both = evaluated(3, 0.5, 0.5)
    shares = both.shares | {"pass_at_4": Share(0.75, 0.7, 0.8), "maj_at_4": Share(0.6, 0.5, 0.7)}
    one = replace(both, shares=shares, num_prompts=25)
    both = replace(one, sets={"gsm8k": one}, num_prompts=50)
    plain = in_a_file(width=200)
    plain.show_evaluation(both)
    lines = lines_of(plain)
    more = "pass@4 75.0% (70.0% to 80.0%), maj@4 60.0% (50.0% to 70.0%) at version 3"
    assert lines == [
        f"held-out accuracy 50.0% of 50 x 2 (40.4% to 59.6%), {more}",
        f"held-out gsm8k accuracy 50.0% of 25 x 4 (40.4% to 59.6%), {more}",
    ]
    progress = on_terminal()
    progress.show_evaluation(evaluated(0, 0.25, 0.25))
    progress.show_evaluation(both)
    text = drawn(progress)
    assert "held-out accuracy  25.0% +-9.3 (v0)  50.0% +-9.6 (v3)" in text
    assert "pass@4             75.0% +-5.0 (v3)" in text
    assert "gsm8k accuracy     50.0% +-9.6 (v3)" in text, "earlier ones had no such set"


def test_progress_shows_turns_and_tools_of_episodes():
    scalars = {
        "episode/turns": 2.5,
        "episode/environment_s": 1.5,
        "tool_calls/lookup": 7.0,
        "tool_s/lookup": 0.0125,
        "tool_errors/lookup": 0.0,
        "tool_calls/search": 1200.0,
        "tool_s/search": 1.25,
        "tool_errors/search": 1.0,
    }
    plain = in_a_file(1)
    plain.show_step(1, scalars)
    assert "turns 2.50" in plain.console.export_text()
    progress = on_terminal(100)
    progress.show_step(1, scalars)
    text = drawn(progress)
    for words in (
        "mean 2.50, 1.50 s with the environment",
        "search 1,200 calls of 1.25 s, 1 error",
    ):
        assert words in text
    assert "; lookup 7 calls of 12.5 ms" in text
    progress.show_step(2, {"reward/mean": 0.0})
    assert "tools" not in drawn(progress), "a step without episodes has none"


def test_the_display_shows_which_executors_are_ready_while_they_start():
    progress = on_terminal()
    with progress.startup() as report:
        for name in ("storage-0", "generator-0", "generator-1", "trainer"):
            report(name, "starting")
        for name, state in (
            ("storage-0", "ready"),
            ("generator-1", "ready"),
            ("trainer", "loading"),
        ):
            report(name, state)
        text = drawn(progress)
        for words in ("storage            ready after 0 s", "trainer            loading (0 s)"):
            assert words in text
        assert "generator          1 of 2 ready; generator-0 starting (0 s)" in text
        for index in range(64):
            report(f"generator-{index}", "loading")
        assert "0 of 64 ready; 64 loading" in drawn(progress), "one row however many"
    assert "ready" not in drawn(progress), "past the start it shows the training"


def test_a_log_file_gets_a_line_per_role_that_is_ready_and_one_while_a_start_drags_on(monkeypatch):
    num_threads = threading.active_count()
    monkeypatch.setattr("llamarl.metrics.console.QUIET_INTERVAL_S", 0.01)
    progress = in_a_file()
    with progress.startup() as report:
        for name in ("generator-0", "generator-1", "trainer"):
            report(name, "loading")
        report("generator-0", "ready")
        report("generator-1", "ready")
        deadline_s = time.monotonic() + 20
        shown = progress.console.export_text
        while "still" not in shown(clear=False) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    lines = lines_of(progress)
    assert lines[:2] == ["starting the executors", "generator ready after 0 s"]
    assert lines[2] == "still starting: generator ready after 0 s, trainer loading (0 s)"
    assert threading.active_count() == num_threads, "nothing is repeated past the start"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_sample_is_one_line_that_no_terminal_obeys(width):
    progress = on_terminal(width)
    completion = "It is \x1b[31m\a[bold]4[/bold].\r\nAnswer: 4 " + "x" * 30 + "\u56db" * 30
    progress.show_sample("What is\n2 + 2?", completion, 1.0)
    text = drawn(progress)
    (line,) = (line for line in text.splitlines() if "sample" in line)
    assert "+ 2? -> It is" in line, "of a prompt that is too long, the end"
    assert "(reward 1)" in line
    assert cell_len(line) == width
    assert len(text.splitlines()) == 4, "nothing wraps"
    assert not set(text) & {"\x1b", "\a", "\r"}


def test_a_log_file_shows_a_sample_with_each_evaluation():
    progress = in_a_file()
    progress.show_evaluation(evaluated(0, 0.5, 0.5))
    progress.show_sample("2 + 2?", "4", 1.0)
    progress.show_evaluation(evaluated(1, 0.5, 0.5))
    lines = lines_of(progress)
    assert lines[2] == "sample: 2 + 2? -> 4  (reward 1)"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [  # R: binom::binom.confint(x, n, methods="wilson")
        (0.0, 10, 0.0, 0.2775),
        (0.5, 10, 0.2366, 0.7634),
        (1.0, 10, 0.7225, 1.0),
        (0.9, 1000, 0.8799, 0.9171),
    ],
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert interval(share, count) == pytest.approx((low, high), abs=1e-4)
    words = with_interval(Share(0.5, *interval(0.5, 10)), "10")
    assert words == "50.0% of 10 (23.7% to 76.3%)"


def test_a_sample_begins_with_the_question_not_with_the_template() -> None:
    def prompt(question: object) -> Prompt:
        return Prompt(prompt_id=1, text="<|im_start|>", token_ids=(1,), fields={"q": question})

    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"}]
    assert prompt(chat).question("q") == "1+2?"
    assert prompt("1+3?").question("q") == "1+3?"
    assert prompt("1+3?").question("question") == "<|im_start|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "1"}]}]
    assert prompt(parts).question("q") == "<|im_start|>"


ON_A_TERMINAL = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from rich.console import Console
from llamarl.metrics.console import Progress
console = Console(force_terminal=True)
with Progress(4, live=True, console=console):
    try:
        sys.stdout.write("READY")
        sys.stdout.flush()
        for _ in range(600):  # a signal just before a sleep does not shorten that one
            time.sleep(0.1)
    except KeyboardInterrupt:
        pass
"""


def read_until(terminal: int, words: bytes, process: subprocess.Popen[bytes] | None) -> bytes:
    seen, limit_s = b"", time.monotonic() + 60
    while words not in seen and time.monotonic() < limit_s:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096)
        elif process is not None and process.poll() is not None:
            break
    return seen


@pytest.mark.full
def test_ctrl_c_is_not_drawn_into_the_display_and_the_terminal_is_left_as_it_was() -> None:
    terminal, child_end = pty.openpty()
    before = termios.tcgetattr(child_end)
    assert before[3] & termios.ECHOCTL
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + ON_A_TERMINAL,
        ],
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        start_new_session=True,
        preexec_fn=restore_ctrl_c,
    )
    assert b"READY" in read_until(terminal, b"READY", process)
    os.write(terminal, b"\x03")
    assert b"^C" not in read_until(terminal, b"^C", process)
    assert process.wait(60) == 0
    assert termios.tcgetattr(child_end) == before
    os.close(terminal)
    os.close(child_end)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_log_line_ends_a_run_whatever_letters_it_has(encoding: str, tmp_path: Path) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, line_buffering=True)
    take_any_letter(terminal)
    with own_handlers() as root:
        console = Console(file=terminal, width=200)
        show_warnings(console, lambda: "0:08", shows_user_code=True)
        with kept_log(str(tmp_path)):
            root.warning("ValueError: café 中 \ud800")
        console.print("after")
    shown = terminal.buffer.getvalue().decode(encoding)
    assert ("café 中" if encoding == "utf-8" else "caf\\xe9 \\u4e2d") in shown
    assert "\\ud800" in shown
    assert "after" in shown
    assert "café 中 \\ud800" in (tmp_path / "logs" / "controller.log").read_text("utf-8")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_a_bar_that_goes_and_every_console_one_line(is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
    with tokenizing_bar(console) as show:
        for num_done in range(4):
            show("prompts.jsonl", num_done, 3)
    shown = text.getvalue()
    assert ("tokenizing" in shown) == is_terminal
    assert re.search(r"tokenized prompts\.jsonl in \d\.\d s", shown.splitlines()[-1])


def test_nothing_is_said_where_nothing_was_tokenised() -> None:
    text = io.StringIO()
    with tokenizing_bar(Console(file=text, force_terminal=True)):
        pass
    assert text.getvalue() == ""


def test_ctrl_c_amid_the_work_is_not_kept_waiting() -> None:
    shown: list[int] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        with tokenizing_bar(Console(file=io.StringIO())) as show:
            for num_done in range(3):
                show("prompts.jsonl", num_done, 3)
                shown.append(num_done)
                task.cancel()  # as the handler of the signal does

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert shown == [0]


TRAIN = ["llamarl", "train", "--config-dir", "recipes/a b", "num_steps=9"]


def test_the_command_of_a_run_can_be_pasted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_provenance(tmp_path, TRAIN, "", RECIPE / "run.yaml", None)
    words = shlex.split((tmp_path / "command.txt").read_text())
    assert words == ["cd", str(folder), "&&", *TRAIN]


@pytest.mark.parametrize("more", [[], ["checkpoint.resume=off", "run_dir=elsewhere"]])
def test_the_command_that_goes_on_names_the_folder_and_resumes(
    more: list[str], tmp_path: Path
) -> None:
    program, *arguments = shlex.split(resume_command([*TRAIN, *more], str(tmp_path)))
    assert os.path.basename(program) == "llamarl"
    assert arguments == [*TRAIN[1:], f"run_dir={tmp_path}", "checkpoint.resume=auto"]


def test_a_multirun_keeps_its_own_folders() -> None:
    words = shlex.split(resume_command([*TRAIN, "-m", "seed=1,2", "run_dir=r"], "/r/0"))
    assert words[-4:] == ["-m", "seed=1,2", "run_dir=r", "checkpoint.resume=auto"]


def test_a_disk_that_is_nearly_large_enough_is_shown_in_figures_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = SimpleNamespace(architecture=read_architecture(CHECKPOINT))
    config = make_config(*MINIMUM)
    for free in (0, 10**7, 2 * 10**7):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(ValueError, match=rf"got {free // 10**6} MB at") as caught:
            train._check_disk(config, inputs, str(tmp_path))  # type: ignore[arg-type]
        assert f"with {free // 10**6} MB" not in str(caught.value)
