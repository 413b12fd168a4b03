"""Quantised matrices and their scales as parameters of a publish, with names of their own.

Owns: which matrices a format quantises, what the results are called, and their boxes on a source
that makes them from its shards. Does not own: making them (`shard_scales.py`, `writer.py`) or a
generator's memory. Invariant: free of torch; a source says only where its own parameters are, and
what follows from these is derived here by both the controller and the source.

    model.layers.0.self_attn.q_proj.weight@KEY              values, boxes as of the matrix
    model.layers.0.self_attn.q_proj.weight@KEY.scale        one for each row: shape (rows,)
    model.layers.0.self_attn.qkv.weight@KEY.tensor_scale    one for q, k and v together: shape (1,)

A scale of rows lies on each source rank that holds any part of the row, a scale of a tensor on all.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from llamarl.models.families import FUSED, LINEARS
from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout
from llamarl.weights.layout.formats import Format

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
    """The matrices among the `names` of a model's parameters that a format quantises."""
    known = [*names]
    head = HEAD if HEAD in known else EMBEDDING
    for name in known:
        module = ".".join(name.split(".")[-3:-1])
        is_linear = module in LINEARS and name.endswith(".weight")
        if is_linear or (format_.has_head and name == head):
            whole = name
            if format_.is_per_tensor and module in _FUSED_INTO:
                whole = name.replace(module, _FUSED_INTO[module])
            values, scales = (f"{each}{MARK}{format_.key}" for each in (name, whole))
            end = TENSOR_SCALE if format_.is_per_tensor else ROWS_SCALE
            yield QuantizedParameter(name, values, scales + end, format_)


def is_quantized(name: str) -> bool:
    """Whether this is the name of values or scales."""
    return MARK in name


def base_of(name: str) -> str:
    """The matrix of which these are values, or scales of its rows."""
    return name.partition(MARK)[0]


def made_from(base: ParameterLayout | None, name: str, wanted: ParameterLayout) -> ParameterLayout:
    """Where a source rank has the values or scales `name`, of shape and dtype as `wanted`, that it
    makes from the matrix `base` (None: of several matrices)."""
    rows = [(0, 1)]
    if not name.endswith(TENSOR_SCALE):
        assert base is not None, name
        if not name.endswith(ROWS_SCALE):
            return replace(base, dtype=wanted.dtype)
        rows = [(box.start[0], box.stop[0]) for box in base.boxes]
        assert len(rows) <= 1, f"a source rank must hold {name} in one piece, got {rows}"
    boxes = tuple(Box(start=(a,), stop=(b,), buffer=name, offset=0, strides=(1,)) for a, b in rows)
    return ParameterLayout(shape=wanted.shape, dtype=wanted.dtype, boxes=boxes)


def offered(source: list[RankLayout], target: list[RankLayout]) -> list[RankLayout]:
    """The source as this target sees it: with the values and scales that the target wants, made
    from matrices that it then need not want.

    A source that holds them itself, a replica, stays as it is.
    """
    wanted = {
        name: layout
        for rank in target
        for name, layout in rank.parameters.items()
        if is_quantized(name)
    }
    if not wanted or any(name in rank.parameters for rank in source for name in wanted):
        return source
    plain = {name for rank in target for name in rank.parameters if not is_quantized(name)}
    replaced = {base_of(name) for name in wanted} - plain
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
        base = held.get(base_of(name))
        if base is not None or name.endswith(TENSOR_SCALE):
            found[name] = made_from(base, name, layout)
    return found
