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
    parameters: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, ParameterLayout]]:
    """(this rank's memory by parameter name, its layout); a rank may hold no box of a DTensor, and
    holds all of a plain tensor.

    The tensors share the shards' memory. Buffers carry the parameters' names.
    """
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, ParameterLayout] = {}
    for name, parameter in parameters.items():
        local, start = parameter.detach(), (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach()
            shape, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            assert tuple(local.shape) == tuple(shape), (name, local.shape, shape)
        stop = tuple(first + size for first, size in zip(start, local.shape, strict=True))
        box = Box(start=tuple(start), stop=stop, buffer=name, offset=0, strides=local.stride())
        tensors[name] = local
        layouts[name] = ParameterLayout(
            shape=tuple(parameter.shape),
            dtype=str(local.dtype).removeprefix("torch."),
            boxes=(box,) if local.numel() else (),
        )
    return tensors, layouts


def cut_rows(parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """The DTensors whose rows are divided among ranks; the same on each rank."""
    return frozenset(
        name
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor)
        and any(
            parameter.device_mesh.size(dim) > 1
            and any(placement.is_shard(of) for of in range(1, parameter.ndim))
            for dim, placement in enumerate(parameter.placements)
        )
    )
