"""Numbers of a step, in metrics.jsonl and, read with TensorBoard's own reader, in its files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llamarl.core.config import DataConfig
from llamarl.core.groups import Dropped, Evaluation, Group, Kept, StepStats
from llamarl.core.records import (
    REWARD,
    SOURCE_ROWS,
    FinishReason,
    Prompt,
    RolloutInfo,
    StageResult,
    StageStatus,
)
from llamarl.metrics.console import Progress
from llamarl.metrics.held_out import result_of, summed_up
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import SpanReader, Spans
from llamarl.metrics.step_metrics import (
    TRAINER_TAGS,
    Drops,
    count_values,
    sample_rows,
    step_scalars,
    sum_sources,
    token_staleness,
)
from llamarl.metrics.summary import summarize
from llamarl.metrics.tensorboard import MOST_BUCKETS, OTHERS, _histogram, chart_tag, description
from llamarl.metrics.trackers import MetricsLog, open_trackers, read_metrics
from tests.fakes import stopped
from tests.json_lines import read_lines

make_row = partial(stopped, num_prompt_tokens=3)


def make_group(group_id: int, rows: list[RolloutInfo], rewards: list[float | None]) -> Group:
    scores = {}
    for row_id, reward in zip([row.row_id for row in rows], rewards, strict=True):
        scores[row_id] = StageResult(row_id=row_id, status=StageStatus.HUNG, error="too slow")
        if reward is not None:
            marks = {"parts": {"exact": float(reward >= 1), "format": 1.0}, "correct": reward >= 1}
            scores[row_id] = StageResult(row_id=row_id, numbers={REWARD: reward}, **marks)
    return Group(
        group_id=group_id,
        prompt=Prompt(
            prompt_id=group_id,
            text=f"question {group_id}",
            token_ids=(1,),
            fields={"answer": "*4*"},
        ),
        row_ids=tuple(row.row_id for row in rows),
        min_version=3,
        rollouts={row.row_id: row for row in rows},
        scores=scores,
    )


TRAINED = make_group(
    0,
    [
        replace(make_row(0, (3, 4), (4, 6)), logprob=-5.0),
        make_row(1, (4, 20), reason=FinishReason.LENGTH),
    ],
    [1.25, 0.25],
)
DROPPED = make_group(
    1, [replace(make_row(2, (4, 30)), logprob=-10.0), make_row(3, (4, 40))], [1.5, None]
)
STATS = StepStats(version=6, scalars={"ratio_mean": 0.98, "grad_norm": 0.5, "loss": 0.125})


def record(**options):
    return step_scalars(
        [TRAINED],
        STATS,
        {"equal_rewards": [DROPPED]},
        {"step": 2.0, "publish": 0.1, "wait/trainer": 0.3},
        **options,
    )


def test_further_numbers_of_rewards_are_means_over_the_rollouts_that_have_them():
    group = make_group(0, [make_row(0, (3, 4)), make_row(1, (3, 4))], [1.0, 0.0])
    for extra, (row_id, score) in zip(
        ({"a": 1.0, "b": 5.0}, {"a": 2.0}), group.scores.items(), strict=True
    ):
        group.scores[row_id] = replace(score, extra=extra)
    scalars, _, _ = step_scalars([group], STATS, {}, {"step": 2.0})
    found = {name: value for name, value in scalars.items() if name.startswith("reward_extra/")}
    assert found == {"reward_extra/a": 1.5, "reward_extra/b": 5.0}
    assert description("reward_extra/a").startswith("Mean of a further number")
    assert chart_tag("reward_extra/a").startswith("1_outcome/")


def test_a_step_is_recorded_with_hand_worked_numbers():
    scalars, histograms, texts = record()
    assert scalars == pytest.approx(
        {
            "rollouts/trained": 2,
            "groups/trained": 1,
            "groups/masked": 0,
            "reward/mean": 1.0,  # 1.25, 0.25 and 1.5; the hung one is no zero
            "reward/std": (0.0625 + 0.5625 + 0.25) ** 0.5 / 3**0.5,
            "accuracy/train": 2 / 3,
            "accuracy/train_low": 0.2076596,  # of 3 rollouts of 2 prompts, as of 3 independent ones
            "accuracy/train_high": 0.9385081,
            "reward_parts/exact": 2 / 3,
            "reward_parts/format": 1.0,
            "reward_failures/raised": 0,
            "reward_failures/hung": 1,
            "reward_failures/invalid": 0,
            "length/mean": 25.0,
            "length/p50": 25.0,
            "length/p90": 37.0,
            "length/max": 40.0,
            "length/truncated_share": 0.25,
            "tokens/trained": 30,
            "tokens/per_s": 15.0,
            "staleness/mean": (4 * 2 + 26 * 1) / 30,
            "staleness/max": 2,
            "staleness/mixed_version_share": 0.5,
            "policy/entropy": 15 / 100,  # of all that was written, trained or not
            "trained/ratio_mean": 0.98,
            "policy/grad_norm": 0.5,
            "trainer/loss": 0.125,
            "time/step_s": 2.0,
            "time/publish_s": 0.1,
            "wait/trainer": 0.3,
            "dropped/groups": 1,
            "dropped/equal_rewards": 1,
        }
    )
    assert histograms == {
        "staleness/tokens": {1: 26, 2: 4},
        "reward/values": {0.25: 1, 1.25: 1, 1.5: 1},
        "length/tokens": {10: 1, 20: 1, 30: 1, 40: 1},
    }
    assert texts == {}


def test_masked_tokens_count_as_untrained():
    scalars, histograms, _ = record(oldest_version=4)
    assert histograms["staleness/tokens"] == {1: 26}
    assert scalars["tokens/trained"] == 26
    assert scalars["staleness/max"] == 1
    assert scalars["groups/masked"] == 1
    assert token_staleness([make_row(0, (0, 5))], version=3, oldest_version=1) == {}


def test_a_step_whose_every_reward_failed_has_no_reward_and_does_not_raise():
    failed = make_group(0, [make_row(0, (5, 4))], [None])
    scalars, _, _ = step_scalars([failed], STATS, {}, {})
    assert "reward/mean" not in scalars
    assert scalars["reward_failures/hung"] == 1


def test_what_stages_of_the_recipes_own_drop_and_write_has_metrics():
    group = make_group(0, [make_row(0, (5, 4)), make_row(1, (5, 4))], [1.0, 0.0])
    group.numbers = {0: {"quality": 0.5}, 1: {"quality": 1.0, "other": 3.0}}
    group.dropped = {1: "rambling"}
    drops = Drops()
    drops.add(group, None)
    counts = drops.take_rollouts()
    scalars, _, _ = step_scalars([group], STATS, {}, {}, dropped_rollouts=counts)
    assert scalars["dropped_rollouts/rambling"] == 1
    assert (scalars["columns/quality"], scalars["columns/other"]) == (0.75, 3.0)
    assert drops.take_rollouts() == {"rambling": 0}, "its curve falls back to 0"


def test_samples_show_the_best_and_the_worst_by_turns():
    other = make_group(2, [make_row(4, (5, 2)), make_row(5, (5, 2))], [0.0, 1.0])
    assert sample_rows([TRAINED, other], 2) == [0, 4]
    _, _, texts = record(completions={0: "so *it* is\nAnswer: 4"})
    assert "question 0" in texts["rollouts"]
    assert "    so *it* is\n    Answer: 4" in texts["rollouts"], "shown as written, not as markup"
    assert (
        "reward 1.25 (exact 1, format 1), stop after 10 tokens, versions 3, 4" in texts["rollouts"]
    )
    assert "Expected" not in texts["rollouts"], "the data has no such field"
    _, _, texts = record(completions={0: "four"}, answer_field="answer")
    assert "Expected:\n\n    *4*" in texts["rollouts"]


def tensorboard_log(run_dir, config=None, first_step=0):
    return MetricsLog(
        run_dir, open_trackers(["tensorboard"], run_dir, config or {}, first_step=first_step)
    )


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    return events.Reload()


def test_metrics_jsonl_and_tensorboard_hold_every_value(tmp_path):
    from tensorboard.util.tensor_util import make_ndarray

    log = tensorboard_log(tmp_path)
    log.log(0, {"evaluation/accuracy": 0.5})
    log.log(6, *record(completions={0: "four"}))
    log.log(6, {"evaluation/accuracy": float("nan")})
    # Everything is on disk already: a killed process never calls close().
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert list(steps) == [0, 6]
    assert steps[6]["reward/mean"] == pytest.approx(1.0)
    assert steps[6]["evaluation/accuracy"] is None
    assert steps[6]["histograms"]["staleness/tokens"] == {"1": 26, "2": 4}
    assert "four" in steps[6]["texts"]["rollouts"]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert all("step" in line for line in lines)

    events = read_events(tmp_path / "tensorboard")
    scalars, _, _ = record()
    for tag, value in scalars.items():
        (event,) = events.Scalars(chart_tag(tag))
        assert (event.step, event.value) == (6, pytest.approx(value))
    (histogram,) = events.Tensors("4_pace/staleness/tokens")
    assert make_ndarray(histogram.tensor_proto).tolist() == [[0.5, 1.5, 26], [1.5, 2.5, 4]]
    (text,) = events.Tensors("2_rollouts/rollouts")
    assert b"four" in make_ndarray(text.tensor_proto).item()
    log.close()


def test_the_hyperparameters_tab_finds_them(tmp_path):
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import DataType

    config = {"trainer.lr": 1e-4, "trainer.betas": [1, 2], "metrics.live": True}
    tensorboard_log(tmp_path, config).close()
    events = read_events(tmp_path / "tensorboard")
    contents = events.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["trainer.lr"].number_value == 1e-4
    assert start.hparams["trainer.betas"].string_value == "[1, 2]"
    experiment = metadata.parse_experiment_plugin_data(contents[metadata.EXPERIMENT_TAG])
    kinds = {info.name: info.type for info in experiment.hparam_infos}
    assert kinds == {
        "trainer.lr": DataType.Value("DATA_TYPE_FLOAT64"),
        "trainer.betas": DataType.Value("DATA_TYPE_STRING"),
        "metrics.live": DataType.Value("DATA_TYPE_BOOL"),
    }
    shown = [metric.name.tag for metric in experiment.metric_infos]
    assert shown[0] == "1_outcome/evaluation/accuracy", "a chart that there is"
    assert events.Tags()["scalars"] == [], "no chart of one point"


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path, caplog):
    _, histograms, texts = record(completions={0: "four"})
    (tmp_path / "metrics.jsonl").write_text("")  # what a cut to the start leaves
    for session, first_step, last_step in ((0, 0, 5), (1, 3, 4)):
        log = tensorboard_log(tmp_path, first_step=first_step)
        if session == 1:  # a version that was made before, and is evaluated only now
            log.log(2, {"evaluation/accuracy": 0.5})
        for step in range(max(1, first_step), last_step + 1):
            log.log(step, {"reward/mean": session}, histograms, texts)
        log.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "rew')  # killed while writing
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert {s: line["reward/mean"] for s, line in steps.items()} == {1: 0, 2: 0, 3: 1, 4: 1, 5: 0}
    assert (tmp_path / "metrics.jsonl").read_text()[0] == "{", "no empty line"
    events = read_events(tmp_path / "tensorboard").Scalars("1_outcome/reward/mean")
    assert [text for text in caplog.messages if "plugin" in text] == []
    assert [(event.step, event.value) for event in events] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def finished_evaluation() -> Evaluation:
    groups = [make_group(i, [make_row(i, (6, 12))], [float(i < 10)]) for i in range(16)]
    return summed_up(6, [result_of(group, ()) for group in groups], ())


def test_the_run_logger_turns_events_into_metrics_and_step_marks(tmp_path):
    asked = []

    async def read_completions(row_ids):
        asked.extend(row_ids)
        return dict.fromkeys(row_ids, "four")

    spans = Spans("controller", tmp_path / "spans")
    log = MetricsLog(tmp_path)
    with (tmp_path / "console").open("w") as file:
        run_logger = RunLogger(
            log=log,
            progress=Progress(7, live=True, console=Console(file=file)),
            spans=spans,
            read_completions=read_completions,
            num_samples=1,
        )
        run_logger.start(5)
        run_logger.log_group(DROPPED, Dropped("equal_rewards"))
        run_logger.log_group(TRAINED, Kept((0.5, -0.5)))
        run_logger.log_publish(0.25)
        asyncio.run(run_logger.log_step(STATS, [TRAINED], 4, {}))
        run_logger.log_evaluation(finished_evaluation())
        asyncio.run(run_logger.log_step(StepStats(version=7, scalars={}), [TRAINED], 5, {}))
    spans.close()
    log.close()
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert steps[6]["dropped/equal_rewards"] == 1
    assert steps[6]["time/publish_s"] == 0.25
    assert steps[6]["evaluation/accuracy_low"] == pytest.approx(0.386, abs=1e-3)
    assert steps[6]["histograms"]["staleness/tokens"] == {"1": 26}, "older than S=1 is masked"
    assert steps[7]["dropped/groups"] == 0, "drops are counted once"
    assert steps[7]["dropped/equal_rewards"] == 0, "a reason that was met keeps its curve"
    assert "time/publish_s" not in steps[7]
    assert asked == [0, 0]
    marks = list(SpanReader(tmp_path / "spans/controller.jsonl").read())[1:]
    assert [(span.name, span.cat, span.args["version"]) for span in marks] == [
        ("step", "mark", 6),
        ("step", "mark", 7),
    ]
    assert marks[0].end_ns == marks[1].start_ns, "the steps' time has no hole"
    shown = (tmp_path / "console").read_text()
    assert "step 6/7" in shown
    assert "62.5%" in shown


def test_every_chart_has_a_section_and_a_description_that_tensorboard_reads(tmp_path):
    from tensorboard import data_compat
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    scalars, histograms, texts = record(completions={0: "four"})
    scalars |= dict.fromkeys(TRAINER_TAGS.values(), 0.0)
    log = tensorboard_log(tmp_path)
    log.log(6, scalars, histograms, texts)
    log.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    values = [data_compat.migrate_value(v) for e in events for v in e.summary.value]
    found = {value.tag: value.metadata.summary_description for value in values}
    found = {tag: words for tag, words in found.items() if not tag.startswith("_hparams_")}
    assert set(found) == {chart_tag(tag) for tag in (*scalars, *histograms, *texts)}
    for tag, words in found.items():
        assert not tag.startswith(OTHERS), tag
        assert words.endswith("."), tag
    assert sorted(found)[0].startswith("1_outcome/accuracy"), "what matters most comes first"
    assert chart_tag("my_own/tag") == "6_others/my_own/tag"
    assert chart_tag("my_own/tag_low") == "6_others/my_own/tag_low"
    assert chart_tag("evaluation/easy/accuracy_low") == "7_intervals/evaluation/easy/accuracy_low"
    assert not [tag for tag in found if tag.startswith("1_") and tag.endswith(("_low", "_high"))]
    assert description("my_own/tag") == ""


@given(st.lists(st.floats(-10, 10) | st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=200))
def test_a_histogram_holds_every_value_in_few_buckets(values):
    from tensorboard.util.tensor_util import make_ndarray

    counts = count_values(values)
    assert sum(counts.values()) == len(values)
    buckets = make_ndarray(_histogram("reward/values", counts).tensor)
    assert len(buckets) <= MOST_BUCKETS + 1
    assert buckets[:, 2].sum() == len(values)
    assert buckets[0, 0] <= min(counts) <= max(counts) <= buckets[-1, 1] + 1e-9
    assert np.allclose(buckets[1:, 0], buckets[:-1, 1])


NAMES = ["gsm8k", "math", "code"]


def make_source_group(number: int, source: int, rewards: list[float | None], tokens: int) -> Group:
    row_ids = tuple(range(10 * number, 10 * number + len(rewards)))
    scores = {
        row: StageResult(row_id=row, status=StageStatus.RAISED)
        if reward is None
        else StageResult(row_id=row, numbers={REWARD: reward})
        for row, reward in zip(row_ids, rewards, strict=True)
    }
    return Group(
        group_id=number,
        prompt=Prompt(prompt_id=source * SOURCE_ROWS + 7, text="", token_ids=(1,)),
        row_ids=row_ids,
        min_version=0,
        rollouts={row: stopped(row, (0, tokens), num_prompt_tokens=1) for row in row_ids},
        scores=scores,
    )


OF_SOURCES = [make_source_group(0, 0, [1.0, 0.0], 10), make_source_group(1, 1, [0.5, 0.0], 40)]
DROPPED_OF_SOURCE = [
    make_source_group(2, 0, [1.0, 1.0], 20),
    make_source_group(3, 0, [None, 0.0], 30),
]
FIRST = StepStats(version=1, scalars={})


def test_a_step_has_numbers_of_each_source_with_a_finished_group() -> None:
    scalars, _, _ = step_scalars(
        OF_SOURCES, FIRST, {"solved": DROPPED_OF_SOURCE}, {}, sources=NAMES
    )
    found = {tag: value for tag, value in scalars.items() if tag.startswith("source_")}
    assert found == {
        "source_groups/gsm8k": 3,
        "source_dropped_share/gsm8k": pytest.approx(2 / 3),
        "source_reward/gsm8k": pytest.approx(3 / 5),  # the failed one is no zero
        "source_length/gsm8k": 20,
        "source_groups/math": 1,
        "source_dropped_share/math": 0,
        "source_reward/math": 0.25,
        "source_length/math": 40,
    }
    alone, _, _ = step_scalars(
        OF_SOURCES, FIRST, {"solved": DROPPED_OF_SOURCE}, {}, sources=["gsm8k"]
    )
    assert not [tag for tag in alone if tag.startswith("source_")], "reward/mean says the same"
    for tag in found:
        assert not chart_tag(tag).startswith(OTHERS)
        assert description(tag)


def test_a_run_has_their_means_weighted_by_groups(tmp_path: Path) -> None:
    first, _, _ = step_scalars(OF_SOURCES, FIRST, {"solved": DROPPED_OF_SOURCE}, {}, sources=NAMES)
    second = {"source_groups/gsm8k": 1, "source_dropped_share/gsm8k": 0.0}
    second |= {"source_reward/gsm8k": 1.0, "source_length/gsm8k": 100.0}
    lines = [{"step": 1, **first}, {"step": 2, **second}, {"step": 3, "source_groups/x": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(tmp_path)["sources"] == {
        "gsm8k": {
            "groups": 4,
            "dropped_share": pytest.approx((3 * 2 / 3 + 0) / 4),
            "reward": pytest.approx((3 * 0.6 + 1) / 4),
            "length": (3 * 20 + 100) / 4,
        },
        "math": {"groups": 1, "dropped_share": 0, "reward": 0.25, "length": 40},
        "x": {"groups": 0},
    }
    assert sum_sources([]) == {}


def test_a_source_is_called_by_its_file_unless_two_have_the_same() -> None:
    def names(*prompts: str) -> list[str]:
        return DataConfig(prompts=[*prompts]).source_names

    assert names("a/gsm8k.jsonl", "task", "b c.parquet") == ["gsm8k", "task", "b_c"]
    assert names("a/train.jsonl", "b/train.parquet", "c.jsonl") == ["train_0", "train_1", "c_2"]
    assert DataConfig(prompts="x.jsonl").source_names == ["x"]
    assert DataConfig(prompts="data/v1.2").source_names == ["v1.2"], "a folder"
