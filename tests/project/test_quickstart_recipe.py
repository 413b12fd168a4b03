"""The shipped quickstarts: their sets of questions are disjoint, their files fit together."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarl.core.config import DataConfig, RewardConfig
from llamarl.model.inventory import check_checkpoint
from llamarl.model.tokenizer import check_tokenizer, load_tokenizer
from llamarl.scoring.reward_functions import reward_exact
from tests.json_lines import read_lines
from tests.places import CHECKPOINT, RECIPE, ROOT, TOOLS_RECIPE
from tests.prompt_files import read_prompts

sys.path.insert(0, str(ROOT / "tools"))


@dataclass
class Quickstart:
    """A recipe's folder, the tool that writes it, and what the tool asks of a checkpoint."""

    folder: Path
    tool: Any
    num_demonstrations: int
    good: dict[str, float]

    def rows(self, name: str) -> list[dict[str, str]]:
        return read_lines(self.folder / f"{name}.jsonl")

    def questions(self, name: str) -> list[tuple[int, ...]]:
        """The questions of a file as sorted numbers: another order is the same question."""
        return [numbers_of(row["question"]) for row in self.rows(name)]


def numbers_of(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


SUMS = importlib.import_module("make_quickstart")
TOOLS = importlib.import_module("make_quickstart_tools")
QUICKSTARTS = {
    "sums": Quickstart(
        RECIPE,
        SUMS,
        SUMS.NUM_DEMONSTRATIONS,
        {"accuracy": 0.45, "right_form": 0.99, "forced_work_accuracy": 0.98},
    ),
    "tools": Quickstart(
        TOOLS_RECIPE, TOOLS, TOOLS.NUM_PATIENT, {"accuracy": 0.4, "made_to_call_accuracy": 0.98}
    ),
}


@pytest.fixture(params=QUICKSTARTS)
def quickstart(request: pytest.FixtureRequest) -> Quickstart:
    return QUICKSTARTS[request.param]


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return yaml.safe_load((RECIPE / "run.yaml").read_text())


@pytest.mark.parametrize("name", ["held_out", "prompts"])
def test_question_files_are_the_ones_the_tool_writes(quickstart: Quickstart, name: str) -> None:
    assert quickstart.rows(name) == quickstart.tool.rows_of(name, seed=0)


def test_sft_takes_each_demonstration_once(quickstart: Quickstart) -> None:
    sft = yaml.safe_load((quickstart.folder / "sft.yaml").read_text())
    num_groups = sft["num_steps"] * sft["trainer"]["groups_per_step"]
    assert num_groups == quickstart.num_demonstrations


def test_checkpoint_rule_names_every_miss(quickstart: Quickstart) -> None:
    misses, good = quickstart.tool.misses, quickstart.good
    assert misses(good) == []
    assert len(misses({**good, "accuracy": 0.9})) == 1
    assert len(misses(dict.fromkeys(good, 0.0))) == len(good)


def test_questions_are_in_one_set_only() -> None:
    sums, tools = QUICKSTARTS.values()
    shown = {
        "sums": {tuple(sorted(each.numbers)) for each in first(SUMS.draw_demonstrations(seed=0))},
        "tools": {
            numbers_of(turns[0][1]) for turns in first(TOOLS.draw_demonstrations(0, are_mixed=True))
        },
    }
    for name, each in (("sums", sums), ("tools", tools)):
        held_out, prompts = each.questions("held_out"), each.questions("prompts")
        assert len({*held_out, *prompts}) == len(held_out) + len(prompts) > 4000
        assert not {*held_out, *prompts} & shown[name]


def first(demonstrations: Any) -> Any:
    return itertools.islice(demonstrations, 20_000)


def test_answers_are_the_sums_and_worked_ones_hold_every_step(run: dict[str, Any]) -> None:
    assert SUMS.worked_answer((5, 8, 70)) == "5+8=13, 13+70=83. Answer: 83"
    tokenizer = load_tokenizer(CHECKPOINT)
    sums = QUICKSTARTS["sums"]
    for name in ("held_out", "prompts"):
        for row, numbers in zip(sums.rows(name), sums.questions(name), strict=True):
            assert row["answer"] == str(sum(numbers))
    lengths = [len(tokenizer.encode(row["worked"], special=False)) for row in sums.rows("prompts")]
    assert max(lengths) >= 5 * min(lengths), "they differ clearly"
    assert max(lengths) < run["sampling"]["max_tokens"]


def test_reward_pays_right_answers_in_either_form_and_nothing_else(run: dict[str, Any]) -> None:
    keys = ("functions", "pattern", "require_stop")
    config = RewardConfig(**{key: run["reward"][key] for key in keys})
    tokenizer = load_tokenizer(CHECKPOINT)
    data = DataConfig(prompts="prompts.jsonl", max_prompt_tokens=run["data"]["max_prompt_tokens"])
    for prompt in read_prompts(RECIPE / "held_out.jsonl", data, tokenizer)[:100]:
        answer, worked = prompt.fields["answer"], prompt.fields["worked"]
        assert reward_exact(prompt, worked, True, config) == 1
        assert reward_exact(prompt, f"Answer: {answer}", True, config) == 1
        assert reward_exact(prompt, worked, False, config) == 0
        for wrong in (f"Answer: {int(answer) + 1}", f"Answer: {answer}, ", answer):
            assert reward_exact(prompt, wrong, True, config) == 0


def test_the_tokenizer_gives_back_every_text_and_is_autotokenizers() -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(CHECKPOINT)
    for row in QUICKSTARTS["sums"].rows("held_out"):
        for text in (row["question"], row["worked"]):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    theirs = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    ids = tokenizer.encode("What is 5+8+70?")
    assert theirs("What is 5+8+70?")["input_ids"] == ids
    assert (ids[0], len(ids)) == (1, 9)
    assert theirs.eos_token_id == tokenizer.eos_token_ids[0] == 2


def test_the_tokenizer_with_a_tool_is_the_written_one_and_keeps_calls(tmp_path: Path) -> None:
    checkpoint = TOOLS_RECIPE / "checkpoint"
    TOOLS.write_tokenizer(tmp_path, 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (checkpoint / name).read_text()
    tokenizer = load_tokenizer(checkpoint)
    (call, *_, last) = TOOLS.patient_answer((12, 34, 56))
    assert call == ("assistant", "<calculator>12*34</calculator>")
    assert last == ("assistant", "Answer: 22848")
    for text in (call[1], last[1]):
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_checkpoint_is_small_grouped_query_and_fits_its_tokenizer(run: dict[str, Any]) -> None:
    architecture = check_checkpoint(CHECKPOINT)
    check_tokenizer(load_tokenizer(CHECKPOINT), architecture.vocab_size)
    assert architecture.head_dim == 32
    assert architecture.num_kv_heads < architecture.num_heads
    assert architecture.eos_token_ids == (2,)
    assert run["generator"]["max_model_len"] <= architecture.max_positions
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 5_000_000
