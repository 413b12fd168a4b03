"""The trained model on one rank: shards, gradients, optimizer state, and their files.

Owns: everything that an optimizer step changes. Does not own: batches and losses (the trainer).
Invariant: master weights, gradients and moments are float32 shards (DTensors) that stay the same
tensors for the whole run, so a publish may read them between two steps; no rank holds the whole
model. With adapters these alone are trained, published and saved; the weights beside them are
shards in the compute dtype and never change.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llamarl.config import TrainerConfig
from llamarl.device.devices import send
from llamarl.models import adapter_files, hf
from llamarl.models.adapters import initialize
from llamarl.models.dcp_index import SavedShards
from llamarl.models.loading import load_model
from llamarl.models.parallelize import gather, reshard
from llamarl.models.random_states import RandomStates, is_state
from llamarl.models.snapshot import Snapshot
from llamarl.models.trained_model import TrainedModel

log = logging.getLogger(__name__)


class Policy:
    """A sharded model under training, whose ranks are those of the default process group; every
    method is called on all of them.

    `checkpoint` and `tokenizer` are the folders that an export copies from. All methods must run on
    one thread; `snapshot` may write its copy on another.
    """

    def __init__(
        self,
        model: TrainedModel,
        config: TrainerConfig,
        checkpoint: str,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._num_ranks = dist.get_world_size()
        self._gathers_once = config.reshard_after == "step"
        self._lora = config.lora
        self.model = model
        self.parameters: dict[str, DTensor] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                self.frozen[name] = parameter
                continue
            assert isinstance(parameter, DTensor), name
            self.parameters[name] = parameter
        self._optimizer = _make_optimizer(list(self.parameters.values()), config)
        device = next(iter(self.parameters.values())).device
        self.snapshot = Snapshot(device)
        data_rank = dist.get_rank() // config.tensor_parallel
        self._random = RandomStates(seed, data_rank, config.num_data_ranks, device)

    @classmethod
    def load(
        cls,
        checkpoint: str,
        mesh: DeviceMesh,
        config: TrainerConfig,
        seed: int,
        tokenizer: str | None = None,
        adapter: str | None = None,
    ) -> Self:
        """The weights of a checkpoint, sharded over `mesh`; with `config.lora` and the `adapter` in
        a folder (None: one that changes nothing). ValueError if one is missing or does not fit."""
        device = torch.device(mesh.device_type)
        is_adapted = config.lora.is_used
        dtype = getattr(torch, config.compute_dtype) if is_adapted else torch.float32
        model = load_model(checkpoint, config, device, mesh, dtype)
        policy = cls(model, config, checkpoint, tokenizer, seed)
        if is_adapted and adapter is not None:
            adapter_files.load_into(policy.parameters, adapter)
        elif is_adapted:
            initialize(policy.parameters, seed)
        return policy

    def movable(self, tag: str) -> list[torch.Tensor]:
        """This rank's memory of one tag, "weights" or "state" (gradients and moments), which may
        leave the device between two passes. Gathered weights that a pass left are freed here."""
        if tag == "weights":
            reshard(self.model)
            trained = [parameter.to_local().detach() for parameter in self.parameters.values()]
            return trained + [_local(parameter).detach() for parameter in self.frozen.values()]
        state: list[torch.Tensor | None] = []
        for parameter in self.parameters.values():
            state += [parameter.grad, *self._optimizer.state[parameter].values()]
        return [tensor.to_local() for tensor in state if isinstance(tensor, DTensor)]

    def finish_inference(self) -> None:
        """Free the weights gathered by passes without a backward, unless the step reuses them."""
        if not self._gathers_once:
            reshard(self.model)

    def scale_gradients(self, denominator: float, max_norm: float) -> float:
        """Divide the summed gradients by `denominator`, then clip them to the global `max_norm`.

        Returns their norm after the division and before the clipping.
        """
        sharded = [p.grad for p in self.parameters.values() if isinstance(p.grad, DTensor)]
        if not sharded:
            return 0.0
        grads = [grad.to_local() for grad in sharded]
        squares = torch.stack(torch._foreach_norm(grads)).double().square()
        copies = torch.tensor([_num_copies(grad) for grad in sharded], dtype=torch.float64)
        square = (squares / send(copies, squares.device)).sum()
        if self._num_ranks > 1:
            dist.all_reduce(square)
        norm = square.sqrt().item() / denominator
        torch._foreach_mul_(grads, min(1.0, max_norm / (norm + 1e-6)) / denominator)
        return norm

    def update(self, lr: float) -> None:
        """One optimizer step with the scaled gradients, which are freed."""
        reshard(self.model)  # the next pass must gather what this changes
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients, as `update` does; the weights stay what they are."""
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, folder: str, version: int) -> None:
        """Write weights, moments, random states and `version` into `folder`; raises as
        `Snapshot.write`."""
        self.snapshot.write(folder, self._state(version))

    def copy(self, version: int, host: str, available_bytes: Callable[[], int]) -> bool:
        """Copy what `save` would write, for `snapshot.write_copy`; False as `Snapshot.take`."""
        return self.snapshot.take(self._state(version), host, available_bytes)

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, under any number of ranks; returns the version.

        Random states of another number of data-parallel ranks, or of another kind of device, are
        not these ranks': then theirs follow from the seed and the version, which a line says.
        ValueError if `folder` is no checkpoint, or is one of another model or optimizer.
        """
        shards = SavedShards(folder)
        state = self._state()
        shapes = shards.shapes()
        is_random_same = self._random.are_those_of(shapes)
        if not is_random_same:
            state = {name: each for name, each in state.items() if not is_state(name)}
        _check_same(state, shapes, folder)
        reshard(self.model)
        try:
            dcp.load(state, storage_reader=shards)
        except CheckpointException as error:  # a BaseException with the failures of all ranks
            cause, _ = next(iter(error.failures.values()))
            why = " ".join(str(cause).split()) or type(cause).__name__
            raise ValueError(
                f"checkpoint.resume must name a complete checkpoint, got {folder}, which cannot be "
                f"loaded: {why}"
            ) from error
        version = int(state["version"])
        if is_random_same:
            self._random.restore(state)
        else:
            self._random.derive(version)
            self._report_derived(folder, version)
        return version

    def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout, or the adapters as
        peft does; rank 0 writes.

        Tensor by tensor: beside its shards no rank ever holds more than one whole parameter.
        """
        whole = ((name, gather(parameter)) for name, parameter in self.parameters.items())
        if dist.get_rank() == 0:
            save = partial(adapter_files.save, lora=self._lora) if self.frozen else hf.save
            save(
                folder,
                whole,
                source_folder=self._checkpoint,
                tokenizer_folder=self._tokenizer,
                dtype=getattr(torch, dtype),
            )
        else:
            for _ in whole:
                pass
        dist.barrier()

    def _state(self, version: int = 0) -> dict[str, torch.Tensor]:
        """The live tensors that a checkpoint holds; loading writes into them."""
        state: dict[str, torch.Tensor] = {"version": torch.tensor(version)}
        state |= self._random.present()
        for name, parameter in self.parameters.items():
            state[f"model.{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    def _report_derived(self, folder: str, version: int) -> None:
        """Rank 0 for all; it matters only where a pass draws random numbers."""
        if dist.get_rank() == 0:
            log.log(
                logging.WARNING if self._lora.dropout else logging.INFO,
                "%s has the random states of other ranks or devices: those of these %d ranks "
                "follow from the seed and version %d",
                folder,
                self._num_ranks,
                version,
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_copies(tensor: DTensor) -> int:
    """Ranks that hold the same elements of `tensor`."""
    pairs = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    assert not any(placement.is_partial() for placement in tensor.placements)
    return math.prod(size for placement, size in pairs if placement.is_replicate())


def _check_same(
    state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], folder: str
) -> None:
    """ValueError unless `folder` holds tensors of these `shapes`, random states aside: a load would
    skip those it lacks."""
    names = state.keys() | shapes.keys()
    for name in sorted(name for name in names if not is_state(name)):
        expected = tuple(state[name].shape) if name in state else None
        if shapes.get(name) != expected:
            raise ValueError(
                f"checkpoint.resume must name a checkpoint of this model and optimizer, got "
                f"{folder}, where {name} has shape {shapes.get(name)} instead of {expected}"
            )


def _make_optimizer(parameters: list[DTensor], config: TrainerConfig) -> torch.optim.Optimizer:
    """AdamW or plain SGD, its state allocated now, so that a lack of memory shows at the start.

    Only matrices decay: a norm's scale or a bias pulled towards 0 changes what the model computes
    without making it any simpler.
    """
    decay = config.weight_decay
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, foreach=True)
    betas = (config.betas[0], config.betas[1])
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer
