"""The parallel form of the decoder.

Owns: the device mesh, which rank holds what of each parameter, and how FSDP2, tensor and sequence
parallel, activation checkpointing and compilation are laid over the modules. Does not own: the
process group (`process_group.py`), the head's sums over the vocabulary (`head.py`) or the
optimizer. Invariant: gradients are the exact sum over ranks with rows of their own, reduced in
float32; nothing divides them here.

Ranks count through the mesh with `tensor` fastest, so that the ranks of one tensor-parallel group
are neighbours (one host), then `shard`, then `replicate`.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llamarl.config import TrainerConfig
from llamarl.models.architecture import Architecture
from llamarl.models.inventory import parameter_shapes
from llamarl.models.transformer import Layer, Transformer

MESH_DIMENSIONS = ("replicate", "shard", "tensor")

# What tensor-parallel ranks hold of a parameter, by the module it belongs to; all others are whole.
SPLIT_OUTPUTS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SPLIT_INPUTS = ("o_proj", "down_proj")


def mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """The mesh's dimensions, slowest first; `shard` always, the others if they have ranks."""
    sizes = (config.replicate, config.num_shard_ranks, config.tensor_parallel)
    shape = dict(zip(MESH_DIMENSIONS, sizes, strict=True))
    return {name: size for name, size in shape.items() if size > 1 or name == "shard"}


def parameter_placements(
    architecture: Architecture, config: TrainerConfig
) -> dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]:
    """Parameter name -> (mesh shape, one placement per mesh dimension), without any process.

    Rank r has the coordinate r of a row-major count through the mesh. The placements are those of
    weights, gradients and moments alike.
    """
    shape = mesh_shape(config)
    found: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {}
    for name in parameter_shapes(architecture):
        tensor = _tensor_placement(name)
        is_cut_twice = "tensor" in shape and tensor == Shard(0)
        placements: dict[str, Placement] = {
            "replicate": Replicate(),
            # FSDP cuts what tensor parallel left: neighbours in `shard` are not adjacent rows.
            "shard": (
                _StridedShard(0, split_factor=config.tensor_parallel) if is_cut_twice else Shard(0)
            ),
            "tensor": tensor,
        }
        found[name] = (tuple(shape.values()), tuple(placements[key] for key in shape))
    return found


def _tensor_placement(name: str) -> Placement:
    """What one tensor-parallel rank holds of the parameter `name`."""
    module, kind = name.split(".")[-2:]
    if module in SPLIT_OUTPUTS:
        return Shard(0)
    return Shard(1) if module in SPLIT_INPUTS and kind == "weight" else Replicate()


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool,
) -> Transformer:
    """Shard every parameter of `model` over the one-dimensional `mesh`, in place; returns it.

    Parameters (float32, or still on the meta device) become DTensors; forward and backward run in
    `compute_dtype`. A mesh of one rank takes the same path.
    """
    # Inputs are not cast: token ids are integers, and the rotation tables stay float32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    is_alone = mesh.size() == 1  # then gathering again for the backward pass would only copy
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        layer.recomputes = activation_checkpointing
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_alone)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
