"""Packed rollouts through transformers' own code: what the library computes for each alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llamarl.core.config import TransformersConfig
from llamarl.model import hf
from llamarl.model.architecture import read_any_architecture
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.inventory import check_checkpoint, parameter_shapes
from llamarl.model.transformer import TrainedModel
from llamarl.trainer.parallel import load_model
from tests.tiny_checkpoints import write_reference

VOCAB, TEMPERATURE = 64, 0.7
LENGTHS = [24, 6, 30]  # longer and shorter than the windows below
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass
class Family:
    """`is_packed`: its rollouts share one row; `is_plain`: its logits are hidden x head."""

    sizes: dict[str, Any] = field(default_factory=dict)
    is_packed: bool = True
    is_plain: bool = True


FAMILIES = {
    "llama": Family(),
    "mistral": Family({"sliding_window": 8}),
    "gemma3_text": Family({**WINDOWS, "query_pre_attn_scalar": 40}),
    "gemma2": Family(WINDOWS, is_packed=False, is_plain=False),  # attention scores are capped
    "phi": Family(is_plain=False),  # the head has a bias
    "phi3": Family(),
    "olmo2": Family(),
    "granite": Family({"logits_scaling": 3.0, "attention_multiplier": 0.3}, is_plain=False),
    "gpt_oss": Family(WINDOWS, is_packed=False),  # attention sinks
    "qwen2_moe": Family(EXPERTS | {"shared_expert_intermediate_size": 32}, is_packed=False),
    "bloom": Family({"n_head": 4}, is_packed=False),  # attention that cannot be replaced
    "falcon_h1": Family(RECURRENT, is_packed=False),  # a recurrent state beside attention
}


def write_family(folder: Path, name: str) -> Path:
    """A checkpoint of one of FAMILIES."""
    write_reference(folder, name, **(SIZES | FAMILIES[name].sizes))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {name: write_family(place / name, name) for name in FAMILIES}


def load(folder: Path) -> TrainedModel:
    return load_model(str(folder), TransformersConfig(), torch.device("cpu"), None, torch.float32)


def tokens(seed: int, num: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rollout_has_the_librarys_gradients(folders: dict[str, Path], family: str) -> None:
    model: Any = load(folders[family])
    assert model._is_packed == FAMILIES[family].is_packed
    assert model._is_head_plain == FAMILIES[family].is_plain
    ids, targets = tokens(1, sum(LENGTHS)), tokens(2, sum(LENGTHS))
    inputs = ModelInputs(ids, make_packing(LENGTHS), targets)
    stats = model(inputs, TEMPERATURE)
    (stats.logprobs.sum() + 0.1 * stats.entropy.sum()).backward()
    some = torch.arange(0, len(ids), 3)
    chosen = model(replace(inputs, chosen=some), TEMPERATURE)
    for among_all, alone in zip(stats, chosen, strict=True):
        torch.testing.assert_close(among_all[some], alone, rtol=0, atol=1e-5)
    library = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    for part, target, logprobs, entropy in zip(
        *(column.split(LENGTHS) for column in (ids, targets, *stats)), strict=True
    ):
        logits = library(input_ids=part[None], use_cache=False).logits[0] / TEMPERATURE
        wanted = logits.log_softmax(-1)
        spread = -(wanted.exp() * wanted).sum(-1)
        chosen = wanted.gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(logprobs, chosen, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy, spread, rtol=0, atol=1e-5)
        (chosen.sum() + 0.1 * spread.sum()).backward()
    wanted_gradients = {name: each.grad for name, each in library.named_parameters()}
    assert dict(model.named_parameters()).keys() == wanted_gradients.keys()
    assert (
        parameter_shapes(check_checkpoint(folders[family], is_any=True)).keys()
        == wanted_gradients.keys()
    )
    largest = max(float(each.norm()) for each in wanted_gradients.values())
    for name, parameter in model.named_parameters():
        apart = float((parameter.grad - wanted_gradients[name]).norm())
        assert apart <= 1e-5 * float(wanted_gradients[name].norm()) + 1e-7 * largest, name


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "gpt_oss", "falcon_h1"])
def test_a_neighbour_in_the_pack_changes_no_bit(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family])
    mine, targets = tokens(3, 20), tokens(4, 60)
    packing = make_packing([31, 9, 20])
    seen = [
        torch.stack(model(ModelInputs(ids, packing, targets), 1.0))[:, 40:]
        for ids in (torch.cat((tokens(seed, 40), mine)) for seed in (5, 6))
    ]
    if family == "gpt_oss":  # its experts' products round with the tokens of others
        torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-5)
    else:
        assert seen[0].equal(seen[1])


def test_tensors_of_any_family_are_in_layer_order(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["phi3"] / "config.json", tmp_path)
    names = [f"model.layers.{i}.mlp.weight" for i in range(12)]  # a file sorts 10 before 2
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert list(parameter_shapes(read_any_architecture(tmp_path))) == names


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "unheard_of"}, r"^transformers cannot build .*unheard_of"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "^transformers cannot "),
        *(
            ({"model_type": kind}, f"must be a causal language model of text, got '{kind}'")
            for kind in ("bert", "bart", "whisper")
        ),
        (
            {"model_type": "gemma3", "text_config": {"vocab_size": 64}},
            "model_type in .* must be a model of text alone .*, got 'gemma3'",
        ),
    ],
)
def test_what_the_library_cannot_build_is_refused_and_no_code_runs(
    folders: dict[str, Path], tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    known = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | values))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'witness')!r}, 'w')\nConfig = 1\n")
    with pytest.raises(ValueError, match=words) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        (
            "granitemoe",  # its files have the same matrices under other names
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            r"experts\.down_proj of the model must have the shape",
        ),
        (
            "glm4_moe",
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            r"must have nothing in its files but parameters, .* got '.*e_score_correction_bias'",
        ),
    ],
)
def test_a_family_whose_files_have_other_tensors_than_its_code_is_refused(
    tmp_path: Path, family: str, sizes: dict[str, Any], words: str
) -> None:
    write_reference(tmp_path, family, **SIZES, **sizes)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_experts_of_any_family_are_stacked_as_the_library_does_and_written_apart_again(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders["qwen2_moe"]
    model = load(source)
    hf.save(tmp_path / "out", model.named_parameters(), source_folder=source, dtype=torch.float32)
    written, read = (load_file(each / "model.safetensors") for each in (tmp_path / "out", source))
    assert "model.layers.0.mlp.experts.4.down_proj.weight" in written
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        assert written[name].equal(tensor), name


def cut(tensors: dict[str, torch.Tensor], name: str, rows: int) -> None:
    tensors[name] = tensors[name][:rows].clone()


EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop(f"{EXPERT}.2.up_proj.weight"), r"each of 5 experts, got no .*2\.up_proj"),
        (
            lambda t: t.update({f"{EXPERT}.5.up_proj.weight": t.pop(f"{EXPERT}.2.up_proj.weight")}),
            r"each of 6 experts, got no .*experts\.2\.up_proj",
        ),
        (
            lambda t: t.update(
                {f"{EXPERT}.02.up_proj.weight": t.pop(f"{EXPERT}.2.up_proj.weight")}
            ),
            r"each of 5 experts, got no .*experts\.2\.up_proj",
        ),
        (
            lambda t: cut(t, f"{EXPERT}.2.up_proj.weight", 20),
            r"2\.up_proj\.weight must have the shape \(32, 64\) of its kind, got \(20, 64\)",
        ),
        (
            lambda t: cut(t, f"{EXPERT}.0.down_proj.weight", 20),
            r"0\.down_proj\.weight must have the shape \(64, 32\) of its kind, got \(20, 32\)",
        ),
    ],
    ids=["missing", "gap", "another spelling", "short", "short down"],
)
def test_a_mixture_with_damaged_experts_is_refused_before_anything_starts(
    folders: dict[str, Path],
    tmp_path: Path,
    damage: Callable[[dict[str, torch.Tensor]], object],
    words: str,
) -> None:
    shutil.copytree(folders["qwen2_moe"], tmp_path / "damaged")
    path = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=words):
        check_checkpoint(tmp_path / "damaged", is_any=True)


def test_a_bfloat16_model_leaves_the_default_dtype_of_other_threads_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_dtype, seen = torch.set_default_dtype, []
    monkeypatch.setattr(torch, "set_default_dtype", lambda d: (seen.append(d), set_dtype(d)))
    config = TransformersConfig(compute_dtype="bfloat16")
    made = load_model(str(folders["llama"]), config, torch.device("cpu"), None, torch.bfloat16)
    assert {*seen} <= {torch.float32}
    assert {each.dtype for each in made.parameters()} == {torch.bfloat16}
