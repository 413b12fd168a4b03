"""Recipes compose, choices set their values, wrong ones are named; the config is cheap."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import generator_of, pools_of
from llamarl.publish.reshard import weight_kind
from llamarl.recipe.choices import CHOICES, set_by
from llamarl.recipe.composition import CONF_FOLDER, compose, to_config, to_yaml
from tests.e2e.forks import Forks
from tests.places import RECIPE, ROOT
from tests.recipe.composing import compose_file, compose_recipe

RECIPES = sorted(path.parent for path in ROOT.glob("recipes/*/run.yaml"))
MINIMUM = ["model.checkpoint=x", "data.prompts=x.jsonl"]
GROUPS = [(group, choice) for group, choices in CHOICES.items() for choice in choices]


def make_config(*overrides: str) -> Config:
    return compose_file(CONF_FOLDER, "config", overrides)


GPUS = ["generator.device=cuda", "trainer.device=cuda"]
NEEDS = {
    "cuda_ipc": GPUS,
    "environment": ["environment.tools=[task]", "data.chat=true"],
    "judge": ["reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m"],
    "distill": ["algorithm.teacher=folder"],
}


@pytest.mark.parametrize(("group", "choice"), GROUPS, ids=[f"{g}={c}" for g, c in GROUPS])
def test_every_choice_composes(group: str, choice: str) -> None:
    config = make_config(f"{group}={choice}", *NEEDS.get(choice, []), *MINIMUM)
    section = getattr(config, group)
    assert type(section) is CHOICES[group][choice].section
    assert vars(section).items() >= CHOICES[group][choice].values.items()


VLLM_ON_GPUS = f"generator=vllm weights=collective {' '.join(GPUS)}"


@pytest.mark.parametrize("generator", ["embedded", "vllm"])
def test_precision_and_graphs_follow_the_device_unless_they_are_chosen(generator: str) -> None:
    chosen = {"cpu": "bfloat16", "cuda": "float32"}
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        devices = [f"generator.device={device}", f"trainer.device={device}"]
        common = [f"generator={generator}", "weights=collective", *devices, *MINIMUM]
        config = make_config(*common)
        assert (config.generator.dtype, config.trainer.compute_dtype) == (dtype, dtype)
        other = chosen[device]
        config = make_config(*common, f"generator.dtype={other}", f"trainer.compute_dtype={other}")
        assert (config.generator.dtype, config.trainer.compute_dtype) == (other, other)
        if generator == "vllm":
            assert config.generator.enforce_eager == (device == "cpu")
            assert make_config(*common, "generator.enforce_eager=true").generator.enforce_eager


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement=colocated", "placement.offload=none"],
        ["placement=colocated", "generator.enforce_eager=true"],
    ],
)
def test_what_moves_memory_goes_without_graphs(overrides: list[str]) -> None:
    make_config(*VLLM_ON_GPUS.split(), *overrides, *MINIMUM)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_composes(recipe: Path) -> None:
    assert compose_recipe(recipe, [f"recipe_dir='{recipe}'"]).recipe_dir == str(recipe)


@pytest.mark.full
def test_the_command_line_prints_the_composed_config(forks: Forks) -> None:
    done = forks.run("train", f"--config-dir={RECIPES[0]}", "--cfg", "job", "trainer.lr=0.125")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["trainer"]["lr"] == 0.125
    assert {"override /algorithm": "aipo"} in shown["defaults"]
    done = forks.run("train", f"--config-dir={RECIPES[0]}", "--cfg=hydra")
    assert "--cfg must be job, got 'hydra'" in done.stderr


WRONG = [
    ("algorithm.rho=0.5", "algorithm.rho must be at least 1, got 0.5"),
    ("sampling.top_p=0.9", "sampling.top_k must be 1 to 1024 with top_p or min_p"),
    ("sampling.min_p=0.1", "sampling.top_k must be 1 to 1024 with top_p or min_p"),
    ("sampling.top_k=2000", "sampling.top_k must be at most 1024, got 2000"),
    ("sampling.temperature=0", "sampling.temperature must be at least 0.001, got 0.0"),
    ("algorithm.advantage=gdpo", "trainer.parts must be batch with algorithm.advantage=gdpo"),
    ("sampling.max_tokens=1024", "generator.max_model_len must hold"),
    ("sampling.rollouts_per_prompt=1", "sampling.rollouts_per_prompt must be at least 2"),
    ("trainer.num_mini_batches=2 trainer.num_passes=2", "staleness.max_staleness must be at"),
    (
        "trainer.num_passes=2 staleness.late=mask experience.sampler=task",
        "experience.sampler must be admission or group_complete with several optimizer steps",
    ),
    ("trainer.num_passes=0", "trainer.num_passes must be at least 1, got 0"),
    ("algorithm.proximal=always", "algorithm.proximal must be one of none, recompute, interp"),
    ("algorithm.proximal_rho=0.5", "algorithm.proximal_rho must be at least 1, got 0.5"),
    ("staleness.max_staleness=-1", "staleness.max_staleness must be at least 0"),
    ("staleness.late=never", "staleness.late must be one of wait, mask, got 'never'"),
    ("reward.functions=[exact,format]", "reward.weights must have one weight per function"),
    ("reward.functions=[magic]", "reward.functions must be one of math"),
    ("reward.functions=[exact] reward.pattern='('", "reward.pattern must be a regular"),
    ("reward.functions=[exact] reward.pattern=a", "reward.pattern must have a group around the"),
    ("reward.weights=[nan]", "reward.weights must be a finite number, got [nan]"),
    ("reward.weights=[1e308]", "reward.weights must be at most 1000000.0, got [1e+308]"),
    ("reward.timeout_s=1e308", "reward.timeout_s must be at most 86400.0, got 1e+308"),
    ("reward.num_workers=100000", "reward.num_workers must be at most 1024"),
    ("reward.max_failure_rate=2", "reward.max_failure_rate must be at most 1"),
    ("reward.on_failure=ignore", "reward.on_failure must be one of drop, zero, got 'ignore'"),
    ("data.weights=[0]", "data.weights must be above 0, got [0.0]"),
    ("data.weights=[0.5,0.5]", "data.weights must have one number for each of the 1 sources"),
    ("data.repeat_share=0", "data.repeat_share must be at least 0.001"),
    ("data.system=hello", "data.system must stay unset without data.chat"),
    ("num_steps=-1", "num_steps must be at least 0, got -1"),
    ("generator.num_collectors=2", "generator.num_collectors must be at most generator.num_re"),
    ("trainer.groups_per_step=100000", "the rollouts open at once (1600000), at most 1048576"),
    ("evaluation.temperature=1e-9", "evaluation.temperature must be 0 (greedy) or at least"),
    ("evaluation.rollouts_per_prompt=4", "evaluation.temperature must be above 0 with evaluation"),
    (
        "evaluation.rollouts_per_prompt=4 evaluation.temperature=1 evaluation.at_k=[1,8]",
        "evaluation.at_k must be at most evaluation.rollouts_per_prompt (4), got [1, 8]",
    ),
    ("evaluation.at_k=[1,1]", "evaluation.at_k must name each k once"),
    ("evaluation.at_k=[0]", "evaluation.at_k must be at least 1, got [0]"),
    ("data.held_out=x.jsonl evaluation.sets={a:a.jsonl}", "data.held_out must be null with"),
    ("data.held_out=null evaluation.sets={a/b:a.jsonl}", "evaluation.sets must have names of up"),
    ("data.held_out=null evaluation.sets={a:task}", "evaluation.sets must have a file, a folder"),
    ("evaluation.patience=2", "evaluation.patience must be 0 without evaluation.every_steps"),
    ("evaluation.patience=2 evaluation.every_steps=1", "evaluation.patience must be 0 without"),
    ("data.held_out=null checkpoint.best=accuracy", "checkpoint.best must stay empty without"),
    ("data.held_out=x.jsonl checkpoint.best=accuracy_", "accuracy, reward, got 'accuracy_'"),
    ("data.held_out=x.jsonl checkpoint.best=pass_at_4", "checkpoint.best must be one of"),
    ("trainer.betas=[nan,0.9]", "trainer.betas must be a finite number, got [nan, 0.9]"),
    ("sampling.stop_strings=['']", "sampling.stop_strings must not be empty, got ['']"),
    ("generator.elastic=[1]", "generator.elastic must be [] or [fewest, most] with 1 <= fewest"),
    ("generator.elastic=[3,1]", "generator.elastic must be [] or [fewest, most]"),
    ("generator.elastic=[2,4]", "generator.num_replicas must be from 2 to 4"),
    ("generator.elastic=[1,4] generator.max_restarts=0", "generator.max_restarts must be at"),
    ("generator.elastic=[1,4] placement=colocated", "generator.elastic must be [] with"),
    ("weights=cuda_ipc", "generator.device and trainer.device must be cuda"),
    ("placement.offload=pinned", "generator.device and trainer.device must be cuda"),
    ("generator.device=cuda trainer.device=cuda", "generator.device must be cpu with"),
    ("generator.quantization=fp8", "generator.quantization must be one of none, int8 on cpu"),
    ("generator=vllm generator.quantization=int8", "must be one of none, fp8_per_channel"),
    ("generator=vllm generator.quantization=fp8_per_channel", "generator.dtype must be bfloat16"),
    ("generator=vllm generator.block_size=20", "generator.block_size must be a multiple of 32"),
    ("generator=vllm cluster=inline", "cluster.backend must be monarch with generator=vllm"),
    ("weights=collective cluster=inline", "weights.transport must be shared_memory with"),
    (
        "trainer.num_ranks=12 trainer.tensor_parallel=4 trainer.replicate=2",
        "trainer.num_ranks must be a multiple of tensor_parallel (4) times replicate (2)",
    ),
    (
        "trainer.num_ranks=2 trainer.tensor_parallel=2 trainer.compile=inductor",
        "trainer.compile must be none with trainer.tensor_parallel=2",
    ),
    (
        "trainer=transformers trainer.num_ranks=2 trainer.tensor_parallel=2",
        "trainer.tensor_parallel must be 1 with trainer=transformers, got 2",
    ),
    ("trainer=transformers trainer.compile=inductor", "trainer.compile must be none with"),
    (
        "trainer.activation_checkpointing=selective trainer.compile=inductor",
        "trainer.compile must be none with trainer.activation_checkpointing=selective",
    ),
    ("weights.staging=twice", "weights.staging must be one of double_buffer, host, got 'twice'"),
    ("weights.transport=post", "weights.transport must be one of shared_memory"),
    ("placement.offload=tape", "placement.offload must be one of file, pinned, none"),
    ("generator=vllm generator.enforce_eager=false", "enforce_eager must be true with"),
    (f"{VLLM_ON_GPUS} placement=colocated", "generator.enforce_eager must be true with"),
    ("cluster.num_hosts=2 cluster.sites=[a]", "cluster.sites must name the site of each of 2"),
    ("algorithm=ppo algorithm.clip_ratio_c=1", "algorithm.clip_ratio_c must be above 1, got 1"),
    ("experience.sampler=admissions", "experience.sampler must be one of admission,"),
    ("experience.sampler=rank_aware", "experience.sampler must be one of admission,"),
    ("experience.sampler=token_balanced", "batches of the trainer's are always balanced), got"),
    ("experience.sampler=task", "staleness.late must be mask with experience.sampler=task (which"),
    ("dispatch.ranker=oracle", "dispatch.ranker must be none, history or model without"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_a_value_that_cannot_be_is_named_in_one_line(wrong: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        make_config(*wrong.split(), *MINIMUM)
    assert "\n" not in str(raised.value)


def test_importing_the_config_loads_no_heavy_package_nor_checkpoints_and_advantages_torch() -> None:
    code = """
import sys, llamarl.core.config
assert not {"torch", "hydra", "omegaconf", "numpy"} & {*sys.modules}
import llamarl.core.checkpoint, llamarl.trainer.advantages
from llamarl.trainer.losses import algorithms
assert len(algorithms()) > 9
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def with_pools(*texts: str) -> str:
    """The override; as in YAML, where texts with blanks need no quotes."""
    return f"generator.pools={list(texts)}"


def test_pools_take_what_they_do_not_set_from_the_generator() -> None:
    pools = with_pools("num_replicas=2", "quantization=int8 max_num_seqs=8 dtype=bfloat16")
    config = make_config(pools, "generator.max_num_seqs=32", *MINIMUM)
    assert config.generator.num_replicas == 3
    wide, narrow = pools_of(config.generator)
    assert (wide.replicas, narrow.replicas) == (range(2), range(2, 3))
    assert generator_of(config.generator, 1) == replace(config.generator, num_replicas=2, pools=[])
    own = generator_of(config.generator, 2)
    assert (own.quantization, own.max_num_seqs, own.dtype) == ("int8", 8, "bfloat16")
    assert own.max_model_len == config.generator.max_model_len
    assert weight_kind(config.generator, 0) == weight_kind(config.generator, 1)
    assert weight_kind(config.generator, 1) != weight_kind(config.generator, 2)
    vllm = make_config(with_pools("num_replicas=1", "engine=vllm block_size=64"), *MINIMUM)
    assert isinstance(generator_of(vllm.generator, 1), VllmConfig)


@pytest.mark.parametrize(
    ("pools", "others", "words"),
    [
        ("fast", "", "generator.pools[1] must be KEY=VALUE each, set apart by blanks, got 'fast'"),
        ("num_rank=2", "", "got 'num_rank' (did you mean num_ranks?)"),
        ("block_size=32", "", "generator.pools[1] must set any of device, dtype, enforce_eager,"),
        ("num_collectors=1", "", "generator.pools[1] must set any of "),
        ("dtype=float32 dtype=bfloat16", "", "generator.pools[1] must set dtype once"),
        ("num_ranks=two", "", "generator.pools[1].num_ranks must be a whole number, got 'two'"),
        ("num_replicas=0", "", "generator.pools[1].num_replicas must be at least 1, got 0"),
        ("engine=sglang", "", "generator.pools[1].engine must be one of embedded, vllm"),
        ("quantization=fp8", "", "generator.pools[1].quantization must be one of none, int8 on"),
        ("enforce_eager=maybe", "", "generator.pools[1].enforce_eager must be one of true, false"),
        ("max_model_len=64", "", "generator.pools[1].max_model_len must hold a prompt token"),
        ("device=cuda", "", "generator.pools[1].device must be cpu with weights.transport=shared"),
        ("num_ranks=2", "cluster=inline", "generator.pools[1].num_ranks must be 1 with cluster"),
        ("site=moon", "", "generator.pools[1] must name a site, as every pool or none does"),
        ("dtype=float32", "placement=colocated", "placement.colocated must be False with gener"),
        ("dtype=float32", "generator.num_replicas=3", "be left out, or the sum of generator.pools"),
        ("dtype=float32", "generator.elastic=[1,4]", "generator.elastic must be [] with generator"),
    ],
)
def test_a_pool_with_a_mistake_is_named(pools: str, others: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        make_config(*others.split(), with_pools("num_replicas=1", pools), *MINIMUM)
    assert "\n" not in str(raised.value)


FILE = """
defaults: [config, {override /algorithm: grpo}, _self_]
model: {checkpoint: x}
data: {prompts: x.jsonl}
reward: {functions: [task, format], weights: [1, 0.5]}
algorithm: {clip_high: 0.28, entropy_coefficient: 0.01}
cluster: {backend: inline}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(FILE)
    return tmp_path


def composed(folder: Path, *arguments: str) -> Config:
    return to_config(compose(folder, arguments))


def test_a_choice_of_the_command_line_wins_against_the_recipes_file(recipe: Path) -> None:
    assert composed(recipe, "reward=exact", "reward.weights=[1]").reward.functions == ["exact"]
    own = set_by("algorithm", "gspo", "grpo")
    assert own["clip_high"] != 0.28
    config = composed(recipe, "algorithm=gspo")
    assert config.algorithm.clip_high == own["clip_high"]
    assert config.algorithm.entropy_coefficient == 0.01, "0 is the default of both"
    assert composed(recipe, "cluster=monarch").cluster.backend == "monarch"
    assert composed(RECIPE, "reward=math").reward.functions == ["math"]


def test_what_it_leaves_open_and_a_value_beside_it_stay(recipe: Path) -> None:
    assert composed(recipe, "algorithm=grpo").algorithm.clip_high == 0.28
    assert composed(recipe, "algorithm=gspo", "algorithm.clip_high=0.1").algorithm.clip_high == 0.1
    assert composed(recipe, "trainer=transformers").reward.functions == ["task", "format"]
    assert composed(recipe).cluster.backend == "inline"


def test_a_recipe_that_begins_with_another_file_has_that_ones_choices(recipe: Path) -> None:
    """Its own choice, given again, changes nothing."""
    (recipe / "run.yaml").rename(recipe / "base.yaml")
    (recipe / "run.yaml").write_text("defaults: [base, _self_]\nnum_steps: 7\n")
    config = composed(recipe, "algorithm=grpo")
    assert (config.algorithm.clip_high, config.num_steps) == (0.28, 7)


def test_a_choice_whose_values_do_not_fit_the_file_is_one_line(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"^reward\.weights must have one weight per function"):
        composed(recipe, "reward=exact")


def test_a_choice_of_each_group_is_found_in_what_it_composes() -> None:
    for group, choices in CHOICES.items():
        choice = [*choices][-1]
        written = yaml.safe_load(to_yaml(compose(RECIPE, [f"{group}={choice}"])))
        assert {f"override /{group}": choice} in written["defaults"]


def test_the_written_recipe_composes_to_itself(recipe: Path, tmp_path: Path) -> None:
    first = compose(recipe, ["algorithm=cispo", "weights=collective", "data.system='1e3'"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(to_yaml(first))
    again = compose(folder, [])
    assert to_yaml(again) == to_yaml(first)
    names = yaml.safe_load(to_yaml(first))["defaults"]
    assert {"override /algorithm": "cispo"} in names
    assert {"override /weights": "collective"} in names
    assert not any("override /reward" in each for each in names), "two functions are no choice"
