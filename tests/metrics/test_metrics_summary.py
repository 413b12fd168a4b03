"""summary.json out of a small hand-made run folder, and how progress and summary look."""

from __future__ import annotations

import io
import json
import logging
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from llamarl.core.groups import Group
from llamarl.core.records import FinishReason
from llamarl.metrics.console import Progress
from llamarl.metrics.rendering import render_summary
from llamarl.metrics.step_metrics import MEANINGS, Drops
from llamarl.metrics.summary import summarize
from llamarl.metrics.trackers import MetricsLog
from llamarl.trainer.advantages import EQUAL_REWARDS, FAILED_REWARD, SOLVED
from tests.json_lines import write_lines
from tests.metrics.test_console import drawn, drive, in_a_file, lines_of, on_terminal, show
from tests.metrics.test_metrics_step import make_group, make_row
from tests.metrics.test_metrics_time import write_spans


def trained(version: int, spans: list[list[int]], oldest_version: int = 0, **more: int) -> dict:
    num_tokens = sum(count for _, count in spans)
    outcome = {"outcome": "trained", "version": version, "oldest_version": oldest_version}
    return {**outcome, "num_tokens": num_tokens, "spans": spans, "reward": 1.0, **more}


def dropped(group_id: int, reason: str) -> dict:
    return {"outcome": "dropped", "reason": reason, "group_id": group_id, "reward": None}


def evaluated(prompt_id: int, version: int, reward: float | None, **more: int) -> dict:
    line = {"outcome": "evaluated", "version": version, "reward": reward, "prompt_id": prompt_id}
    return {**line, **more}


def log_steps(folder: Path, *steps: tuple) -> None:
    log = MetricsLog(folder)
    for step in steps:
        log.log(*step)
    log.close()


@pytest.fixture
def run_dir(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    lines = [
        evaluated(1, 0, 1.0),
        evaluated(2, 0, 0.0),
        evaluated(3, 0, None),
        trained(0, [[0, 10]]),
        trained(1, [[0, 4], [1, 6]], num_uses=2),
        dropped(3, "equal_rewards"),
        evaluated(1, 2, 1.0),
    ]
    write_lines(archive / "rollouts-0.jsonl", lines)
    lines = [
        dropped(3, "equal_rewards"),
        dropped(4, "equal_rewards"),
        dropped(4, "equal_rewards"),
        dropped(5, "failed_reward"),
        trained(2, [[0, 50], [1, 20]], oldest_version=1),  # the oldest 50 were masked
        {"outcome": "unused", "spans": []},
        evaluated(2, 2, 0.5, correct=1),  # correct is what the first function's, not the sum
        evaluated(1, 1, 0.0),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"outcome": "trai'
    (archive / "rollouts-1.jsonl").write_text(text)
    spans = tmp_path / "spans"
    write_spans(spans, "controller", [("start", "mark", 5, 5), ("step", "mark", 10, 20)])
    write_spans(spans, "generator-0", [("decode", "busy", 10, 16, 60)])
    write_spans(spans, "trainer-0", [("batch", "wait", 10, 14), ("accumulate", "busy", 14, 20)])
    write_spans(spans, "controller", [("publish", "publish", 15, 16)])
    ratios = {"trained/ratio_mean": 0.5, "trained/clipped_share": 0.1}
    log_steps(
        tmp_path,
        (1, {"trained/ratio_mean": 1.0, "trained/clipped_share": 0.0, "tokens/trained": 10}),
        (1, {"reward/mean": 0.25, "staleness/mean": 0.2}),
        (1, {"tokens/per_s": 4.0, "time/step_s": 5.0}),
        (2, {"reward/mean": 0.75, "staleness/mean": 1.0, **ratios, "tokens/trained": 30}),
        (2, {"tokens/per_s": 12.0, "time/step_s": 15.0}),
        (2, {"evaluation/accuracy": 0.123}),
    )
    return tmp_path


def test_the_summary_equals_the_hand_worked_one(run_dir):
    summary = summarize(run_dir)
    assert summary == {
        "accuracy_before": pytest.approx(1 / 3),
        "accuracy_after": 1.0,
        "reward_before": pytest.approx(1 / 3),
        "reward_after": 0.75,
        "interval_before": [pytest.approx(0.0615, abs=1e-4), pytest.approx(0.7923, abs=1e-4)],
        "interval_after": [pytest.approx(0.3424, abs=1e-4), 1.0],
        "version_after": 2,
        "held_out_prompts": 2,
        "held_out_shares": {},
        "training_reward": [0.25, 0.75],
        **dict.fromkeys(("training_loss", "loss_before", "loss_after")),
        "steps": 3,
        "wall_s": 15.0,
        "tokens_per_s": 10.0,
        "rollouts_trained": 3,
        "groups_dropped": {"equal_rewards": 2, "failed_reward": 1},
        "ended_by": "",
        "sources": {},
        "staleness_mean": pytest.approx((0.2 * 10 + 1.0 * 30) / 40),
        "staleness_max": 1,
        "both_busy_share": pytest.approx(0.2),
        "mixed_version_share": pytest.approx(2 / 3),
        "tokens_during_publish": 10,
        "ratio_mean": pytest.approx(0.625),
        "ratio_clipped_share": pytest.approx(0.075),
        "executors": {
            "controller": {"busy": 0.0, "wait": {}},
            "generator": {"busy": pytest.approx(0.6), "wait": {}},
            "trainer": {"busy": pytest.approx(0.6), "wait": {"batch": pytest.approx(0.4)}},
        },
    }
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert not list(run_dir.glob("*.tmp"))


def test_a_step_counts_whose_rollouts_were_lost_with_their_storage(run_dir):
    assert summarize(run_dir)["steps"] == 3
    log_steps(run_dir, *((step, {"reward/mean": 1.0}) for step in (3, 4)))
    assert summarize(run_dir)["steps"] == 4


def test_a_run_that_stored_nothing_has_a_summary_of_nulls(tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    summary = summarize(tmp_path / "empty")
    assert summary.keys() == summarize(run_dir).keys()
    assert summary["steps"] == 0
    assert summary["accuracy_before"] is None
    assert summary["staleness_max"] is None
    shown = show(lambda console: render_summary(summary, {}, "llamarl --help", console))
    assert "llamarl --help" in shown


def test_a_run_evaluated_once_has_no_accuracy_after(run_dir):
    (run_dir / "archive" / "rollouts-1.jsonl").unlink()
    path = run_dir / "archive" / "rollouts-0.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    summary = summarize(run_dir)
    assert summary["accuracy_before"] == pytest.approx(1 / 3)
    assert summary["accuracy_after"] is None


def test_the_final_table_shows_everything_and_keeps_paths_and_command_whole(run_dir):
    summary = summarize(run_dir)
    paths = {"TensorBoard": "/somewhere/" + "deep/" * 20, "exported model": "runs/x/export"}
    command = "llamarl train --config-dir recipes/quickstart " + "a.b=1 " * 10 + "end=1"
    text = show(lambda console: render_summary(summary, paths, command, console))
    shown = ["33.3% +-45.9 before", "100.0% +-65.8 after", "3: 2 equal rewards, 1 failed reward"]
    shown += ["0:15", "trainer", "60% busy", "40% batch", "mean 0.80, max 1", "67%", "20%"]
    assert [words for words in shown if words not in text] == []
    for whole in (*paths.values(), command):
        assert whole in text, "never wrapped or cut"
    table = [line for line in text.splitlines() if line[:1] in "|\u2502\u256d\u2570+"]
    assert max(map(len, table)) <= 80


def scored(number: int, *rewards: float | None, finish: FinishReason = FinishReason.STOP) -> Group:
    rows = [make_row(10 * number + i, (3, 4), reason=finish) for i in range(len(rewards))]
    return make_group(number, rows, list(rewards))


def test_drops_are_shown_while_a_step_still_waits_for_its_groups():
    progress, drops = on_terminal(), Drops()
    for group_id in range(180):
        drops.add(scored(group_id, 1.0, 1.0), "solved" if group_id >= 20 else "equal_rewards")
    ready = [scored(group_id, 0.0, 1.0) for group_id in range(12)]
    for group in ready:
        drops.add(group, None)
    progress.show_drops(drops)
    text = drawn(progress)
    assert "180: 160 solved, 20 equal rewards" in text
    assert "12 ready, 180 dropped" in text
    for _ in range(2):  # a later pass uses them again
        drops.take(ready[:8])
    text = drawn(progress)
    assert "180: 160 solved, 20 equal rewards" in text
    assert "4 ready, 0 dropped" in text


def test_a_log_file_says_every_few_seconds_what_was_dropped():
    progress, drops = in_a_file(2), Drops()
    for group_id in range(3):
        drops.add(scored(group_id, 1.0, 1.0), "solved")
        progress.show_drops(drops)
    assert lines_of(progress) == [], "not a line per group"
    progress._printed_s -= 60
    progress.show_drops(drops)
    progress.show_drops(drops)
    assert lines_of(progress) == ["step 0/2  dropped 3: 3 solved (3 after the last batch)"]


def warnings_of(caplog: pytest.LogCaptureFixture, verdicts: list[tuple[Group, str | None]]) -> list:
    caplog.clear()
    drops = Drops()
    for group, reason in verdicts:
        drops.add(group, reason)
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_warning_names_once_why_more_than_half_of_the_groups_are_dropped(caplog):
    good, full = (scored(0, 0.0, 1.0), None), (scored(1, 1.0, 1.0), "solved")
    assert warnings_of(caplog, [full] * 32) == []
    assert warnings_of(caplog, [good, full] * 200) == [], "half is not more than half"
    (warning,) = warnings_of(caplog, [good] * 300 + [full] * 300)
    assert "33 of the last 64 groups were dropped, 33 of them as solved" in warning
    assert "algorithm.filters=[] keeps them" in warning
    assert MEANINGS["solved"] in warning
    failed, cut = scored(2, 0.0, None), scored(3, 0.0, 0.0, finish=FinishReason.LENGTH)
    first, second = warnings_of(
        caplog, [(failed, "failed_reward")] * 40 + [(cut, "equal_rewards")] * 80
    )
    assert "the last error: too slow" in first
    assert "2 of the last one's 2 rollouts were cut at max_tokens" in second


def test_every_reason_for_a_drop_has_a_meaning():
    assert {FAILED_REWARD, EQUAL_REWARDS, SOLVED} <= MEANINGS.keys()


def test_a_shaped_reward_leads_and_one_equal_to_the_accuracy_is_left_out(run_dir):
    def final(**values: float) -> list[str]:
        summary = summarize(run_dir) | values
        return show(lambda c: render_summary(summary, {}, "next", c)).splitlines()

    shaped = final(accuracy_before=0.0, accuracy_after=0.0, reward_before=0.1, reward_after=0.334)
    reward, accuracy = (line for line in shaped if "held-out" in line)
    assert "held-out reward    0.100 before   0.334 after" in reward
    assert "0.0% +-79.2 before   0.0% +-100.0 after   (correct)" in accuracy
    plain = final(accuracy_before=0.5, accuracy_after=1.0, reward_before=0.501, reward_after=1.0)
    assert [line for line in plain if "held-out reward" in line] == []
    early = final(accuracy_before=0.0, accuracy_after=0.0, reward_before=0.0, reward_after=0.002)
    assert any("0.000 before   0.002 after" in line for line in early)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_console_is_too_narrow_for_the_panels(run_dir, width):
    summary = summarize(run_dir)
    waits = {"requests": 0.3, "activation of the other side": 0.2}
    summary["executors"] = {"generator": {"busy": 0.5, "wait": waits}}
    console = Console(width=width, record=True, file=io.StringIO())
    render_summary(summary, {"timeline": "x" * 200}, "y" * 200, console)
    lines = console.export_text().splitlines()
    panel = [line for line in lines if line[:1] in "|\u2502\u256d\u2570+" and line]
    assert {len(line) for line in panel} == {width}
    (generator,) = (line for line in panel if "% busy" in line)
    assert "50% busy" in generator
    assert "30% requests" in generator
    assert sum("activation" in line for line in panel) == (width >= 120)
    assert any(line.endswith("x" * 200) for line in lines)
    assert any(line.endswith("y" * 200) for line in lines)


def test_damaged_lines_are_named_and_not_counted(tmp_path, caplog):
    lines = [
        b'{"outcome": "unused"}',
        b"\xff",
        b"[1]",
        b'{"outcome": "trained"}',
        b"[" * 10**5,
        b'{"a',
    ]
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "rollouts-0.jsonl").write_bytes(b"\n".join(lines))
    steps = [
        b'{"step": 1, "trained/ratio_mean": 0.5, "tokens/trained": 2}',
        b"[1]",
        b"\xff",
        b'{"step": []}',
    ]
    steps += [b'{"step": 2, "trained/ratio_mean": "x", "tokens/trained": 2}', b"[" * 10**5]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(steps))
    spans = [b"[" * 10**5, b"\xff", b"[]", b'{"cat": 1}', b'{"cat": [], "name": []}']
    spans += [b'{"cat": "busy", "name": "x", "start_ns": "1", "end_ns": 2}']
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "trainer-0.jsonl").write_bytes(b"\n".join(spans) + b"\n")
    assert summarize(tmp_path)["ratio_mean"] == 0.5
    named = {record.args[1] for record in caplog.records if isinstance(record.args, tuple)}
    assert named == {2, 3, 4, 5}


def test_an_ascii_terminal_gets_ascii(run_dir, tmp_path):
    summary = summarize(run_dir)
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        console = Console(width=80, file=file, force_terminal=True, legacy_windows=False)
        render_summary(summary, {"TensorBoard": "x"}, "next", console)
        progress = Progress(3, live=True, console=console)
        drive(progress)
        progress.show_sample("two", "\u56db", 1.0)
        console.print(progress._render())
    assert "####" in (tmp_path / "out").read_text(encoding="ascii")


def test_texts_of_metrics_jsonl_take_no_memory(tmp_path):
    text = "x" * 2**20
    scalars = {"trained/ratio_mean": 1.0, "trained/clipped_share": 0.5, "tokens/trained": 4.0}
    log_steps(tmp_path, *((step, scalars, None, {"rollouts": text}) for step in range(1, 17)))
    tracemalloc.start()
    try:
        MetricsLog(tmp_path).close()
        assert tracemalloc.get_traced_memory()[1] < 2**20, "its last byte says whether a line ended"
        assert summarize(tmp_path)["ratio_clipped_share"] == 0.5
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20, "of 16 MiB: a line at a time"
    finally:
        tracemalloc.stop()


def test_further_conversations_of_an_episode_are_no_rollouts(run_dir):
    before = summarize(run_dir)
    further = {"episode": 1, "conversation": 2}
    lines = [trained(2, [[2, 5]]) | further, evaluated(2, 2, None) | further]
    write_lines(run_dir / "archive" / "rollouts-2.jsonl", lines)
    assert summarize(run_dir) == before
