"""The reference of the config says what the dataclasses say, and knows what others call a key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from llamarl.recipe.composition import compose, reference, to_config
from llamarl.recipe.names_elsewhere import ELSEWHERE, FOREIGN_SECTIONS, NOT_HERE
from tests.places import RECIPE, ROOT
from tests.recipe.test_config import MINIMUM, make_config


def test_every_key_has_type_default_and_meaning() -> None:
    config = make_config(*MINIMUM)
    given = {"run_dir", "model.checkpoint", "data.prompts"}
    flat = {key: value for key, value in fields_of(config).items() if key not in given}
    assert len(flat) > 100
    for name, value in flat.items():
        key = reference().keys[name]
        resolved = key.default == "auto" or name == "generator.enforce_eager"  # by the device
        assert resolved or yaml.safe_load(key.default) == value, name
        assert key.meaning.endswith("."), name
        assert key.name in key.line()
        assert " ".join(key.text().split()).count(key.meaning) == 1


def fields_of(config: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in vars(config).items():
        is_section = hasattr(value, "__dataclass_fields__")
        inner = fields_of(value) if is_section else {"": value}
        found |= {f"{name}.{field}".rstrip("."): each for field, each in inner.items()}
    return found


def test_keys_of_one_choice_and_defaults_that_differ_are_marked() -> None:
    keys = reference().keys
    assert "algorithm=aipo|distill|dppo_kl|dppo_tv\n" in keys["algorithm.rho"].text()
    advantage = " ".join(keys["algorithm.advantage"].text().split())
    assert "default mean (" in advantage
    assert "rloo: leave_one_out" in advantage
    assert "from 0 to 1," in keys["trainer.min_lr_share"].text()


def test_names_from_elsewhere_lead_to_one_key_and_are_none_here() -> None:
    names = [name for words in ELSEWHERE.values() for name in words.split()]
    assert len(names) == len(set(names))
    here = {*reference().keys, *reference().sections}
    assert ELSEWHERE.keys() <= here
    leaves = {key.rpartition(".")[2] for key in here}
    assert not leaves & set(names)
    overview = reference().overview()
    for name in names:
        (meant,) = reference().meant_by(name)
        assert f"{name:<36}{meant}\n" in overview
        assert reference().about(name).startswith((meant, f"== {meant}"))


def test_a_name_from_elsewhere_leads_to_the_key_of_its_section_if_there_is_one() -> None:
    samples = "rollouts_per_prompt"
    for section, meant in {"evaluation": "evaluation", "trainer": "sampling"}.items():
        assert reference().meant_by(f"{section}.num_samples") == [f"{meant}.{samples}"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("num_step", ["num_steps"]),
        ("trainer.lrr", ["trainer.lr"]),
        ("algorithms", ["algorithm"]),
        ("sampling.lr", ["trainer.lr"]),
        ("zebra", []),
    ],
)
def test_a_wrong_key_is_understood(written: str, meant: list[str]) -> None:
    assert reference().meant_by(written) == meant
    with pytest.raises(ValueError, match=f"KEY must .* lists, got '{written}'") as raised:
        reference().about(written)
    assert all(key in str(raised.value) for key in meant)


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ("lr", ["trainer.lr"]),
        ("trainr.lr", ["trainer.lr"]),
        ("sample_rollouts", ["metrics.sample_rollouts"]),
        ("max_tokens", ["sampling.max_tokens", "evaluation.max_tokens"]),
        ("algorithm.beta", ["algorithm.kl_coefficient"]),
        ("actor_rollout_ref.rollout.n", ["sampling.rollouts_per_prompt"]),
        ("actor_rollout_ref.rollout.max_num_seqs", ["generator.max_num_seqs"]),
    ],
)
def test_the_last_part_of_a_key_and_a_path_from_elsewhere_are_explained(
    asked: str, keys: list[str]
) -> None:
    assert reference().about(asked) == "\n\n".join(reference().keys[key].text() for key in keys)


def test_the_last_part_of_a_path_is_no_key_of_something_else() -> None:
    """As of a path to a file of rewards, which is no model."""
    with pytest.raises(ValueError, match=r"got 'data\.custom_cls\.path'"):
        reference().about("data.custom_cls.path")


def test_the_choices_of_groups_are_explained() -> None:
    for group, choices in reference().groups.items():
        for choice in {*choices} - {*reference().sections}:
            assert f"{group}={choice}" in reference().about(choice)
    assert "Sets" in reference().about("colocated")
    assert len(reference().about("task").splitlines()) == 2  # of algorithm and of reward


def test_a_key_without_counterpart_is_explained_and_refused_with_the_reason() -> None:
    assert "No key here: a group's mean reward is the baseline" in reference().about("gae_lambda")
    reasons = [reference().reason_without(name) for name in ("critic.lr", "algorithm.lam")]
    assert reasons == ["a group's mean reward is the baseline, there is no critic"] * 2
    assert reference().reason_without("trainer.lr") is None


def test_names_without_counterpart_are_none_here_and_have_one_reason() -> None:
    both = [*NOT_HERE.values(), *FOREIGN_SECTIONS.values()]
    names = [name for words in both for name in words.split()]
    assert len(names) == len(set(names))
    leaves = {key.rpartition(".")[2] for key in {*reference().keys, *reference().sections}}
    choices = {choice for each in reference().groups.values() for choice in each}
    elsewhere = {name for words in ELSEWHERE.values() for name in words.split()}
    assert not {*names} & (leaves | choices | elsewhere)
    for name in [name for words in NOT_HERE.values() for name in words.split()]:
        assert f"{name}\n    No key here: " in reference().about(name)


def test_a_reason_names_only_keys_and_pages_that_exist() -> None:
    for reason in (*NOT_HERE, *FOREIGN_SECTIONS):
        for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", reason):
            assert word in reference().keys or word.endswith(".md"), reason
        for page in re.findall(r"docs/[\w/-]+\.md", reason):
            assert (ROOT / page).is_file(), page


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            "lora.rank=8",
            "lora.rank must be a known key, got an unknown one (did you mean trainer.lora.rank?)",
        ),
        (
            "+lora.rank=8",
            "lora must be a known key, got an unknown one (did you mean trainer.lora.rank?)",
        ),
        ("learning_rate=1e-4", "learning_rate must be .* (did you mean trainer.lr?)"),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr must be .*er.lr?"),
        ("actor_rollout_ref.rollout.n=8", "did you mean sampling.rollouts_per_prompt?"),
        ("+actor_rollout_ref=8", "other names here (docs/coming-from-trl-and-verl.md)"),
        ("algorithm.filter_groups.enable=true", "did you mean algorithm.filters?"),
        ("critic.optim.lr=1", "there is no critic"),
        ("deepspeed=zero3.json", "the trainer is sharded by FSDP2"),
        ("algorithm=gae", "got 'gae': a group's mean reward is the baseline"),
        ("algorithm=dpo", "got 'dpo': pairs of answers train nothing here"),
        ("algorithm=grp0", "got 'grp0' (did you mean grpo?)"),
        ("generator=sglang", "got 'sglang': new weights are copied into"),
        ("trainer=megatron", "got 'megatron': the trainer is sharded by FSDP2"),
        ("trainer.optimizer=adam", "one of adamw, sgd, got 'adam' (did you mean adamw?)"),
        ("sampling.presence_penalty=1", "must be a known key, got an unknown one: training draws"),
    ],
)
def test_an_argument_for_another_framework_is_answered_in_one_line(
    written: str, words: str
) -> None:
    with pytest.raises(ValueError, match=" must ") as caught:
        to_config(compose(RECIPE, [written]))
    line = str(caught.value)
    wanted = [re.escape(each).replace(r"\.\*", ".*") for each in words.split("|")]
    assert re.search("|".join(wanted), line), line
    assert "\n" not in line


def llamarl(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m llamarl {command}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.full
def test_help_is_ours_fits_the_width_and_may_be_cut_off() -> None:
    done = llamarl("train --help", COLUMNS="72")
    assert done.returncode == 0, done.stderr
    assert "Hydra" not in done.stdout
    assert "_schema" not in done.stdout
    lines = done.stdout.splitlines()
    described = [line for line in lines if line.startswith("    ")]
    assert len(described) > 250
    assert max(map(len, described)) <= 90, "what cannot be broken may stand out"
    assert sum(len(line) > 72 for line in described) < 5
    cut = llamarl("config | head -1")
    assert (cut.returncode, cut.stderr, cut.stdout.count("\n")) == (0, "", 1)
