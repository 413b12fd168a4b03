"""The model families, and the architecture of a checkpoint as its config.json describes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llamarl.core.extensions import load_extensions
from llamarl.core.files import read_object
from llamarl.model.safetensors_file import IGNORED_SUFFIX, read_header, weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """A family's mixture of experts, as its files describe it.

    `block` is the module that holds router and experts, `matrices` are the gate, up and down
    matrices of each expert. `size_key` of config.json is the intermediate size of one expert; the
    chosen experts' gates are divided by their sum always, never, or if the flag `normalized` is
    set."""

    block: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    size_key: str = "moe_intermediate_size"
    normalized: str | bool = "norm_topk_prob"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The meaning of one `model_type` of config.json.

    `model_class` is the class of transformers and vLLM, as in `architectures`. The biases, of q, k
    and v (`attention_bias`), of the attention's output and of the feed-forward, exist always,
    never, or if the flag of config.json with this name is set. `qk_norm`: q and k are normalised,
    each head by itself or (`norms_all_heads`) all together. `head_dim` and `rope_theta` are the
    defaults if the file has none (head_dim None: hidden size over heads). `empty_keys` must be
    false or absent in the file, for instance because attention is always full. `experts` is None in
    a dense family."""

    model_class: str
    attention_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    head_dim: int | None = None
    rope_theta: float = 10000.0
    empty_keys: tuple[str, ...] = ("use_sliding_window",)
    experts: ExpertFamily | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(
        model_class="LlamaForCausalLM",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen2": Family(model_class="Qwen2ForCausalLM", attention_bias=True),
    "qwen3": Family(
        model_class="Qwen3ForCausalLM",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
    ),
    "qwen3_moe": Family(
        model_class="Qwen3MoeForCausalLM",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        experts=ExpertFamily(),
    ),
    "mixtral": Family(
        model_class="MixtralForCausalLM",
        rope_theta=1e6,
        empty_keys=("sliding_window",),
        experts=ExpertFamily(
            block="block_sparse_moe",
            matrices=("w1", "w3", "w2"),
            size_key="intermediate_size",
            normalized=True,
        ),
    ),
    "olmoe": Family(
        model_class="OlmoeForCausalLM",
        attention_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        norms_all_heads=True,
        empty_keys=("clip_qkv",),
        experts=ExpertFamily(size_key="intermediate_size"),
    ),
}
"""The families by `model_type`."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [outputs, inputs] of a layer; `Architecture.size` turns these names into numbers.

    `bias` is the field of Architecture that says whether the matrix has one; `split` the dimension
    that tensor-parallel ranks divide.
    """

    outputs: str
    inputs: str
    bias: str
    split: int


LINEARS: dict[str, Linear] = {
    "self_attn.q_proj": Linear("queries", "hidden", "attention_bias", 0),
    "self_attn.k_proj": Linear("keys", "hidden", "attention_bias", 0),
    "self_attn.v_proj": Linear("keys", "hidden", "attention_bias", 0),
    "self_attn.o_proj": Linear("hidden", "queries", "output_bias", 1),
    "mlp.gate_proj": Linear("intermediate", "hidden", "mlp_bias", 0),
    "mlp.up_proj": Linear("intermediate", "hidden", "mlp_bias", 0),
    "mlp.down_proj": Linear("hidden", "intermediate", "mlp_bias", 1),
}
"""The matrices of a layer, by name."""

FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Matrices that an engine multiplies with at once, side by side along their outputs."""

ROUTER, GATE_UP, DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""The parameters of a layer's mixture: the router [experts, hidden], and all experts' matrices
stacked, [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate]."""

VOCABULARY = ("embed_tokens", "lm_head")
"""Matrices [vocabulary, hidden]; ranks divide the vocabulary."""

_SPLITS = {
    **{name.rpartition(".")[2]: linear.split for name, linear in LINEARS.items()},
    **dict.fromkeys(VOCABULARY, 0),
}


LORA_A, LORA_B = "lora_A", "lora_B"
"""The modules of an adapter, beside the weight of its matrix: [rank, inputs], [outputs, rank]."""


def split_dimension(name: str) -> int | None:
    """Return the dimension of the parameter `name` that tensor-parallel ranks divide; None if each
    rank holds all of it: norms, routers, biases of matrices that are divided along their inputs,
    and the half of an adapter that its matrix's divided dimension does not touch. Of stacked
    experts it is the first, as a rank holds whole ones."""
    if is_stacked(name):
        return 0
    *_, outer, module, kind = ("", *name.split("."))
    if module in (LORA_A, LORA_B):
        split = _SPLITS.get(outer)
        return split if split == (1 if module == LORA_A else 0) else None
    split = _SPLITS.get(module)
    return None if split == 1 and kind == "bias" else split


def is_stacked(name: str) -> bool:
    """Return whether this parameter holds matrices of all experts of a layer."""
    return name.endswith((f".{GATE_UP}", f".{DOWN}"))


def is_adapter(name: str) -> bool:
    """Return whether this parameter is one of an adapter's two."""
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight"))


load_extensions("llamarl.families")


OTHER_HEADS = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
)
"""Tables of families that see the tokens behind a token (BERT), or answer by a second half (BART,
Whisper): the library makes a causal model of parts of them, which their checkpoints are not."""


def causal_families() -> set[str]:
    """Return the causal families by model_type, as far as the installed version knows them."""
    from transformers.models.auto import modeling_auto  # seconds, which others save

    others = [getattr(modeling_auto, name, {}) for name in OTHER_HEADS]
    return {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.difference(*others)


NUMBERS = {  # wider than any model's; beyond them float32 computes something else, or NaN
    "rms_norm_eps": (1e-15, 1.0),
    "rope_theta": (1.0, 1e15),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}
MAX_SIZES = {  # far above any model: the shapes of larger ones alone would fill the memory
    "vocab_size": 10**8,
    "hidden_size": 10**6,
    "intermediate_size": 10**7,
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**5,
    "max_position_embeddings": 10**10,
    "original_max_position_embeddings": 10**10,
    "moe_intermediate_size": 10**7,
    "num_experts": 2**15,  # their numbers fit int16
    "num_local_experts": 2**15,
    "num_experts_per_tok": 2**15,
    "decoder_sparse_step": 10**4,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies; lengths in tokens.

    Wavelengths below `original_max_positions / high_freq_factor` stay, those above
    `original_max_positions / low_freq_factor` grow by `factor`, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The mixture of experts in each layer but the `dense_layers`, which have a feed-forward.

    A token's gates are the router's probabilities of its `num_chosen` likeliest experts, divided by
    their sum if `normalized`."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalized: bool
    dense_layers: tuple[int, ...] = ()

    @property
    def index_dtype(self) -> str:
        """The dtype of an expert's number in a record of routes."""
        return "uint8" if self.num_experts <= 256 else "int16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder.

    `head_dim` need not be hidden_size / num_heads; `num_kv_heads` divides `num_heads`.
    `attention_bias`: q, k and v have biases; `output_bias`: the attention output has; `mlp_bias`:
    the three of the feed-forward have. `qk_norm`: q and k are normalised before the rotation, each
    head by itself or (`norms_all_heads`) all together. `eos_token_ids` are those of config.json and
    generation_config.json. `experts` is None in a dense model.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norms_all_heads: bool = False
    eos_token_ids: tuple[int, ...]
    experts: ExpertSizes | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have a mixture of experts in place of a feed-forward."""
        if self.experts is None:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.experts.dense_layers)

    @property
    def active_channels(self) -> int:
        """The most intermediate channels of a layer that a token meets: those of its experts."""
        if self.experts is None:
            return self.intermediate_size
        of_experts = self.experts.num_chosen * self.experts.intermediate_size
        return max(of_experts, self.intermediate_size * bool(self.experts.dense_layers))

    @property
    def model_class(self) -> str:
        """The name of the model's class in transformers and vLLM."""
        return FAMILIES[self.model_type].model_class

    def size(self, name: str) -> int:
        """Return the size of a dimension that `LINEARS` names."""
        sizes = {
            "hidden": self.hidden_size,
            "queries": self.num_heads * self.head_dim,
            "keys": self.num_kv_heads * self.head_dim,
            "intermediate": self.intermediate_size,
        }
        return sizes[name]


FrozenModels = Mapping[str, Architecture]
"""The models that run stages of a recipe's own, by stage; the reference of a KL term is not among
them."""
NO_MODELS: FrozenModels = MappingProxyType({})


def read_architecture(folder: str | Path) -> Architecture:
    """Read `folder`/config.json.

    Raises ValueError if the folder or file is missing or damaged, or if a setting is not supported
    (sliding window, quantised weights, other rotary types, ...)."""
    values, eos_token_ids = read_settings(folder)
    fields = Fields(Path(folder) / "config.json", values)
    _refuse_unsupported(fields)
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    per_head = hidden_size // num_heads if hidden_size % num_heads == 0 else None
    family = FAMILIES[values["model_type"]]
    architecture = Architecture(
        model_type=values["model_type"],
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", family.head_dim or per_head),
        max_positions=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        **_rope(fields, family),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.given(family.attention_bias),
        output_bias=fields.given(family.output_bias),
        mlp_bias=fields.given(family.mlp_bias),
        qk_norm=family.qk_norm,
        norms_all_heads=family.norms_all_heads,
        eos_token_ids=eos_token_ids,
        experts=_experts(fields, family.experts),
    )
    _check_sizes(fields, architecture)
    return architecture


def read_settings(folder: str | Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return config.json of the checkpoint, and the end-of-sequence ids of that and of
    generation_config.json. Raises ValueError if the folder or a file is missing or damaged."""
    folder = Path(folder)
    if not os.path.isdir(folder):  # False also for a name that no file may have
        raise ValueError(f"the checkpoint must be an existing folder, got {str(folder)!r}")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"the checkpoint folder must hold config.json, got {str(folder)!r} without"
        )
    values = read_object(path)
    generation = folder / "generation_config.json"
    more = read_object(generation) if generation.exists() else {}
    eos = _ids(values.get("eos_token_id")) + _ids(more.get("eos_token_id"))
    return values, tuple(dict.fromkeys(eos))


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object; every failure names the file and the key."""

    path: Path
    values: Mapping[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= MAX_SIZES[key]:
            raise self.error(key, f"be a whole number from 1 to {MAX_SIZES[key]}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.values.get(key)
        value = default if value is None else value
        least, most = NUMBERS[key]
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.error(key, f"be a number from {least:g} to {most:g}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value not in (None, False, True):
            raise self.error(key, "be true or false", value)
        return bool(value)

    def given(self, value: str | bool) -> bool:
        """Return a family's fixed value, or the flag that it names."""
        return self.flag(value) if isinstance(value, str) else value

    def error(self, key: str, must: str, got: object) -> ValueError:
        return ValueError(f"{key} in {self.path} must {must}, got {got!r}")


def _refuse_unsupported(fields: Fields) -> None:
    values = fields.values
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        others = "others train, without a forecast, with trainer=transformers generator=vllm"
        must = f"be one of {known} ({others})"
        raise fields.error("model_type", must, model_type)
    family = FAMILIES[model_type]
    experts = EXPERTS if family.experts is None else ()
    for key, allowed, must in (
        ("architectures", ([family.model_class], None, []), f"be [{family.model_class!r}]"),
        ("quantization_config", (None,), "be absent: weights cannot be quantised"),
        ("hidden_act", ("silu",), "be silu"),
        *((key, (None, False), "be false or absent") for key in family.empty_keys),
        *((key, (None, False), f"be absent of a dense {model_type}") for key in experts),
    ):
        if (value := values.get(key, allowed[0])) not in allowed:  # 0 is False
            raise fields.error(key, must, value)
    layer_types = values.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise fields.error("layer_types", "be full_attention throughout", sorted(set(layer_types)))


def _experts(fields: Fields, family: ExpertFamily | None) -> ExpertSizes | None:
    """Return the mixture of experts that the file describes; None if all layers are dense."""
    if family is None:
        return None
    key = next((key for key in EXPERTS if key in fields.values), EXPERTS[0])
    num_experts, num_chosen = fields.size(key), fields.size("num_experts_per_tok")
    if num_chosen > num_experts:
        must = f"be at most {key}, {num_experts}"
        raise fields.error("num_experts_per_tok", must, num_chosen)
    num_layers = fields.size("num_hidden_layers")
    every, dense = fields.size("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise fields.error("mlp_only_layers", "be a list of layers' numbers", dense)
    layers = tuple(i for i in range(num_layers) if i in dense or (i + 1) % every)
    sizes = ExpertSizes(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.size(family.size_key),
        normalized=fields.given(family.normalized),
        dense_layers=layers,
    )
    return None if len(layers) == num_layers else sizes


def _rope(fields: Fields, family: Family) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` from either spelling.

    transformers 5 writes one object `rope_parameters` with the base inside; older files have
    `rope_theta` beside `rope_scaling` (whose type key may be `type`). As in transformers,
    `rope_scaling` wins if both exist."""
    values = fields.values
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    inner = values.get(key) or {}
    if not isinstance(inner, dict):
        raise fields.error(key, "be an object", inner)
    rope = Fields(fields.path, inner)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise fields.error(key, "have rope_type default or llama3", kind)
    for place in (values, inner):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            got = place["partial_rotary_factor"]
            raise fields.error("partial_rotary_factor", "be 1", got)
    nested = [name for name, value in inner.items() if isinstance(value, dict)]
    if nested:
        raise fields.error(key, "hold for all layers alike", nested)
    theta = rope.number("rope_theta", fields.number("rope_theta", family.rope_theta))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    # transformers lets the outer key win, then the inner one, then the context length.
    outer = values.get("original_max_position_embeddings")
    original = (
        fields.size("original_max_position_embeddings")
        if outer is not None
        else rope.size("original_max_position_embeddings", fields.size("max_position_embeddings"))
    )
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error("high_freq_factor", "be above low_freq_factor", scaling.high_freq_factor)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_sizes(fields: Fields, architecture: Architecture) -> None:
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"divide num_attention_heads ({heads})", kv_heads)
    if architecture.head_dim % 2:
        raise fields.error("head_dim", "be even (rotary pairs)", architecture.head_dim)
    outside = [i for i in architecture.eos_token_ids if not 0 <= i < architecture.vocab_size]
    if outside:
        raise fields.error(
            "eos_token_id", f"lie within the vocabulary of {architecture.vocab_size}", outside
        )


def _ids(value: object) -> list[int]:
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in values):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return values


UNBOUNDED_POSITIONS = 2**24  # as many as generator.max_model_len may be
VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class OtherArchitecture:
    """The architecture of a family that we do not know. `model_class` is the first of config.json's
    `architectures`; `settings` a digest of what the file says about the computation; `shapes` has
    the shapes of the files' tensors, by name."""

    model_type: str
    model_class: str
    vocab_size: int
    max_positions: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    settings: str
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)


AnyArchitecture = Architecture | OtherArchitecture


def read_any_architecture(folder: str | Path) -> AnyArchitecture:
    """Return the architecture of a family that we know, if nothing in config.json is unsupported;
    else an OtherArchitecture.

    Raises ValueError if the folder holds no checkpoint of a language model."""
    try:
        return read_architecture(folder)
    except ValueError:
        return _read(Path(folder))


def _read(folder: Path) -> OtherArchitecture:
    values, eos_token_ids = read_settings(folder)
    fields = Fields(folder / "config.json", values)
    for key in ("model_type", "architectures"):
        if not values.get(key):
            raise fields.error(key, "be given", values.get(key))
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        raise fields.error("quantization_config", "be absent: weights cannot be quantised", method)
    if "text_config" in values:
        must = "be a model of text alone (this one's text_config is a part of it)"
        raise fields.error("model_type", must, values["model_type"])
    tie_embeddings = fields.flag("tie_word_embeddings")
    shapes = {
        name: entry.shape
        for path in weight_files(folder)
        for name, entry in read_header(path).items()
        if not (tie_embeddings and name == "lm_head.weight") and not name.endswith(IGNORED_SUFFIX)
    }
    kept = {key: value for key, value in values.items() if key not in VOLATILE}
    return OtherArchitecture(
        model_type=str(values["model_type"]),
        model_class=str(values["architectures"][0]),
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("max_position_embeddings", UNBOUNDED_POSITIONS),
        tie_embeddings=tie_embeddings,
        eos_token_ids=eos_token_ids,
        settings=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        shapes={name: shapes[name] for name in sorted(shapes, key=_place)},
    )


def _place(name: str) -> list[str]:
    """Return a key that sorts layers by number, so that an export holds one file's tensors at a
    time."""
    return [part.zfill(6) if part.isdigit() else part for part in name.split(".")]
