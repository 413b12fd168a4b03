"""Which boxes of the parameters this rank's shards hold: from DTensors to a layout.

Offsets come from torch's own computation, never from rank arithmetic: uneven and strided shards
(FSDP2 over tensor parallel) do not follow the obvious formula.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llamarl.weights.layout.boxes import Box, ParameterLayout


def shard_boxes(
    parameters: Mapping[str, DTensor],
) -> tuple[dict[str, Tensor], dict[str, ParameterLayout]]:
    """(this rank's memory by parameter name, its layout); a rank may hold no box of a parameter.

    The tensors share the shards' memory. Buffers carry the parameters' names.
    """
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, ParameterLayout] = {}
    for name, parameter in parameters.items():
        local = parameter.to_local().detach()
        shape, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        assert tuple(local.shape) == tuple(shape), (name, local.shape, shape)
        tensors[name] = local
        layouts[name] = _layout(name, tuple(parameter.shape), tuple(start), local)
    return tensors, layouts


def whole_boxes(
    parameters: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, ParameterLayout]]:
    """The same of plain tensors, of which a lone rank holds all."""
    tensors = {name: parameter.detach() for name, parameter in parameters.items()}
    layouts = {
        name: _layout(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        for name, tensor in tensors.items()
    }
    return tensors, layouts


def _layout(
    name: str, shape: tuple[int, ...], start: tuple[int, ...], local: Tensor
) -> ParameterLayout:
    stop = tuple(first + size for first, size in zip(start, local.shape, strict=True))
    box = Box(start=start, stop=stop, buffer=name, offset=0, strides=local.stride())
    dtype = str(local.dtype).removeprefix("torch.")
    return ParameterLayout(shape=shape, dtype=dtype, boxes=(box,) if local.numel() else ())
