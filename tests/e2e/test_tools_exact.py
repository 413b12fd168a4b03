"""Episodes of real runs, token by token: ids trained are ids generated, observations have no part
in learning, and generator and trainer agree on what was written, whatever path it took."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.core.records import NO_VERSION
from llamarl.model.tokenizer import load_tokenizer
from llamarl.recipe.inputs import read_inputs
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE
from tests.recipe.test_mistakes import compose

SMALL = [
    "cluster=inline",
    "num_steps=3",
    "trainer.groups_per_step=6",
    "trainer.warmup_steps=0",
    "trainer.lr=0",
    "evaluation.max_prompts=6",
    "evaluation.every_steps=0",
    "checkpoint.export=false",
    "experience.keep_rollouts=1",
]
CALL = re.compile(r"<calculator>(\d+)\*(\d+)</calculator>")
TOKENIZER = load_tokenizer(TOOLS_RECIPE / "checkpoint")


@dataclass(frozen=True)
class Piece:
    """A run of a response: of one turn, or an observation."""

    is_observation: bool
    ids: list[int]

    @property
    def text(self) -> str:
        return TOKENIZER.decode_raw(self.ids)


def pieces(line: dict[str, Any]) -> list[Piece]:
    pairs = zip(line["token_versions"], line["response_ids"], strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0] == NO_VERSION)
    return [Piece(is_observed, [i for _, i in run]) for is_observed, run in runs]


def metrics(run_dir: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in read_lines(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            found.setdefault(name, []).append(value)
    return found


def questions() -> dict[str, dict[int, dict[str, str]]]:
    """By the outcome of a rollout, rows of the recipe by the number of their line."""
    files = {"evaluated": "held_out", "trained": "prompts"}
    return {
        outcome: dict(enumerate(read_lines(TOOLS_RECIPE / f"{name}.jsonl"), start=1))
        for outcome, name in files.items()
    }


def check(line: dict[str, Any], rows: dict[int, dict[str, str]]) -> list[Piece]:
    """What the model wrote and what it was told, by the words of the recipe."""
    question = rows[line["prompt_id"]]["question"]
    expected = f"<bos><|user|>{question}<|end|><|assistant|>"
    assert TOKENIZER.decode_raw(line["prompt_ids"]) == expected
    found = pieces(line)
    assert not found[0].is_observation
    assert not found[-1].is_observation, "nothing is observed that no turn follows"
    for turn, observation in zip(found[:-1:2], found[1::2], strict=True):
        assert turn.text.endswith("<|end|>")
        calls = [int(a) * int(b) for a, b in CALL.findall(turn.text)]
        said = "".join(f"<|tool|>{product}<|end|>" for product in calls)
        if "error" not in observation.text:
            assert observation.text == said + "<|assistant|>"
    is_observed = np.array(line["token_versions"]) == NO_VERSION
    logprobs = np.array(line["generator_logprobs"])
    assert (logprobs[is_observed] == 0).all()
    assert (logprobs[~is_observed] <= 0).all()
    assert sum(count for _, count in line["spans"]) == (~is_observed).sum()
    assert all(version >= 0 for version, _ in line["spans"])
    assert line["num_tokens"] == len(is_observed)
    if "trainer_logprobs" in line:
        difference = np.abs(np.array(line["trainer_logprobs"]) - logprobs)[~is_observed]
        assert difference.max() < 5e-3, "under equal weights both compute the same"
    return found


def run(forks: Forks, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """A run of the recipe whose weights stay as they are; its archive."""
    common = f"--config-dir={TOOLS_RECIPE}", f"run_dir={run_dir}", *SMALL
    done: subprocess.CompletedProcess[str] = forks.run("train", *common, *overrides)
    assert done.returncode == 0, done.stderr
    return read_rollouts(run_dir)


CUT = "cut and resumed on two replicas of two slots, with a frozen model"
PATHS = {
    CUT: [
        "sampling.segment_tokens=3",
        "generator.num_replicas=2",
        "generator.max_num_seqs=2",
        "algorithm.kl_coefficient=0.01",
    ],
    "late, with the mask, keys and values computed again after a commit, by transformers": [
        "staleness.late=mask",
        "generator.max_num_seqs=4",
        "generator.kv_after_commit=recompute",
        "trainer=transformers",
    ],
}


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.long if path != CUT else ()) for path in PATHS]
)
def test_every_token_is_what_it_should_be(forks: Forks, tmp_path: Path, path: str) -> None:
    overrides = PATHS[path]
    has_few_slots = any("max_num_seqs" in each for each in overrides)  # at work at every commit,
    for attempt in range(3):  # unless the machine is so busy that the generator waits for it
        lines = run(forks, tmp_path / str(attempt), *overrides)
        if not has_few_slots or any(len(line["spans"]) > 1 for line in lines):
            break
    else:
        raise AssertionError("no commit came amid an episode")
    rows = questions()
    outcomes = Counter(line["outcome"] for line in lines)
    assert outcomes["evaluated"] == 12
    assert outcomes["trained"] > 0
    num_turns: list[int] = []
    for line in lines:
        if line["outcome"] in rows:
            found = check(line, rows[line["outcome"]])
            if line["finish"] == "stop":
                num_turns.append(len(found) // 2 + 1)
                answer = rows[line["outcome"]][line["prompt_id"]]["answer"]
                assert line["reward"] == (found[-1].text == f"Answer: {answer}<|end|>")
    assert {1, 2} <= {*num_turns}
    assert max(num_turns) >= 3
    scalars = metrics(tmp_path / str(attempt))
    assert max(scalars["episode/turns"]) > 1
    assert all(0 < share < 1 for share in scalars["episode/observed_share"])
    assert max(scalars["trained/ratio_max"]) < 1.01
    ratios = zip(scalars["trained/ratio_mean"], scalars["tokens/trained"], strict=True)
    assert [ratio for ratio, count in ratios if count] == [pytest.approx(1.0, abs=1e-3)] * sum(
        count > 0 for count in scalars["tokens/trained"]
    )
    assert scalars["trained/kl_generator"] == pytest.approx([0.0] * 3, abs=1e-4)
    # Observations are no trained tokens, and no masked ones.
    assert min(scalars["tokens/masked"]) >= 0
    seen = [line for line in lines if "trainer_logprobs" in line]
    written = sum(count for line in seen for _, count in line["spans"])
    assert sum(scalars["tokens/trained"]) + sum(scalars["tokens/masked"]) == written
    finished = [line for line in lines if line["outcome"] in ("trained", "dropped")]
    mean = np.mean([sum(count for _, count in line["spans"]) for line in finished])
    assert np.mean(scalars["length/mean"]) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.calls=auto"], "environment.calls must be hermes, llama, xml or tagged"),
        (["environment.tools=[task,browser]"], "environment.tools must be one of task"),
        (["data.chat=false"], "data.chat must be true with environment.tools"),
        (["reward.functions=[environment]"], "must not name environment unless each environment"),
        (["environment.tools=[]", "reward.functions=[environment]"], "without environment.tools"),
        (["environment.max_turns=0"], "environment.max_turns must be at least 1"),
    ],
)
def test_what_a_recipe_names_wrongly_is_one_line_before_the_start(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        read_inputs(compose(TOOLS_RECIPE, *SMALL, *overrides))
    assert "\n" not in str(raised.value)


def test_a_run_without_the_tool_says_nothing_of_episodes(forks: Forks, tmp_path: Path) -> None:
    lines = run(forks, tmp_path, "environment.tools=[]", "num_steps=1")
    whole = [line for line in lines if "token_versions" in line]
    assert whole
    assert all(NO_VERSION not in line["token_versions"] for line in whole)
    assert not [name for name in metrics(tmp_path) if name.startswith(("episode", "tool"))]


@pytest.mark.long
def test_an_evaluation_takes_turns_too(forks: Forks, tmp_path: Path) -> None:
    common = f"--config-dir={TOOLS_RECIPE}", f"run_dir={tmp_path}", "cluster=inline"
    done = forks.run("evaluate", *common, "evaluation.max_prompts=30")
    assert done.returncode == 0, done.stderr
    right = [line for line in read_rollouts(tmp_path) if line["correct"]]
    assert len(right) >= 5
    assert all("</calculator>\n[" in line["completion"] for line in right)
    assert f"accuracy {len(right) / 30:.1%} of 30" in done.stdout


TASK = Path(__file__).with_name("agent_task.py")
ONE_STEP = ["num_steps=1", "trainer.groups_per_step=8", "evaluation.max_prompts=4"]


def tokens(forks: Forks, recipe: Path, run_dir: Path, *overrides: str) -> dict[Any, Any]:
    """What was written, shown and rewarded, by rollout, when each token is what it should be;
    log-probs differ in their last bits."""
    done = forks.run(
        "train", f"--config-dir={recipe}", f"run_dir={run_dir}", *SMALL, *ONE_STEP, *overrides
    )
    assert done.returncode == 0, done.stderr
    rows, found = questions(), {}
    for line in read_rollouts(run_dir):
        if line["outcome"] in rows:
            check(line, rows[line["outcome"]])
            names = "prompt_ids", "response_ids", "token_versions", "reward", "finish"
            found[line["outcome"], line["row_id"]] = [line[name] for name in names]
    return found


@pytest.mark.long
def test_a_program_of_ones_own_plays_the_very_episodes_of_the_tools_recipe(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    shutil.copy(TASK, recipe / "task.py")
    played = tokens(forks, recipe, tmp_path / "played", "reward.functions=[environment]")
    called = tokens(forks, TOOLS_RECIPE, tmp_path / "called")
    assert len(called) >= 60
    assert played == called
    num_observed = [versions.count(NO_VERSION) for _, _, versions, *_ in called.values()]
    assert sum(number > 0 for number in num_observed) > 20, "many took a turn with the tool"
