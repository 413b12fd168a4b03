"""Where every parameter lies in the engine's flat arena, and the fused views the forward uses.

Owns: the arena's layout. Does not own: its memory (`weights/arena.py`) or the maths
(`decoder.py`). Invariant: all weights are views of one flat tensor, so changing the version is
binding another tensor; nothing is copied.

Fused matrices are offsets only. The rows of qkv go by kv head, `[q_0 .. q_(G-1), k, v]` for each
(G query heads share one kv head), so that queries, keys and values of one kv head lie together;
gate and up lie one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from llamarl.models.architecture import Architecture
from llamarl.models.hf import load_into, parameter_shapes
from llamarl.weights.layout import Box, ParameterLayout

BUFFER = "arena"
ALIGN_BYTES = 64  # a cache line, and the widest vector load

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """The whole arena: HF-named `parameters`, fused tensors by name, and `num_elements`."""

    dtype: str
    parameters: dict[str, ParameterLayout]
    fused: dict[str, tuple[int, tuple[int, ...]]]
    num_elements: int

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The fused or plain tensor `name` as a view of `flat`."""
        offset, shape = self.fused[name]
        return flat[offset : offset + math.prod(shape)].view(shape)

    def parameter_boxes(self, flat: Tensor, name: str) -> list[tuple[tuple[slice, ...], Tensor]]:
        """Views of the boxes of one HF parameter, each with its place in that parameter."""
        boxes = []
        for box in self.parameters[name].boxes:
            shape = tuple(b - a for a, b in zip(box.start, box.stop, strict=True))
            place = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            boxes.append((place, flat.as_strided(shape, box.strides, box.offset)))
        return boxes


@dataclass(frozen=True, slots=True)
class _Target:
    """One parameter of the arena as `load_into` sees it: a shape, and a place to copy to."""

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[slice, ...], Tensor]]

    def copy_(self, source: Tensor) -> None:
        for place, box in self.boxes:
            box.copy_(source[place])


def load_checkpoint(layout: ArenaLayout, flat: Tensor, folder: str) -> None:
    """Copy a checkpoint's weights into their places in `flat`, one tensor at a time.

    ValueError if the checkpoint is missing, damaged or of another architecture.
    """
    targets = {
        name: _Target(parameter.shape, layout.parameter_boxes(flat, name))
        for name, parameter in layout.parameters.items()
    }
    load_into(cast(Mapping[str, Tensor], targets), folder)


class _Builder:
    """Appends tensors to the arena one after the other."""

    def __init__(self, architecture: Architecture, dtype: str) -> None:
        self.shapes = parameter_shapes(architecture)
        self.dtype = dtype
        self.align = ALIGN_BYTES // DTYPES[dtype].itemsize
        self.boxes: dict[str, list[Box]] = {name: [] for name in self.shapes}
        self.fused: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.end = 0

    def reserve(self, name: str, shape: tuple[int, ...]) -> int:
        """Room for the tensor `name`; returns its offset."""
        offset = -(-self.end // self.align) * self.align
        self.fused[name] = (offset, shape)
        self.end = offset + math.prod(shape)
        return offset

    def rows(self, name: str, start: int, stop: int, offset: int) -> None:
        """Rows `start:stop` of parameter `name` lie at `offset`, row after row."""
        rest = self.shapes[name][1:]
        strides = (rest[0], 1) if rest else (1,)
        zeros = (0,) * len(rest)
        box = Box(
            start=(start, *zeros), stop=(stop, *rest), buffer=BUFFER, offset=offset, strides=strides
        )
        self.boxes[name].append(box)

    def plain(self, name: str) -> None:
        """A parameter that is a tensor of its own."""
        offset = self.reserve(name, self.shapes[name])
        self.rows(name, 0, self.shapes[name][0], offset)

    def qkv(self, prefix: str, kind: str, architecture: Architecture) -> None:
        """Fuse q, k and v of one layer; `kind` is weight or bias."""
        width = architecture.hidden_size if kind == "weight" else 1
        dim = architecture.head_dim
        group = architecture.num_heads // architecture.num_kv_heads
        num_rows = architecture.num_kv_heads * (group + 2) * dim
        shape = (num_rows, width) if kind == "weight" else (num_rows,)
        offset = self.reserve(f"{prefix}.qkv.{kind}", shape)
        for head in range(architecture.num_kv_heads):
            for name, first, size in (
                ("q_proj", head * group, group),
                ("k_proj", head, 1),
                ("v_proj", head, 1),
            ):
                self.rows(f"{prefix}.{name}.{kind}", first * dim, (first + size) * dim, offset)
                offset += size * dim * width


def arena_layout(architecture: Architecture, dtype: str) -> ArenaLayout:
    """Lay out all parameters of `architecture` in one flat tensor of `dtype` ("float32", ...)."""
    builder = _Builder(architecture, dtype)
    builder.plain("model.embed_tokens.weight")
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        builder.plain(f"{prefix}.input_layernorm.weight")
        for kind in ("weight", "bias") if architecture.attention_bias else ("weight",):
            builder.qkv(f"{prefix}.self_attn", kind, architecture)
        for name in ("q_norm.weight", "k_norm.weight", "o_proj.weight", "o_proj.bias"):
            if f"{prefix}.self_attn.{name}" in builder.shapes:
                builder.plain(f"{prefix}.self_attn.{name}")
        builder.plain(f"{prefix}.post_attention_layernorm.weight")
        size, width = builder.shapes[f"{prefix}.mlp.gate_proj.weight"]
        offset = builder.reserve(f"{prefix}.mlp.gate_up.weight", (2 * size, width))
        builder.rows(f"{prefix}.mlp.gate_proj.weight", 0, size, offset)
        builder.rows(f"{prefix}.mlp.up_proj.weight", 0, size, offset + size * width)
        if architecture.mlp_bias:
            offset = builder.reserve(f"{prefix}.mlp.gate_up.bias", (2 * size,))
            builder.rows(f"{prefix}.mlp.gate_proj.bias", 0, size, offset)
            builder.rows(f"{prefix}.mlp.up_proj.bias", 0, size, offset + size)
            builder.plain(f"{prefix}.mlp.down_proj.bias")
        builder.plain(f"{prefix}.mlp.down_proj.weight")
    builder.plain("model.norm.weight")
    if not architecture.tie_embeddings:
        builder.plain("lm_head.weight")
    missing = [name for name, boxes in builder.boxes.items() if not boxes]
    assert not missing, f"parameters without a place in the arena: {missing}"
    parameters = {
        name: ParameterLayout(shape=builder.shapes[name], dtype=dtype, boxes=tuple(boxes))
        for name, boxes in builder.boxes.items()
    }
    return ArenaLayout(
        dtype=dtype, parameters=parameters, fused=builder.fused, num_elements=builder.end
    )


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """Views of one layer; matrices are transposed views [in, out], ready for `torch.mm`."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True, kw_only=True)
class Weights:
    """Views of all weights of one version."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def bind(layout: ArenaLayout, architecture: Architecture, flat: Tensor) -> Weights:
    """Views of every weight in `flat` ([num_elements or more], the layout's dtype).

    ValueError if `flat` is too short or of another dtype.
    """
    if flat.dtype != DTYPES[layout.dtype] or flat.numel() < layout.num_elements:
        raise ValueError(
            f"arena must hold {layout.num_elements} elements of {layout.dtype}, "
            f"got {flat.numel()} of {flat.dtype}"
        )

    def view(name: str) -> Tensor:
        return layout.view(flat, name)

    def optional(name: str) -> Tensor | None:
        return layout.view(flat, name) if name in layout.fused else None

    layers = []
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        layers.append(
            LayerWeights(
                input_norm=view(f"{prefix}.input_layernorm.weight"),
                qkv=view(f"{attention}.qkv.weight").t(),
                qkv_bias=optional(f"{attention}.qkv.bias"),
                q_norm=optional(f"{attention}.q_norm.weight"),
                k_norm=optional(f"{attention}.k_norm.weight"),
                output=view(f"{attention}.o_proj.weight").t(),
                output_bias=optional(f"{attention}.o_proj.bias"),
                mlp_norm=view(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=view(f"{prefix}.mlp.gate_up.weight").t(),
                gate_up_bias=optional(f"{prefix}.mlp.gate_up.bias"),
                down=view(f"{prefix}.mlp.down_proj.weight").t(),
                down_bias=optional(f"{prefix}.mlp.down_proj.bias"),
            )
        )
    embedding = view("model.embed_tokens.weight")
    head = embedding if architecture.tie_embeddings else view("lm_head.weight")
    return Weights(
        embedding=embedding, layers=layers, norm=view("model.norm.weight"), head=head.t()
    )
