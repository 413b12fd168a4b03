"""Which sizes of a checkpoint the tensor-parallel ranks must divide.

Owns: the check, for trainer and embedded engine alike. Does not own: what vLLM can divide
(`generation/vllm/limits.py`) or how anything is split (`parallelize.py`). Invariant: torch-free,
because the controller's process asks before any other process starts.
"""

from __future__ import annotations

from llamarl.config import EmbeddedConfig, GeneratorConfig, TrainerConfig
from llamarl.models.architecture import Architecture


def check_parallel(
    architecture: Architecture, trainer: TrainerConfig, generator: GeneratorConfig
) -> None:
    """ValueError, in one line, unless every tensor-parallel rank gets an equal share."""
    check_split("trainer.tensor_parallel", trainer.tensor_parallel, architecture)
    if isinstance(generator, EmbeddedConfig):
        check_split("generator.num_ranks", generator.num_ranks, architecture)


def check_split(name: str, num_ranks: int, architecture: Architecture) -> None:
    """ValueError, in one line, unless `num_ranks`, which `name` says, get equal shares."""
    a = architecture
    sizes = {
        "attention heads": a.num_heads,
        "key-value heads": a.num_kv_heads,
        "intermediate channels": a.intermediate_size,
        "tokens of the vocabulary": a.vocab_size,
    }
    if any(size % num_ranks for size in sizes.values()):
        said = ", ".join(f"{size} {what}" for what, size in sizes.items())
        raise ValueError(f"{name} must divide the checkpoint's {said}, got {num_ranks}")
