"""The emulated accelerator as a platform of the package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.core.device.devices import PLATFORMS
from llamarl.core.device.names import DEVICES
from llamarl.core.device.platform import Accelerator, Card, Graphs, Handle, Replay
from tests.emulated.accelerator import DEVICE_MEMORY_BYTES, KIND, EmulatedTensor, register
from tests.emulated.module import Module

SHARED: dict[object, Tensor] = {}


class RecordedGraphs:
    """Runs again what was recorded; counts."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        compute()
        return compute

    def forget(self) -> None:
        pass


class EmulatedPlatform(Accelerator):
    """See `Platform`; small tiles, so that a small model has several."""

    kind = KIND
    num_logits, num_tiled = 2**14, 1 << 12

    def __init__(self) -> None:
        self.pinned_bytes: dict[int, int] = {}  # by address
        self.num_pinned = 0  # since the start

    def pin(self, flat: Tensor, label: str) -> None:
        self.pinned_bytes[flat.data_ptr()] = flat.nbytes
        self.num_pinned += 1

    def unpin(self, address: int) -> None:
        self.pinned_bytes.pop(address, None)

    def find(self, field: str, index: int) -> torch.device:
        return torch.device(KIND, 0)

    def card(self, device: torch.device) -> Card:
        return Card(name="emulated", memory_bytes=DEVICE_MEMORY_BYTES, uuid="emulated-0")

    def share(self, flat: Tensor) -> Handle:
        """Processes of a GPU map its memory; here sender and receiver are one process."""
        SHARED[flat.data_ptr()] = flat.backing.view(torch.uint8)
        return (flat.data_ptr(),)

    def map_shared(self, handle: Handle) -> Tensor:
        return EmulatedTensor(SHARED[handle[0]])

    def graphs(self, device: torch.device) -> Graphs:
        return RecordedGraphs()


def install() -> None:
    """Let this process have the device; once."""
    if KIND not in PLATFORMS:
        register(Module())
        PLATFORMS[KIND] = EmulatedPlatform()
        DEVICES.append(KIND)
