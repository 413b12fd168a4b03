"""A checkpoint as a model in memory, whole or this rank's shards.

Owns: which code computes it, and the order of building, sharding and reading. Does not own: any of
these. Invariant: nothing is allocated before the model is sharded.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from llamarl.config import TrainerConfig, TransformersConfig
from llamarl.models import hf
from llamarl.models.architecture import read_architecture
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
    """The model in `dtype` on `device`, sharded over `mesh` (None: whole); on all ranks.

    ValueError if the checkpoint is missing or does not fit.
    """
    model = empty_model(checkpoint, config, device, mesh, dtype)
    hf.load_into(dict(model.named_parameters()), checkpoint)
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
        parallelize(model, mesh, config)
    model.to_empty(device=device)
    return model


def _build(checkpoint: str, config: TrainerConfig, dtype: torch.dtype) -> TrainedModel:
    if not isinstance(config, TransformersConfig):
        with torch.device("meta"):
            return Transformer(read_architecture(checkpoint)).to(dtype)
    from llamarl.models.transformers_model import TransformersModel  # seconds, which others save

    return TransformersModel(checkpoint, dtype, getattr(torch, config.compute_dtype))
