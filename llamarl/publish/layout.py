"""Layouts, which say which rank holds which box of which parameter, and in which format."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Self

from llamarl.core.config import EmbeddedConfig, GeneratorConfig, VllmConfig
from llamarl.core.config.generator import pools_of
from llamarl.model.architecture import (
    FUSED,
    LINEARS,
    AnyArchitecture,
    OtherArchitecture,
    is_stacked,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The quantisation of a matrix W [out, in], or of a stack of them [experts, out, in], to values
    of the same shape of `dtype` and scales of `scale_dtype`.

        W'     = W in base_dtype                            what the engine would have been given
        scale  = max(max|W'| / largest, smallest_scale)     of a row, or of all rows
        values = W' / scale, between -largest and largest, rounded to dtype

    With `is_per_tensor` all matrices that the engine multiplies as one, such as q, k and v, share
    one scale. With `is_inverted` W' is multiplied by 1 / scale, which may round differently.
    `has_head` says that the head, tied or not, is quantised as well as the matrices of the layers.
    `key` is part of the names of parameters in this format."""

    key: str
    dtype: str
    largest: float
    base_dtype: str
    scale_dtype: str
    smallest_scale: float
    is_per_tensor: bool = False
    is_inverted: bool = False
    has_head: bool = False


FP8 = "float8_e4m3fn"
LARGEST = {"int8": 127.0, FP8: 448.0}
VLLM_SMALLEST = 1.0 / (LARGEST[FP8] * 512.0)  # of its scales of rows; of a tensor's there is none


def format_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> Format | None:
    """Return the format of a replica's matrices; None if they are not in eight bits, or if vLLM
    quantises them itself at each commit: those of a family that is not known, or with experts,
    which it rearranges."""
    quantization, dtype = generator.quantization, generator.dtype
    if quantization == "none" or isinstance(architecture, OtherArchitecture):
        return None
    if isinstance(generator, VllmConfig):
        if architecture.experts is not None:
            return None
        is_per_tensor = quantization == "fp8"
        return Format(
            key=f"{quantization}-{dtype}",
            dtype=FP8,
            largest=LARGEST[FP8],
            base_dtype=dtype,
            scale_dtype="float32",
            smallest_scale=0.0 if is_per_tensor else VLLM_SMALLEST,
            is_per_tensor=is_per_tensor,
            is_inverted=is_per_tensor,
        )
    assert isinstance(generator, EmbeddedConfig), generator
    values = FP8 if quantization == "fp8" else quantization
    return Format(
        key=f"rows-{quantization}-{dtype}",
        dtype=values,
        largest=LARGEST[values],
        base_dtype=dtype,
        scale_dtype=dtype,  # the engine applies them to activations of this dtype
        smallest_scale=1e-30,  # a row of zeros would divide by zero
        has_head=True,
    )


Kind = str | Format
"""The form of a replica's weights: a dtype, or a format of its matrices."""


def kinds_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> tuple[Kind, ...]:
    """Return the kinds of weights of all pools, each once."""
    pools = [pool.generator for pool in pools_of(generator)]
    return tuple(dict.fromkeys(format_of(each, architecture) or each.dtype for each in pools))


def formats_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> tuple[Format, ...]:
    """Return the formats of all pools, each once."""
    return tuple(kind for kind in kinds_of(generator, architecture) if isinstance(kind, Format))


BUFFER = "weights"  # the name of a generator rank's flat weight buffer
MESSAGE_BYTES = 32 * 1024 * 1024  # of the messages that a route is cut into
KEPT_BYTES = 8 * MESSAGE_BYTES  # of those that a source rank keeps for replicas a little behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of one parameter (DCP calls it a chunk): its global index ranges, and its place
    in a rank's memory.

    `offset` and `strides` count elements of the parameter's dtype, from the start of `buffer`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: str
    offset: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the box in each dimension."""
        return tuple(map(operator.sub, self.stop, self.start))

    def offset_of(self, index: tuple[int, ...]) -> int:
        """Return the place of global `index` in `buffer`, in elements."""
        steps = map(operator.sub, index, self.start)
        return self.offset + sum(map(operator.mul, steps, self.strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter on one rank: its global `shape`, its `dtype` ("float32", "bfloat16"), and the
    boxes that the rank holds."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The parameters of one rank; `host` says whose memory they are in.

    `frozen` are this rank's sums of weights that no publish moves, by kind and name: a target has
    the sums of its own kind, a source those of all kinds."""

    rank: int
    host: str
    parameters: dict[str, ParameterLayout]
    frozen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Copy(NamedTuple):
    """One strided copy of `shape` elements of parameter `name` from a source rank to a target rank,
    repeated over layers that look alike.

    `start` is the global index of its first element, which the fingerprint needs. Strides and
    offsets count elements of the respective dtype, in the target's weight buffer from its start.

    The fields describe the first layer. In each of the other `num_layers` - 1 layers, the layer's
    number in `name` and in `source_buffer` is `layer_step` higher than in the layer before, and the
    offsets are `source_layer_step` and `target_layer_step` elements further."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source_rank: int
    source_buffer: str
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: tuple[int, ...]
    target_dtype: str
    num_layers: int = 1
    layer_step: int = 0
    source_layer_step: int = 0
    target_layer_step: int = 0

    def slab(self, dim: int, begin: int, extent: int) -> Self:
        """Return this copy from `begin` on along `dim`, `extent` long there; both may exceed its
        shape."""
        return self._replace(
            start=(*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :]),
            shape=(*self.shape[:dim], extent, *self.shape[dim + 1 :]),
            source_offset=self.source_offset + begin * self.source_strides[dim],
            target_offset=self.target_offset + begin * self.target_strides[dim],
        )

    def layers(self, first: int, step: int) -> Self:
        """Return this copy for every `step`-th layer from the `first` one on, which counts from
        0."""
        by = first * self.layer_step
        return self._replace(
            name=in_layer(self.name, by),
            source_buffer=in_layer(self.source_buffer, by),
            source_offset=self.source_offset + first * self.source_layer_step,
            target_offset=self.target_offset + first * self.target_layer_step,
            num_layers=len(range(first, self.num_layers, step)),
            layer_step=step * self.layer_step,
            source_layer_step=step * self.source_layer_step,
            target_layer_step=step * self.target_layer_step,
        )

    def each(self) -> Iterator[Self]:
        """Yield the copies of the single layers, in order."""
        if self.num_layers == 1:
            yield self
            return
        names = _in_layers(self.name, self.num_layers, self.layer_step)
        buffers = _in_layers(self.source_buffer, self.num_layers, self.layer_step)
        one = type(self)
        source, target = self.source_offset, self.target_offset
        for name, buffer in zip(names, buffers, strict=True):
            yield one(
                name, self.start, self.shape,
                self.source_rank, buffer, source, self.source_strides,
                self.target_rank, target, self.target_strides, self.target_dtype,
            )  # fmt: skip
            source += self.source_layer_step
            target += self.target_layer_step


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the name without its layer's number, which is the first number between two dots, and
    that number; None if it has no layer."""
    found = _LAYER.search(name)
    if found is None or found[0] != str(int(found[0])):
        return None
    return f"{name[: found.start()]}{name[found.end() :]}", int(found[0])


@lru_cache(maxsize=1 << 14)
def in_layer(name: str, by: int) -> str:
    """Return the name in the layer whose number is `by` higher; the same name if it has no
    layer."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), name, count=1)


@lru_cache(maxsize=4096)  # the copies of all ranks have the same names
def _in_layers(name: str, count: int, step: int) -> tuple[str, ...]:
    return tuple(in_layer(name, index * step) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of the bytes from one source executor to one replica, as one of their ranks sees it:
    the `copies` that begin or end there, over `transport`.

    `source` names the executor ("trainer", or "generator-0" that passes on what it received).
    `sources` and `targets` are the ranks that send and receive anything. `rendezvous` is the file
    path where the ranks of a collective route meet, which no other route uses; else "".
    `message_bytes` is the largest message of a packed transport, unless one element is larger.
    `is_slow`: the route leads to another site."""

    source: str
    replica: int
    transport: str
    copies: tuple[Copy, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    rendezvous: str = ""
    message_bytes: int = MESSAGE_BYTES
    is_slow: bool = False

    def each(self) -> Iterator[Copy]:
        """Return the copies of the single layers, in the order of `copies`."""
        return (single for copy in self.copies for single in copy.each())


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingHandle:
    """The staging memory of one generator rank, prepared for writing `version`.

    `address` is what the route's transport needs to reach it: a path (shared_memory), a handle
    (cuda_ipc), or None (collective: the rank receives by itself). If `may_be_freed`, the owner may
    free the memory between two writes, when others need the device: a process that has mapped it
    unmaps it after the write."""

    version: int
    replica: int
    rank: int
    host: str
    address: object
    num_bytes: int
    may_be_freed: bool = False


Held = dict[int, ParameterLayout]  # one parameter on one side: rank -> layout
Steps = dict[int, tuple[int, ...]]  # rank -> how far its boxes move from layer to layer, elements


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Parameters `names` of layers whose numbers grow by `layer_step`. `sources` and `targets` are
    the layouts of the first of them; from each to the next, box i of a rank moves by
    `source_steps[rank][i]` or `target_steps[rank][i]` elements, and nothing else changes."""

    names: tuple[str, ...]
    layer_step: int
    sources: Held
    targets: Held
    source_steps: Steps
    target_steps: Steps


def find_alike(sources: dict[str, Held], targets: dict[str, Held]) -> Iterator[AlikeLayers]:
    """Yield all parameters, with those that look alike on all ranks together. Both sides have the
    same names."""
    families: dict[str, list[tuple[int, str]]] = {}
    for name in targets:
        family, layer = layer_of(name) or (name, 0)
        families.setdefault(family, []).append((layer, name))
    for members in families.values():
        members.sort()
        looks = [_look(layer, sources[name], targets[name]) for layer, name in members]
        begin = 0
        while begin < len(members):
            end, layer_step, moved = begin + 1, 0, [0] * len(looks[begin][1])
            while end < len(members) and looks[end][0] == looks[begin][0]:
                step = members[end][0] - members[end - 1][0]
                by = [b - a for a, b in zip(looks[end - 1][1], looks[end][1], strict=True)]
                if end > begin + 1 and (step, by) != (layer_step, moved):
                    break
                end, layer_step, moved = end + 1, step, by
            names = tuple(name for _, name in members[begin:end])
            sides, left = (sources[names[0]], targets[names[0]]), iter(moved)
            steps = [
                {rank: tuple(islice(left, len(layout.boxes))) for rank, layout in side.items()}
                for side in sides
            ]
            yield AlikeLayers(names, layer_step, *sides, *steps)
            begin = end


def _look(layer: int, *sides: Held) -> tuple[list[object], list[int]]:
    """Return all about a parameter of this layer, on all ranks of both sides, but the offsets of
    its boxes; and these."""
    look: list[object] = []
    offsets: list[int] = []
    for side in sides:
        look.append(len(side))
        for rank, layout in side.items():
            look.append((rank, layout.shape, layout.dtype, len(layout.boxes)))
            for box in layout.boxes:
                look.append((box.start, box.stop, box.strides, in_layer(box.buffer, -layer)))
                offsets.append(box.offset)
    return look, offsets


MARK = "@"
ROWS_SCALE, TENSOR_SCALE = ".scale", ".tensor_scale"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FUSED_INTO = {part: whole for whole, parts in FUSED.items() for part in parts}


@dataclass(frozen=True, slots=True)
class QuantizedParameter:
    """Matrix `base` in a format: the names of its `values` and of its `scales`."""

    base: str
    values: str
    scales: str
    format: Format


def quantized_parameters(names: Iterable[str], format_: Format) -> Iterator[QuantizedParameter]:
    """Yield the matrices that a format quantises among the `names` of a model's parameters."""
    known = [*names]
    head = HEAD if HEAD in known else EMBEDDING
    for name in known:
        module = ".".join(name.split(".")[-3:-1])
        is_linear = is_stacked(name) or (module in LINEARS and name.endswith(".weight"))
        if is_linear or (format_.has_head and name == head):
            whole = name
            if format_.is_per_tensor and module in _FUSED_INTO:
                whole = name.replace(module, _FUSED_INTO[module])
            values, scales = (f"{each}{MARK}{format_.key}" for each in (name, whole))
            end = TENSOR_SCALE if format_.is_per_tensor else ROWS_SCALE
            yield QuantizedParameter(name, values, scales + end, format_)


def made_from(base: ParameterLayout | None, name: str, wanted: ParameterLayout) -> ParameterLayout:
    """Return where a source rank has the values or scales `name`, of shape and dtype as `wanted`,
    that it makes from the matrix `base` (None: from several matrices)."""
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), (1,))]
    if not name.endswith(TENSOR_SCALE):
        assert base is not None, name
        if not name.endswith(ROWS_SCALE):
            return replace(base, dtype=wanted.dtype)
        rows = [(box.start[:-1], box.stop[:-1]) for box in base.boxes]
        assert len(rows) <= 1, f"a source rank must hold {name} in one piece, got {rows}"
    boxes = []
    for start, stop in rows:
        sizes = [*map(operator.sub, stop, start)]
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        boxes.append(Box(start=start, stop=stop, buffer=name, offset=0, strides=strides))
    return ParameterLayout(shape=wanted.shape, dtype=wanted.dtype, boxes=tuple(boxes))


def offered(source: list[RankLayout], target: list[RankLayout]) -> list[RankLayout]:
    """Return the source's layouts for this target: with the values and scales that the target
    wants, in place of matrices that only these are made from.

    A source that holds them itself, a replica, stays as it is."""
    wanted = {
        name: layout for rank in target for name, layout in rank.parameters.items() if MARK in name
    }
    if not wanted or any(name in rank.parameters for rank in source for name in wanted):
        return source
    plain = {name for rank in target for name in rank.parameters if MARK not in name}
    replaced = {name.partition(MARK)[0] for name in wanted} - plain
    return [
        replace(rank, parameters=_offered(rank.parameters, wanted, replaced)) for rank in source
    ]


def _offered(
    held: Mapping[str, ParameterLayout],
    wanted: Mapping[str, ParameterLayout],
    replaced: set[str],
) -> dict[str, ParameterLayout]:
    found = {name: layout for name, layout in held.items() if name not in replaced}
    for name, layout in wanted.items():
        base = held.get(name.partition(MARK)[0])
        if base is not None or name.endswith(TENSOR_SCALE):
            found[name] = made_from(base, name, layout)
    return found
