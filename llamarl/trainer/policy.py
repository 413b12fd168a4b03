"""The trained model on one rank: shards, gradients, optimizer state, random numbers, and their
files."""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from pickle import Unpickler
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llamarl.core import files
from llamarl.core.config import TrainerConfig
from llamarl.core.device.devices import platform_of, send
from llamarl.core.device.names import CPU
from llamarl.core.memory import available_bytes
from llamarl.model import adapters, hf
from llamarl.model.adapters import initialize
from llamarl.model.transformer import TrainedModel
from llamarl.publish.transports.mapped import this_host
from llamarl.trainer.parallel import gather, load_model, reshard

PREFIX = "random."


class RandomStates:
    """The random states of data-parallel rank `data_rank`, which computes on `device`. Making them
    starts the streams of version 0."""

    def __init__(
        self, seed: int, data_rank: int, num_data_ranks: int, device: torch.device
    ) -> None:
        self._seed, self._data_rank, self._num_data_ranks = seed, data_rank, num_data_ranks
        self._devices = {each.type: each for each in (torch.device(CPU), device)}
        self.derive(0)

    def derive(self, version: int) -> None:
        """Start streams that follow from seed, version and data rank alone."""
        text = f"{self._seed} {version} {self._data_rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # the device's too

    def present(self) -> dict[str, Tensor]:
        """Return this rank's states for a checkpoint: uint8, in host memory."""
        return {
            self._name(kind, self._data_rank): platform_of(device).random_state(device)
            for kind, device in self._devices.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue the streams from the states that `present` returned."""
        for kind, device in self._devices.items():
            platform_of(device).set_random_state(device, state[self._name(kind, self._data_rank)])

    def are_those_of(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a checkpoint with tensors of these shapes has the states of as many data
        ranks as there are now, for devices of this kind; all ranks find the same."""
        expected = {
            self._name(kind, rank): tuple(platform_of(device).random_state(device).shape)
            for kind, device in self._devices.items()
            for rank in range(self._num_data_ranks)
        }
        return expected == {name: shape for name, shape in shapes.items() if is_state(name)}

    def _name(self, kind: str, data_rank: int) -> str:
        return f"{PREFIX}{kind}.{data_rank}"


def is_state(name: str) -> bool:
    """Return whether a checkpoint's tensor of this name is a random state."""
    return name.startswith(PREFIX)


DCP_INDEX_FILE = ".metadata"
CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)


class SavedShards(FileSystemReader):
    """Reads a checkpoint folder that trainer ranks saved. Raises ValueError if the index is
    missing, damaged or of another origin."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / DCP_INDEX_FILE
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            _check(index, path.parent)
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path} must be the index of a checkpoint, got {reason}") from None
        index.storage_meta.load_id = self.load_id
        return index

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor in the folder, by its name."""
        saved = self.read_metadata().state_dict_metadata
        return {name: tuple(getattr(entry, "size", ())) for name, entry in saved.items()}


def _allowed() -> Mapping[tuple[str, str], Callable[..., Any]]:
    classes: dict[tuple[str, str], Callable[..., Any]] = {
        (kind.__module__, kind.__qualname__): kind for kind in CLASSES
    }
    dtypes: dict[str, Any] = {k: v for k, v in vars(torch).items() if isinstance(v, torch.dtype)}
    paths = [("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")]  # Python 3.13's is the last
    return (
        classes
        | {("torch", name): dtype for name, dtype in dtypes.items()}
        | dict.fromkeys(paths, PurePosixPath)
        | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
    )


class _IndexUnpickler(Unpickler):
    ALLOWED = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise ValueError(f"{module}.{name}, which no trainer saves") from None


def _check(index: object, folder: Path) -> None:
    """Raise ValueError unless every tensor's pieces lie in files of `folder`."""
    if not isinstance(index, metadata.Metadata):
        raise ValueError(f"an object of type {type(index).__name__}")
    if not isinstance(index.storage_meta, metadata.StorageMeta):
        raise ValueError("no record of its storage")
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str or not isinstance(entry, metadata.TensorStorageMetadata):
            raise ValueError(f"{name!r}, which is no tensor")
    sizes: dict[str, int] = {}
    for where, info in index.storage_data.items():
        name = info.relative_path
        if PurePosixPath(name).name != name:
            raise ValueError(f"a piece of {where.fqn} outside the folder, in {name}")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise ValueError(f"a piece of {where.fqn} past the end of {name}")


WRITE_LIMIT = timedelta(days=1)  # the fastest rank waits so long for the slowest one
LARGEST_SHARE = 0.5  # of a host's available memory that copies may take: others grow too


class Snapshot:
    """One rank's part of a checkpoint; made by all ranks of the default group at once.

    The copy's memory is allocated by the first `take` and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._platform = device, platform_of(device)
        backend = self._platform.host_backend
        self._group = dist.new_group(backend=backend, timeout=WRITE_LIMIT)
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, state: dict[str, torch.Tensor]) -> bool:
        """Copy `state` into host memory. Returns False, on all ranks, if one of their hosts has too
        little memory for the copies of its ranks."""
        if not self._copies:
            if not self._is_room(state):
                return False
            self._copies = {
                name: torch.empty_like(tensor, device="cpu", pin_memory=self._platform.runs_ahead)
                for name, tensor in state.items()
            }
        for name, copy in self._copies.items():
            _local(copy).copy_(_local(state[name]), non_blocking=True)
        self._platform.synchronize(self._device)
        return True

    def write_copy(self, folder: str) -> None:
        """Write the last copy; on any thread, but not twice at a time. Raises as `write`."""
        self.write(folder, self._copies)

    def write(self, folder: str, state: dict[str, torch.Tensor]) -> None:
        """Write `state` into `folder`, each rank its shards and its part of the manifest.

        Raises OSError if the disk is full: before anything is written, unless it fills up
        meanwhile; RuntimeError for any other failure."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        hf.check_space(folder, num_bytes, "a checkpoint needs")
        try:
            dcp.save(state, checkpoint_id=folder, process_group=self._group)
        except CheckpointException as error:  # a BaseException with the failures of all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            # torch's zip writer hides that a disk is full, so the message has the free space.
            free_bytes = shutil.disk_usage(folder).free
            message = (
                f"checkpoint could not be written by rank {rank}: {cause} ({free_bytes} bytes are "
                f"free in {folder})"
            )
            if isinstance(cause, OSError):
                raise OSError(cause.errno, message) from error
            raise RuntimeError(message) from error
        rank = dist.get_rank()
        files.write_part(Path(folder), rank, Path(folder).glob(f"__{rank}_*"))

    def _is_room(self, state: dict[str, torch.Tensor]) -> bool:
        num_bytes = sum(_local(tensor).nbytes for tensor in state.values())
        own = this_host(), num_bytes, available_bytes()
        answers = [own] * dist.get_world_size()
        dist.all_gather_object(answers, own, self._group)
        needed, room = defaultdict[str, int](int), dict[str, int]()
        for host, num_bytes, free_bytes in answers:
            needed[host] += num_bytes
            room[host] = min(room.get(host, free_bytes), free_bytes)
        return all(needed[host] <= LARGEST_SHARE * room[host] for host in needed)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


log = logging.getLogger(__name__)


class Policy:
    """A sharded model under training, whose ranks are those of the default process group; every
    method is called on all of them. `parameters` are published and saved, and trained unless a
    router is to stay as it is; `frozen` are the weights beside adapters.

    `checkpoint` and `tokenizer` are the folders that an export copies from. All methods must run on
    one thread; `snapshot` may write its copy on another."""

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
            if not parameter.requires_grad and config.lora.is_used:
                self.frozen[name] = parameter
                continue
            assert isinstance(parameter, DTensor), name
            self.parameters[name] = parameter
        trained = [each for each in self.parameters.values() if each.requires_grad]
        self._optimizer = _make_optimizer(trained, config)
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
        """Load the weights of a checkpoint, sharded over `mesh`; with `config.lora` also the
        `adapter` in a folder (None: one that changes nothing). Raises ValueError if one is missing
        or does not fit."""
        device = torch.device(mesh.device_type)
        is_adapted = config.lora.is_used
        dtype = getattr(torch, config.compute_dtype) if is_adapted else torch.float32
        model = load_model(checkpoint, config, device, mesh, dtype)
        policy = cls(model, config, checkpoint, tokenizer, seed)
        if is_adapted and adapter is not None:
            adapters.load_into(policy.parameters, adapter)
        elif is_adapted:
            initialize(policy.parameters, seed)
        return policy

    def movable(self, tag: str) -> list[torch.Tensor]:
        """Return this rank's memory of one tag, "weights" or "state" (gradients and moments), which
        may leave the device between two passes. Gathered weights that a pass left are freed
        here."""
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
        """Take one optimizer step with the scaled gradients, which are freed."""
        reshard(self.model)  # the next pass must gather what this changes
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients, as `update` does; the weights stay what they are."""
        self._optimizer.zero_grad(set_to_none=True)

    def restore(self, folder: str) -> int:
        """Load a checkpoint of `state`, written under any number of ranks. Returns its version.

        Random states of another number of data-parallel ranks, or of another kind of device, are
        not used: these ranks' states then follow from the seed and the version, which a line in the
        log says. Raises ValueError if `folder` is no checkpoint, or is one of another model or
        optimizer."""
        shards = SavedShards(folder)
        state = self.state()
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
            return version
        self._random.derive(version)
        if dist.get_rank() == 0:  # for all; it matters only where a pass draws random numbers
            log.log(
                logging.WARNING if self._lora.dropout else logging.INFO,
                "%s has the random states of other ranks or devices: those of these %d ranks "
                "follow from the seed and version %d",
                folder,
                self._num_ranks,
                version,
            )
        return version

    def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout, or the adapters as
        peft does; rank 0 writes.

        It goes tensor by tensor: beside its shards no rank ever holds more than one whole
        parameter."""
        whole = ((name, gather(parameter)) for name, parameter in self.parameters.items())
        if dist.get_rank() == 0:
            save = partial(adapters.save, lora=self._lora) if self.frozen else hf.save
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

    def state(self, version: int = 0) -> dict[str, torch.Tensor]:
        """Return the live tensors that a checkpoint holds, which `snapshot` writes or copies, and
        loading writes into: weights, moments, random states and `version`."""
        state: dict[str, torch.Tensor] = {"version": torch.tensor(version)}
        state |= self._random.present()
        for name, parameter in self.parameters.items():
            state[f"model.{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state


def _num_copies(tensor: DTensor) -> int:
    """Return the number of ranks that hold the same elements of `tensor`."""
    pairs = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    assert not any(placement.is_partial() for placement in tensor.placements)
    return math.prod(size for placement, size in pairs if placement.is_replicate())


def _check_same(
    state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], folder: str
) -> None:
    """Raise ValueError unless `folder` holds tensors of these `shapes`, random states aside: a load
    would skip tensors that it lacks."""
    names = state.keys() | shapes.keys()
    for name in sorted(name for name in names if not is_state(name)):
        expected = tuple(state[name].shape) if name in state else None
        if shapes.get(name) != expected:
            raise ValueError(
                f"checkpoint.resume must name a checkpoint of this model and optimizer, got "
                f"{folder}, where {name} has shape {shapes.get(name)} instead of {expected}"
            )


def _make_optimizer(parameters: list[DTensor], config: TrainerConfig) -> torch.optim.Optimizer:
    """Make AdamW or plain SGD, its state allocated now, so that a lack of memory shows at the
    start.

    Only matrices decay: a norm's scale or a bias pulled towards 0 changes what the model computes
    without making it any simpler."""
    groups = [  # torch updates those of one mesh at once
        {"params": same, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for mesh in dict.fromkeys(each.device_mesh for each in parameters)
        for is_matrix in (True, False)
        if (same := [p for p in parameters if p.device_mesh == mesh and (p.ndim >= 2) == is_matrix])
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


def learning_rate(config: TrainerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first) in a run of `num_steps`; a
    resumed run needs no state for it.

    Warm-up: lr * (step + 1) / warmup_steps while step < warmup_steps, which may be given as a share
    of num_steps (rounded up, as in transformers). Then constant, or with

        p = (step - warmup_steps) / (num_steps - warmup_steps)        m = min_lr_share

    lr times m + (1 - m) * (1 - p) (linear) or m + (1 - m) * (1 + cos(pi p)) / 2 (cosine). As in
    transformers, p is 0 at the first step after warm-up and would be 1 one step after the last: a
    step at learning rate 0 would cost a batch and a publish without any training."""
    warmup_steps = config.warmup_steps or math.ceil(config.warmup_share * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    num_falling = max(1, num_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / num_falling)
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_share + (1 - config.min_lr_share) * shape)
