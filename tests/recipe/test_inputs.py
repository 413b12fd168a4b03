"""What a run reads is checked before any process starts; each mistake is one line that names it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.core import files
from llamarl.recipe.inputs import check_identity, identity, read_inputs, read_planned_architecture
from llamarl.recipe.prompt_inputs import with_measured_prompts
from tests.places import RECIPE
from tests.recipe.composing import compose_recipe
from tests.tiny_checkpoints import write_reference

GOOD = '{"question": "What is 5+8?", "answer": "13"}\n'

Damage = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda recipe: (recipe / name).write_bytes(data)


def edit(name: str, **values: object) -> Damage:
    def damage(recipe: Path) -> None:
        path = recipe / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def replace(name: str, old: bytes, new: bytes) -> Damage:
    def damage(recipe: Path) -> None:
        data = (recipe / name).read_bytes()
        assert old in data
        (recipe / name).write_bytes(data.replace(old, new, 1))

    return damage


def remove(name: str) -> Damage:
    return lambda recipe: (recipe / name).unlink()


def planned(**values: object) -> Damage:
    """The architecture that the recipe was planned with, which differs in these values."""

    def damage(recipe: Path) -> None:
        (recipe / "planned").mkdir()
        config = json.loads((recipe / "checkpoint" / "config.json").read_text())
        (recipe / "planned" / "config.json").write_text(json.dumps(config | values))

    return damage


def damage_one_byte(recipe: Path) -> None:
    """Of an export, which lists what its files hold."""
    files.write(recipe / "checkpoint")
    replace(WEIGHTS, b"\x3b", b"\x3c")(recipe)


def teacher(**values: object) -> Damage:
    """The checkpoint itself, with these values in its config.json."""

    def damage(recipe: Path) -> None:
        shutil.copytree(recipe / "checkpoint", recipe / "teacher")
        edit("teacher/config.json", **values)(recipe)

    return damage


def narrow_teacher(recipe: Path) -> None:
    """The policy's embedding has rows that no token has, the teacher's has them not."""
    shutil.copytree(recipe / "checkpoint", recipe / "teacher")
    config = json.loads((recipe / "checkpoint" / "config.json").read_text())
    config["vocab_size"] += 16
    tensors = load_file(recipe / WEIGHTS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            more = torch.zeros(16, tensors[name].shape[1], dtype=tensors[name].dtype)
            tensors[name] = torch.cat([tensors[name], more])
    save_file(tensors, recipe / WEIGHTS, metadata={"format": "pt"})
    (recipe / "checkpoint" / "config.json").write_text(json.dumps(config))


def teacher_of_another_family(recipe: Path) -> None:
    write_reference(recipe / "other", "qwen2")
    (recipe / "task.py").write_text(
        "from llamarl.scoring.stages import Column, FrozenModel, Stage\n"
        "column = Column('teacher', 'float32', 'response')\n"
        "def loss(inputs): return -inputs.trainer_logprobs\n"
        "stages = [Stage('a', FrozenModel('other'), writes=[column])]\n"
    )


def nothing(recipe: Path) -> None:
    """The mistake is in the overrides."""


GPUS = ["generator.device=cuda", "trainer.device=cuda"]
WEIGHTS, CONFIG = "checkpoint/model.safetensors", "checkpoint/config.json"
TOKENIZER = "checkpoint/tokenizer.json"
TASK = "reward.functions=[task]"

DISTILL = "algorithm=distill algorithm.teacher=teacher"
CASES: list[tuple[Damage, str, str]] = [
    (remove(WEIGHTS), "", r"must hold model\.safetensors"),
    (damage_one_byte, "", r"model\.safetensors must hold the bytes that"),
    (edit(CONFIG, model_type="gpt2"), "trainer=transformers", r"others train, .* got 'gpt2'"),
    (
        nothing,
        "model.checkpoint=meta-llama/Llama-3.2-1B",
        r"existing folder, .* model\.checkpoint=hf:meta-llama/Llama-3\.2-1B\)",
    ),
    (
        planned(rms_norm_eps=1e-6),
        "model.architecture=planned",
        r"norm_eps of the checkpoint .* must be 1e-06 as in .*planned, .* got 1e-05",
    ),
    (
        nothing,
        "trainer.num_ranks=3 trainer.tensor_parallel=3",
        "trainer.tensor_parallel must divide the checkpoint's 4 attention heads, .* got 3",
    ),
    (nothing, "generator.max_model_len=300", "at most the checkpoint's 256 positions"),
    (remove(TOKENIZER), "", r"must hold tokenizer\.json"),
    (replace(TOKENIZER, b": 5,", b": 999,"), "", "got token id 999"),
    (
        nothing,
        "sampling.stop_strings=['<pad>.']",
        "stop_strings must hold a special token, .* by its",
    ),
    (write("prompts.jsonl", GOOD + '{"question": "a"}'), "", "jsonl:2: .* 'answer'"),
    (nothing, "data.prompts=[]", r"data\.prompts must name a .*, got \[\]"),
    (nothing, "data.prompts=7", r"data\.prompts must name .*, got 7"),
    (nothing, "data.prompts=[prompts.jsonl,prompts.jsonl]", "prompts must name each source once"),
    (nothing, "data.prompts=[prompts.jsonl,more.jsonl]", r"must exist.*more"),
    (
        write("more.jsonl", "\n"),
        "data.prompts=[prompts.jsonl,more.jsonl]",
        r"more\.jsonl must hold at least one prompt, got none",
    ),
    (  # all are left out
        write("more.jsonl", GOOD.replace("5+8", "1+" * 90)),
        "data.prompts=[more.jsonl,prompts.jsonl] data.overlong=drop",
        r"more\.jsonl must hold at least one prompt of at most 32 tokens \(data\..*\), got none",
    ),
    (
        write("prompts.jsonl", GOOD + '{"question": "a", "reward_model": {"style": "rule"}}'),
        "reward.answer_field=reward_model.ground_truth",
        r"jsonl:1: the row must have the field 'reward_model\.ground_truth' \(reward\.answer_field",
    ),
    (remove("held_out.jsonl"), "", r"must exist, got .*held_out\.jsonl"),
    (nothing, TASK, r"task\.py"),
    (write("task.py", "def f(:\n"), TASK, r"must load, got .*line 1"),
    (write("task.py", b"\xff\xfe"), TASK, r"task\.py must be Python in UTF-8"),
    (
        write("task.py", "import nowhere\nreward = print\n"),
        TASK,
        r"No module named 'nowhere' \(task\.py, line 1: import nowhere\)",
    ),
    (
        teacher_of_another_family,
        "algorithm=task algorithm.loss_columns=[teacher] experience.stages=[a]",
        r"the vocabulary of .*/other \(stage a\) must be the policy's 64, got 97",
    ),
    (narrow_teacher, DISTILL, r"vocabulary of .*teacher .* at least the policy's 80, .*, got 64"),
    (
        teacher(max_position_embeddings=20),
        DISTILL,
        r"the positions of .*teacher .* must be at least generator\.max_model_len \d+, got 20",
    ),
    (nothing, "reward=format reward.pattern='<eos>(.*)'", r"hold no special token .* \(<eos>\)"),
    (  # task.py adds no such tracker
        write("task.py", "def reward(prompt, completion):\n    return 1.0\n"),
        f"{TASK} metrics.trackers=[csv]",
        "metrics.trackers must be one of tensorboard, ",
    ),
]


def read(recipe: Path, overrides: list[str]) -> object:
    config = compose_recipe(RECIPE, [f"recipe_dir='{recipe}'", *overrides])
    return config, read_inputs(config)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    shutil.copytree(RECIPE, folder)
    rows = (RECIPE / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(rows[:20]))
    return folder


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_gpu_memory_that_others_cannot_map_by_its_handle_is_refused(
    name: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = [*GPUS, "cluster.hosts=['tls://host:1']"]
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    read(recipe, [*cuda, "weights=collective"])
    with pytest.raises(ValueError, match=f"{name} must not have expandable_segments:True with"):
        read(recipe, [*cuda, "weights=cuda_ipc"])
    monkeypatch.setenv(name, "expandable_segments:False")
    read(recipe, [*cuda, "weights=cuda_ipc"])


@pytest.mark.parametrize("section", ["generator", "trainer"])
def test_a_gpu_on_a_machine_without_one_is_refused_by_its_own_key(
    section: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.core.device.names.DRIVER_FILES", (str(recipe / "nowhere"),))
    with pytest.raises(ValueError, match=f"{section}.device must be cpu on a machine without a "):
        read(recipe, [f"{section}.device=cuda", "weights=collective"])
    monkeypatch.setattr("llamarl.core.device.names.DRIVER_FILES", (str(recipe),))
    read(recipe, [*GPUS, "weights=collective"])


def test_the_recipe_has_no_mistake_yet(recipe: Path) -> None:
    _, inputs = read(recipe, [])
    assert len(inputs.prompts) == 20


@pytest.mark.parametrize(("damage", "overrides", "words"), CASES)
def test_a_mistake_is_named_in_one_line(
    damage: Damage, overrides: str, words: str, recipe: Path
) -> None:
    damage(recipe)
    with pytest.raises(ValueError, match=words) as caught:
        read(recipe, overrides.split())
    assert len(str(caught.value).splitlines()) == 1


def test_an_answer_whose_end_stops_no_rollout_is_one_line_at_the_start(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<pad>{% endfor %}"
    edit("checkpoint/tokenizer_config.json", chat_template=template)(recipe)
    read(recipe, [])
    read(recipe, ["data.chat=true", "sampling.stop_strings=['<pad>']"])
    assert not caplog.messages
    read(recipe, ["data.chat=true"])
    (line,) = caplog.messages
    assert "ends an answer with <pad>, at which rollouts do not stop" in line


def test_prompts_that_leave_no_room_for_a_completion_are_an_error_or_left_out(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of both files, in a run and in a plan, each with the limits of its own completions."""
    lengths = {"prompts.jsonl": [10, 30], "held_out.jsonl": [12, 22, 30]}
    for name, some in lengths.items():
        rows = [GOOD.replace("5+8", "1+" * (length // 2)) for length in some]
        write(name, "".join(rows))(recipe)
    room = ["generator.max_model_len=64", "sampling.max_tokens=40", "evaluation.max_tokens=32"]
    overrides = [*room, "data.max_prompt_tokens=60", "plan.prompt_tokens=0"]
    words = r"sampling\.max_tokens must leave room for the longest prompt \(3\d tokens\)"
    with pytest.raises(ValueError, match=words):
        read(recipe, overrides)
    config = compose_recipe(RECIPE, [f"recipe_dir='{recipe}'", *overrides])
    with pytest.raises(ValueError, match=words):
        with_measured_prompts(config)
    assert not caplog.records

    config = replace_fields(config, data=replace_fields(config.data, overlong="drop"))
    assert with_measured_prompts(config).plan.prompt_tokens < 20
    assert not caplog.records, "a plan reads the first prompts only"
    inputs = read_inputs(config)
    assert [p.prompt_id for p in inputs.prompts] == [1]
    assert [p.prompt_id for p in inputs.held_out] == [1, 2]
    less = r"\(generator\.max_model_len=64 less {}\.max_tokens={}\) and are left out"
    assert re.search("1 of 2 .* more than 24 tokens " + less.format("sampling", 40), caplog.text)
    assert re.search("1 of 3 .* more than 32 tokens " + less.format("evaluation", 32), caplog.text)


def test_a_forecast_needs_no_checkpoint(recipe: Path) -> None:
    planned(eos_token_id=[2, 3])(recipe)
    overrides = ["model.architecture=planned"]
    config, inputs = read(recipe, overrides)
    assert inputs.architecture.eos_token_ids == (2,), "other ends of completions do not matter"
    assert read_planned_architecture(config) == inputs.architecture
    shutil.rmtree(recipe / "checkpoint")
    without = read_planned_architecture(config)
    assert without == replace_fields(inputs.architecture, eos_token_ids=(2, 3))
    with pytest.raises(ValueError, match=r"must divide the checkpoint's 4 attention heads"):
        read_planned_architecture(
            replace_fields(
                config,
                trainer=replace_fields(config.trainer, num_ranks=3, tensor_parallel=3),
            )
        )


def test_a_run_cannot_go_on_with_other_prompts(recipe: Path) -> None:
    config, inputs = read(recipe, [])
    saved = json.loads(json.dumps(identity(config, inputs)))  # as a checkpoint keeps it
    check_identity(saved, identity(*read(recipe, ["num_steps=7", "trainer.lr=1"])))
    for change, words in {
        "seed=1": "seed must be 0, as in the checkpoint, got 1",
        "data.shuffle=false": r"data\.shuffle must be true, as in the checkpoint, got false",
        "data.weights=[1]": r"data\.weights must be \[\], as in the checkpoint, got \[1\.0\]",
        "trainer.optimizer=sgd": r'optimizer must be "adamw", as in the checkpoint, got "sgd"',
    }.items():
        with pytest.raises(ValueError, match=words):
            check_identity(saved, identity(*read(recipe, [change])))
    edit(CONFIG, rms_norm_eps=0.5)(recipe)
    with pytest.raises(ValueError, match=r"norm_eps of model\.checkpoint must be .*, got 0\.5"):
        check_identity(saved, identity(*read(recipe, [])))
    (recipe / "prompts.jsonl").write_text(GOOD * 20)
    with pytest.raises(ValueError, match=r"data\.prompts, .* must give the same prompts"):
        check_identity(saved, identity(*read(recipe, [])))
