"""Where every parameter lies in the engine's flat weight buffer, and the fused views the forward
uses.

Owns: the layout of one rank's weight buffer. Does not own: its memory (`weights/weight buffer.py`)
or the maths (`decoder.py`). Invariant: all matrices that `bind` makes are views of one flat tensor,
so changing the version is binding another tensor; only the norms' short vectors are copied.

Tensor-parallel ranks each hold a slice of every matrix: whole heads of q, k and v, rows of gate and
up, the columns of o and down that meet these, and a range of the vocabulary of embedding and head.
What is added once per token (norms, the biases of o and down) is on every rank.

Linear weights lie transposed, [in, out]: on CPUs `torch.mm` is a tenth faster with them (measured
with float32, 8 to 64 rows). q, k and v lie side by side, and so do gate and up: fusing and
transposing are only offsets and strides of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from llamarl.generation.quantized import QuantizedMatrix
from llamarl.models.architecture import Architecture
from llamarl.models.divisibility import check_split
from llamarl.models.families import FUSED, split_dimension
from llamarl.models.inventory import parameter_shapes
from llamarl.weights.layout.boxes import BUFFER, Box, ParameterLayout

ALIGN_BYTES = 64  # a cache line, and the widest vector load

MATRICES = frozenset({"qkv", "output", "gate_up", "down", "head"})  # what is quantised

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """The whole weight buffer: HF-named `parameters`, fused tensors by name, and `num_elements`."""

    dtype: str
    parameters: dict[str, ParameterLayout]
    fused: dict[str, tuple[int, tuple[int, ...]]]
    num_elements: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The fused or plain tensor `name` as a view of `flat`."""
        offset, shape = self.fused[name]
        return flat[offset : offset + math.prod(shape)].view(shape)

    def parameter(self, flat: Tensor, name: str) -> Tensor:
        """This rank's box of the HF parameter `name` as a view of `flat`."""
        (box,) = self.parameters[name].boxes
        return flat.as_strided(_extents(box.start, box.stop), box.strides, box.offset)


def _extents(start: Sequence[int], stop: Sequence[int]) -> tuple[int, ...]:
    return tuple(last - first for first, last in zip(start, stop, strict=True))


class _Builder:
    """Appends tensors of one rank to its weight buffer, one after the other."""

    def __init__(self, architecture: Architecture, dtype: str, rank: int, num_ranks: int) -> None:
        self.whole = parameter_shapes(architecture)
        self.starts: dict[str, tuple[int, ...]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of this rank's boxes
        for name, shape in self.whole.items():
            start, size = [0] * len(shape), list(shape)
            dim = split_dimension(name)
            if dim is not None:
                size[dim] = shape[dim] // num_ranks
                start[dim] = rank * size[dim]
            self.starts[name], self.shapes[name] = tuple(start), tuple(size)
        self.dtype = dtype
        self.align = ALIGN_BYTES // DTYPES[dtype].itemsize
        self.parameters: dict[str, ParameterLayout] = {}
        self.fused: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.end = 0

    def reserve(self, name: str, shape: tuple[int, ...]) -> int:
        """Room for the tensor `name`; returns its offset."""
        offset = -(-self.end // self.align) * self.align
        self.fused[name] = (offset, shape)
        self.end = offset + math.prod(shape)
        return offset

    def put(self, name: str, offset: int, strides: tuple[int, ...]) -> None:
        """This rank's box of parameter `name` lies at `offset` with `strides`."""
        start = self.starts[name]
        stop = tuple(first + size for first, size in zip(start, self.shapes[name], strict=True))
        box = Box(start=start, stop=stop, buffer=BUFFER, offset=offset, strides=strides)
        self.parameters[name] = ParameterLayout(
            shape=self.whole[name], dtype=self.dtype, boxes=(box,)
        )

    def plain(self, name: str) -> None:
        """A parameter as it is, row after row."""
        shape = self.shapes[name]
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        self.put(name, self.reserve(name, shape), strides)

    def fuse(self, prefix: str, name: str) -> None:
        """The weights of `name`, or of those that it fuses, side by side in one tensor [in, out];
        likewise their biases [out].

        Absent parameters (biases, qk-norm) are passed over.
        """
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{part}.{kind}" for part in FUSED.get(name, (name,))]
            if parts[0] not in self.shapes:
                continue
            num_outputs = sum(self.shapes[part][0] for part in parts)
            inputs = self.shapes[parts[0]][1:]
            offset = self.reserve(f"{prefix}{name}.{kind}", (*inputs, num_outputs))
            for part in parts:
                self.put(part, offset, (1, num_outputs) if inputs else (1,))
                offset += self.shapes[part][0]


def buffer_layout(
    architecture: Architecture, dtype: str, rank: int = 0, num_ranks: int = 1
) -> BufferLayout:
    """Lay out what tensor-parallel rank `rank` holds in one flat tensor of `dtype` ("float32").

    ValueError if the ranks cannot split heads, feed-forward and vocabulary evenly.
    """
    check_split("generator.num_ranks", num_ranks, architecture)
    builder = _Builder(architecture, dtype, rank, num_ranks)
    builder.plain("model.embed_tokens.weight")
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}."
        builder.plain(f"{prefix}input_layernorm.weight")
        builder.fuse(prefix, "self_attn.qkv")
        builder.fuse(prefix, "self_attn.q_norm")
        builder.fuse(prefix, "self_attn.k_norm")
        builder.fuse(prefix, "self_attn.o_proj")
        builder.plain(f"{prefix}post_attention_layernorm.weight")
        builder.fuse(prefix, "mlp.gate_up")
        builder.fuse(prefix, "mlp.down_proj")
    builder.plain("model.norm.weight")
    builder.fuse("", "lm_head")
    missing = builder.shapes.keys() - builder.parameters.keys()
    assert not missing, f"parameters without a place in the weight buffer: {missing}"
    return BufferLayout(
        dtype=dtype,
        parameters=builder.parameters,
        fused=builder.fused,
        num_elements=builder.end,
    )


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
        return layout.view(flat, name)

    def optional(name: str) -> Tensor | None:
        return layout.view(flat, name) if name in layout.fused else None

    def norm(name: str) -> Tensor:
        weight = view(name).float()
        return weight * weight.shape[0] ** 0.5

    layers = []
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        layers.append(
            LayerWeights(
                input_norm=norm(f"{prefix}.input_layernorm.weight"),
                qkv=view(f"{attention}.qkv.weight"),
                qkv_bias=optional(f"{attention}.qkv.bias"),
                q_norm=norm(f"{attention}.q_norm.weight") if architecture.qk_norm else None,
                k_norm=norm(f"{attention}.k_norm.weight") if architecture.qk_norm else None,
                output=view(f"{attention}.o_proj.weight"),
                output_bias=optional(f"{attention}.o_proj.bias"),
                mlp_norm=norm(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=view(f"{prefix}.mlp.gate_up.weight"),
                gate_up_bias=optional(f"{prefix}.mlp.gate_up.bias"),
                down=view(f"{prefix}.mlp.down_proj.weight"),
                down_bias=optional(f"{prefix}.mlp.down_proj.bias"),
            )
        )
    embedding = view("model.embed_tokens.weight")
    head = embedding.t() if architecture.tie_embeddings else view("lm_head.weight")
    return Weights(embedding=embedding, layers=layers, norm=norm("model.norm.weight"), head=head)


def quantize(weights: Weights, kind: str, scratch: Tensor) -> Weights:
    """A copy of `weights`, the matrices quantised ("int8" or "fp8"); embedding, norms and biases
    keep their dtype. The head is quantised too: measured, it adds a tenth to the divergence. For
    `scratch`, whose device the copy is on, see `quantized.py`."""

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
    """Let the tensors of `target` hold those of `source`, at the addresses they have."""
    for old, new in zip(tensors(target), tensors(source), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def tensors(weights: Weights) -> Iterator[Tensor]:
    """Every tensor of a set."""
    records: list[Weights | LayerWeights] = [weights, *weights.layers]
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, QuantizedMatrix):
                yield from (value.values, value.scales)
            elif isinstance(value, Tensor):
                yield value
