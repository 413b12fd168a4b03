"""Environments of the package verifiers run as they are: its harness, its servers, its rewards."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.extensions import load_module
from llamarl.core.records import NO_VERSION, Prompt
from llamarl.model.tokenizer import load_tokenizer
from llamarl.prompts.rows import load as load_prompts
from llamarl.prompts.rows import make_rows
from llamarl.scoring.definition import find_defined
from llamarl.scoring.episodes import Episodes
from tests.e2e.commands import finish, read_rollouts, start
from tests.places import ROOT, TOOLS_RECIPE

pytestmark = pytest.mark.environments

RECIPE = ROOT / "recipes" / "verifiers"
SOURCE = (RECIPE / "task.py").read_text()
ENV = {"taskset": {"id": "guess-number"}}
NULL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
ASKED = {"role": "user", "content": "What is n? 0<n<9"}


@pytest.fixture(autouse=True)
def taskset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the recipe is on the path, as its page says; also in processes of the test."""
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(RECIPE), *filter(None, sys.path)]))
    yield
    sys.modules.pop("guess_number", None)


def row(index: int, **env: Any) -> dict[str, Any]:
    return {"question": "", "env": {**ENV, **env}, "size": 20, "index": index}


def play(*, replies: list[str] | None = None, **given: Any) -> tuple[float, list[dict[str, Any]]]:
    """(reward, all that the model was shown) of an episode in which the model says `replies`, or
    one number after the other."""

    async def main() -> tuple[float, list[dict[str, Any]]]:
        episodes = Episodes(find_defined(load_module({"task.py": SOURCE})))
        prompt = Prompt(prompt_id=1, text="", token_ids=(1,), fields=given)
        begun = await episodes.begin(prompt, 1, [])
        shown = begun["messages"]
        for said in replies if replies is not None else map(str, range(1, 9)):
            answer = await episodes.take_turn(1, said, [])
            shown += answer["messages"]
            if not answer["messages"]:
                break
        return (await episodes.finish(1))["reward"], shown

    return asyncio.run(asyncio.wait_for(main(), 120.0))


def test_the_first_tasks_of_a_taskset_are_held_out() -> None:
    options = {"env": ENV, "num_prompts": 3, "num_held_out": 2}
    held_out = make_rows({"task.py": SOURCE}, options, held_out=True)
    trained = make_rows({"task.py": SOURCE}, options, held_out=False)
    assert [row["index"] for row in held_out + trained] == [0, 1, 2, 3, 4]
    assert {row["question"] for row in held_out + trained} == {ASKED["content"]}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"taskset": {"id": "nope"}}, "taskset 'nope' not found"),
        ({"taskset": {"id": "guess-number", "larges": 1}}, "taskset.larges: Extra inputs are not"),
        ({**ENV, "player": {"harness": {"id": "nil"}}}, "harness 'nil' not found"),
        ({}, "SingleAgentEnv needs a seed taskset"),
    ],
)
def test_an_environment_that_does_not_load_is_one_line(env: dict[str, Any], why: str) -> None:
    options = {"env": env, "num_prompts": 3, "num_held_out": 2}
    mistake = load_prompts({"task_source": {"task.py": SOURCE}})(None, False, options)["mistake"]
    assert mistake.startswith("task.py: data.options.env must be an environment of verifiers, got")
    assert why in mistake
    assert "\n" not in mistake


@pytest.mark.parametrize(
    "env",
    [
        {},
        # The package's own chat program, which uv starts with packages from its index.
        pytest.param({"player": NULL}, marks=pytest.mark.slow),
    ],
)
def test_an_episode_is_played_by_the_harness_and_rewarded_by_the_task(env: dict[str, Any]) -> None:
    reward, shown = play(**row(3, **env))
    secret = 1 + sum(message["content"].startswith("n>") for message in shown)
    told = [{"role": "user", "content": f"n>{guess}"} for guess in range(1, secret)]
    assert shown == [ASKED, *told]
    assert reward == pytest.approx(1.0 - 0.1 * (secret - 1))
    assert secret > 1, "one turn would show nothing"


def test_an_episode_that_is_cut_is_scored_as_wrong() -> None:
    reward, shown = play(**row(3), replies=["nothing"])
    assert shown == [ASKED, {"role": "user", "content": "n>0"}]
    assert reward == 0.0


def test_a_run_trains_on_what_the_model_said_to_the_harness(tmp_path: Path) -> None:
    options = ["cluster=inline", "experience.keep_rollouts=1", f"run_dir={tmp_path}"]
    code, _, errors = finish(start("train", f"--config-dir={RECIPE}", *options))
    assert code == 0, errors
    tokenizer = load_tokenizer(TOOLS_RECIPE / "checkpoint")
    outcomes = "trained", "evaluated"
    lines = [line for line in read_rollouts(tmp_path) if line["outcome"] in outcomes]
    prompt = tokenizer.encode(tokenizer.render_chat([ASKED]), special=False)
    num_observed = 0
    for line in lines:
        assert line["prompt_ids"] == prompt
        pairs = zip(line["response_ids"], line["token_versions"], strict=True)
        observed = [token for token, version in pairs if version == NO_VERSION]
        num_observed += len(observed) > 0
        said = tokenizer.decode_raw(observed).split("<|assistant|>")[:-1]
        assert all(part.removeprefix("<|end|>").startswith("<|user|>n") for part in said), said
    assert len(lines) == 2 * 16 + 2 * 4, json.dumps(lines[:1])
    assert num_observed > len(lines) / 2
