"""Adapters beside the matrices of a model, and the model without them.

Owns: the computation of adapters, and their first values. Does not own: which there are
(`adapter_inventory.py`), or sharding over data-parallel ranks (`parallelize.py`). Invariant: with
the adapters off the model computes bit for bit what its checkpoint does, so it is its own
reference.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from llamarl.config import LoraConfig
from llamarl.models.adapter_inventory import adapted_modules
from llamarl.models.families import LORA_A, LORA_B, is_adapter, split_dimension


@dataclass(eq=False)
class AdapterSwitch:
    """Whether the adapters of a model take part in its passes."""

    is_on: bool = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """The block computes the model of the checkpoint."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


def attach(
    root: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    lora: LoraConfig,
    mesh: DeviceMesh | None = None,
) -> AdapterSwitch:
    """Give modules of `root` adapters of these `shapes`, float32, on the meta device; all else is
    frozen.

    ValueError if one of these is no linear layer.
    `mesh` is that of tensor parallel, which divides the matrices already. Frozen weights may have
    any dtype: FSDP brings all to the compute dtype.
    """
    switch = AdapterSwitch()
    root.requires_grad_(False)
    for module in adapted_modules(shapes):
        linear = _linear(root, module)
        for part in (LORA_A, LORA_B):
            name = f"{module}.{part}.weight"
            num_outputs, num_inputs = shapes[name]
            half = nn.Linear(num_inputs, num_outputs, False, "meta", torch.float32)
            if mesh is not None:
                split = split_dimension(name)
                place = [Replicate() if split is None else Shard(split)]
                half.weight = nn.Parameter(distribute_tensor(half.weight, mesh, place))
            linear.add_module(part, half)
        # Before the hook with which tensor parallel hands on the matrix's output.
        linear.register_forward_hook(_Addend(switch, lora), prepend=True)
    return switch


def _linear(root: nn.Module, name: str) -> nn.Linear:
    """ValueError, with the kind of what is there, unless it is a linear layer: of GPT-2 it is a
    convolution, of a mixture of experts one tensor for all."""
    try:
        found: object = root.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        got = "none" if found is None else type(found).__name__
        raise ValueError(
            f"trainer.lora.targets must name linear layers of {type(root).__name__}, got {name}, "
            f"which is {got}"
        )
    return found


@dataclass(frozen=True, eq=False)
class _Addend:
    """A hook behind a matrix: adds scale * B A x to its output."""

    switch: AdapterSwitch
    lora: LoraConfig

    def __call__(self, linear: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        if not self.switch.is_on:
            return out
        a, b = (linear.get_parameter(f"{half}.weight") for half in (LORA_A, LORA_B))
        (x,) = inputs
        if not isinstance(out, DTensor):
            return torch.add(out, self._product(self._dropped(x), a, b), alpha=self.lora.scale)
        # Each rank's part of B A x, or its addend, whichever the matrix's own product gives it.
        local = self._product(self._dropped(x), _local(a), _local(b))
        added = DTensor.from_local(local, out.device_mesh, out.placements, run_check=False)
        return torch.add(out, added, alpha=self.lora.scale)

    def _product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a), b)

    def _dropped(self, x: Tensor) -> Tensor:
        """This rank's part of x, with a share of zeros where gradients are wanted. The ranks that
        tensor parallel splits x over draw the same numbers, those of all of x, so that they drop
        what one process would."""
        rate = self.lora.dropout if torch.is_grad_enabled() else 0.0
        local = _local(x) if isinstance(x, DTensor) else x
        if rate == 0.0:
            return local
        if local.shape == x.shape:
            return F.dropout(local, rate)
        assert isinstance(x, DTensor)
        (split,) = x.placements
        assert isinstance(split, Shard)
        size = local.shape[split.dim]
        with torch.no_grad():
            scales = F.dropout(local.new_ones(x.shape), rate)
            first = x.device_mesh.get_local_rank() * size
            scales = scales.narrow(split.dim, first, size).clone()
        return local * scales


def _local(tensor: Tensor) -> Tensor:
    """This rank's part. The gradient of what all ranks hold is the sum of theirs, because each
    comes by one part of the other half."""
    assert isinstance(tensor, DTensor)
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return tensor.to_local(grad_placements=[Partial()] if is_whole else None)


@torch.no_grad()
def initialize(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Set adapters to their first values: A uniform within 1 / sqrt(inputs), B zeros, as PEFT does.

    They follow from seed and name alone, not from the sharding.
    """
    for name, parameter in parameters.items():
        if not is_adapter(name):
            continue
        whole = torch.zeros(parameter.shape)
        if name.endswith(f".{LORA_A}.weight"):
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            whole.uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(parameter.shape[1]))
        write(parameter, whole)


@torch.no_grad()
def write(parameter: Tensor, whole: Tensor) -> None:
    """Copy `whole` into a parameter, of a sharded one into this rank's part."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    (chunk,) = parameter.__create_chunk_list__()  # torch's own offsets: strided shards too
    place = tuple(
        slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )
    parameter.to_local().copy_(whole[place])
