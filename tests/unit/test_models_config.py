"""Reading config.json: both spellings, real files' fields, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.model.architecture import RopeScaling, read_architecture
from tests.places import ROOT

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
    "other model": (LLAMA_3_1, {"model_type": "mixtral"}, "model_type .* one of llama, qwen2"),
    "no model type": (LLAMA_3_1, {"model_type": ...}, "model_type .* got None"),
    "strange model type": (LLAMA_3_1, {"model_type": ["llama"]}, "model_type .* one of"),
    "other head": (
        QWEN_3,
        {"architectures": ["Qwen3ForSequenceClassification"]},
        "architectures .* must be",
    ),
    "experts": (QWEN_3, {"num_experts": 8}, "num_experts .* only dense models"),
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
def test_a_missing_folder_or_file_is_named(
    name: str, text: str | None, words: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_architecture(tmp_path / name)
