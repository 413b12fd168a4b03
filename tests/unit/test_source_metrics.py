"""Numbers of each source of prompts, of a step and over a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.core.config import DataConfig
from llamarl.core.groups import Group, StepStats
from llamarl.core.records import REWARD, SOURCE_ROWS, Prompt, StageResult, StageStatus
from llamarl.metrics.step_metrics import step_scalars, sum_sources
from llamarl.metrics.summary import summarize
from llamarl.metrics.tensorboard import OTHERS, chart_tag, description
from tests.fakes import stopped

NAMES = ["gsm8k", "math", "code"]


def make_group(number: int, source: int, rewards: list[float | None], tokens: int) -> Group:
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


TRAINED = [make_group(0, 0, [1.0, 0.0], 10), make_group(1, 1, [0.5, 0.0], 40)]
DROPPED = [make_group(2, 0, [1.0, 1.0], 20), make_group(3, 0, [None, 0.0], 30)]
STATS = StepStats(version=1, scalars={})


def test_a_step_has_numbers_of_each_source_with_a_finished_group() -> None:
    scalars, _, _ = step_scalars(TRAINED, STATS, {"solved": DROPPED}, {}, sources=NAMES)
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
    alone, _, _ = step_scalars(TRAINED, STATS, {"solved": DROPPED}, {}, sources=["gsm8k"])
    assert not [tag for tag in alone if tag.startswith("source_")], "reward/mean says the same"
    for tag in found:
        assert not chart_tag(tag).startswith(OTHERS)
        assert description(tag)


def test_a_run_has_their_means_weighted_by_groups(tmp_path: Path) -> None:
    first, _, _ = step_scalars(TRAINED, STATS, {"solved": DROPPED}, {}, sources=NAMES)
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
