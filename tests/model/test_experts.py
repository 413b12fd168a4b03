"""Mixtures of experts: their files, the routing by a record, the load-balancing loss."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llamarl.core.config import EmbeddedConfig, TrainerConfig, TransformersConfig
from llamarl.model import hf
from llamarl.model.architecture import DOWN, GATE_UP, Architecture, ExpertSizes
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.experts import as_cell, grouped_mm, read_cell, routing_of
from llamarl.model.inventory import check_checkpoint, check_parallel
from llamarl.model.safetensors_file import INDEX_FILE, SINGLE_FILE
from tests.tiny_checkpoints import (
    CASES,
    LENGTHS,
    LLAMA,
    load,
    make_model,
    reference_logits,
    token_ids,
    write_reference,
)

SPARSE = ("qwen3_moe", "qwen3_moe_tied", "mixtral", "olmoe")
MIXTURE = dataclasses.replace(
    LLAMA,
    model_type="qwen3_moe",
    qk_norm=True,
    experts=ExpertSizes(num_experts=6, num_chosen=2, intermediate_size=28, normalized=True),
)


@pytest.mark.parametrize("case", SPARSE)
def test_logits_of_mixtures_equal_the_librarys_to_rounding(tmp_path: Path, case: str) -> None:
    expected = reference_logits(write_reference(tmp_path, **CASES[case]))
    with torch.no_grad():
        found = load(tmp_path).logits(token_ids(), LENGTHS)
    assert expected.std() >= 1, "small logits would hide differences"
    assert ((found - expected).norm() / expected.norm()).item() <= 2e-5


def fused(folder: Path, architecture: Architecture) -> None:
    """Rewrite the files with the experts of each layer stacked, as transformers 5 names them."""
    tensors = dict(load(folder).named_parameters())
    assert any(name.endswith(GATE_UP) for name in tensors)
    assert any(name.endswith(DOWN) for name in tensors)
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    save_file(detached, folder / SINGLE_FILE, metadata={"format": "pt"})
    check_checkpoint(folder)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_stacked_and_single_experts_are_read_from_one_file_or_hundreds(
    tmp_path: Path, case: str
) -> None:
    folder = tmp_path / "source"
    write_reference(folder, **CASES[case])
    model = load(folder)
    expected = {name: each.detach() for name, each in model.named_parameters()}
    many, stacked = tmp_path / "many", tmp_path / "stacked"
    hf.save(many, expected.items(), source_folder=folder, dtype=torch.float32, max_shard_bytes=1)
    names = json.loads((many / INDEX_FILE).read_text())["weight_map"]
    assert len({*names.values()}) == len(names) > 60, "a file per tensor"
    assert {*names} == {*load_file(folder / SINGLE_FILE)}, "the names that transformers writes"
    shutil.copytree(folder, stacked)
    fused(stacked, check_checkpoint(folder))  # type: ignore[arg-type]
    for copy in (many, stacked):
        found = dict(load(copy).named_parameters())
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        reloaded = AutoModelForCausalLM.from_pretrained(copy)
        for name, parameter in reloaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name


def test_experts_that_are_missing_twice_there_or_of_another_shape_are_named(
    tmp_path: Path,
) -> None:
    write_reference(tmp_path, **CASES["qwen3_moe"])
    whole = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"

    def refused(tensors: dict[str, Any], message: str) -> None:
        save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message) as caught:
            check_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)

    refused({k: v for k, v in whole.items() if k != name}, f"must hold the tensor {name}, got")
    more = whole | {name.replace(".5.", ".7."): whole[name].clone()}
    refused(more, r"only the tensors that its config.json implies, got .*experts\.7\.up_proj")
    refused(whole | {name: whole[name][:-1].clone()}, f"{name} .* must have shape")
    names = [f"model.layers.2.mlp.experts.{expert}.down_proj.weight" for expert in range(7)]
    for broken in (torch.tensor(1.0), whole[name][0].clone(), whole[name][None].clone()):
        refused(whole | {name: broken}, f"{name} .* must have shape")
    stacked = torch.stack([whole[each] for each in names])
    both = whole | {f"model.layers.2.{DOWN}": stacked}
    refused(both, r"only the tensors that .* got .*layers\.2\.mlp\.experts\.0\.down_proj")
    (tmp_path / SINGLE_FILE).unlink()
    parts = {"a.safetensors": whole, "b.safetensors": {name: whole[name]}}
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    weight_map = dict.fromkeys(whole, "a.safetensors") | {name: "b.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        ValueError, match=rf"{name} must be in one file of .*, got a\.saf.* and b\."
    ):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 4, "expert_parallel": 4}, "divide the checkpoint's 6 experts, got 4"),
        (
            {"num_ranks": 10, "expert_parallel": 2},
            "leave a number of ranks that divides a dimension of each expert, got 5 ranks",
        ),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(
    options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^trainer\.expert_parallel must {message}"):
        check_parallel(MIXTURE, TrainerConfig(**options), EmbeddedConfig())
    for name, value in {
        "expert_parallel": 2,
        "freeze_router": True,
        "router_aux_loss_coefficient": 0.1,
    }.items():
        fields: dict[str, Any] = {"num_ranks": 2, name: value}
        with pytest.raises(
            ValueError, match=rf"^trainer\.{name} must be .* with a llama, which has"
        ):
            check_parallel(LLAMA, TrainerConfig(**fields), EmbeddedConfig())
        with pytest.raises(ValueError, match=rf"^trainer\.{name} .* with trainer=transformers"):
            TransformersConfig(**fields)
    heads = dataclasses.replace(MIXTURE, num_heads=4, num_kv_heads=4)
    with pytest.raises(ValueError, match=r"^generator\.num_ranks .* checkpoint's 6 experts, got 4"):
        check_parallel(heads, TrainerConfig(), EmbeddedConfig(num_ranks=4))


def test_a_single_expert_is_a_matrix_in_the_files(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    one = {"num_experts": 1, "num_experts_per_tok": 1, "mlp_only_layers": []}
    reference = write_reference(source, **(CASES["qwen3_moe"] | one))
    model = load(source)
    hf.save(copy, model.named_parameters(), source_folder=source, dtype=torch.float32)
    written = load_file(copy / SINGLE_FILE)
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: tensor.shape for name, tensor in load_file(source / SINGLE_FILE).items()
    }
    with torch.no_grad():
        found = load(copy).logits(token_ids(), LENGTHS)
    expected = reference_logits(reference)
    assert ((found - expected).norm() / expected.norm()).item() <= 2e-5


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_tokens_go_where_the_record_says_and_gradients_reach_the_router(checkpointing: str) -> None:
    model = make_model(MIXTURE, 0)
    model.set_checkpointing(checkpointing)
    ids = token_ids()[:40] % 96
    packing = make_packing((30, 10))
    random = torch.Generator().manual_seed(1)
    record = torch.rand(40, 2, 6, generator=random).argsort(-1)[..., :2].to(torch.uint8)
    model(ModelInputs(ids, packing, ids, experts=record), 1.0).logprobs.sum().backward()
    stats = model.routing_stats
    assert stats is not None
    expected = torch.stack([record[:, i].flatten().bincount(minlength=6) for i in (0, 1)])
    assert torch.equal(stats.counts, expected)
    for layer, block in enumerate(each.mlp for each in model.model.layers):
        assert block.gate.weight.grad.abs().sum() > 0
        used = expected[layer] > 0
        touched = block.experts.down_proj.grad.abs().sum((1, 2)) > 0
        assert torch.equal(used, touched)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    model.set_checkpointing("none")
    model(ModelInputs(ids, packing, ids, experts=record), 1.0).logprobs.sum().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name], rtol=1e-5, atol=1e-6)


def test_a_record_of_the_models_own_choices_changes_nothing_and_others_are_counted() -> None:
    model = make_model(MIXTURE, 0)
    ids, packing = token_ids()[:40] % 96, make_packing((30, 10))
    chosen: list[torch.Tensor] = []
    for block in (each.mlp for each in model.model.layers):
        block.register_forward_hook(lambda *call: chosen.append(call[1][1].chosen))
    with torch.no_grad():
        free = model(ModelInputs(ids, packing, ids), 1.0)
        record = torch.stack(chosen, 1)
        assert record.dtype == torch.uint8
        bound = model(ModelInputs(ids, packing, ids, experts=record), 1.0)
        assert torch.equal(free.logprobs, bound.logprobs)
        assert model.routing_stats.num_moved.tolist() == [0, 0]
        record[3, 1] = (record[3, 1] + 1) % 6
        unlike = {*record[3, 1].tolist()} - {*chosen[1][3].tolist()}
        model(ModelInputs(ids, packing, ids, experts=record), 1.0)
        assert model.routing_stats.num_moved.tolist() == [0, len(unlike)]


def test_the_load_balancing_loss_has_the_librarys_gradient() -> None:
    model = make_model(MIXTURE, 0)
    ids, packing = token_ids()[:40] % 96, make_packing((30, 10))
    inputs = ModelInputs(ids, packing, ids, torch.arange(5, 30))
    blocks = [layer.mlp for layer in model.model.layers]
    logits: list[torch.Tensor] = []
    hooks = [
        block.register_forward_pre_hook(
            lambda block, args: logits.append(args[0] @ block.gate.weight.t())
        )
        for block in blocks
    ]
    stats = model(inputs, 1.0)
    aux = sum(load_balancing_loss_func((each,), 6, 2) for each in logits) / len(blocks)
    (stats.logprobs.sum() + 0.3 * 25 * aux).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model.aux_loss_coefficient = 0.3
    model(inputs, 1.0).logprobs.sum().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_the_entropy_of_a_router_is_that_of_its_probabilities() -> None:
    model = make_model(MIXTURE, 0)
    ids, packing = token_ids()[:40] % 96, make_packing((30, 10))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
        model(ModelInputs(ids, packing, ids), 1.0)
    assert model.routing_stats.num_tokens == 40
    expected = torch.full((2,), 40 * torch.tensor(6.0).log())
    torch.testing.assert_close(model.routing_stats.entropy, expected)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("sizes", [(8, 12), (5, 7)])
def test_grouped_products_are_those_of_each_expert(
    counts: list[int], sizes: tuple[int, int]
) -> None:
    random = torch.Generator().manual_seed(0)
    num_rows = sum(counts)
    x = torch.randn(num_rows, sizes[0], generator=random, requires_grad=True)
    matrices = torch.randn(4, sizes[1], sizes[0], generator=random, requires_grad=True)
    found = grouped_mm(x, matrices, torch.tensor(counts))
    parts = [part @ matrices[e].t() for e, part in enumerate(x.split(counts))]
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(num_rows, sizes[1], generator=random)
    torch.testing.assert_close(
        torch.autograd.grad(found, (x, matrices), grad),
        torch.autograd.grad(expected, (x, matrices), grad),
    )


def test_the_router_computes_in_float32_whatever_the_rest() -> None:
    model = make_model(MIXTURE, 0).bfloat16()
    block = model.model.layers[0].mlp
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen: list[torch.Tensor] = []
    block.register_forward_hook(lambda *call: chosen.append(call[1][1].chosen))
    (routing,) = routing_of(1, None, len(x), 0.0)
    block(x, routing)
    wide = (x.float() @ block.gate.weight.float().t()).softmax(-1)
    assert torch.equal(chosen[0].long(), wide.topk(2).indices)
    assert routing.entropy is not None
    torch.testing.assert_close(routing.entropy, -torch.special.xlogy(wide, wide).sum())


def test_a_record_of_another_model_is_refused_in_one_line() -> None:
    record = np.arange(24, dtype=np.uint8).reshape(6, 2, 2) % 6
    assert np.array_equal(read_cell(as_cell(record), 6, MIXTURE), record)
    with pytest.raises(
        ValueError, match=r"4 bytes for each of 5 tokens \(2 layers, 2 experts\), got 24"
    ):
        read_cell(as_cell(record), 5, MIXTURE)
    with pytest.raises(ValueError, match="name experts below 6, got 6: of another model"):
        read_cell(as_cell(record + 1), 6, MIXTURE)
    with pytest.raises(ValueError, match="must be empty, as llama has none"):
        read_cell(as_cell(record), 6, LLAMA)
    many = dataclasses.replace(MIXTURE.experts, num_experts=300, num_chosen=1)
    wide = dataclasses.replace(MIXTURE, experts=many)
    record = np.array([[[299], [0]]], np.int16)
    assert np.array_equal(read_cell(as_cell(record), 1, wide), record)
    with pytest.raises(ValueError, match="name experts below 300"):
        read_cell(as_cell(record - 1), 1, wide)
