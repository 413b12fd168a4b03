"""A rank's boxes of a checkpoint, read into its flat memory.

Owns: reading only what the rank holds. Does not own: which boxes these are (`parameters.py`,
`vllm/recorder.py`) or what a checkpoint must hold (`models/inventory.py`). Invariant: of each file
only the boxes' bytes are read, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from llamarl.models.architecture import Architecture
from llamarl.models.inventory import locate, parameter_shapes
from llamarl.models.safetensors_file import FileReader
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
    names_by_file: dict[Path, list[str]] = {}
    expected = parameter_shapes(architecture)
    for name, path in locate(Path(folder), expected, architecture).items():
        names_by_file.setdefault(path, []).append(name)
    for path, names in names_by_file.items():
        with FileReader(path) as file:
            for name in names:
                for box in parameters[name].boxes:
                    size = tuple(b - a for a, b in zip(box.start, box.stop, strict=True))
                    target = flat.as_strided(size, box.strides, box.offset)
                    file.read(name, box.start, target)
                    # A sum is cheap, and finite numbers may still overflow it.
                    if not target.sum().isfinite() and not target.isfinite().all():
                        raise ValueError(
                            f"{name} in {path} must hold finite numbers, got NaN or inf"
                        )
