"""Without vLLM: what it cannot run is refused, its version checked, tensors are staged for it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.core.config import VllmConfig
from llamarl.generator.vllm.limits import check_installed, check_limits, memory_share
from llamarl.generator.vllm.staging import on_device
from llamarl.model.architecture import ExpertSizes, read_architecture
from tests.recipe.test_inputs import RECIPE, read

ARCHITECTURE = read_architecture(str(RECIPE / "checkpoint"))  # 4 heads of 32, 2 for keys, 3 layers

EXPERTS = ExpertSizes(num_experts=6, num_chosen=2, intermediate_size=16, normalized=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_fits_is_accepted(num_ranks: int) -> None:
    check_limits(VllmConfig(num_ranks=num_ranks, max_model_len=256), ARCHITECTURE)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        ({"num_ranks": 3}, {}, "generator.num_ranks must divide the checkpoint's 4 attention"),
        ({"num_ranks": 8}, {"intermediate_size": 12}, "and 12 intermediate channels, got 8"),
        ({"num_ranks": 4}, {"num_kv_heads": 3}, "checkpoint's 3 key-value heads or be a multiple"),
        (
            {"num_ranks": 4},
            {"experts": replace(EXPERTS, intermediate_size=18)},
            "divide the checkpoint's 4 attention heads and 18 channels of an expert, got 4",
        ),
        (
            {"num_ranks": 4, "expert_parallel": True, "device": "cuda"},
            {"experts": replace(EXPERTS, dense_layers=(0,))},
            "4 attention heads and 352 intermediate channels and 6 experts, got 4",
        ),
        (
            {"expert_parallel": True, "device": "cuda"},
            {},
            "expert_parallel must be false with a llama, which has no experts, got True",
        ),
        ({}, {"head_dim": 24}, "head size must be one of 32, 64, .* (vLLM on CPU), got 24"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(config: dict, changes: dict, words: str) -> None:
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern) as raised:
        check_limits(VllmConfig(**config), replace(ARCHITECTURE, **changes))
    assert "\n" not in str(raised.value)


def test_the_kv_cache_must_hold_one_rollout_and_an_empty_block() -> None:
    # 128 tokens in blocks of 32: 5 blocks, keys and values, 3 layers, 2 heads of 32, 4 bytes
    needed_bytes = 5 * 32 * 2 * 3 * 2 * 32 * 4
    config = VllmConfig(max_model_len=128, kv_cache_bytes=needed_bytes)
    check_limits(config, ARCHITECTURE)
    half = replace(config, num_ranks=2, dtype="bfloat16", kv_cache_bytes=needed_bytes // 4)
    check_limits(half, ARCHITECTURE)
    for each in (config, half):
        small = replace(each, kv_cache_bytes=each.kv_cache_bytes - 1)
        with pytest.raises(ValueError, match=f"must be at least {each.kv_cache_bytes}, which hold"):
            check_limits(small, ARCHITECTURE)


def test_a_gpu_must_have_room_for_one_ranks_weights_and_kv_cache_and_no_more() -> None:
    sizes = {"num_layers": 0, "vocab_size": 1000, "hidden_size": 50, "tie_embeddings": True}
    architecture = replace(ARCHITECTURE, **sizes)  # an embedding of 50,000 numbers, a norm of 50
    config = VllmConfig(device="cuda", num_ranks=2, kv_cache_bytes=49_950)
    assert memory_share(config, architecture, 1_000_000) == 0.1
    whole = replace(config, num_ranks=1, dtype="float32", kv_cache_bytes=199_800)
    assert memory_share(whole, architecture, 1_000_000) == 0.4
    assert memory_share(replace(config, quantization="fp8"), architecture, 1_000_000) < 0.08
    assert memory_share(whole, architecture, 1000) == 1.0


@pytest.mark.parametrize(
    ("version", "override", "words"),
    [
        ("0.31.1", "", "must have vllm 0.32.0 installed .*, got 0.31.1"),
        ("0.32.0", "generator.num_ranks=3", "generator.num_ranks must divide"),
        ("0.32.0", "generator.kv_cache_bytes=1000", "generator.kv_cache_bytes must be at least"),
        ("0.32.0", "sampling.temperature=0.005", "sampling.temperature must be 0 or at least 0.01"),
        ("0.32.0", "sampling.temperature=2.5", "sampling.temperature must be at most 2 "),
        ("0.32.0", "evaluation.temperature=2.5", "evaluation.temperature must be at most 2 "),
        ("0.32.0", "evaluation.temperature=0.005", "evaluation.temperature must be 0 or at"),
        ("0.32.0", "model.checkpoint={mamba}", "'mamba'"),
    ],
)
def test_a_run_is_refused_with_its_inputs(
    version: str, override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(RECIPE / "checkpoint", tmp_path / "mamba")
    config_file = tmp_path / "mamba" / "config.json"
    config_file.write_text(config_file.read_text().replace('"llama"', '"mamba"'))
    overrides = ["generator=vllm", override.format(mamba=tmp_path / "mamba")]
    with pytest.raises(ValueError, match=words) as raised:
        read(RECIPE, [each for each in overrides if each])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cu130", "0.31.1", "0.32.1"])
def test_the_supported_version_alone_is_accepted(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, found)
    monkeypatch.syspath_prepend(tmp_path)
    if found.startswith("0.32.0"):
        return check_installed()
    with pytest.raises(ValueError, match=f"must have vllm 0.32.0 installed .*, got {found}$"):
        check_installed()


def install(folder: Path, version: str) -> None:
    """What importlib finds of an installed vllm."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def groups_of(*shapes: list[tuple[int, ...]]) -> list[dict[str, Tensor]]:
    return [
        {str(i): torch.randn(shape).to(torch.bfloat16) for i, shape in enumerate(group)}
        for group in shapes
    ]


def test_tensors_elsewhere_come_to_the_device_in_two_slots_that_take_turns() -> None:
    groups = groups_of([(5, 7)], [(3, 3), (9,)], [(2, 8)], [(5, 7), (1,)])
    slots = []
    for group, moved in zip(groups, on_device(groups, torch.device("meta")), strict=True):
        assert {name: each.device.type for name, each in moved.items()} == dict.fromkeys(
            group, "meta"
        )
        assert [each.shape for each in moved.values()] == [each.shape for each in group.values()]
        assert {each.dtype for each in moved.values()} == {torch.bfloat16}
        slots.append({each.untyped_storage()._cdata for each in moved.values()})
    assert all(len(slot) == 1 for slot in slots)
    assert slots[0] == slots[2] != slots[1] == slots[3]


def test_each_group_arrives_whole_and_is_not_overwritten_while_it_is_used() -> None:
    groups = groups_of([(5, 7)], [(3, 3), (9,)], [(2, 8)], [(5, 7), (1,)])
    named = torch.device("cpu", 0)  # the same memory under a name that no tensor bears
    for group, moved in zip(groups, on_device(groups, named), strict=True):
        assert moved.keys() == group.keys()
        for name, tensor in moved.items():
            assert torch.equal(tensor, group[name])
            assert tensor.data_ptr() != group[name].data_ptr()


def test_tensors_that_are_there_already_are_not_copied() -> None:
    groups = groups_of([(5, 7)], [(3, 3)])
    found = list(on_device(groups, torch.device("cpu")))
    assert [each["0"].data_ptr() for each in found] == [each["0"].data_ptr() for each in groups]
