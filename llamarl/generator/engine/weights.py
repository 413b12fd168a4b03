"""The parameters of the embedded engine: their layout, quantised matrices and adapters, and the
reading of them from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarl.core.config import LoraConfig
from llamarl.core.device.devices import platform_of
from llamarl.model.adapter_inventory import adapter_shapes, locate_adapter
from llamarl.model.architecture import (
    DOWN,
    FUSED,
    GATE_UP,
    LORA_A,
    LORA_B,
    AnyArchitecture,
    Architecture,
    split_dimension,
)
from llamarl.model.experts import segments
from llamarl.model.inventory import check_engine_ranks, locate, parameter_shapes
from llamarl.model.safetensors_file import FileBox, Piece, read_boxes
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.fingerprint import frozen_sums
from llamarl.publish.layout import (
    EMBEDDING,
    HEAD,
    Format,
    ParameterLayout,
    QuantizedParameter,
    quantized_parameters,
)
from llamarl.publish.shards import Shape, quantize, row_maxima, scales_of
from llamarl.publish.target import MemoryPlan, Place, view_box

WIDENED_ELEMENTS = 1 << 21  # 8 MiB in float32: smaller tiles are slower, much larger ones too


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix in eight bits: `values` [out, in], and `scales` [out] in the activations' dtype.

    `scratch` is a flat tensor of that dtype, as large as a tile, shared by all matrices that one
    thread uses."""

    values: Tensor
    scales: Tensor
    scratch: Tensor

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x` [n, in] times this matrix: [n, out] in `dtype`, float32 or (None) that of
        `x`."""
        num_outputs, num_inputs = self.values.shape
        step = len(self.scratch) // num_inputs
        multiply = torch.mm if dtype in (None, x.dtype) else widened_mm
        if num_outputs <= step:
            return multiply(x, self._widen(self.values).t()).mul_(self.scales)
        out = x.new_empty(len(x), num_outputs, dtype=dtype)
        for start in range(0, num_outputs, step):
            part = self._widen(self.values[start : start + step])
            out[:, start : start + step] = multiply(x, part.t())
        return out.mul_(self.scales)

    def dequantized(self) -> Tensor:
        """Return the matrix [in, out] that `product` multiplies with, float32."""
        return (self.values.float() * self.scales.float().unsqueeze(1)).t()

    def _widen(self, values: Tensor) -> Tensor:
        return self.scratch[: values.numel()].view(values.shape).copy_(values)


def widened_mm(x: Tensor, matrix: Tensor) -> Tensor:
    """Return `x` [n, in] times `matrix` [in, out], both of one dtype: float32 [n, out].

    On CPUs torch has no such product of bfloat16: there the matrix is widened a tile at a time.
    Measured with a matrix of 25 million elements and 64 rows on one core with AVX-512: 37 ms, as
    with a float32 matrix, where a product rounded to bfloat16 takes 10 ms."""
    if x.dtype == torch.float32:
        return torch.mm(x, matrix)
    if platform_of(x.device).has_wide_mm:
        return torch.mm(x, matrix, out_dtype=torch.float32)
    wide, out = x.float(), x.new_empty(len(x), matrix.shape[1], dtype=torch.float32)
    step = max(WIDENED_ELEMENTS // len(matrix), 1)
    for start in range(0, matrix.shape[1], step):
        part = slice(start, start + step)
        torch.mm(wide, matrix[:, part].float(), out=out[:, part])
    return out


def make_scratch(num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scratch for matrices of at most `num_inputs` inputs: a widened tile fits a cache."""
    num_elements = max(platform_of(device).num_tiled, num_inputs)
    return torch.empty(num_elements, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """The matrix `base` with an adapter: `down` [in, ranks], and `up` [ranks, out], which is
    multiplied by `scale`."""

    base: Tensor | QuantizedMatrix
    down: Tensor
    up: Tensor
    scale: float

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x` [n, in] times this matrix: [n, out] in the dtype of `x`."""
        assert dtype in (None, x.dtype), "heads have no adapter"
        base = self.base
        out = torch.mm(x, base) if isinstance(base, Tensor) else base.product(x)
        return self.add(out, x)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapter's part of the product to `out`, in place, and return it."""
        return out.addmm_(torch.mm(x, self.down), self.up, alpha=self.scale)


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The matrices of a layer's experts in eight bits: `values` [experts, out, in], and `scales`
    [experts, out] in the activations' dtype; `scratch` as of QuantizedMatrix."""

    values: Tensor
    scales: Tensor
    scratch: Tensor

    def product(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the products [rows, out] of `x` [rows, in], which is sorted by expert, with the
        matrix of each row's expert; `counts` int64 [experts]."""
        out = x.new_empty(len(x), self.values.shape[1])
        for expert, rows in segments(counts):
            matrix = QuantizedMatrix(self.values[expert], self.scales[expert], self.scratch)
            out[rows] = matrix.product(x[rows])
        return out


Experts = Tensor | QuantizedExperts

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SCALES = ".scales"

LAYER = {
    "input_norm": "input_layernorm",
    "qkv": "self_attn.qkv",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_up",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
"""Field of LayerWeights -> the module of a layer whose weight it is, in the buffer's order; the
module's bias is the field `<field>_bias`."""

STACKED = {"expert_gate_up": GATE_UP, "expert_down": DOWN}
"""Field of LayerWeights -> the parameter of a layer that holds the matrices of its experts."""


class BufferLayout:
    """The parameters of tensor-parallel rank `rank`, in one flat tensor of `dtype` ("float32"), or
    of bytes if its matrices are in a format.

    `parameters` has the layouts by their names in a publish, `fused` the places by the names of
    fused tensors and of those that stay alone (scales with SCALES behind the name), and `memory`
    the whole tensor, from which the engine decodes as it is. Raises ValueError if the ranks cannot
    split heads, feed-forward and vocabulary evenly."""

    def __init__(
        self,
        architecture: Architecture,
        dtype: str,
        rank: int = 0,
        num_ranks: int = 1,
        format_: Format | None = None,
    ) -> None:
        check_engine_ranks(num_ranks, architecture)
        self.dtype, self.format = dtype, format_
        self._plan = MemoryPlan()
        self.parameters, self.fused = self._plan.parameters, self._plan.places
        self._shapes = parameter_shapes(architecture)
        self._boxes = {
            name: rank_box(architecture, name, shape, rank, num_ranks)
            for name, shape in self._shapes.items()
        }
        made = () if format_ is None else quantized_parameters(self._shapes, format_)
        self._quantized = {each.base: each for each in made}
        place = self._plan.reserve(EMBEDDING, self._boxes[EMBEDDING][0], dtype)
        self._put(EMBEDDING, place.offset)
        for layer in range(architecture.num_layers):
            for module in LAYER.values():
                self._append(f"model.layers.{layer}.", module)
            for name in STACKED.values():
                self._append_stacked(f"model.layers.{layer}.{name}")
        self._append("model.", "norm")
        self._append("", "lm_head")
        if architecture.tie_embeddings and EMBEDDING in self._quantized:
            self._append_quantized(HEAD, [self._quantized[EMBEDDING]])
        held = {*self.parameters, *(each.base for each in self._quantized.values())}
        missing = self._shapes.keys() - held
        assert not missing, f"parameters without a place in the weight buffer: {missing}"
        self.memory = self._plan.memory()

    def parameter(self, flat: Tensor, name: str) -> Tensor:
        """Return this rank's box of a parameter as a view of `flat`."""
        (box,) = self.parameters[name].boxes
        return view_box(flat, self.parameters[name], box)

    def _append(self, prefix: str, name: str) -> None:
        """Append the weights of `name`, or of the modules that it fuses, side by side as one tensor
        [in, out], and their biases, or the weight of a norm, likewise [out]. Parameters that the
        model lacks are left out."""
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{part}.{kind}" for part in FUSED.get(name, (name,))]
            if parts[0] not in self._shapes:
                continue
            fused = f"{prefix}{name}.{kind}"
            if parts[0] in self._quantized:
                self._append_quantized(fused, [self._quantized[part] for part in parts])
                continue
            sizes = [self._boxes[part][0] for part in parts]
            num_outputs, inputs = sum(size[0] for size in sizes), sizes[0][1:]
            offset = self._plan.reserve(fused, (*inputs, num_outputs), self.dtype).offset
            for part, size in zip(parts, sizes, strict=True):
                self._put(part, offset, (1, num_outputs) if inputs else (1,))
                offset += size[0]

    def _append_stacked(self, name: str) -> None:
        """Append the matrices [experts, out, in] of a layer's experts, if it has them."""
        if name in self._quantized:
            self._append_quantized(name, [self._quantized[name]])
        elif name in self._shapes:
            place = self._plan.reserve(name, self._boxes[name][0], self.dtype)
            self._put(name, place.offset)

    def _append_quantized(self, fused: str, parts: list[QuantizedParameter]) -> None:
        """Append the values [out, in] of matrices one below the other, and their scales [out], or
        [1]; of a stack [experts, out, in] and [experts, out]."""
        boxes = [self._boxes[part.base] for part in parts]
        num_rows, row = sum(size[0] for size, _ in boxes), boxes[0][0][1:]
        form, plan = parts[0].format, self._plan
        scale_shape = (1,) if form.is_per_tensor else (num_rows, *row[:-1])
        values = plan.reserve(fused, (num_rows, *row), form.dtype).offset
        scales = plan.reserve(fused + SCALES, scale_shape, form.scale_dtype).offset
        for part, (size, start) in zip(parts, boxes, strict=True):
            shape = self._shapes[part.base]
            plan.put(part.values, shape, (size, start), form.dtype, values)
            values += math.prod(size)
            if form.is_per_tensor:
                plan.put(part.scales, (1,), ((1,), (0,)), form.scale_dtype, scales)
            else:
                rows = size[:-1], start[:-1]
                plan.put(part.scales, shape[:-1], rows, form.scale_dtype, scales)
                scales += math.prod(size[:-1])

    def _put(self, name: str, offset: int, strides: Shape | None = None) -> None:
        self._plan.put(name, self._shapes[name], self._boxes[name], self.dtype, offset, strides)


def rank_box(
    architecture: Architecture, name: str, shape: Shape, rank: int, num_ranks: int
) -> tuple[Shape, Shape]:
    """Return the shape and the first index of a tensor-parallel rank's part of a parameter. Where
    there are more ranks than key-value heads, neighbours hold the same head."""
    dim = split_dimension(name)
    start, size = [0] * len(shape), list(shape)
    if dim is not None:
        parts, part = num_ranks, rank
        is_kv = not {"k_proj", "v_proj"}.isdisjoint(name.split("."))
        if is_kv and num_ranks > architecture.num_kv_heads:
            parts = architecture.num_kv_heads
            part = rank * parts // num_ranks
        size[dim] = -(-shape[dim] // parts)
        start[dim] = min(part * size[dim], shape[dim])
        size[dim] = min(size[dim], shape[dim] - start[dim])
    return tuple(size), tuple(start)


Matrix = Tensor | QuantizedMatrix | AdaptedMatrix


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer; matrices are [in, out].

    A layer has `gate_up` and `down`, or a router, which is a float32 copy, and experts.

    The norms' weights are float32 copies times the square root of their size, which saves one
    operation per norm: `decoder.normalize`."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix | None
    gate_up_bias: Tensor | None
    down: Matrix | None
    down_bias: Tensor | None
    router: Tensor | None
    expert_gate_up: Experts | None
    expert_down: Experts | None


@dataclass(slots=True, kw_only=True)
class Weights:
    """The weights of one version."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix


def bind(
    layout: BufferLayout, architecture: Architecture, flat: Tensor, scratch: Tensor | None = None
) -> Weights:
    """Return views of every weight in `flat` ([memory.num_elements or more], of its dtype);
    quantised matrices multiply by way of `scratch` (`make_scratch`).

    Raises ValueError if `flat` is too short or of another dtype."""
    memory = layout.memory
    if flat.dtype != memory.dtype or flat.numel() < memory.num_elements:
        raise ValueError(
            f"weight buffer must hold {memory.num_elements} elements of {memory.dtype}, "
            f"got {flat.numel()} of {flat.dtype}"
        )

    def view(name: str) -> Matrix:
        found = layout.fused[name].view(flat)
        if name + SCALES not in layout.fused:
            return found
        assert scratch is not None
        return QuantizedMatrix(found, layout.fused[name + SCALES].view(flat), scratch)

    def stack(name: str) -> Experts | None:
        if name not in layout.fused:
            return None
        found = layout.fused[name].view(flat)
        if name + SCALES not in layout.fused:
            return found
        assert scratch is not None
        return QuantizedExperts(found, layout.fused[name + SCALES].view(flat), scratch)

    def norm(name: str) -> Tensor:
        weight = layout.fused[name].view(flat).float()
        return weight * weight.shape[0] ** 0.5

    def of_layer(layer: int, field: str) -> Matrix | Experts | None:
        if field in STACKED:
            return stack(f"model.layers.{layer}.{STACKED[field]}")
        kind = "bias" if field.endswith("_bias") else "weight"
        name = f"model.layers.{layer}.{LAYER[field.removesuffix('_bias')]}.{kind}"
        if name not in layout.fused:
            return None
        if field == "router":
            return layout.fused[name].view(flat).float()
        return norm(name) if field.endswith("norm") else view(name)

    names = [field.name for field in fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: of_layer(layer, name) for name in names})  # type: ignore[arg-type]
        for layer in range(architecture.num_layers)
    ]
    embedding = layout.fused[EMBEDDING].view(flat)
    head = view(HEAD) if HEAD in layout.fused else embedding.t()
    return Weights(embedding=embedding, layers=layers, norm=norm("model.norm.weight"), head=head)


class AdapterLayout:
    """The adapters of tensor-parallel rank `rank`, in one flat tensor of `dtype` ("float32").

    Matrices that the engine multiplies with at once have their adapters side by side: for q, k and
    v all A as one [in, 3 * rank], and B on the diagonal of one [3 * rank, out], whose other
    elements are zeros that no publish writes. Tensor-parallel ranks divide the side of an adapter
    that its matrix divides, and hold all of the other. The tensors that `adapt` makes are views, so
    a change of version only binds another tensor.

    `parameters` has their layouts by their names in a publish, and `memory` the whole tensor, from
    which the engine decodes as it is."""

    def __init__(
        self,
        architecture: Architecture,
        lora: LoraConfig,
        dtype: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._plan = MemoryPlan()
        self.parameters = self._plan.parameters
        self._lora, self._dtype = lora, dtype
        self._shapes = adapter_shapes(architecture, lora)
        self._boxes = {
            name: rank_box(architecture, name, shape, rank, num_ranks)
            for name, shape in (parameter_shapes(architecture) | self._shapes).items()
        }
        self._places: dict[tuple[int, str], tuple[Place, Place]] = {}
        for layer in range(architecture.num_layers):
            for field, module in LAYER.items():
                parts = FUSED.get(module, (module,))
                self._append(layer, field, [f"model.layers.{layer}.{part}" for part in parts])
        missing = self._shapes.keys() - self.parameters.keys()
        assert not missing, f"adapters without a place: {missing}"
        self.memory = self._plan.memory()

    def adapt(self, weights: Weights, flat: Tensor) -> Weights:
        """Return the `weights` with the adapters in `flat`, as views of both."""
        layers = [*weights.layers]
        for (layer, field), (down, up) in self._places.items():
            base = getattr(layers[layer], field)
            adapted = AdaptedMatrix(base, down.view(flat), up.view(flat), self._lora.scale)
            changed: dict[str, Any] = {field: adapted}
            layers[layer] = replace(layers[layer], **changed)
        return replace(weights, layers=layers)

    def _append(self, layer: int, field: str, modules: list[str]) -> None:
        """Append the adapters of matrices that are multiplied with at once."""
        adapted = [module for module in modules if f"{module}.{LORA_A}.weight" in self._shapes]
        if not adapted:
            return
        sizes = [self._boxes[f"{module}.weight"][0] for module in modules]
        rank, num_outputs = self._lora.rank, sum(size[0] for size in sizes)
        num_rows, num_inputs = rank * len(adapted), sizes[0][1]
        prefix = f"model.layers.{layer}.{field}"
        down = self._plan.reserve(f"{prefix}.down", (num_inputs, num_rows), self._dtype)
        up = self._plan.reserve(f"{prefix}.up", (num_rows, num_outputs), self._dtype)
        self._places[layer, field] = down, up
        row = column = 0
        for module, size in zip(modules, sizes, strict=True):
            if module in adapted:
                self._put(f"{module}.{LORA_A}.weight", down.offset + row, (1, num_rows))
                offset = up.offset + row * num_outputs + column
                self._put(f"{module}.{LORA_B}.weight", offset, (1, num_outputs))
                row += rank
            column += size[0]

    def _put(self, name: str, offset: int, strides: Shape) -> None:
        self._plan.put(name, self._shapes[name], self._boxes[name], self._dtype, offset, strides)


def overwrite(target: Weights, source: Weights) -> None:
    """Copy the values of `source` into the tensors of `target`, whose addresses stay."""
    for old, new in zip(tensors(target), tensors(source), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def tensors(weights: Weights) -> Iterator[Tensor]:
    """Yield every tensor of a set of weights."""
    records: list[Weights | LayerWeights] = [weights, *weights.layers]
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, AdaptedMatrix):
                yield from (value.down, value.up)
                value = value.base
            if isinstance(value, QuantizedMatrix | QuantizedExperts):
                yield from (value.values, value.scales)
            elif isinstance(value, Tensor):
                yield value


def load_boxes(
    parameters: Mapping[str, ParameterLayout],
    flat: Tensor,
    folder: str,
    architecture: AnyArchitecture,
    format_: Format | None = None,
    rounded_to: torch.dtype = torch.float32,
) -> None:
    """Copy a rank's boxes of the checkpoint into their places in `flat`, casting each, and
    quantising matrices that `parameters` have in a format; all after rounding to `rounded_to`.

    Raises ValueError if the checkpoint is missing, damaged, of another architecture, or holds
    numbers that are not finite."""
    files = locate(Path(folder), architecture)

    read_boxes(files, lambda name: _targets(flat, parameters.get(name)))
    for layout in parameters.values():
        if getattr(torch, layout.dtype) == torch.float32 != rounded_to:
            for _, values in _targets(flat, layout):
                _round(values, rounded_to)
    if format_ is None:
        return
    sharing: dict[str, list[QuantizedParameter]] = {}
    for each in quantized_parameters(files, format_):
        if each.values in parameters:
            sharing.setdefault(each.scales, []).append(each)
    for parts in sharing.values():
        _load_quantized(parameters, flat, parts, files, rounded_to)


def _targets(flat: Tensor, layout: ParameterLayout | None) -> list[FileBox]:
    """Return the boxes that the rank holds of a parameter, with their places in `flat`."""
    found = () if layout is None else layout.boxes
    return [(box.start, view_box(flat, layout, box)) for box in found if layout is not None]


def _round(values: Tensor, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        values.copy_(values.to(dtype))


def load_adapter_boxes(
    parameters: Mapping[str, ParameterLayout], flat: Tensor, folder: str
) -> None:
    """Copy a rank's boxes of an adapter's files into their places in `flat`, casting each. Raises
    as `load_boxes`."""
    shapes = {name: layout.shape for name, layout in parameters.items()}
    files = locate_adapter(Path(folder), shapes)
    read_boxes(files, lambda name: _targets(flat, parameters[name]))


def sums_of_boxes(
    parameters: Mapping[str, ParameterLayout], flat: Tensor, rank: int, num_ranks: int
) -> Fingerprints:
    """Return the fingerprints of the boxes in `flat`, for one of a replica's ranks. A box that
    several ranks hold, which are neighbours then, is counted by the first one."""

    def owns(name: str) -> bool:
        layout = parameters[name]
        num_held = sum(math.prod(box.shape) for box in layout.boxes)
        num_parts = -(-math.prod(layout.shape) // max(num_held, 1))
        return rank % max(1, num_ranks // num_parts) == 0

    return frozen_sums(parameters, lambda name, box: view_box(flat, parameters[name], box), owns)


def _load_quantized(
    parameters: Mapping[str, ParameterLayout],
    flat: Tensor,
    parts: Sequence[QuantizedParameter],
    files: Mapping[str, Iterable[Piece]],
    rounded_to: torch.dtype,
) -> None:
    """Quantise the rank's own rows of a matrix, or several matrices that share one scale, of which
    all rows are read."""
    form, scales = parts[0].format, parameters[parts[0].scales]
    matrices: list[tuple[int, Tensor]] = []  # from this row on
    for part in parts:
        layout = parameters[part.values]
        first = min((box.start[0] for box in layout.boxes), default=0)
        last = max((box.stop[0] for box in layout.boxes), default=0)
        if form.is_per_tensor:
            first, last = 0, layout.shape[0]
        shape = (last - first, *layout.shape[1:])
        rows = torch.empty(shape, dtype=getattr(torch, form.base_dtype))
        targets: list[FileBox] = [((first, *[0] * (rows.ndim - 1)), rows)]
        read_boxes({part.base: files[part.base]}, {part.base: targets}.__getitem__)
        _round(rows, rounded_to)
        matrices.append((first, rows))
    maxima = torch.cat([row_maxima(rows) for _, rows in matrices])
    found = scales_of(maxima.amax().view(1) if form.is_per_tensor else maxima, form)
    begin = 0 if form.is_per_tensor else matrices[0][0]
    for box in scales.boxes:
        view_box(flat, scales, box).copy_(found[box.start[0] - begin : box.stop[0] - begin])
    found = found.to(flat.device)
    for part, (first, rows) in zip(parts, matrices, strict=True):
        values = parameters[part.values]
        for box in values.boxes:
            held = slice(box.start[0] - first, box.stop[0] - first)
            own = rows[held, ..., box.start[-1] : box.stop[-1]].to(flat.device)
            by = found if form.is_per_tensor else found[held]
            view_box(flat, values, box).copy_(quantize(own, by, form))
