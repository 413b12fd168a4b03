"""The parallel form of the decoder.

Owns: how FSDP2 shards it and in which precision. Does not own: the process group
(`process_group.py`) or the optimizer. Invariant: gradients are the exact sum over ranks, reduced in
float32; nothing divides them here.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llamarl.models.transformer import Layer, Transformer


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
