"""A rank's weights from a checkpoint, cast or quantised, into its flat memory.

Owns: which parts of the files a rank reads. Does not own: the files
(`models/safetensors_file.py`) or where a parameter lies (`parameters.py`, `vllm/recorder.py`).
Invariant: what lies in the memory afterwards is what a publish of the same checkpoint would have
written, bit for bit.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llamarl.generation.parameters import view_box
from llamarl.models.adapter_inventory import locate_adapter, parameter_of
from llamarl.models.inventory import locate
from llamarl.models.other_architecture import AnyArchitecture
from llamarl.models.safetensors_file import FileBox, read_boxes
from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.layout.boxes import Box, ParameterLayout
from llamarl.weights.layout.formats import Format
from llamarl.weights.layout.quantized_parameters import QuantizedParameter, quantized_parameters
from llamarl.weights.quantization.frozen_sums import frozen_sums
from llamarl.weights.quantization.rounding import quantize, row_maxima, scales_of


def load_boxes(
    parameters: Mapping[str, ParameterLayout],
    flat: Tensor,
    folder: str,
    architecture: AnyArchitecture,
    format_: Format | None = None,
    rounded_to: torch.dtype = torch.float32,
) -> None:
    """Copy a rank's boxes of the checkpoint into their places in `flat`, casting each, and
    quantising what `parameters` have in a format; all after rounding to `rounded_to`.

    ValueError if the checkpoint is missing, damaged, of another architecture, or holds numbers that
    are not finite.
    """
    files = locate(Path(folder), architecture)

    def boxes(name: str) -> list[FileBox]:
        layout = parameters.get(name)
        found = () if layout is None else layout.boxes
        return [(box.start, view_box(flat, layout, box)) for box in found if layout is not None]

    read_boxes(files, boxes)
    for layout in parameters.values():
        if getattr(torch, layout.dtype) == torch.float32 != rounded_to:
            for box in layout.boxes:
                _round(view_box(flat, layout, box), rounded_to)
    if format_ is None:
        return
    sharing: dict[str, list[QuantizedParameter]] = {}
    for each in quantized_parameters(files, format_):
        if each.values in parameters:
            sharing.setdefault(each.scales, []).append(each)
    for scales, parts in sharing.items():
        shards = {part.base: _rows(part, parameters[part.values], files) for part in parts}
        for _, matrix in shards.values():
            _round(matrix, rounded_to)
        _write_scales(flat, parameters[scales], shards, format_)
        for part in parts:
            start, matrix = shards[part.base]
            _write_values(flat, parameters, part, start, matrix)


def _round(values: Tensor, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        values.copy_(values.to(dtype))


def load_adapter_boxes(
    parameters: Mapping[str, ParameterLayout], flat: Tensor, folder: str
) -> None:
    """Copy a rank's boxes of an adapter's files into their places in `flat`, casting each; raises
    as `load_boxes`."""
    shapes = {name: layout.shape for name, layout in parameters.items()}

    def boxes(name: str) -> list[FileBox]:
        layout = parameters[parameter_of(name)]
        return [(box.start, view_box(flat, layout, box)) for box in layout.boxes]

    read_boxes(locate_adapter(Path(folder), shapes), boxes)


def sums_of_boxes(
    parameters: Mapping[str, ParameterLayout], flat: Tensor, rank: int, num_ranks: int
) -> Fingerprints:
    """The sums of what lies in `flat`, for one of a replica's ranks. What several ranks hold, which
    are neighbours then, is the first one's to count."""

    def owns(name: str) -> bool:
        layout = parameters[name]
        num_held = sum(math.prod(box.shape) for box in layout.boxes)
        num_parts = -(-math.prod(layout.shape) // max(num_held, 1))
        return rank % max(1, num_ranks // num_parts) == 0

    def view(name: str, box: Box) -> Tensor:
        return view_box(flat, parameters[name], box)

    return frozen_sums(parameters, view, owns)


def _rows(
    part: QuantizedParameter, layout: ParameterLayout, files: Mapping[str, Path]
) -> tuple[int, Tensor]:
    """(first row, rows) of a matrix: whole rows, all if one scale is that of all, else its own."""
    starts = [box.start[0] for box in layout.boxes]
    first, last = min(starts, default=0), max((b.stop[0] for b in layout.boxes), default=0)
    if part.format.is_per_tensor:
        first, last = 0, layout.shape[0]
    dtype = getattr(torch, part.format.base_dtype)
    matrix = torch.empty((last - first, layout.shape[1]), dtype=dtype)
    read_boxes({part.base: files[part.base]}, lambda name: [((first, 0), matrix)])
    return first, matrix


def _write_scales(
    flat: Tensor,
    layout: ParameterLayout,
    shards: Mapping[str, tuple[int, Tensor]],
    format_: Format,
) -> None:
    maxima: Iterable[Tensor] = (row_maxima(matrix) for _, matrix in shards.values())
    first = 0
    if format_.is_per_tensor:
        found = torch.cat([*maxima]).amax().view(1)
    else:
        (found,), ((first, _),) = maxima, shards.values()
    scales = scales_of(found, format_)
    for box in layout.boxes:
        view_box(flat, layout, box).copy_(scales[box.start[0] - first : box.stop[0] - first])


def _write_values(
    flat: Tensor,
    parameters: Mapping[str, ParameterLayout],
    part: QuantizedParameter,
    first: int,
    matrix: Tensor,
) -> None:
    values, scales = parameters[part.values], parameters[part.scales]
    held = {box.start[0]: view_box(flat, scales, box) for box in scales.boxes}
    for box in values.boxes:
        rows, columns = (slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        source = matrix[rows.start - first : rows.stop - first, columns].to(flat.device)
        own = held[0] if part.format.is_per_tensor else held[rows.start]
        view_box(flat, values, box).copy_(quantize(source, own, part.format))
