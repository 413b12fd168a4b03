"""What is refused of the calls of a loop of one's own, and what is left when something fails."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llamarl.controller.library import LibraryEngines, Question
from llamarl.core.config import Config, VllmConfig
from llamarl.core.errors import UserCodeError
from llamarl.model.hf import as_parameters
from llamarl.model.inventory import parameter_shapes
from llamarl.model.prompt_rules import make_prompt
from llamarl.recipe.inputs import Inputs, read_inputs
from llamarl.recipe.rules import replace_sampling, train_sampling
from tests.e2e.commands import Command
from tests.e2e.test_library import RECIPE, run
from tests.recipe.test_mistakes import compose

Call = Callable[[Config, Inputs], object]


def test_rewards_may_be_given_in_place_of_those_of_score_and_be_corrected(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        (group,) = await engines.generate(itertools.islice(engines.prompts, 1))
        await engines.score([group])
        assert await engines.settle(group, [float("nan")] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [float("inf")] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [1e300] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [1.0] + [0.0] * 7) is None
        (rewards,) = zip(
            *(await engines.get_experience(group.row_ids, ["reward"]))["reward"], strict=True
        )
        assert list(rewards) == [1.0] + [0.0] * 7
        with pytest.raises(ValueError, match=r"rewards must be one per rollout, got \[1.0\]"):
            await engines.settle(group, [1.0])
        await engines.forward_backward([group])
        assert (await engines.optim_step()).version == 1

    run(work, tmp_path)


@pytest.fixture(scope="module")
def recipe() -> tuple[Config, Inputs]:
    config = compose(RECIPE)
    return config, read_inputs(config)


def asking(question: Question) -> Call:
    return lambda config, inputs: make_prompt(question, -1, config.data, inputs.tokenizer)


def sampling(**own: object) -> Call:
    return lambda config, inputs: replace_sampling(
        train_sampling(config, inputs), own, inputs.tokenizer, config
    )


def sampling_by_vllm(temperature: float) -> Call:
    def call(config: Config, inputs: Inputs) -> object:
        config = replace(config, generator=VllmConfig())
        own = {"temperature": temperature}
        return replace_sampling(train_sampling(config, inputs), own, inputs.tokenizer, config)

    return call


def bringing(**changed: object) -> Call:
    """A source whose tensors differ from the checkpoint's in these."""

    def call(config: Config, inputs: Inputs) -> object:
        shapes = parameter_shapes(inputs.architecture)
        return as_parameters(
            {n: torch.zeros(s) for n, s in shapes.items()} | changed, inputs.architecture
        )

    return call


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (asking(""), "'question' must be text that is not blank, got \"\""),
        (asking({"text": "?"}), "the row must have the field 'question'"),
        (asking([0, 10**6]), "token ids must be 0 to 48, got [0, 1000000]"),
        (asking([]), "token ids must be 0 to 48, got []"),
        (
            asking([{"role": "user", "content": "?"}]),
            "'question' must be text for a tokenizer without a chat template",
        ),
        (asking(None), "a question must be a text, a row, messages or token ids, got None"),
        (asking(3.5), "a question must be a text, a row, messages or token ids, got 3.5"),
        (asking("1+" * 40), "at most 32 tokens (data.max_prompt_tokens)"),
        (sampling(top_p=0.0), "top_p must be above 0, got 0.0"),
        (sampling(temperature=-1.0), "temperature must be at least 0, got -1.0"),
        (sampling(temperature=1e-5), "temperature must be 0 (greedy) or at least 0.001, got 1e-05"),
        (sampling(stop_strings="=A"), "stop_strings must be a list, got '=A'"),
        (sampling(stop_strings=[""]), "stop_strings must not be empty, got ['']"),
        (sampling(stop_strings=["<pad>."]), "stop_strings must hold a special token"),
        (sampling(stop_token_ids=[None]), "stop_token_ids must be ids of tokens, got [None]"),
        (sampling(stop_token_ids=[2**63]), "stop_token_ids must be ids of tokens"),
        (sampling(stop_token_ids=[1.5]), "stop_token_ids must be ids of tokens, got [1.5]"),
        (sampling_by_vllm(0.005), "temperature must be 0 or at least 0.01 (vLLM), got 0.005"),
        (sampling_by_vllm(2.5), "temperature must be at most 2 (vLLM), got 2.5"),
        (sampling(top_k=-1), "top_k must be 0 or more, got -1"),
        (sampling(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (sampling(max_tokens=2.5), "max_tokens must be a whole number, got 2.5"),
        (sampling(max_token=8), "(did you mean max_tokens?)"),
        (bringing(x=torch.zeros(1)), "no parameters but the checkpoint's, got x"),
        (bringing(**{NORM: torch.zeros(3)}), "must have shape (128,), got (3,)"),
        (bringing(**{NORM: [1.0]}), "must be a plain tensor, got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_recipe_could_not_hold_is_refused_of_a_call(
    wrong: Call, words: str, recipe: tuple[Config, Inputs]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        wrong(*recipe)


def test_one_rollout_is_no_group_to_be_trained_on(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        (group,) = await engines.generate(["What is 1+2?"], num_rollouts=1)
        with pytest.raises(ValueError, match=r"sampling\.rollouts_per_prompt must be at least 2"):
            await engines.settle(group, [1.0])

    run(work, tmp_path, "algorithm=rloo")


def test_an_error_in_the_background_reaches_every_call(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    for name in ("checkpoint", "prompts.jsonl"):
        (recipe / name).symlink_to(RECIPE / name)
    text = (RECIPE / "run.yaml").read_text()
    (recipe / "run.yaml").write_text(
        re.sub(r"reward:(\n  .*)+", "reward: {functions: [task]}", text)
    )
    (recipe / "task.py").write_text("def reward(prompt, completion):\n    return 1 / 0\n")

    async def work(engines: LibraryEngines) -> None:
        groups = await engines.generate(itertools.islice(engines.prompts, 8))
        for _ in range(2):
            with pytest.raises(UserCodeError, match="ZeroDivisionError"):
                await engines.score(groups)
        with pytest.raises(UserCodeError, match="ZeroDivisionError"):
            await engines.generate(["1+1="])

    run(
        work,
        tmp_path / "run",
        "data.held_out=null",
        recipe=recipe,
        executors=["generator", "scorer"],
    )


LEAVING = """
import asyncio, os, signal, sys
import llamarl
from llamarl.core.errors import NoGenerator

async def block(run_dir):
    async with llamarl.start_engines({recipe!r}, run_dir=run_dir, executors={parts}) as engines:
        if "trainer" in {parts}:
            await engines.sync_weights()
        futures = await engines.submit([next(engines.prompts) for _ in range(32)])
        {how}

if __name__ == "__main__":
    try:
        asyncio.run(block(sys.argv[1]))
    except (KeyError, NoGenerator) as error:
        print(error, flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "how", "said"),
    [
        (
            *(("generator", "scorer", "trainer"), "raise KeyError('of the caller')"),
            "'of the caller'",
        ),
        (
            ("generator",),
            "os.kill(engines.executors.generators[0].pids[0], signal.SIGKILL);"
            "await asyncio.gather(*futures)",
            "every generator replica is lost",
        ),
    ],
    ids=["raised", "killed"],
)
def test_an_exception_in_the_block_leaves_no_process(
    parts: Sequence[str], how: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING.format(recipe=str(RECIPE), parts=parts, how=how))
    mark = f"LLAMARL_TEST_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"{said}\n"
        assert Command(process, mark).family() == [process.pid]
        assert not list((tmp_path / "run").glob(".rendezvous-*"))
        assert json.loads((tmp_path / "run" / "environment.json").read_text())["python"]
    finally:
        _, warned = process.communicate(timeout=30)  # which ends its input
        assert "never retrieved" not in warned
        assert process.returncode == 0
