"""A rank's boxes of a checkpoint, read into its flat memory.

Owns: reading only what the rank holds. Does not own: which boxes these are (`parameters.py`,
`vllm/recorder.py`) or what a checkpoint must hold (`models/inventory.py`). Invariant: no memory is
taken beside the flat one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from llamarl.models.architecture import Architecture
from llamarl.models.inventory import locate
from llamarl.models.safetensors_file import FileBox, read_boxes
from llamarl.weights.layout.boxes import ParameterLayout


def load_boxes(
    parameters: Mapping[str, ParameterLayout],
    flat: Tensor,
    folder: str,
    architecture: Architecture,
) -> None:
    """Copy these boxes of the checkpoint into their places in `flat`, casting each.

    ValueError if the checkpoint is missing, damaged, of another architecture, or holds numbers that
    are not finite.
    """

    def boxes(name: str) -> Iterator[FileBox]:
        for box in parameters[name].boxes:
            size = tuple(b - a for a, b in zip(box.start, box.stop, strict=True))
            yield box.start, flat.as_strided(size, box.strides, box.offset)

    read_boxes(locate(Path(folder), architecture), boxes)
