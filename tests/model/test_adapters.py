"""Adapters in one process: the trainer's layers, the embedded engine, files, and the peft
library."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llamarl.cli.reports import merge
from llamarl.core.config import EmbeddedConfig, LoraConfig
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.weights import AdaptedMatrix, AdapterLayout, BufferLayout, bind
from llamarl.model import adapters as adapter_files
from llamarl.model.adapter_inventory import (
    adapted_modules,
    adapter_shapes,
    check_adapter,
    read_lora,
)
from llamarl.model.adapters import attach, initialize
from llamarl.model.architecture import read_any_architecture, read_architecture
from llamarl.recipe.local_inputs import with_local_files
from tests.adapter_oracle import merged, random_adapters
from tests.generator.engine_models import (
    VARIANTS,
    finish,
    flat_weights,
    make_request,
    model_logprobs,
    random_prompts,
)
from tests.random_search import case, searched
from tests.recipe.test_config import MINIMUM, make_config
from tests.tiny_checkpoints import (
    LENGTHS,
    LLAMA,
    load,
    make_model,
    relative_error,
    token_ids,
    write_checkpoint,
    write_reference,
)
from tests.uneven_publish import publish

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = LoraConfig(rank=3, alpha=5.0)


def attached(model: torch.nn.Module, adapters: dict[str, torch.Tensor], lora: LoraConfig) -> Any:
    """Give the model these adapters; returns their switch."""
    shapes = {name: tuple(each.shape) for name, each in adapters.items()}
    switch = attach(model, shapes, lora)
    for name, values in adapters.items():
        module, _, _ = name.rpartition(".")
        model.get_submodule(module).weight = torch.nn.Parameter(values.clone())
    return switch


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_computes_with_its_adapter_and_without_it_as_before(name: str) -> None:
    model = make_model(VARIANTS[name], 1)
    adapters = random_adapters(VARIANTS[name], LORA)
    ids = token_ids() % VARIANTS[name].vocab_size
    before = model.logits(ids, LENGTHS)
    expected = merged(model, adapters, LORA).logits(ids, LENGTHS)
    switch = attached(model, adapters, LORA)
    assert relative_error(model.logits(ids, LENGTHS), expected) <= 1e-5
    assert relative_error(before, expected) > 0.1
    with switch.off():
        assert torch.equal(model.logits(ids, LENGTHS), before)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == adapters.keys()


def test_dropout_is_of_training_passes_alone() -> None:
    lora = replace(LORA, dropout=0.5)
    model = make_model(LLAMA, 1)
    attached(model, random_adapters(LLAMA, lora), lora)
    ids = token_ids() % LLAMA.vocab_size
    with torch.no_grad():
        assert torch.equal(model.logits(ids, LENGTHS), model.logits(ids, LENGTHS))
    assert not torch.equal(model.logits(ids, LENGTHS), model.logits(ids, LENGTHS))


def test_first_values_change_nothing_and_follow_from_seed_and_name() -> None:
    shapes = adapter_shapes(LLAMA, LORA)
    found = [{name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(3)]
    for parameters, seed in zip(found, (0, 0, 1), strict=True):
        initialize(parameters, seed)
    first, same, other = found
    for name, values in first.items():
        assert torch.equal(values, same[name])
        if "lora_B" in name:
            assert not values.any()
        else:
            assert not torch.equal(values, other[name])
            bound = shapes[name][1] ** -0.5
            assert 0.7 * bound < values.abs().max() <= bound
    a = [name for name in shapes if "lora_A" in name]
    assert len({found[0][name].sum().item() for name in a}) == len(a)


@searched(60, 600)
def test_an_engine_decodes_with_the_adapters_that_a_publish_brings(seeds: range) -> None:
    """Any matrices, ranks and versions, on both runners, against the merged model."""
    for seed in seeds:
        with case(seed):
            check_engine(random.Random(seed))


def check_engine(source: random.Random) -> None:
    architecture = VARIANTS[source.choice([*VARIANTS])]
    modules = adapted_modules(adapter_shapes(architecture, LoraConfig(rank=1)))
    names = sorted({module.rpartition(".")[2] for module in modules})  # experts have none
    targets = source.sample(names, source.randint(1, len(names)))
    lora = LoraConfig(rank=source.randint(1, 9), alpha=source.uniform(0.5, 8), targets=targets)
    model = make_model(architecture, source.randint(0, 9))
    engine = EmbeddedEngine(
        architecture,
        EmbeddedConfig(max_num_seqs=3, max_model_len=64, quantization="none"),
        lora=lora,
        is_padded=source.random() < 0.5,
    )
    whole = EmbeddedEngine(architecture, EmbeddedConfig(max_num_seqs=3, max_model_len=64))
    assert engine._base is not None
    engine._base.copy_(flat_weights(whole, model))
    versions = [random_adapters(architecture, lora, source.randint(0, 99)) for _ in range(2)]
    for row, prompt in enumerate(random_prompts(4, 20)):
        engine.submit(make_request(row, prompt, 12))
    done = {}
    for version, adapters in enumerate(versions):
        engine.commit(publish([engine.memory], adapters)[0], version)
        if version == 0:
            for _ in range(source.randint(0, 6)):
                done |= {item.request.row_id: item for item in engine.step()}
    done |= finish(engine)
    assert len(done) == 4
    models = [merged(model, adapters, lora) for adapters in versions]
    for item in done.values():
        written = item.written
        of_each = [model_logprobs(each, item) for each in models]  # type: ignore[arg-type]
        num_first = int((written.versions == 0).sum())
        assert written.versions.tolist() == sorted(written.versions.tolist())
        np.testing.assert_allclose(written.logprobs[:num_first], of_each[0][:num_first], atol=2e-4)
        if num_first == 0:  # else the first version's keys and values are kept
            np.testing.assert_allclose(written.logprobs, of_each[1], atol=2e-4)


@searched(40, 400)
def test_tensor_parallel_ranks_share_an_adapted_matrix(seeds: range) -> None:
    for seed in seeds:
        with case(seed):
            check_ranks(random.Random(seed))


def check_ranks(source: random.Random) -> None:
    architecture = replace(LLAMA, num_heads=8, num_kv_heads=4, head_dim=6, intermediate_size=44)
    num_ranks = source.choice((1, 2, 4))
    targets = source.sample(NAMES, source.randint(1, 7))
    lora = LoraConfig(rank=source.randint(1, 9), alpha=3.0, targets=targets)
    adapters = random_adapters(architecture, lora, source.randint(0, 99))
    model = make_model(architecture, 0)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    expected = dict(merged(model, adapters, lora).named_parameters())
    layouts = [AdapterLayout(architecture, lora, "float32", r, num_ranks) for r in range(num_ranks)]
    wholes = [BufferLayout(architecture, "float32", r, num_ranks) for r in range(num_ranks)]
    flats = publish([each.memory for each in layouts], adapters)
    bases = publish([each.memory for each in wholes], weights)
    ranks = [
        layout.adapt(bind(whole, architecture, base), flat)
        for layout, whole, base, flat in zip(layouts, wholes, bases, flats, strict=True)
    ]
    x = torch.randn(5, architecture.hidden_size)
    for index, layers in enumerate(zip(*(each.layers for each in ranks), strict=True)):
        prefix = f"model.layers.{index}."
        parts = [f"self_attn.{part}_proj" for part in "qkv"]
        sizes = [expected[f"{prefix}{part}.weight"].shape[0] // num_ranks for part in parts]
        cut = [product(layer.qkv, x).split(sizes, 1) for layer in layers]
        for part, pieces in zip(parts, zip(*cut, strict=True), strict=True):
            assert_near(torch.cat(pieces, 1), x @ expected[f"{prefix}{part}.weight"].t())
        y = torch.randn(5, architecture.intermediate_size)
        found = sum(
            product(layer.down, piece)
            for layer, piece in zip(layers, y.chunk(num_ranks, 1), strict=True)
        )
        assert_near(found, y @ expected[f"{prefix}mlp.down_proj.weight"].t())


def product(matrix: Any, x: torch.Tensor) -> torch.Tensor:
    return matrix.product(x) if isinstance(matrix, AdaptedMatrix) else x @ matrix


def assert_near(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


def test_beside_eight_bits_an_adapter_keeps_its_precision() -> None:
    config = EmbeddedConfig(max_num_seqs=2, max_model_len=64, quantization="int8")
    plain = EmbeddedEngine(LLAMA, config)
    adapted = EmbeddedEngine(LLAMA, config, lora=LORA)
    assert adapted._base is not None
    model, adapters = make_model(LLAMA, 1), random_adapters(LLAMA, LORA)
    adapted._base.copy_(flat_weights(plain, model))
    (flat,) = publish([adapted.memory], adapters)
    weights = adapted.process_weights(flat)
    matrix = weights.layers[0].down
    assert isinstance(matrix, AdaptedMatrix)
    x = torch.randn(3, LLAMA.intermediate_size)
    a, b = (adapters[f"model.layers.0.mlp.down_proj.lora_{half}.weight"] for half in "AB")
    exact = x @ matrix.base.dequantized() + 5.0 / 3 * (x @ a.t()) @ b.t()  # type: ignore[union-attr]
    torch.testing.assert_close(matrix.product(x), exact, rtol=1e-4, atol=1e-4)


@pytest.fixture
def reference(tmp_path: Path) -> tuple[str, Any]:
    folder = tmp_path / "model"
    return str(folder), write_reference(folder, "llama")


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "mlp.down_proj"]])
def test_peft_computes_the_same_with_an_exported_adapter(
    reference: tuple[str, Any], tmp_path: Path, targets: list[str]
) -> None:
    checkpoint, library = reference
    lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
    architecture = read_architecture(checkpoint)
    adapters = random_adapters(architecture, lora)
    folder = tmp_path / "adapter"
    items = adapters.items()
    adapter_files.save(folder, items, lora=lora, source_folder=checkpoint, dtype=torch.float32)
    ids = token_ids()[None, :50]
    model = load(checkpoint)
    attached(model, adapters, lora)
    theirs = PeftModel.from_pretrained(library, str(folder))
    assert theirs.peft_config["default"].r == 4
    ours = model.logits(ids[0], [50])
    assert relative_error(ours, theirs(ids).logits[0]) <= 1e-5
    merge([str(folder), str(tmp_path / "whole")])
    both = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert relative_error(both(ids).logits[0], ours) <= 1e-5


def test_an_adapter_of_peft_is_one_to_start_from(
    reference: tuple[str, Any], tmp_path: Path
) -> None:
    checkpoint, library = reference
    config = PeftConfig(r=5, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(library, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    lora = read_lora(tmp_path / "adapter")
    assert (lora.rank, lora.alpha) == (5, 7.0)
    check_adapter(tmp_path / "adapter", read_any_architecture(checkpoint), lora)
    shapes = adapter_shapes(read_architecture(checkpoint), lora)
    adapters = {name: torch.empty(shape) for name, shape in shapes.items()}
    adapter_files.load_into(adapters, str(tmp_path / "adapter"))
    model = load(checkpoint)
    attached(model, adapters, lora)
    ids = token_ids()[:50]
    assert relative_error(model.logits(ids, [50]), theirs(ids[None]).logits[0]) <= 1e-5


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["q_prj"]}, "trainer.lora.targets must be all-linear, or name q_proj, k_proj"),
        ({"targets": ["q_proj", "lm_head"]}, "got 'lm_head'"),
        ({"rank": 25}, "trainer.lora.rank must be at most 24, the smaller size of model.layers.0."),
    ],
)
def test_adapters_that_do_not_fit_a_model_are_refused(
    lora: dict, words: str, tmp_path: Path
) -> None:
    architecture = read_architecture(write_checkpoint(tmp_path / "tiny"))
    with pytest.raises(ValueError, match=words):
        adapter_shapes(architecture, LoraConfig(**({"rank": 4} | lora)))


def test_a_layer_that_is_not_linear_is_refused_by_its_name() -> None:
    root = torch.nn.Module()
    root.c_attn = torch.nn.Conv1d(8, 8, 1)
    for name, got in (("c_attn", "Conv1d"), ("experts.0", "none")):
        shapes = {f"{name}.lora_A.weight": (2, 8), f"{name}.lora_B.weight": (8, 2)}
        with pytest.raises(
            ValueError, match=f"linear layers of Module, got {name}, which is {got}"
        ):
            attach(root, shapes, LoraConfig(rank=2))


def written(tmp_path: Path, lora: LoraConfig) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """A tiny checkpoint, the folder of an adapter for it, and the matrices in that."""
    checkpoint, folder = write_checkpoint(tmp_path / "tiny"), tmp_path / "adapter"
    adapters = random_adapters(read_architecture(checkpoint), lora)
    adapter_files.save(
        folder, adapters.items(), lora=lora, source_folder=checkpoint, dtype=torch.float32
    )
    return checkpoint, folder, adapters


def with_key(key: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


DAMAGES: dict[str, tuple[Any, str]] = {
    "kind": (with_key("peft_type", "IA3"), "must be LORA"),
    "rank": (with_key("r", 8), "trainer.lora.rank must be 8"),
    "alpha": (with_key("lora_alpha", 1), "alpha must be 1"),
    "dora": (with_key("use_dora", True), "use_dora in"),
    "bias": (with_key("bias", "all"), "bias in .* 'none'"),
    "pissa": (with_key("init_lora_weights", "pissa_niter_4"), "must be True or 'gaussian'"),
    "olora": (with_key("init_lora_weights", "olora"), "'olora'"),
    "alora": (with_key("alora_invocation_tokens", [1, 2]), "alora_invocation_tokens in .* absent"),
    "a key of next year": (with_key("use_xlora", True), "use_xlo"),
    "pattern": (with_key("rank_pattern", {"q": 1}), "rank_pat"),
    "no file": (lambda f: (f / "adapter_model.safetensors").unlink(), "the folder of an adapter"),
    "cut off": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 9),
        "must be a whole safetensors file",
    ),
    "json": (lambda f: (f / "adapter_config.json").write_text("{"), "must be JSON"),
    "other model": (lambda f: resized(f), "have shape .* as this model's"),
    "more": (lambda f: with_more(f), "got one more"),
}


def resized(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: each[:, :-1].contiguous() for name, each in tensors.items()}, path)


def with_more(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 2)}, path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_adapter_of_another_model_or_kind_is_refused_in_a_line(
    damage: str, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=4, alpha=6.0)
    checkpoint, folder, _ = written(tmp_path, lora)
    architecture = read_architecture(checkpoint)
    check_adapter(folder, architecture, lora)
    change, words = DAMAGES[damage]
    change(folder)
    with pytest.raises(ValueError, match=words) as caught:
        check_adapter(folder, architecture, lora)
    assert "\n" not in str(caught.value)


def test_of_an_adapter_to_start_from_rank_alpha_and_targets_count_and_the_recipes_dropout(
    tmp_path: Path,
) -> None:
    lora = LoraConfig(rank=4, alpha=6.0, targets=["q_proj"])
    _, folder, _ = written(tmp_path, lora)

    def started(*overrides: str) -> LoraConfig:
        config = make_config(f"model.adapter={folder}", *overrides, *MINIMUM)
        return with_local_files(config, "train")[0].trainer.lora

    assert started() == lora
    assert started("trainer.lora.dropout=0.3") == replace(lora, dropout=0.3)
    assert started("trainer.lora.alpha=6", "trainer.lora.targets=[q_proj]") == lora
    for key, got in (("alpha", "64"), ("targets", "[k_proj]")):
        with pytest.raises(ValueError, match=rf"^trainer\.lora\.{key} must be left out, or .* got"):
            started(f"trainer.lora.{key}={got}")


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_what_peft_writes_of_a_plain_adapter_is_taken(start: Any, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=6.0)
    checkpoint, folder, _ = written(tmp_path, lora)
    saved = json.loads((folder / "adapter_config.json").read_text())
    values = PeftConfig(init_lora_weights=start, lora_dropout=0.1).to_dict()
    values |= {name: saved[name] for name in ("r", "lora_alpha", "target_modules")}
    values |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "init_lora_weights": start}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    check_adapter(folder, read_architecture(checkpoint), lora)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_pass_that_is_computed_again_drops_the_same_inputs(checkpointing: str) -> None:
    lora = replace(LORA, dropout=0.3)
    model = make_model(LLAMA, 1)
    adapters = random_adapters(LLAMA, lora)
    attached(model, adapters, lora)
    ids = token_ids() % LLAMA.vocab_size

    def gradients(checkpointing: str) -> dict[str, torch.Tensor]:
        model.set_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(5)
        model.logits(ids, LENGTHS).square().mean().backward()
        return {name: model.get_parameter(name).grad.clone() for name in adapters}

    wanted, found = gradients("none"), gradients(checkpointing)
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "must be ADAPTER FOLDER"),
        (["adapter"], "must be ADAPTER FOLDER"),
        (["adapter", "new", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, got"),
        (["nothing", "new"], "ADAPTER must be the folder of an adapter"),
        (["adapter", "tiny"], "FOLDER must not exist yet"),
        (["adapter", "new", "--checkpoint", "nothing"], "must be the folder of the checkpoint"),
    ],
)
def test_merge_says_what_is_wrong_with_its_arguments(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, LoraConfig(rank=4))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        merge(arguments)
    assert not Path("new").exists()


def test_an_export_is_replaced_whole(tmp_path: Path) -> None:
    lora = LoraConfig(rank=4)
    checkpoint, folder, adapters = written(tmp_path, lora)
    name = "model.layers.0.mlp.up_proj.lora_B.weight"
    adapters[name] += 1
    adapter_files.save(
        folder, adapters.items(), lora=lora, source_folder=checkpoint, dtype=torch.bfloat16
    )
    found = load_file(folder / "adapter_model.safetensors")[f"base_model.model.{name}"]
    assert torch.equal(found, adapters[name].bfloat16())
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".adapter")]
