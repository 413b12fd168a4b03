"""Real runs of two steps in which every pair of options' values occurs; each is checked from what
it leaves in its archive.

LLAMARL_PAIRS_SEED makes other cases with the same property.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.forks import Forks
from tests.e2e.option_pairs import Case, Pair, all_pairs, cover, pair, pairs_of
from tests.e2e.test_variants import GROUPS, SIZE, Ended, Line, assert_losses, differences, versions
from tests.places import RECIPE
from tests.recipe.test_mistakes import compose

SEED = int(os.environ.get("LLAMARL_PAIRS_SEED", "0"))
STEPS, MAX_TOKENS, STOP = 2, 96, ". An"
ALGORITHMS = [
    "aipo",
    "cispo",
    "dapo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "gmpo",
    "grpo",
    "gspo",
    "ppo",
    "reinforce",
    "rloo",
    "sapo",
    "task",
]
POOLS = "['num_ranks=1', 'quantization=int8 max_num_seqs=16']"

# option: {value: overrides}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "algorithm": {name: [f"algorithm={name}"] for name in ALGORITHMS},
    "kl": {
        "off": ["algorithm.kl_coefficient=0"],
        "k1": ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"],
        "k3": ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k3"],
    },
    "cluster": {"monarch": [], "inline": ["cluster=inline"]},
    "placement": {"disaggregated": [], "colocated": ["placement=colocated"]},
    "replicas": {
        "one": [],
        "two": ["generator.num_replicas=2", "generator.num_collectors=1"],
        "pools": [f"generator.pools={POOLS}"],
        "elastic": ["generator.elastic=[1,2]"],
    },
    "generator ranks": {"1": [], "2": ["generator.num_ranks=2"]},
    "trainer": {
        "one": [],
        "two shards": ["trainer.num_ranks=2"],
        "two copies": ["trainer.num_ranks=2", "trainer.replicate=2"],
        "tensor parallel": ["trainer.num_ranks=2", "trainer.tensor_parallel=2"],
        "transformers": ["trainer=transformers"],
    },
    "weights": {
        "all": [],
        "adapters": ["trainer.lora.rank=4"],
        "adapters of some": ["trainer.lora.rank=3", "trainer.lora.targets=[q_proj,up_proj]"],
    },
    "steps per batch": {"one": [], "two": ["trainer.num_mini_batches=2"]},
    "compute": {"float32": [], "bfloat16": ["trainer.compute_dtype=bfloat16"]},
    "checkpointing": {
        "none": [],
        "selective": ["trainer.activation_checkpointing=selective"],
        "full": ["trainer.activation_checkpointing=full", "trainer.reshard_after=step"],
    },
    "engine": {
        "float32": [],
        "bfloat16": ["generator.dtype=bfloat16"],
        "int8": ["generator.quantization=int8"],
    },
    "cache": {"keep": [], "recompute": ["generator.kv_after_commit=recompute"]},
    "slots": {"many": [], "four": ["generator.max_num_seqs=4"]},
    "segments": {"whole": [], "cut": ["sampling.segment_tokens=6"]},
    "stop": {"tokenizer": [], "strings": [f"sampling.stop_strings=['{STOP}']"]},
    "parts": {"dynamic": [], "batch": ["trainer.parts=batch"]},
    "staleness": {name: [f"staleness.max_staleness={name}"] for name in ("0", "1", "2")},
    "late": {"wait": [], "mask": ["staleness.late=mask"]},
    "sampler": {
        name: [f"experience.sampler={name}"] for name in ("admission", "group_complete", "task")
    },
    "stages": {
        "none": [],
        "rollouts": ["experience.stages=[brief,judge]", "algorithm.reward_columns=[quality]"],
        "groups": ["experience.stages=[rank]", "algorithm.reward_columns=[ranked]"],
    },
    "units": {"one": [], "two": ["experience.units_per_host=2"]},
    "memory": {"enough": [], "none": ["experience.max_bytes=1"]},
    "staging": {"double_buffer": [], "host": ["weights.staging=host"]},
    "transport": {"shared_memory": [], "collective": ["weights=collective"]},
    "ranker": {name: [f"dispatch.ranker={name}"] for name in ("none", "history", "model")},
    "filters": {"none": ["algorithm.filters=[]"], "equal": ["algorithm.filters=[equal_rewards]"]},
    "checkpoints": {"last": [], "each": ["checkpoint.every_steps=1"]},
}
PARALLEL = ("two shards", "two copies", "tensor parallel")
REFUSED: dict[Pair, str] = {
    **{
        pair(("cluster", "inline"), ("trainer", value)): "trainer.num_ranks must be 1"
        for value in PARALLEL
    },
    pair(("cluster", "inline"), ("generator ranks", "2")): "generator.num_ranks must be 1",
    pair(("cluster", "inline"), ("transport", "collective")): "weights.transport must",
    pair(("placement", "colocated"), ("replicas", "pools")): "placement.colocated must be False",
    pair(("placement", "colocated"), ("replicas", "elastic")): "generator.elastic must be []",
    pair(("sampler", "task"), ("late", "wait")): "staleness.late must be mask",
    pair(("steps per batch", "two"), ("staleness", "0")): "staleness.max_staleness must be at",
    pair(("steps per batch", "two"), ("sampler", "task")): "experience.sampler must be",
    pair(("generator ranks", "2"), ("replicas", "pools")): "",  # a pool says how many it has
}
COMMON = [
    *(f"num_steps={STEPS}", f"trainer.groups_per_step={GROUPS}", "trainer.warmup_steps=0"),
    *("trainer.lr=1e-3", "experience.keep_rollouts=1", "checkpoint.export=false"),
    *("evaluation.max_prompts=4", "evaluation.every_steps=1", "metrics.trackers=[]"),
]
TASK = """
from llamarl.scoring.stages import Drop, Stage

def loss(inputs):
    return -inputs.ratio.detach().clamp(max=2.0) * inputs.advantages * inputs.trainer_logprobs

def sample(ready, count):
    if len(ready) < count:
        return [], []
    taken = [item.item_id for item in ready[:count]]
    return taken, taken

def brief(completion):
    return Drop("rambling") if sum(map(ord, completion)) % 16 == 0 else None

def judge(prompt, completion):
    return float(sum(map(ord, completion)) % 5)

def rank(reward):
    return [sum(other < mine for other in reward) / len(reward) for mine in reward]

stages = [
    Stage("brief", brief, reads=["completion"]),
    Stage("judge", judge, reads=["prompt", "completion"], writes=["quality"]),
    Stage("rank", rank, reads=["reward"], writes=["ranked"], per="group"),
]
"""


@cache
def cases() -> tuple[list[Case], set[Pair]]:
    values = {option: [*choices] for option, choices in OPTIONS.items()}
    return cover(values, REFUSED, SEED)


def overrides(case: Case) -> list[str]:
    """Each algorithm's own KL coefficient and filters give way to the options'."""
    return [text for option, value in case.items() for text in OPTIONS[option][value]]


def test_every_pair_of_values_is_run_or_refused() -> None:
    made, impossible = cases()
    covered = set().union(*map(pairs_of, made))
    values = {option: [*choices] for option, choices in OPTIONS.items()}
    assert covered | REFUSED.keys() == all_pairs(values)
    assert not covered & REFUSED.keys()
    assert not impossible


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "recipe"
    shutil.copytree(RECIPE, folder)
    (folder / "task.py").write_text(TASK)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("refused", [p for p, words in REFUSED.items() if words], ids=sorted)
def test_what_is_left_out_is_refused(refused: Pair, recipe: Path) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared as a text below
        compose(recipe, *COMMON, *overrides(dict(refused)))
    assert REFUSED[refused] in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(cases()[0])))
def test_each_case_trains_two_steps_on_whole_rollouts(
    number: int, forks: Forks, recipe: Path, tmp_path: Path
) -> None:
    case = cases()[0][number]
    arguments = [*COMMON, *overrides(case), f"run_dir={tmp_path / 'run'}"]
    done = forks.run("train", f"--config-dir={recipe}", *arguments)
    words = f"case {number} of seed {SEED}: {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, words
    run = Ended(tmp_path / "run")
    check_outcomes(run, case, words)
    check_rollouts(run, case)
    if case["stages"] == "none" and case["algorithm"] != "task":
        tolerance = 1e-3 if case["compute"] == "bfloat16" else 1e-4
        kl = {"kl_coefficient": 0.1, "kl_estimator": case["kl"]} if case["kl"] != "off" else {}
        assert_losses(run, case["algorithm"], tolerance, **{"kl_coefficient": 0.0, **kl})


def check_outcomes(run: Ended, case: Case, words: str) -> None:
    """Every rollout has one, each step its groups, and nothing is older than allowed."""
    assert "Traceback" not in words, words
    assert run.summary["steps"] == len(run.steps) == STEPS
    counts = Counter(row["row_id"] for row in run.rows)
    assert set(counts.values()) == {1}, [row for row, count in counts.items() if count > 1]
    by_step = Counter(row["version"] for row in run.trained)
    assert set(by_step) == {*range(STEPS)}
    if case["stages"] != "rollouts":
        assert set(by_step.values()) == {GROUPS * SIZE}
    evaluated = Counter(row["version"] for row in run.rows if row["outcome"] == "evaluated")
    assert evaluated == dict.fromkeys(range(STEPS + 1), 4)
    training = [row for row in run.rows if row["outcome"] != "evaluated" and row["sampling"]]
    seeds = [row["sampling"]["seed"] for row in training]
    assert len({*seeds}) == len(seeds), "two rollouts were drawn with one seed"
    bound = int(case["staleness"])
    for row in run.trained:
        assert row["oldest_version"] == row["version"] - bound
        trained = [version for version in versions(row) if version >= row["oldest_version"]]
        assert trained == versions(row) or case["late"] != "wait", "older than allowed"
        assert max(versions(row)) <= row["version"]


def check_rollouts(run: Ended, case: Case) -> None:
    """Lengths, ends and log-probs of what was written."""
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "checkpoint")
    for row in run.rows:
        if "response_ids" in row:
            check_end(row, tokenizer, case)
    is_rough = "bfloat16" in (case["compute"], case["engine"])
    is_rough |= case["engine"] == "int8" or case["replicas"] == "pools"
    own = [row for row in run.trained if {*versions(row)} == {row["version"]}]
    apart = [distance for age, distance in differences(own) if age == 0]
    assert max(apart, default=0.0) < (1.0 if is_rough else 2e-3), "mu is not pi on policy"


def check_end(row: Line, tokenizer: Any, case: Case) -> None:
    assert len(versions(row)) == row["num_tokens"] == len(row["response_ids"])
    assert len(row["generator_logprobs"]) == row["num_tokens"]
    assert row["num_tokens"] <= row["sampling"]["max_tokens"] <= MAX_TOKENS
    assert versions(row) == sorted(versions(row))
    if row["finish"] == "length":
        assert row["num_tokens"] == row["sampling"]["max_tokens"]
    if case["stop"] == "strings" and row["finish"] in ("stop", "length"):
        before = tokenizer.decode(row["response_ids"][:-1])
        assert STOP not in before, "a rollout went on after the token that ended it"
        assert row["finish"] == "stop" or STOP not in tokenizer.decode(row["response_ids"])
