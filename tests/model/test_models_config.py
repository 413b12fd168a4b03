"""Reading config.json: both spellings, real fields, what is refused; and `llamarl models`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli.reports import models
from llamarl.model.architecture import FAMILIES, ExpertSizes, RopeScaling, read_architecture
from llamarl.model.inventory import active_sizes, parameter_shapes
from tests.hub_server import Hub
from tests.places import CHECKPOINT, ROOT
from tests.recipe.hub_client import client_of_hub
from tests.tiny_checkpoints import CONFIG, write_checkpoint, write_reference

LLAMA_3_1, QWEN_2_5 = (  # the published files, but for what nobody reads
    json.loads((ROOT / "recipes" / recipe / "architecture" / "config.json").read_text())
    for recipe in ("llama31_8b_math", "qwen25_7b_math")
)
QWEN_3 = {  # Qwen3 0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 151936,
}


QWEN_3_MOE = {  # Qwen3 30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {  # 8x7B
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def write(folder: Path, values: dict[str, Any], **changes: Any) -> Path:
    """`values` with `changes`; a change to ... leaves the key out."""
    merged = {key: value for key, value in (values | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    return folder


def test_published_files_are_read(tmp_path: Path) -> None:
    llama = read_architecture(write(tmp_path, LLAMA_3_1))
    assert (llama.head_dim, llama.num_kv_heads, llama.rope_theta) == (128, 8, 500000.0)
    assert llama.eos_token_ids == (128001, 128008, 128009)
    assert llama.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    assert not any((llama.attention_bias, llama.output_bias, llama.qk_norm, llama.tie_embeddings))
    qwen2 = read_architecture(write(tmp_path, QWEN_2_5))
    assert (qwen2.head_dim, qwen2.attention_bias, qwen2.output_bias) == (128, True, False)
    qwen3 = read_architecture(write(tmp_path, QWEN_3))
    assert (qwen3.head_dim, qwen3.attention_bias, qwen3.qk_norm) == (128, False, True)
    assert (qwen3.rope_scaling, qwen3.tie_embeddings) == (None, True)


def test_published_mixtures_of_experts_are_read(tmp_path: Path) -> None:
    def num_parameters() -> int:
        return sum(map(math.prod, parameter_shapes(architecture).values()))

    def num_active() -> int:
        layers = range(architecture.num_layers)
        num_vocabulary = 2 * architecture.vocab_size * architecture.hidden_size
        sizes = (sum(active_sizes(architecture, layer).values()) for layer in layers)
        return num_vocabulary + architecture.hidden_size + sum(sizes)

    architecture = read_architecture(write(tmp_path, QWEN_3_MOE))
    assert (num_parameters(), num_active()) == (30_532_122_624, 3_353_032_704)
    assert architecture.sparse_layers == tuple(range(48))
    sizes = architecture.experts
    assert sizes == ExpertSizes(
        num_experts=128, num_chosen=8, intermediate_size=768, normalized=True
    )
    assert read_architecture(write(tmp_path, QWEN_3_MOE | {"norm_topk_prob": False})).experts == (
        dataclasses.replace(sizes, normalized=False)
    )
    renamed = QWEN_3_MOE | {"num_local_experts": 128}  # as transformers 5 writes it
    del renamed["num_experts"]
    assert read_architecture(write(tmp_path, renamed)) == architecture
    some = read_architecture(
        write(tmp_path, QWEN_3_MOE | {"mlp_only_layers": [3], "decoder_sparse_step": 2})
    )
    assert some.sparse_layers == tuple(i for i in range(48) if i % 2 and i != 3)
    architecture = read_architecture(write(tmp_path, MIXTRAL))
    assert (num_parameters(), num_active()) == (46_702_792_704, 12_879_925_248)
    mixtral = architecture.experts
    assert mixtral is not None
    assert (mixtral.intermediate_size, mixtral.normalized) == (14336, True)


def test_old_and_new_spelling_mean_the_same(tmp_path: Path) -> None:
    expected = read_architecture(write(tmp_path, LLAMA_3_1))
    inner = dict(LLAMA_3_1["rope_scaling"])
    new = inner | {"rope_theta": 500000.0}
    written = write(tmp_path, LLAMA_3_1, rope_theta=..., rope_scaling=..., rope_parameters=new)
    assert read_architecture(written) == expected
    inner["type"] = inner.pop("rope_type")
    assert read_architecture(write(tmp_path, LLAMA_3_1, rope_scaling=inner)) == expected
    both = write(tmp_path, LLAMA_3_1, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert read_architecture(both) == expected  # as in transformers, the older key wins


def test_what_old_files_leave_out_has_its_known_default(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("rope_theta", "rope_scaling", "num_key_value_heads", "mlp_bias"), ...)
    architecture = read_architecture(write(tmp_path, LLAMA_3_1, **left_out))
    assert architecture.rope_theta == 10000.0
    assert architecture.num_kv_heads == architecture.num_heads


def test_the_ends_of_a_sequence_come_from_both_files(tmp_path: Path) -> None:
    write(tmp_path, LLAMA_3_1, eos_token_id=128001)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128009]}')
    assert read_architecture(tmp_path).eos_token_ids == (128001, 128009)
    write(tmp_path, LLAMA_3_1, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    assert read_architecture(tmp_path).eos_token_ids == ()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other model": (LLAMA_3_1, {"model_type": "gpt2"}, "model_type .* one of llama, qwen2"),
    "no model type": (LLAMA_3_1, {"model_type": ...}, "model_type .* got None"),
    "strange model type": (LLAMA_3_1, {"model_type": ["llama"]}, "model_type .* one of"),
    "other head": (
        QWEN_3,
        {"architectures": ["Qwen3ForSequenceClassification"]},
        "architectures .* must be",
    ),
    "experts": (QWEN_3, {"num_experts": 8}, "num_experts .* be absent of a dense qwen3"),
    "more choices than experts": (
        QWEN_3_MOE,
        {"num_experts_per_tok": 129},
        "num_experts_per_tok .* be at most num_experts, 128, got 129",
    ),
    "no choice": (QWEN_3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok .* from 1"),
    "dense layers as text": (QWEN_3_MOE, {"mlp_only_layers": "2"}, "mlp_only_layers .* list"),
    "quantised": (
        LLAMA_3_1,
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config .* quantised",
    ),
    "sliding window": (QWEN_2_5, {"use_sliding_window": True}, "use_sliding_window .* be false"),
    "sliding layers": (
        QWEN_3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types .* full_attention",
    ),
    "yarn": (QWEN_3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "got 'yarn'"),
    "linear": (LLAMA_3_1, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "got 'linear'"),
    "partial rotation": (LLAMA_3_1, {"partial_rotary_factor": 0.5}, "partial_rotary_factor .* 1"),
    "rotation by layer": (
        QWEN_3,
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "hold for all layers alike",
    ),
    "rope scaling without factor": (
        LLAMA_3_1,
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "factor .* number from 1 to 1e.06, got None",
    ),
    "activation": (LLAMA_3_1, {"hidden_act": "gelu"}, "hidden_act .* be silu"),
    "head ratio": (LLAMA_3_1, {"num_key_value_heads": 5}, "num_key_value_heads .* divide"),
    "odd head_dim": (LLAMA_3_1, {"head_dim": 65}, "head_dim .* be even"),
    "missing size": (LLAMA_3_1, {"hidden_size": ...}, "hidden_size .* whole number .* None"),
    "too many layers": (LLAMA_3_1, {"num_hidden_layers": 10**9}, "num_hidden_layers .* whole"),
    "endless number": (LLAMA_3_1, {"rms_norm_eps": float("inf")}, "rms_norm_eps .* number from"),
    "vanishing base": (LLAMA_3_1, {"rope_theta": 1e-300}, "rope_theta .* number from 1 to 1e.15,"),
    "vanishing epsilon": (LLAMA_3_1, {"rms_norm_eps": 1e-300}, "rms_norm_eps .* got 1e-300"),
    "vanishing factor": (
        LLAMA_3_1,
        {"rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 1e-300}},
        "factor .* got 1e-300",
    ),
    "text as size": (LLAMA_3_1, {"vocab_size": "many"}, "vocab_size .* got 'many'"),
    "text as flag": (LLAMA_3_1, {"tie_word_embeddings": "yes"}, "true or false, got 'yes'"),
    "end outside the vocabulary": (LLAMA_3_1, {"vocab_size": 128_000}, "eos_token_id .* 128000"),
    "end as text": (LLAMA_3_1, {"eos_token_id": "</s>"}, "eos_token_id .* got '</s>'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    values, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        read_architecture(write(tmp_path, values, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("nowhere", None, r"existing folder, got '.*nowhere'"),
        ("a" * 5000, None, "existing folder, got"),
        ("", None, r"must hold config\.json"),
        ("", '{"model_type":', "must be JSON, got a damaged file"),
        ("", "[]", "must hold a JSON object, got list"),
    ],
    ids=["nowhere", "long name", "no file", "damaged file", "list"],
)
def test_a_missing_file_is_named(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_architecture(tmp_path / name)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_hub(tmp_path) as hub:
        yield hub


def rows_of(checkpoint: str | Path) -> dict[str, str]:
    _, *lines = models([str(checkpoint)]).splitlines()
    return {line[2:24].strip(): line[24:] for line in lines}


def test_all_families_are_listed() -> None:
    said = models([])
    for name, family in FAMILIES.items():
        assert f"  {name:<12}{family.model_class}\n" in said
    listed = {name.strip() for name in said.replace("\n", " ").split(",")}
    assert {"gemma2", "gpt2", "mistral", "gemma3_text"} <= listed
    others = {"bert", "roberta", "bart", "whisper", "marian", "musicgen", "pegasus", "xlm-roberta"}
    assert not others & listed, "no causal language models"
    assert f"transformers {importlib.metadata.version('transformers')}" in said


def test_a_checkpoint_of_our_families_runs_everywhere() -> None:
    found = rows_of(CHECKPOINT)
    shapes = parameter_shapes(read_architecture(CHECKPOINT)).values()
    num_parameters = sum(math.prod(shape) for shape in shapes)
    assert found["family"] == "llama (LlamaForCausalLM)"
    assert found["parameters"] == f"{num_parameters:,}"
    size = (CHECKPOINT / "model.safetensors").stat().st_size
    assert found["weights"] == f"{size:,} bytes in 1 safetensors file"
    assert found["trainer=native"] == found["generator=embedded"] == "yes"
    assert found["trainer=transformers"].startswith("yes")
    assert found["generator=vllm"].startswith("yes")


def test_a_checkpoint_of_another_family_runs_with_transformers(tmp_path: Path) -> None:
    model = write_reference(tmp_path, "olmo2")
    found = rows_of(tmp_path)
    assert found["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert found["trainer=native"].startswith("no: model_type in ")
    assert found["generator=embedded"].startswith("no")
    assert found["trainer=transformers"].startswith("yes")


@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        ({"quantization_config": {"bits": 4}}, "trainer=transformers", "no: its weights are quant"),
        ({"model_type": "x", "auto_map": {"A": "b"}}, "trainer=transformers", "no: its code is in"),
        ({"model_type": "x"}, "trainer=transformers", "no: transformers "),
        ({"model_type": "x", "architectures": ["X"]}, "generator=vllm", "not known: |no: vLLM"),
        ({"vocab_size": 63}, "trainer=native", "no: model.embed_tokens.weight in "),
        ({"hidden_act": "gelu"}, "trainer=native", "no: hidden_act in "),
    ],
)
def test_what_does_not_run_has_its_reason(
    tmp_path: Path, changes: dict[str, Any], row: str, words: str
) -> None:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | changes))
    assert rows_of(tmp_path / "model")[row].startswith(tuple(words.split("|")))


def test_vllm_is_asked_by_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = tmp_path / "vllm" / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text('MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert rows_of(CHECKPOINT)["generator=vllm"] == "yes"
    registry.write_text("MODELS = {}")
    assert rows_of(CHECKPOINT)["generator=vllm"] == "no: vLLM has no LlamaForCausalLM"


def test_weights_that_are_not_here_are_said_to_be(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    found = rows_of(tmp_path)
    assert found["weights"] == "0 bytes in 0 safetensors files, not all of them here"
    assert found["trainer=native"] == "yes"


def test_a_name_is_described_without_its_weights(hub: Hub) -> None:
    found = rows_of("hf:org/tiny")
    size = (CHECKPOINT / "model.safetensors").stat().st_size
    assert found["weights"] == f"{size:,} bytes in 1 safetensors file, not all of them here"
    assert found["parameters"] == rows_of(CHECKPOINT)["parameters"]
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/none"], "the checkpoint must be an existing folder, got '/none'"),
        (["hf:none"], "CHECKPOINT must be hf:ORG/NAME or"),
        (["hf:org/none"], "CHECKPOINT must be a model of the Hub, got hf:org/none"),
        (["a", "b"], "CHECKPOINT must be one folder or name"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(hub: Hub, arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=" must ") as caught:
        models(arguments)
    assert words in str(caught.value)
