"""Whole recipes on the emulated accelerator, by shapes alone: one rank of hundreds, no memory.

Tensors of the device have shapes and dtypes but no values, and a process group that is not there
stands for all other ranks. What is followed: memory by the lives of tensors, and collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llamarl.core.config import Config, EmbeddedConfig, WeightsConfig
from llamarl.core.device.devices import PLATFORMS
from llamarl.core.device.platform import Arrival, Handle
from llamarl.core.groups import BatchRollout
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Request,
    Sampling,
)
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.model.architecture import read_architecture
from llamarl.model.experts import SparseFeedForward, TokenExchange
from llamarl.publish.target import WeightBuffer
from llamarl.trainer.activations import AttentionKernel, Watch, fullest_packings
from llamarl.trainer.losses import find_loss
from llamarl.trainer.parallel import empty_model, make_mesh
from llamarl.trainer.passes import Passes
from llamarl.trainer.policy import Policy
from tests.emulated.accelerator import KIND
from tests.emulated.platform import EmulatedPlatform, install

PROMPT_TOKENS = 2


class CountedGroup:
    """A group beside the default one, whose other ranks do not exist."""

    def __init__(self, found: list[tuple[str, int]]) -> None:
        self._found = found

    def allreduce(self, tensors: list[Tensor]) -> CountedGroup:
        self._found.append(("allreduce", sum(each.nbytes for each in tensors)))
        return self

    def _allgather_base(self, into: Tensor, tensor: Tensor) -> CountedGroup:
        self._found.append(("allgather", into.nbytes))
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        pass


class ShapesPlatform(EmulatedPlatform):
    """The device in the pieces of a GPU; what comes back from it is zeros."""

    num_logits, num_tiled = PLATFORMS["cuda"].num_logits, PLATFORMS["cuda"].num_tiled
    backend = host_backend = KIND

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [torch.empty(each.shape, dtype=each.dtype, device=device) for each in tensors]

    def __init__(self) -> None:
        self.collectives: list[tuple[str, int]] = []

    def fetch(self, tensor: Tensor) -> Arrival:
        with unset_fake_temporarily():
            return Arrival(torch.zeros(tensor.shape, dtype=tensor.dtype))

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            return torch.empty(tuple(shape), dtype=dtype)

    def share(self, flat: Tensor) -> Handle:
        return (id(flat),)

    def synchronize(self, device: torch.device) -> None:
        """Nothing is computed."""

    def make_group(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        interface: str,
        fails_alone: bool = False,
    ) -> Any:
        return CountedGroup(self.collectives)


class Collectives(TorchDispatchMode):
    """Notes each collective: its name, and the bytes of what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        room, _, name = func._schema.name.partition("::")
        out = func(*args, **(kwargs or {}))
        if room in ("c10d", "_c10d_functional") and not name.startswith(("wait", "barrier")):
            first = next(each for each in tree_leaves(args) if isinstance(each, Tensor))
            self.found.append((name.strip("_"), first.nbytes))
        return out


class OnDevice(TorchDispatchMode):
    """Makes shapes of the tensors of the device alone: what torch computes about meshes is real."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        target = (kwargs or {}).get("device")
        is_target = target is not None and torch.device(target).type == KIND
        if is_target or any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            with self._fake:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Lives(Watch):
    """Follows storages that FSDP frees by shrinking them, too: their tensors stay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([], device)
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = (
            weakref.WeakKeyDictionary()
        )

    def _notice(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = size = [storage.nbytes()]
            self._add(size[0])
            weakref.finalize(storage, lambda: self._add(-size[0]))

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if (size := self._sizes.get(storage)) is not None:
            self._add(num_bytes - size[0])
            size[0] = num_bytes

    @contextmanager
    def following(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def noticed(storage: torch.UntypedStorage, num_bytes: int) -> None:
            self.resize(storage, num_bytes)
            resize(storage, num_bytes)

        torch.UntypedStorage.resize_ = noticed  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@dataclass
class Shapes:
    """What one rank made: bytes at most, dtypes by role, collectives in order."""

    peak_bytes: int = 0
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    collectives: list[tuple[str, int]] = field(default_factory=list)


class EvenSplits(TokenExchange):
    """An exchange whose rows go to all ranks in equal parts: shapes have no counts."""

    def splits(self, counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
        return [], []

    def send(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        each, more = divmod(len(x), self.num_ranks)
        parts = [each + (rank < more) for rank in range(self.num_ranks)]
        return super().send(x, parts, parts)


@contextmanager
def one_rank(rank: int, num_ranks: int) -> Iterator[ShapesPlatform]:
    """The default process group of `num_ranks`, of which only this one exists."""
    PLATFORMS[KIND] = platform = ShapesPlatform()
    if KIND not in dist.Backend.backend_list:
        create = fake_pg._create_fake_pg
        dist.Backend.register_backend(KIND, create, extended_api=True, devices=["cpu", KIND])
    store = fake_pg.FakeStore()
    dist.init_process_group(KIND, store=store, rank=rank, world_size=num_ranks)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield platform
    finally:
        dist.destroy_process_group()
        PLATFORMS[KIND] = EmulatedPlatform()


def fullest_rollouts(config: Config) -> tuple[list[BatchRollout], dict[str, list[np.ndarray]]]:
    """Rollouts of the micro-batch that needs the most memory."""
    longest = config.generator.max_model_len - 1
    num_tokens = config.trainer.tokens_per_micro_batch
    lengths = max(fullest_packings(num_tokens, longest), key=sum)
    sizes = [length + 1 - PROMPT_TOKENS for length in lengths]
    columns = {
        PROMPT_IDS: [np.zeros(PROMPT_TOKENS, np.int32) for _ in sizes],
        RESPONSE_IDS: [np.zeros(size, np.int32) for size in sizes],
        GENERATOR_LOGPROBS: [np.zeros(size, np.float32) for size in sizes],
        TOKEN_VERSIONS: [np.zeros(size, np.int32) for size in sizes],
        SAMPLING: [np.array([1, 0, 1, 64, 0, 0], np.float64) for _ in sizes],
    }
    rows = [
        BatchRollout(
            row_id=i,
            group_id=0,
            num_prompt_tokens=PROMPT_TOKENS,
            num_tokens=size,
            num_generated=size,
            advantage=1.0,
            oldest_version=0,
        )
        for i, size in enumerate(sizes)
    ]
    return rows, columns


async def train_shapes(
    pool_rank: int, pool_size: int, config: Config, folder: str, rank: int
) -> Shapes:
    """One micro-batch and one update of trainer rank `rank`."""
    seen = Shapes()
    install()
    config.trainer.device = KIND
    device = torch.device(KIND, 0)
    fake, lives = FakeTensorMode(allow_non_fake_inputs=True), Lives(device)
    collectives = Collectives()
    with one_rank(rank, config.trainer.num_ranks), lives.following():
        mesh = make_mesh(KIND, config.trainer)
        with OnDevice(fake):
            model = empty_model(folder, config.trainer, device, mesh, torch.float32)
        for layer in model.layers:
            layer.self_attn.attend = AttentionKernel("flash").attend
            if isinstance(layer.mlp, SparseFeedForward) and layer.mlp.experts.exchange is not None:
                layer.mlp.experts.exchange = EvenSplits(layer.mlp.experts.exchange.group)
        with fake:
            policy = Policy(model, config.trainer, folder)
            spec = SimpleNamespace(algorithm=config.algorithm, sampling=config.sampling)
            passes = Passes(policy, device, spec, find_loss(config.algorithm))
            rows, columns = fullest_rollouts(config)
            for parameter in policy.parameters.values():  # as after an earlier micro-batch
                parameter.grad = torch.zeros_like(parameter)
            with collectives:
                passes._forward_backward(rows, columns, range(len(rows)))
            parameters = policy.parameters.values()
            seen.dtypes["gradients"] = {str(p.grad.dtype) for p in parameters}
            # Of the fused optimizer torch has no shapes but of copies, which a GPU does not make.
            seen.peak_bytes = lives.peak_bytes
            policy.update(config.trainer.lr)
            seen.dtypes["weights"] = {str(p.dtype) for p in parameters}
    seen.collectives = collectives.found
    return seen


async def decode_shapes(
    pool_rank: int, pool_size: int, config: Config, folder: str, rank: int, rendezvous: str
) -> Shapes:
    """Generator rank `rank`, by the embedded engine: two commits from staging memory, prefills and
    some steps of as many rollouts as it has slots."""
    seen = Shapes()
    install()
    generator, device = config.generator, torch.device(KIND, 0)
    fields = ("num_ranks", "max_num_seqs", "max_model_len", "dtype", "quantization")
    embedded = EmbeddedConfig(device="cuda", **{name: getattr(generator, name) for name in fields})
    embedded.device = KIND
    fake, lives = FakeTensorMode(allow_non_fake_inputs=True), Lives(device)
    with one_rank(rank, generator.num_ranks) as platform, lives.following(), fake:
        engine = EmbeddedEngine(
            read_architecture(folder),
            embedded,
            rank=rank,
            num_ranks=generator.num_ranks,
            rendezvous=rendezvous,
        )
        weight_buffer = WeightBuffer(
            engine.memory, WeightsConfig(), replica=0, rank=rank, run_id=str(rank), device=device
        )
        for version in range(2):
            weight_buffer.prepare(version)
            flat = weight_buffer.commit(version)
            engine.commit(engine.process_weights(flat), version)
        for row in range(generator.max_num_seqs):
            sampling = Sampling(max_tokens=generator.max_model_len)
            engine.submit(Request(row_id=row, prompt_ids=(1,) * 64, sampling=sampling, seed=row))
        for _ in range(3):
            engine.step()
        seen.peak_bytes = lives.peak_bytes
        seen.dtypes["weights"] = {str(flat.dtype)}
        seen.dtypes["cache"] = {str(engine._cache.keys.dtype)}
        weight_buffer.close()
    seen.collectives = platform.collectives
    return seen
