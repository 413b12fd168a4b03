"""A mistake in a recipe or an argument is one line that names key, place and way out."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llamarl.cli.main import main
from llamarl.core.config import Config
from llamarl.core.device.names import has_driver
from llamarl.recipe.composition import WITHOUT_CONFIG, for_each_config, reference, to_config
from tests.places import RECIPE, ROOT

GSM8K = ROOT / "recipes" / "gsm8k_llama32_1b_1gpu"


def compose(folder: Path, *overrides: str) -> Config:
    """As `llamarl plan` composes, which makes no run folder."""
    found: list[Config] = []
    arguments = ["--config-dir", str(folder), "hydra.run.dir=.", *overrides]
    for_each_config(
        "llamarl plan", arguments, lambda composed, _: found.append(to_config(composed))
    )
    (config,) = found
    return config


def mistake(folder: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as raised:
        compose(folder, *overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("generator.pools={x: 1}", "generator.pools must be a list of texts, got a section"),
        ("generator.pools=[{x: 1}]", "generator.pools must hold texts or numbers, got [{"),
        ("num_step=3", "got an unknown one (did you mean num_steps?)"),
        ("+trainer.lrr=3", "trainer.lrr must be a known key, got an unknown one (did you mean t"),
        ("beta=0.1", "got an unknown one (did you mean algorithm.kl_coef"),
        ("lora.rank=8", "got an unknown one (did you mean trainer.lora.rank?)"),
        ("+trainer.zebra=8", "got an unknown one: `llamarl config trainer` lists all"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low must come with algorithm=cispo|dapo|"),
        ("num_steps=ten", "num_steps must be a whole number, got 'ten'"),
        ("trainer.lr=fast", "trainer.lr must be a number, got 'fast'"),
        ("trainer.lr=null", "trainer.lr must be a number, got None (the default is 1.0e-06)"),
        ("checkpoint.best=null", "checkpoint.best must be text, got None (the default is '')"),
        ("evaluation.patience=null", "whole number, got None (0: it never ends early)"),
        ("max_hours=null", "max_hours must be a number, got None (0: no limit)"),
        ("trainer.lora.rank=null", "whole number, got None (0 trains all weights)"),
        ("checkpoint.keep=x", "checkpoint.keep must be a whole number, got 'x'"),
        ("num_steps=???", "num_steps must be given, got ???"),
        ("trainer=null", "trainer must be one of native, transformers, got None"),
        ("trainer=deepspeed", "trainer must be one of native, transformers, got 'deepspeed'"),
        ("=3", "an argument must be KEY=VALUE, got '=3'"),
        ("seed=1,2", "seed must be one value, a list as [1,2], or come with --multirun, got 1,2"),
        ("a b", "an argument must be KEY=VALUE, where text with special characters"),
        ("algorithm=grppo", "algorithm must be one of aipo, cispo, "),
        ("run_dir=", "run_dir must not be empty, got ''"),
        ("trainer.betas=[a,0.1]", "trainer.betas must be a list of numbers, got 'a'"),
        ("data.chat=maybe", "data.chat must be true or false, got 'maybe'"),
        ("generator.num_collectors=9223372036854775807", "generator.num_collectors must be at mo"),
    ],
)
def test_a_wrong_argument_is_one_line(argument: str, line: str) -> None:
    assert line in mistake(RECIPE, argument)


@pytest.mark.skipif(has_driver(), reason="of machines without a GPU")
def test_who_asks_for_a_gpu_where_none_is_hears_that_first() -> None:
    devices = ["generator.device=cuda", "trainer.device=cuda"]
    for more in ([], ["cluster=inline"]):
        line = mistake(RECIPE, *devices, *more)
        assert "this machine has no GPU, so a run here has device=cpu" in line
        assert ("weights=cuda_ipc" in line) == (not more), "in one process there is no other"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("num_steps: 30", "num_step: 30", ":3: num_step must be a known key, got an unknown one"),
        ("max_num_seqs", "max_runing", ":13: generator.max_runing must be a known key, got an un"),
        ("trainer:", "trainers:", ":14: trainers must be a known key, got an unknown one (did"),
        ("num_steps: 30", "num_steps: ten", ":3: num_steps must be a whole number, got 'ten'"),
        ("  lr: 2.0e-4", "  lr: null", ":17: trainer.lr must be a number, got None"),
        ("sampling: {", "sampling: {{", ":11: must be YAML, got a mistake at column 1: expected"),
        ("trainer:\n", "trainer: 3\nmetrics:\n", ":14: trainer must be a section, got 3"),
        ("aipo}", "aippo}", ":1: algorithm must be one of aipo, "),
        ("[config,", "[configs,", ":1: defaults must name files, got 'configs'"),
        ("defaults:", "d:", "defaults must begin with config, as in `defaults: [config, _self_]`"),
        ("num_steps: 30", "num_steps: \udcff", "run.yaml must be UTF-8 text, got "),
    ],
)
def test_a_wrong_recipe_has_its_line(before: str, after: str, line: str, tmp_path: Path) -> None:
    text = (RECIPE / "run.yaml").read_text()
    assert before in text
    changed = text.replace(before, after, 1).encode("utf-8", "surrogateescape")
    (tmp_path / "run.yaml").write_bytes(changed)
    said = mistake(tmp_path)
    assert line in said
    assert not line.startswith(":") or said.startswith(f"{tmp_path}/run.yaml:")


def test_a_choice_in_a_recipe_without_defaults_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("num_steps: 2\n")
    said = mistake(tmp_path, "cluster=inline")
    assert said == f"{tmp_path}/run.yaml: {WITHOUT_CONFIG}"


def test_a_key_of_a_group_file_of_the_recipes_own_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "slow.yaml").write_text("defaults: [native]\nlr: 1\nlrr: 2\n")
    text = (RECIPE / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("aipo}", "aipo}, {override /trainer: slow}"))
    said = mistake(tmp_path)
    assert said.startswith(f"{tmp_path}/trainer/slow.yaml:3: trainer.lrr must be a known key")


TRAIN = ["train", "--config-dir", str(RECIPE)]
GRAPH, LAUNCH = ["graph", *TRAIN[1:]], ["launch", *TRAIN[1:]]
PLAN = ["plan", "--config-dir", str(GSM8K)]
WRONG_COMMANDS = [
    (["tran"], "got 'tran' (did you mean train?)"),
    (["train"], "--config-dir must name a recipe's folder, such as recipes/quickstart"),
    (["train", "--config-dir"], "--config-dir must come with a value, got none"),
    (["train", "--config-dir", "nowhere"], "--config-dir must be a recipe's folder, got 'nowhere'"),
    (["train", "--config-dir", ".", "--config-name=other"], "--config-dir must hold other.yaml"),
    (["train", "--config-dir", "."], "run.yaml:2: must be YAML, got a mistake at column 1"),
    ([*TRAIN, "--foo"], "an option must be one of --cfg, --conf"),
    (
        [*TRAIN, "run_dir=run.yaml"],
        "run_dir must be a folder that can be written to, got the file '",
    ),
    (["evaluate"], "--config-dir must name a recipe's folder"),
    ([*GRAPH, "--mermaid"], "--mermaid must name a file or folder, got nothing"),
    ([*GRAPH, "--run", "nowhere"], "--run must name the folder of a run of this recipe"),
    (LAUNCH, "must be one of slurm, kubernetes, without cluster.hosts, to launch a run, got none"),
    (
        [*LAUNCH, "cluster=slurm", "cluster.num_hosts=2", "weights=collective"],
        "cluster.data_interface must name the network interface of tensor traffic, which is not en",
    ),
    (["config", "trainer.lrr"], "(did you mean trainer.lr?)"),
    (["status"], "status must get one folder, RUN, got none"),
    (["status", "nowhere"], "RUN must be the folder of a run that is at work, got nowhere, where"),
    *(
        (["scale", *some.split()], "scale must get RUN generators=N [host=ADDRESS] [--now], got ")
        for some in ("", "run", "run generators", "run replicas=2", "run generators=-1")
    ),
    (["worker", "--adress", "tls://127.0.0.1:0"], "worker: unrecognized arguments: --adress"),
    ([*PLAN, "--json"], "--json must name a file or folder, got nothing"),
    ([*PLAN, "--json", "no/a.json"], "--json must name a file in a folder that can be written"),
    ([*PLAN, "--multirun", "seed=0,1"], "--multirun must come with train or evaluate, got plan"),
    ([*PLAN, "--trace", "nowhere"], "--trace must name a run's folder, got 'nowhere'"),
    ([*PLAN, "trainer.tensor_parallel=3", "trainer.num_ranks=3"], "trainer.tensor_parallel must"),
    ([*PLAN, "model.architecture=null"], "model.checkpoint must be an existing folder"),
    (
        [*PLAN, "model.architecture=null", "model.checkpoint=Qwen/Qwen2.5-0.5B"],
        "Hub: model.checkpoint=hf:Qwen/Qwen2.5-0.5B)",
    ),
    ([*PLAN, "plan.prompt_tokens=1024"], "plan.prompt_tokens must be below"),
    ([*PLAN, "cluster.gpu=B300"], "cluster.gpu must be auto, a size such as 24GB, or one"),
    ([*PLAN, "generator.num_replicas=3"], "cluster.num_hosts must be at least 3"),
]


@pytest.mark.parametrize(
    ("wrong", "words"), WRONG_COMMANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_command_ends_with_code_two_and_one_line(
    wrong: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.yaml").write_text("a: [\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llamarl", *wrong])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


WRONG = [math.nan, math.inf, -math.inf, -1, 2**63, 1e308, 1e-320, "", None, [1], {"a": 1}, "\0"]
WRONG += ["\ud800", "é" * 1000, True, "x", [{"a": 1}], [[1]], [None]]
MINIMUM: dict[str, dict[str, Any]] = {
    "ModelConfig": {"checkpoint": "x"},
    "DataConfig": {"prompts": "x"},
    "DistillConfig": {"teacher": "x"},
}
SECTIONS = {
    each.section: name
    for name, choices in reference().sections.items()
    for each in choices.values()
}


def refusal(composed: Any, name: str, value: object) -> str | None:
    """Why the field must be another one; "" if the type is already wrong, None if it may be."""
    before = composed[name]
    try:
        OmegaConf.update(composed, name, value)
        found = getattr(OmegaConf.to_object(composed), name)
    except OmegaConfBaseException:
        return ""
    except ValueError as error:
        return str(error)
    finally:
        OmegaConf.update(composed, name, before)
    return None if is_sane(found) else "accepted: give it limits (core/fields.py)"


def is_sane(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str | int | float) and is_sane(each) for each in value)
    if isinstance(value, str):
        return value.isprintable() and bool(value)
    return not isinstance(value, float | int) or (math.isfinite(value) and abs(value) < 2**60)


def test_whatever_a_field_is_set_to_it_makes_sense_or_is_refused_in_one_line() -> None:
    keys = set()
    for section, name in SECTIONS.items():
        composed = OmegaConf.structured(section(**MINIMUM.get(section.__name__, {})))
        for field in dataclasses.fields(section):
            key = f"{name}.{field.name}"
            if key in keys:  # another choice of the section has it too
                continue
            keys.add(key)
            for value in WRONG:
                said = refusal(composed, field.name, value)
                if said and not (value == "" and field.default == ""):
                    assert re.fullmatch(rf"{name}\.\w+ must .+, got .+", said), (key, value, said)


WRITTEN = ["nan", "inf", "-inf", "-1", str(2**63), "1e308", "1e-320", "", "''", "null", "[1]"]
WRITTEN += ["{a: 1}", "é", "'\\ud800'", "true", "x", "[]", "{}", "???", "${x}", "1,2", "a=b", "'"]
WRITTEN += ["[{a: 1}]", "[[1]]", "[null]"]


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(WRITTEN), 4))
def test_whatever_is_written_after_a_key_composes_or_is_one_line(start: int) -> None:
    names = [*reference().groups, *reference().sections, *reference().keys]
    for index, name in enumerate(names):
        written = WRITTEN[(start + index) % len(WRITTEN)]
        try:
            compose(RECIPE, f"{name}={written}")
        except ValueError as error:
            assert len(str(error).splitlines()) == 1, f"{name}={written}"  # noqa: PT017
