"""Where every parameter lies in the engine's flat weight buffer, and the fused views the forward
uses.

Owns: the layout of one rank's weight buffer, and filling it from a checkpoint. Does not own: its
memory (`weights/sync/weight_buffer.py`) or the maths (`decoder.py`). Invariant: all matrices that
`bind` makes are views of one flat tensor, so changing the version is binding another tensor; only
the norms' short vectors are copied.

Tensor-parallel ranks each hold a slice of every matrix: whole heads of q, k and v, rows of gate and
up, the matching columns of o and down, and a range of the vocabulary of embedding and head. What
is added once per token (norms, the biases of o and down) is on every rank.

Linear weights lie transposed, [in, out]: on CPUs `torch.mm` is a tenth faster with them (measured
with float32, 8 to 64 rows). q, k and v lie side by side, and so do gate and up: fusing and
transposing are only offsets and strides of the layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from llamarl.generation.quantized import QuantizedMatrix
from llamarl.models.architecture import Architecture
from llamarl.models.families import FUSED, split_dimension
from llamarl.models.inventory import check_num_ranks, locate, parameter_shapes
from llamarl.models.other_architecture import AnyArchitecture
from llamarl.models.safetensors_file import FileBox, read_boxes
from llamarl.weights.layout.boxes import BUFFER, Box, ParameterLayout

ALIGN_BYTES = 64  # a cache line, and the widest vector load
EMBEDDING = "model.embed_tokens.weight"

MATRICES = frozenset({"qkv", "output", "gate_up", "down", "head"})  # those that are quantised

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LAYER = {
    "input_norm": "input_layernorm",
    "qkv": "self_attn.qkv",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_up",
    "down": "mlp.down_proj",
}
"""Field of LayerWeights -> the module of a layer whose weight it is, in the buffer's order; the
module's bias is the field `<field>_bias`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the flat memory: elements from `offset`, row after row."""

    offset: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The tensor as a view of `flat`."""
        return flat[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


class BufferLayout:
    """What tensor-parallel rank `rank` holds, in one flat tensor of `dtype` ("float32").

    `parameters` by Hugging Face name, `fused` by the names of fused tensors and of those that stay
    alone, and `num_elements` in total. ValueError if the ranks cannot split
    heads, feed-forward and vocabulary evenly.
    """

    def __init__(
        self, architecture: Architecture, dtype: str, rank: int = 0, num_ranks: int = 1
    ) -> None:
        check_num_ranks("generator.num_ranks", num_ranks, architecture)
        self.dtype = dtype
        self.parameters: dict[str, ParameterLayout] = {}
        self.fused: dict[str, Place] = {}
        self.num_elements = 0
        self._shapes = parameter_shapes(architecture)
        self._rank, self._num_ranks = rank, num_ranks
        table = self._local_shape(EMBEDDING)
        self._put(EMBEDDING, self._reserve(EMBEDDING, table), (table[1], 1))
        for layer in range(architecture.num_layers):
            for module in LAYER.values():
                self._append(f"model.layers.{layer}.", module)
        self._append("model.", "norm")
        self._append("", "lm_head")
        missing = self._shapes.keys() - self.parameters.keys()
        assert not missing, f"parameters without a place in the weight buffer: {missing}"

    def parameter(self, flat: Tensor, name: str) -> Tensor:
        """This rank's box of the HF parameter `name` as a view of `flat`."""
        (box,) = self.parameters[name].boxes
        return _view_box(flat, box)

    def _append(self, prefix: str, name: str) -> None:
        """The weights of `name`, or of those that it fuses, side by side as one tensor [in, out],
        and their biases, or the weight of a norm, likewise [out]. Parameters that the model lacks
        are left out."""
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{part}.{kind}" for part in FUSED.get(name, (name,))]
            if parts[0] not in self._shapes:
                continue
            shapes = [self._local_shape(part) for part in parts]
            num_outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1:]
            offset = self._reserve(f"{prefix}{name}.{kind}", (*inputs, num_outputs))
            for part, shape in zip(parts, shapes, strict=True):
                self._put(part, offset, (1, num_outputs) if inputs else (1,))
                offset += shape[0]

    def _reserve(self, name: str, shape: tuple[int, ...]) -> int:
        """Make room for the tensor `name`; returns its offset."""
        align = ALIGN_BYTES // DTYPES[self.dtype].itemsize
        offset = -(-self.num_elements // align) * align
        self.fused[name] = Place(offset, shape)
        self.num_elements = offset + math.prod(shape)
        return offset

    def _put(self, name: str, offset: int, strides: tuple[int, ...]) -> None:
        """Record that this rank's box of parameter `name` lies at `offset` with `strides`."""
        size, start = self._local_shape(name), [0] * len(strides)
        split = split_dimension(name)
        if split is not None:
            start[split] = self._rank * size[split]
        stop = tuple(first + extent for first, extent in zip(start, size, strict=True))
        box = Box(start=tuple(start), stop=stop, buffer=BUFFER, offset=offset, strides=strides)
        self.parameters[name] = ParameterLayout(
            shape=self._shapes[name], dtype=self.dtype, boxes=(box,)
        )

    def _local_shape(self, name: str) -> tuple[int, ...]:
        shape, split = list(self._shapes[name]), split_dimension(name)
        if split is not None:
            shape[split] //= self._num_ranks
        return tuple(shape)


def _view_box(flat: Tensor, box: Box) -> Tensor:
    size = tuple(stop - start for start, stop in zip(box.start, box.stop, strict=True))
    return flat.as_strided(size, box.strides, box.offset)


def load_boxes(
    parameters: Mapping[str, ParameterLayout],
    flat: Tensor,
    folder: str,
    architecture: AnyArchitecture,
) -> None:
    """Copy a rank's boxes of the checkpoint into their places in `flat`, casting each.

    ValueError if the checkpoint is missing, damaged, of another architecture, or holds numbers that
    are not finite.
    """

    def boxes(name: str) -> list[FileBox]:
        return [(box.start, _view_box(flat, box)) for box in parameters[name].boxes]

    read_boxes(locate(Path(folder), architecture), boxes)


Matrix = Tensor | QuantizedMatrix


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer; matrices are [in, out].

    The norms' weights are float32 copies times the square root of their size, which saves one
    operation per norm: `decoder.normalize`.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(slots=True, kw_only=True)
class Weights:
    """All weights of one version."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix


def bind(layout: BufferLayout, architecture: Architecture, flat: Tensor) -> Weights:
    """Views of every weight in `flat` ([num_elements or more], the layout's dtype).

    ValueError if `flat` is too short or of another dtype.
    """
    if flat.dtype != DTYPES[layout.dtype] or flat.numel() < layout.num_elements:
        raise ValueError(
            f"weight buffer must hold {layout.num_elements} elements of {layout.dtype}, "
            f"got {flat.numel()} of {flat.dtype}"
        )

    def view(name: str) -> Tensor:
        return layout.fused[name].view(flat)

    def norm(name: str) -> Tensor:
        weight = view(name).float()
        return weight * weight.shape[0] ** 0.5

    def of_layer(layer: int, field: str) -> Tensor | None:
        kind = "bias" if field.endswith("_bias") else "weight"
        name = f"model.layers.{layer}.{LAYER[field.removesuffix('_bias')]}.{kind}"
        if name not in layout.fused:
            return None
        return norm(name) if field.endswith("norm") else view(name)

    names = [field.name for field in fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: of_layer(layer, name) for name in names})  # type: ignore[arg-type]
        for layer in range(architecture.num_layers)
    ]
    embedding = view(EMBEDDING)
    head = embedding.t() if architecture.tie_embeddings else view("lm_head.weight")
    return Weights(embedding=embedding, layers=layers, norm=norm("model.norm.weight"), head=head)


def quantize(weights: Weights, kind: str, scratch: Tensor) -> Weights:
    """A copy of `weights`, the matrices quantised ("int8" or "fp8"); embedding, norms and biases
    keep their dtype. The head is quantised too: measured, it adds a tenth to the divergence. The
    copy is on the device of `scratch` (see `quantized.py`)."""

    def copy(value: Tensor | None, name: str) -> Matrix | None:
        if value is None:
            return None
        if name in MATRICES:
            return QuantizedMatrix.of(value, kind, scratch)
        return value.to(scratch.device, copy=True)

    def copies(record: LayerWeights | Weights) -> dict[str, Matrix | None]:
        values = ((f.name, getattr(record, f.name)) for f in fields(record) if f.name != "layers")
        return {name: copy(value, name) for name, value in values}

    layers = [LayerWeights(**copies(layer)) for layer in weights.layers]  # type: ignore[arg-type]
    return Weights(layers=layers, **copies(weights))  # type: ignore[arg-type]


def overwrite(target: Weights, source: Weights) -> None:
    """Copy the values of `source` into the tensors of `target`, whose addresses stay."""
    for old, new in zip(tensors(target), tensors(source), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def tensors(weights: Weights) -> Iterator[Tensor]:
    """Every tensor of a set of weights."""
    records: list[Weights | LayerWeights] = [weights, *weights.layers]
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, QuantizedMatrix):
                yield from (value.values, value.scales)
            elif isinstance(value, Tensor):
                yield value
