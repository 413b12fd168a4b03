"""The shipped quickstart: its three sets of questions are disjoint, its files fit together."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from llamarl.core.config import DataConfig, RewardConfig
from llamarl.model.inventory import check_checkpoint
from llamarl.model.tokenizer import check_tokenizer, load_tokenizer
from llamarl.scoring.reward_functions import reward_exact
from tests.json_lines import read_lines
from tests.places import CHECKPOINT, RECIPE
from tests.prompt_files import read_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("make_quickstart")


@pytest.fixture(scope="module")
def run() -> dict:
    return yaml.safe_load((RECIPE / "run.yaml").read_text())


def rows(name: str) -> list[dict[str, str]]:
    return read_lines(RECIPE / f"{name}.jsonl")


def sums(name: str) -> list[tuple[int, ...]]:
    """The questions of a file as sorted numbers: another order is the same question."""
    return [tuple(sorted(map(int, re.findall(r"\d+", row["question"])))) for row in rows(name)]


@pytest.mark.long
def test_held_out_questions_are_many_and_disjoint_from_prompts_and_demonstrations(tool):
    held_out, prompts = sums("held_out"), sums("prompts")
    assert len(held_out) == len(set(held_out)) >= 500
    assert len(prompts) == len(set(prompts)) >= 4000
    drawn = itertools.islice(tool.draw_demonstrations(seed=0), tool.NUM_DEMONSTRATIONS)
    demonstrations = {tuple(sorted(demonstration.numbers)) for demonstration in drawn}
    assert len(demonstrations) > 50_000
    assert not set(held_out) & set(prompts)
    assert not set(held_out) & demonstrations
    assert not set(prompts) & demonstrations


def test_sft_takes_each_demonstration_once(tool):
    sft = yaml.safe_load((RECIPE / "sft.yaml").read_text())
    assert sft["num_steps"] * sft["trainer"]["groups_per_step"] == tool.NUM_DEMONSTRATIONS


@pytest.mark.parametrize("name", ["held_out", "prompts"])
def test_question_files_are_the_ones_the_tool_writes(tool, name):
    assert rows(name) == tool.rows_of(name, seed=0)


@pytest.mark.parametrize("name", ["held_out", "prompts"])
def test_answers_are_the_sums(name):
    for row, numbers in zip(rows(name), sums(name), strict=True):
        assert row["answer"] == str(sum(numbers))


def test_worked_answers_hold_every_step_and_differ_clearly_in_length(tool):
    assert tool.worked_answer((5, 8, 70)) == "5+8=13, 13+70=83. Answer: 83"
    tokenizer = load_tokenizer(CHECKPOINT)
    lengths = sorted(
        len(tokenizer.encode(row["worked"], special=False)) for row in rows("held_out")
    )
    assert lengths[-1] >= 5 * lengths[0]


def test_reward_pays_right_answers_in_either_form_and_nothing_else(run):
    config = RewardConfig(
        functions=run["reward"]["functions"],
        pattern=run["reward"]["pattern"],
        require_stop=run["reward"]["require_stop"],
    )
    tokenizer = load_tokenizer(CHECKPOINT)
    data = DataConfig(prompts="prompts.jsonl", max_prompt_tokens=run["data"]["max_prompt_tokens"])
    for prompt in read_prompts(RECIPE / "held_out.jsonl", data, tokenizer)[:100]:
        answer, worked = prompt.fields["answer"], prompt.fields["worked"]
        assert reward_exact(prompt, worked, True, config) == 1
        assert reward_exact(prompt, f"Answer: {answer}", True, config) == 1
        assert reward_exact(prompt, worked, False, config) == 0
        assert reward_exact(prompt, f"Answer: {int(answer) + 1}", True, config) == 0
        assert reward_exact(prompt, f"Answer: {answer}, ", True, config) == 0
        assert reward_exact(prompt, answer, True, config) == 0


def test_tokenizer_gives_back_every_text_and_puts_bos_first(run):
    tokenizer = load_tokenizer(CHECKPOINT)
    for row in rows("held_out"):
        for text in (row["question"], row["worked"]):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("What is 5?")[0] == 1
    assert len(tokenizer.encode("What is 5+8+70?")) == 9
    longest = max(len(tokenizer.encode(row["worked"])) for row in rows("prompts"))
    assert longest <= run["sampling"]["max_tokens"]


def test_autotokenizer_loads_the_same_tokenizer():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    ours = load_tokenizer(CHECKPOINT)
    text = "What is 86+94?"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.eos_token_id == ours.eos_token_ids[0] == 2


def test_checkpoint_is_small_grouped_query_and_fits_its_tokenizer(run):
    architecture = check_checkpoint(CHECKPOINT)
    check_tokenizer(load_tokenizer(CHECKPOINT), architecture.vocab_size)
    assert architecture.head_dim == 32
    assert architecture.num_kv_heads < architecture.num_heads
    assert architecture.eos_token_ids == (2,)
    assert run["generator"]["max_model_len"] <= architecture.max_positions
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 5_000_000


def test_checkpoint_rule_names_every_miss(tool):
    good = {"accuracy": 0.45, "right_form": 0.99, "forced_work_accuracy": 0.98}
    assert tool.misses(good) == []
    assert len(tool.misses({**good, "accuracy": 0.6})) == 1
    assert len(tool.misses({"accuracy": 0.1, "right_form": 0, "forced_work_accuracy": 0})) == 3
