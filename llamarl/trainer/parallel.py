"""The parallel form of the decoder, and the loading of a checkpoint as such a model, whole or this
rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from llamarl.core.config import TrainerConfig, TransformersConfig
from llamarl.model import hf
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.adapters import attach
from llamarl.model.architecture import (
    LINEARS,
    Architecture,
    is_adapter,
    is_stacked,
    read_any_architecture,
    read_architecture,
    split_dimension,
)
from llamarl.model.experts import SparseFeedForward, TokenExchange
from llamarl.model.inventory import expert_shard_dim, parameter_shapes
from llamarl.model.transformer import Layer, TrainedModel, Transformer, recomputed

MESH_DIMENSIONS = ("replicate", "shard", "tensor")
EXPERT_MESH_DIMENSIONS = ("replicate", "shard", "expert")


def mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """Return the mesh's dimensions, slowest first: `shard`, and the others if larger than 1."""
    sizes = (config.replicate, config.num_shard_ranks, config.tensor_parallel)
    shape = dict(zip(MESH_DIMENSIONS, sizes, strict=True))
    return {name: size for name, size in shape.items() if size > 1 or name == "shard"}


def expert_mesh_shape(config: TrainerConfig) -> dict[str, int]:
    """Return likewise the dimensions of the mesh of the stacked experts, over the same ranks:
    neighbours have different experts, whatever the tensor parallelism of the rest."""
    sizes = (config.replicate, config.num_expert_shard_ranks, config.expert_parallel)
    shape = dict(zip(EXPERT_MESH_DIMENSIONS, sizes, strict=True))
    return {name: size for name, size in shape.items() if size > 1 or name == "shard"}


def parameter_mesh_shape(name: str, config: TrainerConfig) -> dict[str, int]:
    """Return the dimensions of the mesh that the parameter `name` lies on."""
    return expert_mesh_shape(config) if is_stacked(name) else mesh_shape(config)


def parameter_placements(
    architecture: Architecture, config: TrainerConfig
) -> dict[str, tuple[Placement, ...]]:
    """Return parameter name -> one placement per dimension of its mesh (`parameter_mesh_shape`);
    needs no process group.

    Rank r is at the r-th coordinate of the mesh in row-major order. Weights, gradients and moments
    have the same placements. Adapters are among them."""
    found: dict[str, tuple[Placement, ...]] = {}
    shapes = parameter_shapes(architecture) | adapter_shapes(architecture, config.lora)
    for name, size in shapes.items():
        shape = parameter_mesh_shape(name, config)
        if is_stacked(name):
            by_expert: dict[str, Placement] = {
                "replicate": Replicate(),
                "shard": Shard(_expert_dim(size, config)),
                "expert": Shard(0),
            }
            found[name] = tuple(by_expert[key] for key in shape)
            continue
        split = split_dimension(name)
        tensor = Replicate() if split is None else Shard(split)
        is_cut_twice = "tensor" in shape and tensor == Shard(0)
        placements: dict[str, Placement] = {
            "replicate": Replicate(),
            # Tensor parallelism splits rows first, though its dimension is last; FSDP splits these.
            "shard": (
                _StridedShard(0, split_factor=config.tensor_parallel) if is_cut_twice else Shard(0)
            ),
            "tensor": tensor,
        }
        found[name] = tuple(placements[key] for key in shape)
    return found


def _expert_dim(shape: tuple[int, ...], config: TrainerConfig) -> int:
    dim = expert_shard_dim(shape, config)
    assert dim is not None, "the recipe was checked"
    return dim


def make_mesh(device_type: str, config: TrainerConfig) -> DeviceMesh:
    """Return the mesh over all ranks of the default process group; every rank calls it."""
    shape = mesh_shape(config)
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def parallelize(
    model: TrainedModel,
    mesh: DeviceMesh,
    config: TrainerConfig,
    adapters: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Make `model` parallel, in place, and give it `adapters` of these shapes, if there are any.

    Parameters (of any dtype, or still on the meta device) become DTensors placed as
    `parameter_placements` says; forward and backward run in `config.compute_dtype`. A mesh of one
    rank is no special case, except that FSDP then leaves frozen weights alone, in the dtype they
    have."""
    assert mesh.mesh_dim_names is not None
    is_split = "tensor" in mesh.mesh_dim_names
    model.aux_loss_coefficient = config.router_aux_loss_coefficient
    if is_split:
        assert isinstance(model, Transformer)
        split(model, mesh["tensor"])
    expert_mesh = _expert_mesh(model, mesh, config)
    if adapters:
        tensor_mesh = mesh["tensor"] if is_split else None
        model.adapters = attach(model.root, adapters, config.lora, tensor_mesh)
    for block in sparse_blocks(model) if config.freeze_router else ():
        block.gate.requires_grad_(False)
    model.set_checkpointing(config.activation_checkpointing)
    for layer in model.layers:
        if config.compile != "none":
            assert isinstance(layer, Layer)
            compile_layer(layer, config.compile)
    _shard(model, mesh, expert_mesh, config)


def sparse_blocks(model: TrainedModel) -> list[SparseFeedForward]:
    """Return the mixtures of experts of the model, in order."""
    return [module for module in model.modules() if isinstance(module, SparseFeedForward)]


def _expert_mesh(model: TrainedModel, mesh: DeviceMesh, config: TrainerConfig) -> DeviceMesh | None:
    """Give each expert-parallel rank its part of the stacked experts, if there are experts. Returns
    their mesh."""
    if not (blocks := sparse_blocks(model)):
        return None
    shape = expert_mesh_shape(config)
    names = tuple(shape)
    expert_mesh = init_device_mesh(mesh.device_type, tuple(shape.values()), mesh_dim_names=names)
    for block in blocks if config.expert_parallel > 1 else ():
        experts = block.experts
        for name, parameter in list(experts.named_parameters()):
            part = distribute_tensor(parameter.data, expert_mesh["expert"], [Shard(0)])
            setattr(experts, name, nn.Parameter(part))
        experts.exchange = TokenExchange(expert_mesh["expert"].get_group())
    return expert_mesh


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism within a layer and sequence parallelism between layers: packed
    tokens are dimension 0."""
    norm = SequenceParallel(sequence_dim=0)
    head_norm = SequenceParallel(sequence_dim=1, use_local_output=True)  # of [N, heads, head_dim]
    # One gather of the tokens feeds the two or three products that follow it.
    attention_input = PrepareModuleInput(
        input_layouts=(Shard(0), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": attention_input,
        "self_attn.q_norm": head_norm,
        "self_attn.k_norm": head_norm,
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    }
    for name, linear in LINEARS.items():
        by_inputs = RowwiseParallel(output_layouts=Shard(0))
        plan[name] = by_inputs if linear.split == 1 else ColwiseParallel()
    for layer in model.model.layers:
        styles = plan
        if isinstance(block := layer.mlp, SparseFeedForward):  # it routes each rank's own tokens
            styles = {key: style for key, style in plan.items() if not key.startswith("mlp")}
            whole = distribute_tensor(block.gate.weight.data, mesh, [Replicate()])
            block.gate.weight, block.mesh = nn.Parameter(whole), mesh
        present = {key: each for key, each in styles.items() if attrgetter(key)(layer) is not None}
        parallelize_module(layer, mesh, present)
    outside: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "model.norm": norm,
    }
    if model.lm_head is not None:
        outside["lm_head"] = ColwiseParallel()
    parallelize_module(model, mesh, outside)
    model.num_tensor_ranks = mesh.size()


def compile_layer(layer: Layer, backend: str) -> None:
    """Compile the layer except for its attention, whose blocks differ with every packing.

    The number of tokens is dynamic from the start, so one compilation serves all packings."""
    layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)
    if isinstance(layer.mlp, SparseFeedForward):  # the rows of an expert differ with every packing
        layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)  # type: ignore[method-assign]
    layer.run = torch.compile(layer.run, backend=backend, dynamic=True)


def _shard(
    model: TrainedModel, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, config: TrainerConfig
) -> None:
    """Apply FSDP2 over `shard`, with copies over `replicate`: one unit per layer, one for its
    experts, which have a mesh of their own, and one for the rest. Frozen weights of which each rank
    has all are left alone: gathering them would only make a second copy."""
    is_left = model.adapters is not None and config.num_shard_ranks == 1
    ignored = {each for each in model.parameters() if is_left and not each.requires_grad}
    # Inputs are not cast: token ids are integers, and the rotation tables stay float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mp_policy": policy}
    # With one shard, gathering again for the backward pass would only copy.
    reshards = config.reshard_after == "forward" and config.num_expert_shard_ranks > 1
    for layer in model.layers:
        if expert_mesh is None or not isinstance(layer, Layer):
            break
        if not isinstance(block := layer.mlp, SparseFeedForward):
            continue
        layer.around = ExpertUnit(block.experts)
        fully_shard(
            layer.around,
            mesh=_data_mesh(expert_mesh),
            ignored_params=ignored,
            reshard_after_forward=reshards,
            shard_placement_fn=lambda each: Shard(_expert_dim(tuple(each.shape), config)),
            **options,
        )
        ignored |= {*block.experts.parameters()}
    options |= {"mesh": _data_mesh(mesh), "ignored_params": ignored}
    reshards = config.reshard_after == "forward" and config.num_shard_ranks > 1
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshards, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if config.reshard_after == "step":  # then a change of the weights calls `reshard`
                module.set_reshard_after_backward(False)


class ExpertUnit(nn.Module):
    """The unit in which FSDP gathers the experts of a layer. It runs all of the layer, around what
    checkpointing computes again, so that recomputing gathers no weights."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Any) -> Any:
        """Run `recomputed` with these arguments."""
        return recomputed(*args)


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of a mesh that FSDP works on."""
    is_replicated = "replicate" in (mesh.mesh_dim_names or ())
    return mesh["replicate", "shard"] if is_replicated else mesh["shard"]


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, so that the next pass gathers the shards' present values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather(tensor: DTensor) -> torch.Tensor:
    """Return the whole of a sharded parameter, gradient or moment, on every rank."""
    placements = list(tensor.placements)
    for dimension in range(len(placements)):  # FSDP split last, so its shards are joined first
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local().detach()


def load_model(
    checkpoint: str,
    config: TrainerConfig,
    device: torch.device,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
) -> TrainedModel:
    """Return the model in `dtype` on `device`, sharded over `mesh` (None: whole); all ranks call
    it. Adapters are float32, and have no values yet.

    Raises ValueError if the checkpoint is missing or does not fit."""
    model = empty_model(checkpoint, config, device, mesh, dtype)
    own = {name: each for name, each in model.named_parameters() if not is_adapter(name)}
    hf.load_into(own, checkpoint)
    with model.adapters.off() if model.adapters is not None else nullcontext():
        model.prepare()
    reshard(model)
    return model


def empty_model(
    checkpoint: str,
    config: TrainerConfig,
    device: torch.device,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
) -> TrainedModel:
    """Return the model of `load_model` before its weights are read; only config.json of the
    checkpoint is."""
    model: TrainedModel
    if isinstance(config, TransformersConfig):
        from llamarl.model.transformers_model import TransformersModel  # seconds that others save

        model = TransformersModel(checkpoint, dtype, getattr(torch, config.compute_dtype))
    else:
        with torch.device("meta"):
            model = Transformer(read_architecture(checkpoint)).to(dtype)
    if mesh is not None:
        adapters = {}
        if config.lora.is_used:
            adapters = adapter_shapes(read_any_architecture(checkpoint), config.lora)
        parallelize(model, mesh, config, adapters)
    model.to_empty(device=device)
    return model
