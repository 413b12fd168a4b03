"""What one trainer rank has in memory, moment by moment.

Owns: state, FSDP's buffers and activations of the fullest rank, and the frozen models beside it.
Does not own: sharing a device with others (`ranks.py`). Invariant: kinds mirror
`trainer/policy.py`, FSDP2 and `publish/source.py`; rank 0, whose shards are never shorter than
others', is the fullest.

How FSDP2's buffers are counted, per group of parameters (each layer, and one of embedding, norm
and head, which stays gathered from forward to backward):

- gathered in the compute dtype: with reshard_after=forward the group at work and the next one,
  which is gathered meanwhile; else all, and one that is being copied out.
- reduced: gradients of the group in the compute dtype, and the same once more in float32, padded,
  as the input of the reduce-scatter. What comes out of it becomes the shard's gradient.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate

from llamarl.core.config import Config, LoraConfig, TrainerConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.device.devices import platform_of
from llamarl.model.adapter_inventory import adapter_shapes, trained_shapes
from llamarl.model.architecture import Architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.planner.forecast import NO_MODELS, STAGE, FrozenModels
from llamarl.planner.memory.activations import forecast_activations, forecast_inference
from llamarl.planner.memory.shardings import local_box, local_elements
from llamarl.publish.layout import KEPT_BYTES, MESSAGE_BYTES
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.transports.routes import TRANSPORTS
from llamarl.scoring.stages import INFER
from llamarl.trainer.parallel import mesh_shape, parameter_placements

MASTER_BYTES = 4  # of a float32 master weight, gradient or moment
QUANTISED_BYTES = 8  # of an element of a tile in all its forms, while it is quantised
LAYER = "model.layers.0."
ANY_LAYER = "model.layers."

Kinds = dict[str, int]
"""Bytes by kind."""


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes by kind. `weights` and `state` (gradients and optimizer) leave the device while another
    executor has it; what is `frozen`, the reference and models that run stages, stays. `moments`
    are the points of a step at which memory may be fullest, each with all that is there."""

    weights: int
    state: Kinds
    moments: tuple[Kinds, ...]
    frozen: Kinds


def forecast_trainer(
    config: Config, architecture: Architecture, frozen: FrozenModels = NO_MODELS
) -> TrainerMemory:
    """Of the fullest rank."""
    trainer = config.trainer
    names = trained_shapes(architecture, trainer.lora).keys()
    elements = local_elements(config, architecture, 0)
    num_trained = sum(elements[name] for name in names)
    trained = MASTER_BYTES * num_trained
    beside = DTYPE_BYTES[trainer.compute_dtype] * (sum(elements.values()) - num_trained)
    state = {"gradients": trained}
    if trainer.optimizer == "adamw":  # one float32 each, besides two moments
        state["optimizer"] = 2 * trained + MASTER_BYTES * len(names)
    weights = trained + beside
    lasting = {"weights": weights, **state}
    if not config.placement.colocated:  # else a sync phase waits for all targets, so none is late
        lasting["snapshot"] = trained
    if not TRANSPORTS[config.weights.transport].is_mapped:
        kept = _packed_bytes(config, num_trained)
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
    """Messages that wait for other replicas, of a rank with so many elements: at most a version of
    them for each pool."""
    pools = pools_of(config.generator)
    if sum(len(pool.replicas) for pool in pools) == 1:
        return 0
    items = sum(DTYPE_BYTES[pool.generator.dtype] for pool in pools)
    return min(KEPT_BYTES, num_elements * items)


def _moments(config: Config, architecture: Architecture, trained: int) -> Iterable[Kinds]:
    """What is there for a while: in the head's backward, a layer's, the embedding's, and in an
    optimizer step of `trained` bytes."""
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
    # The head's gradient waits for the end.
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
    """Elements of one gathered layer, and of the gathered rest, on a tensor-parallel rank; of the
    parameters `names` alone, if given."""
    found = dict.fromkeys(("layer", "rest"), 0)
    mesh = mesh_shape(trainer)
    placements = parameter_placements(architecture, trainer)
    shapes = parameter_shapes(architecture) | adapter_shapes(architecture, trainer.lora)
    for name, shape in shapes.items():
        if names is not None and name not in names:
            continue
        if name.startswith(ANY_LAYER) and not name.startswith(LAYER):
            continue
        tensor = placements[name][1][-1] if "tensor" in mesh else Replicate()
        size, _ = local_box(shape, (trainer.tensor_parallel,), (0,), (tensor,))
        rows = -(-size[0] // trainer.num_shard_ranks) * trainer.num_shard_ranks  # FSDP pads
        found["layer" if name.startswith(LAYER) else "rest"] += rows * math.prod(size[1:])
    return found["layer"], found["rest"]


def _num_gathered(trainer: TrainerConfig, architecture: Architecture) -> int:
    """Layers whose weights are gathered at once, at most."""
    if trainer.num_shard_ranks == 1:
        return architecture.num_layers
    if trainer.reshard_after == "forward":
        return min(2, architecture.num_layers)
    return architecture.num_layers + 1


def _frozen_bytes(config: Config, architecture: Architecture) -> int:
    """Of a frozen model, parallel like the trainer but for a single rank, whose model is plain."""
    trainer = replace(config.trainer, lora=LoraConfig())
    config = replace(config, trainer=trainer)
    num_elements, gathered = sum(local_elements(config, architecture, 0).values()), 0
    if trainer.num_ranks > 1:
        block, root = group_elements(trainer, architecture)
        gathered = root + _num_gathered(trainer, architecture) * block
    passing = forecast_inference(config, architecture)
    return DTYPE_BYTES[trainer.compute_dtype] * (num_elements + gathered) + passing
