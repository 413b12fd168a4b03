"""Which families of the transformers library are causal language models of text.

Owns: that choice, by the library's own tables. Does not own: families that llamarl computes itself
(`families.py`), or whether a checkpoint fits. Invariant: no model's code is imported.
"""

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
