"""The model families: what differs between them, and the parameters that all of them have.

Owns: what a `model_type` implies beyond config.json's sizes; for each parameter its name, its shape
by sizes, and how tensor-parallel ranks divide it; which families of the transformers library are
causal language models of text. Does not own: reading config.json
(`architecture.py`) or the computation (`transformer.py`, `generation/decoder.py`). Invariant: no
other module depends on the family; trainer, embedded engine, reshard plan and planner all read
these tables. Free of torch, because the controller's process checks checkpoints.
"""

from dataclasses import dataclass

from llamarl.extensions import load_extensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one `model_type` of config.json means.

    `model_class` is the class of transformers and vLLM, as in `architectures`. The biases, of q, k
    and v (`attention_bias`), of the attention's output and of the feed-forward, exist always,
    never, or if the flag of config.json with this name is set. `qk_norm`: q and k are normalised
    per head. `head_dim` is the default if the file has none (None: hidden size over heads).
    `window_key` must be false or absent in the file, because attention is always full.
    """

    model_class: str
    attention_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window_key: str = "use_sliding_window"


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
}
"""By `model_type`."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [outputs, inputs] of a layer; `inventory.py` turns the names of sizes into numbers.

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

VOCABULARY = ("embed_tokens", "lm_head")
"""Matrices [vocabulary, hidden]; ranks divide the vocabulary."""

_SPLITS = {
    **{name.rpartition(".")[2]: linear.split for name, linear in LINEARS.items()},
    **dict.fromkeys(VOCABULARY, 0),
}


LORA_A, LORA_B = "lora_A", "lora_B"
"""The modules of an adapter, beside the weight of its matrix: [rank, inputs], [outputs, rank]."""


def split_dimension(name: str) -> int | None:
    """The dimension of the parameter `name` that tensor-parallel ranks divide; None if each rank
    holds all of it: norms, biases of matrices that are divided along their inputs, and the half of
    an adapter that its matrix's divided dimension does not touch."""
    *_, outer, module, kind = ("", *name.split("."))
    if module in (LORA_A, LORA_B):
        split = _SPLITS.get(outer)
        return split if split == (1 if module == LORA_A else 0) else None
    split = _SPLITS.get(module)
    return None if split == 1 and kind == "bias" else split


def is_adapter(name: str) -> bool:
    """Whether this parameter is one of an adapter's two."""
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight"))


load_extensions("llamarl.families")


OTHER_HEADS = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
)
"""Tables of families that see what comes after a token (BERT), or answer by a second half (BART,
Whisper): the library makes a causal model of parts of them, which their checkpoints are not."""


def causal_families() -> set[str]:
    """By model_type, as far as the installed version knows them."""
    from transformers.models.auto import modeling_auto  # seconds, which others save

    others = [getattr(modeling_auto, name, {}) for name in OTHER_HEADS]
    return {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.difference(*others)
