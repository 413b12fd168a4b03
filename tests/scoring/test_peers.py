"""tools/bench_peers.py: TRL renders and reads what llamarl does, and writes as many tokens; slow
tools are the recipe's."""

from __future__ import annotations

import inspect
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench_peers import RECIPE, write_slow_recipe
from generate_bench.engines import random_model
from peers_bench.chat import load_tokenizer
from peers_bench.plain import EQUAL, LONG_TAIL, write_plain_recipe
from peers_bench.processors import run_steps
from peers_bench.replayed_lengths import replay
from peers_bench.sides import Run, job_of
from transformers import PreTrainedTokenizerBase

from llamarl.core.config import EnvironmentConfig
from llamarl.core.extensions import load_module
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.tokenizer import load_tokenizer as load_own
from llamarl.recipe.composition import compose, to_config
from llamarl.recipe.inputs import read_inputs
from llamarl.scoring.definition import Kind, describe, find_defined
from llamarl.scoring.turn_format import TurnFormat
from tests.tiny_checkpoints import LLAMA

pytestmark = pytest.mark.full

CHECKPOINT = RECIPE / "checkpoint"
QUESTION = [{"role": "user", "content": "What is 12*34*56?"}]
TASK = load_module({"task.py": (RECIPE / "task.py").read_text()})
PIECES = ["<calculator>", "</calculator>", "<", ">", "12*34", "408", "Answer: ", "calc", "<|end|>"]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return load_own(CHECKPOINT)


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    return load_tokenizer(CHECKPOINT)


@pytest.fixture(scope="module")
def turns(own: Tokenizer) -> TurnFormat:
    (schemas,) = [each.schemas for each in describe(TASK).values()]
    return TurnFormat(own, Kind(tuple(schemas)), EnvironmentConfig(calls="tagged"))


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(each["name"], each["arguments"]) for each in functions]


def test_both_sides_begin_with_the_same_ids(own: Tokenizer, theirs: Any) -> None:
    ids = theirs.apply_chat_template(
        QUESTION, tools=TASK.tools, add_generation_prompt=True, return_dict=False
    )
    assert ids == own.encode(own.render_chat(QUESTION), special=False)


def test_both_sides_read_the_same_calls(turns: TurnFormat, theirs: Any) -> None:
    """Whatever a model writes, up to the token that ends its turn."""
    prefix = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    num_calls = 0
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES[:-1], k=rng.randint(1, 6)))
        ids = theirs(text + rng.choice(["<|end|>", ""]))["input_ids"]
        found = calls_of(theirs.parse_response(ids, prefix=prefix, tools=TASK.tools))
        expected = [(call.name, dict(call.arguments)) for call in turns.read(ids).calls]
        assert found == expected, (seed, text)
        num_calls += len(found)
    assert num_calls > 100


def test_both_sides_put_the_same_ids_after_a_call(turns: TurnFormat, theirs: Any) -> None:
    said = [{"role": "tool", "name": "calculator", "content": "408"}]
    call = {"type": "function", "function": {"name": "calculator", "arguments": {}}}
    before = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    head = theirs.apply_chat_template(before, return_dict=False)
    whole = theirs.apply_chat_template(
        [*before, *said], add_generation_prompt=True, return_dict=False
    )
    assert whole[: len(head)] == head
    assert whole[len(head) :] == turns.observation(said, theirs.eos_token_id).tolist()


def test_slow_tools_are_those_of_the_recipe_and_wait(tmp_path: Path) -> None:
    folder = write_slow_recipe(tmp_path / "slow")
    slow = load_module({"task.py": (folder / "task.py").read_text()})
    assert describe(slow) == describe(TASK)
    assert all(inspect.iscoroutinefunction(tool) for tool in find_defined(slow).tools.values())


def test_plain_recipes_compose_and_trl_gets_their_numbers(tmp_path: Path) -> None:
    for lengths, num_lengths, most in ((EQUAL, 1, 128), (LONG_TAIL, 512, 512)):
        recipe = write_plain_recipe(tmp_path / lengths, lengths)
        run = Run(recipe=recipe, folder=tmp_path, num_cores=1, num_steps=3, seed=0)
        config = to_config(compose(recipe, run.overrides()))
        inputs = read_inputs(config)
        job = job_of(config, run, num_processes=1, are_calls_gathered=False)
        assert job["lengths"] == inputs.replay_lengths
        assert (len(job["lengths"]), max(job["lengths"])) == (num_lengths, most)
        assert job["max_tokens"] == config.sampling.max_tokens == most
        assert (job["num_prompts"], job["num_generations"], job["num_steps"]) == (8, 8, 3)


def test_trl_writes_as_many_tokens_as_llamarl_replays() -> None:
    """On two ranks, over two generations, whatever a model of random weights would write."""
    model = random_model(replace(LLAMA, vocab_size=8), torch.float32)
    prompts = torch.full((3, 2), 5)
    lengths = [4, 1, 7, 2, 9]
    named = {"attention_mask": torch.ones_like(prompts), "do_sample": True, "max_new_tokens": 9}
    found: list[list[int]] = [[], []]
    whole = [lengths[i % len(lengths)] for i in range(12)]
    for rank, own in enumerate(found):
        replay(model, lengths, num_rows=3, rank=rank, num_ranks=2, eos_token_id=1)
        for _ in range(2):
            rows = model.generate(input_ids=prompts, eos_token_id=1, pad_token_id=0, **named)
            own += [(row[2:] == 1).nonzero()[0].item() + 1 for row in rows]
        del model.generate  # the class has its own
    assert found[0] + found[1] == whole[:3] + whole[6:9] + whole[3:6] + whole[9:]


def test_a_run_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, time; print('at work', flush=True);"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    with pytest.raises(SystemExit) as raised:
        run_steps([sys.executable, "-c", program], {}, tmp_path / "metrics.jsonl", 1, limit_s=1)
    assert str(raised.value).endswith("at work\n\nThis command had not ended after 1 s.")
    child = Path("/proc", (tmp_path / "child").read_text())
    while child.exists() and ") Z" not in (child / "stat").read_text():
        time.sleep(0.01)
