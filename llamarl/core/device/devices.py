"""The devices of this process.

A kind of device is added by one entry of PLATFORMS."""

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
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
        self.has_grouped_mm = another.has_grouped_mm
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
    tensors: list[Tensor] = []
    _with_tensors(record, tensors.append)
    sent = iter(platform_of(device).send(tensors, device))
    return _with_tensors(record, lambda _: next(sent))


def _with_tensors(record: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return the record with what `replace` returns for each of its tensors, in order."""
    if isinstance(record, Tensor):
        return replace(record)
    if isinstance(record, Mapping):
        return {key: _with_tensors(each, replace) for key, each in record.items()}
    if isinstance(record, tuple | list):
        return type(record)([_with_tensors(each, replace) for each in record])
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        names = [field.name for field in dataclasses.fields(record)]
        parts = {name: _with_tensors(getattr(record, name), replace) for name in names}
        return dataclasses.replace(record, **parts)
    return record


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
