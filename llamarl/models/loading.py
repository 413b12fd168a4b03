"""A checkpoint as a model in memory, whole or this rank's shards.

Owns: which code computes it, and the order of building, sharding and reading. Does not own: any of
these. Invariant: nothing is allocated before the model is sharded.
"""

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh

from llamarl.config import TrainerConfig, TransformersConfig
from llamarl.models import hf
from llamarl.models.adapter_inventory import adapter_shapes
from llamarl.models.architecture import read_architecture
from llamarl.models.families import is_adapter
from llamarl.models.other_architecture import read_any_architecture
from llamarl.models.parallelize import parallelize, reshard
from llamarl.models.trained_model import TrainedModel
from llamarl.models.transformer import Transformer


def load_model(
    checkpoint: str,
    config: TrainerConfig,
    device: torch.device,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
) -> TrainedModel:
    """The model in `dtype` on `device`, sharded over `mesh` (None: whole); on all ranks. Adapters
    are float32, and have no values yet.

    ValueError if the checkpoint is missing or does not fit.
    """
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
    """The same before its weights are read: of the checkpoint only config.json is."""
    model = _build(checkpoint, config, dtype)
    if mesh is not None:
        adapters = {}
        if config.lora.is_used:
            adapters = adapter_shapes(read_any_architecture(checkpoint), config.lora)
        parallelize(model, mesh, config, adapters)
    model.to_empty(device=device)
    return model


def _build(checkpoint: str, config: TrainerConfig, dtype: torch.dtype) -> TrainedModel:
    if not isinstance(config, TransformersConfig):
        with torch.device("meta"):
            return Transformer(read_architecture(checkpoint)).to(dtype)
    from llamarl.models.transformers_model import TransformersModel  # seconds, which others save

    return TransformersModel(checkpoint, dtype, getattr(torch, config.compute_dtype))
