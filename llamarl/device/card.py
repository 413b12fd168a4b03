"""Kinds of GPU by name: any card, a size, or a model with its size.

Owns: what a `cluster.gpu` means, and whether a card is of that kind. Does not own: what a kind can
do (`planner/hardware.py`). Invariant: a kind's words are whole words of the card's name, so a GH200
is no H20 and a GB200 no B200. Imports no torch.
"""

import re

AUTO = "auto"  # the card that a process finds
SIZE = re.compile(r"(\d+(?:\.\d+)?)GB")
SIZE_TOLERANCE = 0.1  # GPUs sold with 80 GB have 79e9 to 85e9 bytes
OTHER_CARDS = {"D", "TI", "SUPER", "LAPTOP", "MIG", "ADA"}
"""Words that make another card of a name: an RTX 4090 D is no RTX 4090."""


def size_bytes(kind: str) -> float | None:
    """The memory of a kind that is only a size, such as 24GB, in bytes; None for others."""
    found = SIZE.fullmatch(kind)
    return float(found[1]) * 1e9 if found else None


def is_kind(kind: str, name: str, memory_bytes: int) -> bool:
    """Whether a card with this name and memory is of the kind. "" and AUTO are any card; a size is
    any card with as much memory, or more."""
    if kind in ("", AUTO):
        return True
    least_bytes = size_bytes(kind)
    if least_bytes is not None:
        return memory_bytes >= least_bytes * (1 - SIZE_TOLERANCE)
    model, _, size = kind.rpartition("-")
    wanted = set(model.upper().split("-"))
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    is_same = wanted <= words and not (words - wanted) & OTHER_CARDS
    wanted_bytes = size_bytes(size)
    assert wanted_bytes is not None, kind
    return is_same and abs(memory_bytes / wanted_bytes - 1) <= SIZE_TOLERANCE
