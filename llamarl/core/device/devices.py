"""The devices of this process.

A kind of device is added by one entry of PLATFORMS."""

import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from llamarl.core.device.cuda import CudaPlatform
from llamarl.core.device.names import CPU, GPU, GPU_INDEX, is_kind
from llamarl.core.device.platform import Platform

GPU_VARIABLE = "LLAMARL_GPU"  # the kind of GPU that the recipe is for, such as H100-80GB
T = TypeVar("T")


class MetaPlatform(Platform):
    """A platform on which nothing is computed or stored; its constants are those of `another`
    one."""

    kind = "meta"

    def __init__(self, another: Platform) -> None:
        self.num_logits, self.num_tiled = another.num_logits, another.num_tiled
        self.has_wide_mm = another.has_wide_mm
        self.has_grouped_attention = another.has_grouped_attention  # type: ignore[method-assign]

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]


PLATFORMS: dict[str, Platform] = {CPU: Platform(), GPU: CudaPlatform()}
"""The platforms by torch's device type."""
PLATFORMS["meta"] = MetaPlatform(PLATFORMS[CPU])


def platform_of(device: torch.device | str) -> Platform:
    """Return the platform of a device. KeyError for a type of device that has no platform."""
    return PLATFORMS[torch.device(device).type]


def compute_device(kind: str, field: str) -> torch.device:
    """Return this process's device of `kind`; `field` is the config's name for the choice.

    ValueError if the host has no such GPU, no driver that can run it, or another GPU than the
    recipe was planned for.
    """
    platform = PLATFORMS[kind]
    device = platform.find(field, int(os.environ.get(GPU_INDEX, "0")))
    if device.type != CPU:
        card = platform.card(device)
        check_gpu(os.environ.get(GPU_VARIABLE, ""), card.name, card.memory_bytes)
    return device


def send(record: T, device: torch.device) -> T:
    """Return `record` with its tensors on `device`: all in one copy, which is not waited for.

    A record is a tensor, or a dataclass, tuple, list or mapping of records; all else in it stays.
    """
    tensors = [each for each in _leaves(record) if isinstance(each, Tensor)]
    sent = iter(platform_of(device).send(tensors, device))
    return _rebuilt(record, sent)


def _leaves(record: Any) -> Iterator[Any]:
    for part in _parts(record).values():
        yield from [part] if part is record else _leaves(part)


def _rebuilt(record: Any, sent: Iterator[Tensor]) -> Any:
    if isinstance(record, Tensor):
        return next(sent)
    parts = {
        key: part if part is record else _rebuilt(part, sent)
        for key, part in _parts(record).items()
    }
    if isinstance(record, Mapping):
        return parts
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.replace(record, **parts)
    return type(record)(parts.values()) if isinstance(record, tuple | list) else record


def _parts(record: Any) -> Mapping[Any, Any]:
    """Return the parts of a record by key; a leaf's only part is itself."""
    if isinstance(record, Mapping):
        return record
    if isinstance(record, tuple | list):
        return dict(enumerate(record))
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    return {None: record}


def use_device(device: torch.device) -> None:
    """Make `device` this thread's device, and for this process:

    - keep attention from using cuDNN's kernels: they build a plan for each new shape, which takes
      about half a second, and packed rollouts have a new shape in every micro-batch;
    - let products of bfloat16 matrices add up their parts in float32, which torch does not by
      default.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    platform_of(device).use(device)


def check_gpu(wanted: str, name: str, memory_bytes: int) -> None:
    """Raise ValueError unless a GPU called `name` is of the `wanted` kind, such as H100-80GB."""
    if not is_kind(wanted, name, memory_bytes):
        raise ValueError(
            f"cluster.gpu must be auto, or the kind of GPU of every host, got {wanted}, but "
            f"{socket.gethostname()} has {name} with {memory_bytes / 1e9:.1f} GB"
        )
