"""The memory that a trainer rank needs, and the boxes of the parameters that it holds, computed
from the recipe alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

from llamarl.core.config import Config, LoraConfig, TrainerConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import assign
from llamarl.core.device.devices import platform_of
from llamarl.core.device.hardware import Kinds
from llamarl.core.records import INFER
from llamarl.model.adapter_inventory import adapter_shapes, trained_shapes
from llamarl.model.architecture import NO_MODELS, Architecture, FrozenModels, is_stacked
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import KEPT_BYTES, MESSAGE_BYTES, RankLayout
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.shards import Shape, one_box, rank_layout
from llamarl.publish.transports.routes import TRANSPORTS
from llamarl.trainer.activations import forecast_activations, forecast_inference
from llamarl.trainer.parallel import mesh_shape, parameter_mesh_shape, parameter_placements


def trainer_layouts(config: Config, architecture: Architecture) -> list[RankLayout]:
    """Return the layout of each trainer rank of a recipe, as `shard_boxes` makes it there, in
    order."""
    layout = lru_cache(maxsize=None)(one_box)  # ranks that hold the same share it
    trained = trained_shapes(architecture, config.trainer.lora)
    return [
        rank_layout(
            rank,
            device,
            {
                name: layout(shape, size, start, "float32", name, 0)
                for name, shape, size, start in _local_boxes(config, architecture, rank)
                if name in trained
            },
        )
        for rank, device in enumerate(assign(config)["trainer"])
    ]


def local_elements(config: Config, architecture: Architecture) -> dict[str, int]:
    """Return parameter name -> number of elements that the first trainer rank, the fullest, holds
    of it."""
    return {name: math.prod(size) for name, _, size, _ in _local_boxes(config, architecture, 0)}


def _local_boxes(
    config: Config, architecture: Architecture, rank: int
) -> Iterator[tuple[str, Shape, Shape, Shape]]:
    """Yield (name, shape, shape of the trainer rank's box, its first index) of each parameter."""
    shapes = parameter_shapes(architecture) | adapter_shapes(architecture, config.trainer.lora)
    for name, placements in parameter_placements(architecture, config.trainer).items():
        mesh = tuple(parameter_mesh_shape(name, config.trainer).values())
        place = tuple(map(int, np.unravel_index(rank, mesh)))  # meshes count row after row
        yield name, shapes[name], *local_box(shapes[name], mesh, place, placements)


def local_box(
    shape: Shape, mesh: Shape, place: Shape, placements: tuple[Placement, ...]
) -> tuple[Shape, Shape]:
    """Return the shape and the first index of the box that the rank at `place` holds of a
    parameter.

    FSDP cuts the slices that tensor parallelism, the last mesh dimension, has made. Asked for both
    at once, torch lists every index of such a strided shard, which takes milliseconds; so it is
    asked for one after the other where the slices are equally long, as they are in all models that
    can be run."""
    strided = [placement for placement in placements if isinstance(placement, _StridedShard)]
    if not strided or shape[strided[0].dim] % mesh[-1]:
        return _local_box(shape, mesh, place, placements)
    slice_shape, slice_start = _local_box(shape, mesh[-1:], place[-1:], placements[-1:])
    plain = tuple(
        Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
        for placement in placements[:-1]
    )
    size, start = _local_box(slice_shape, mesh[:-1], place[:-1], plain)
    return size, tuple(a + b for a, b in zip(start, slice_start, strict=True))


@lru_cache(maxsize=1 << 16)
def _local_box(
    shape: Shape, mesh: Shape, place: Shape, placements: tuple[Placement, ...]
) -> tuple[Shape, Shape]:
    size, start = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    return tuple(size), tuple(start)


MASTER_BYTES = 4  # of a float32 master weight, gradient or moment
QUANTISED_BYTES = 8  # of an element of a tile in all its forms, while it is quantised
ANY_LAYER = "model.layers."

STAGE = "stage "  # before its name: the kind of memory that its frozen model takes


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """The bytes of a trainer rank, by kind. `weights` and `state` (gradients and optimizer) leave
    the device while another executor has it; the `frozen` models, the reference and models that run
    stages, stay. `moments` are the points of a step at which memory may be fullest, each with all
    that is there."""

    weights: int
    state: Kinds
    moments: tuple[Kinds, ...]
    frozen: Kinds

    @property
    def fullest(self) -> Kinds:
        """The moment with the most memory."""
        return max(self.moments, key=lambda kinds: sum(kinds.values()))


def lasting_bytes(config: Config, architecture: Architecture) -> tuple[int, Kinds]:
    """Return the bytes of the fullest rank's weights, and of its gradients and optimizer."""
    trainer = config.trainer
    names = trained_shapes(architecture, trainer.lora).keys()
    elements = local_elements(config, architecture)
    num_trained = sum(elements[name] for name in names)
    trained = MASTER_BYTES * num_trained
    beside = DTYPE_BYTES[trainer.compute_dtype] * (sum(elements.values()) - num_trained)
    state = {"gradients": trained}
    if trainer.optimizer == "adamw":  # one float32 each, besides two moments
        state["optimizer"] = 2 * trained + MASTER_BYTES * len(names)
    return trained + beside, state


def forecast_trainer(
    config: Config, architecture: Architecture, frozen: FrozenModels = NO_MODELS
) -> TrainerMemory:
    """Return the memory of the fullest rank."""
    trainer = config.trainer
    weights, state = lasting_bytes(config, architecture)
    trained = state["gradients"]
    lasting = {"weights": weights, **state}
    if not config.placement.colocated:  # else a sync phase waits for all targets, so none is late
        lasting["snapshot"] = trained
    if not TRANSPORTS[config.weights.transport].is_mapped:
        kept = _packed_bytes(config, trained // MASTER_BYTES)
        lasting["transfer"] = 2 * MESSAGE_BYTES + kept
    is_quantised = any(p.generator.quantization != "none" for p in pools_of(config.generator))
    if is_quantised and not trainer.lora.is_used:
        tile_bytes = QUANTISED_BYTES * platform_of(trainer.device).num_tiled
        lasting["transfer"] = lasting.get("transfer", 0) + tile_bytes
    models = {"reference": frozen.get(INFER, architecture)} if config.has_reference_model else {}
    models |= {STAGE + name: model for name, model in frozen.items() if name != INFER}
    return TrainerMemory(
        weights=weights,
        state=state,
        moments=tuple(lasting | kinds for kinds in _moments(config, architecture, trained)),
        frozen={kind: _frozen_bytes(config, model) for kind, model in models.items()},
    )


def _packed_bytes(config: Config, num_elements: int) -> int:
    """Return the bytes of messages that wait for other replicas, on a rank with so many elements:
    at most one version of them for each pool."""
    pools = pools_of(config.generator)
    if sum(len(pool.replicas) for pool in pools) == 1:
        return 0
    items = sum(DTYPE_BYTES[pool.generator.dtype] for pool in pools)
    return min(KEPT_BYTES, num_elements * items)


def _moments(config: Config, architecture: Architecture, trained: int) -> Iterable[Kinds]:
    """Yield the memory that is there for a while: in the head's backward, a layer's, the
    embedding's, and in an optimizer step of `trained` bytes."""
    trainer = config.trainer
    item = DTYPE_BYTES[trainer.compute_dtype]
    names = trained_shapes(architecture, trainer.lora).keys()
    is_left_alone = trainer.lora.is_used and trainer.num_shard_ranks == 1  # by FSDP: the frozen
    block, root = group_elements(trainer, architecture, names if is_left_alone else None)
    block_reduced, root_reduced = group_elements(trainer, architecture, names)
    num_gathered = _num_gathered(trainer, architecture)
    gathered = item * (root + num_gathered * block)
    is_resharded = num_gathered < architecture.num_layers
    beside_head = item * (root + block) if is_resharded else gathered  # the last one's copy-out
    # The head's gradient is reduced only at the end.
    head = root_reduced if architecture.tie_embeddings else root_reduced // 2
    activations = forecast_activations(config, architecture)
    yield {
        "unsharded": beside_head,
        "activations": activations.saved_bytes,
        "logits": activations.logits_bytes,
    }
    yield {
        "unsharded": gathered,
        "activations": activations.saved_bytes,
        "recomputation": activations.block_bytes,
        "reduction": block_reduced * (item + MASTER_BYTES) + head * item,
    }
    yield {
        "unsharded": gathered if trainer.reshard_after == "step" else item * root,
        "activations": activations.embedding_bytes,
        "reduction": root_reduced * (item + MASTER_BYTES),
    }
    if trainer.optimizer == "sgd" and trainer.weight_decay:
        yield {"optimizer": trained}  # torch adds decay and gradients in a list of their own


def group_elements(
    trainer: TrainerConfig, architecture: Architecture, names: Collection[str] | None = None
) -> tuple[int, int]:
    """Return the elements of one gathered layer, and of the gathered rest, on a tensor-parallel
    rank; of the parameters `names` alone, if given."""
    found = dict.fromkeys(("layer", "rest"), 0)
    is_split = "tensor" in mesh_shape(trainer)
    placements = parameter_placements(architecture, trainer)
    shapes = parameter_shapes(architecture) | adapter_shapes(architecture, trainer.lora)
    # Of all layers one with experts is the largest.
    prefix = f"{ANY_LAYER}{min(architecture.sparse_layers, default=0)}."
    for name, shape in shapes.items():
        if names is not None and name not in names:
            continue
        if name.startswith(ANY_LAYER) and not name.startswith(prefix):
            continue
        if is_stacked(name):
            found["layer"] += math.prod(shape) // trainer.expert_parallel
            continue
        tensor = placements[name][-1] if is_split else Replicate()
        size, _ = local_box(shape, (trainer.tensor_parallel,), (0,), (tensor,))
        rows = -(-size[0] // trainer.num_shard_ranks) * trainer.num_shard_ranks  # FSDP pads
        found["layer" if name.startswith(prefix) else "rest"] += rows * math.prod(size[1:])
    return found["layer"], found["rest"]


def _num_gathered(trainer: TrainerConfig, architecture: Architecture) -> int:
    """Return the number of layers whose weights are gathered at once, at most."""
    if trainer.num_shard_ranks == 1:
        return architecture.num_layers
    if trainer.reshard_after == "forward":
        return min(2, architecture.num_layers)
    return architecture.num_layers + 1


def _frozen_bytes(config: Config, architecture: Architecture) -> int:
    """Return the bytes of a frozen model, which is parallel like the trainer, except on a single
    rank, where the model is plain."""
    trainer = replace(config.trainer, lora=LoraConfig())
    config = replace(config, trainer=trainer)
    num_elements, gathered = sum(local_elements(config, architecture).values()), 0
    if trainer.num_ranks > 1:
        block, root = group_elements(trainer, architecture)
        gathered = root + _num_gathered(trainer, architecture) * block
    passing = forecast_inference(config, architecture)
    return DTYPE_BYTES[trainer.compute_dtype] * (num_elements + gathered) + passing
