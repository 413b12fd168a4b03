"""Bytes of a publish on their ways between devices, and how long the busiest way takes.

Owns: loads of network cards, links and memories, and their seconds. Does not own: which copies
there are, or what ranks do beside (`delivery.py`). Invariant: each byte loads one way, at both of
its ends.

Every GPU has a network card and links to the other GPUs of its host; ranks without a GPU share
their host's. Copies between two hosts need a card at both ends; those within a host the links,
those within a GPU its memory. A staging in host memory is reached over PCIe.
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import Device
from llamarl.core.device.names import CPU
from llamarl.planner.efficiency import LAW, LOOPBACK_BYTES_PER_S
from llamarl.planner.hardware import GPUS, Gpu, gpu
from llamarl.publish.transports.routes import TRANSPORTS

Load = Counter[Device]
WAYS = ("card", "link", "memory")


@dataclass(frozen=True, kw_only=True)
class Busiest:
    """Seconds of the busiest sender and of the busiest receiver."""

    sending_s: float
    receiving_s: float


class Ways:
    """Bytes over network cards, over links and within a device's memory: by way (out, in), each by
    device."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.loads: dict[str, tuple[Load, Load]]
        self.loads = {way: (Counter(), Counter()) for way in WAYS}

    def add(self, source: list[Device], target: list[Device], matrix: np.ndarray) -> None:
        """Bytes from each source rank (row) to each target rank (column)."""
        for row, column in np.argwhere(matrix):
            here, there = source[row], target[column]
            way = "link" if here.host == there.host else "card"
            out, into = self.loads["memory" if here == there and here.gpu is not None else way]
            out[here] += int(matrix[row, column])
            into[there] += int(matrix[row, column])

    def bound_s(self) -> float:
        """If every card, link and memory ran at its published speed, all at once."""
        ends = [(way, load) for way, both in self.loads.items() for load in both]
        if self._config.weights.staging == "host":
            waiting: Load = Counter()
            for _, into in self.loads.values():
                waiting.update({each: n for each, n in into.items() if each.gpu is not None})
            ends.append(("host", waiting))
        found = [
            number / self._peaks(device)[way]
            for way, load in ends
            for device, number in load.items()
        ]
        return max(found, default=0.0)

    def busiest(self, among: Container[Device]) -> Busiest:
        """Of these devices, at the speed that the law expects."""
        sending_s, receiving_s = (
            max(
                (
                    number / self._rate(way, device)
                    for way, both in self.loads.items()
                    for device, number in both[end].items()
                    if device in among
                ),
                default=0.0,
            )
            for end in (0, 1)
        )
        return Busiest(sending_s=sending_s, receiving_s=receiving_s)

    def _rate(self, way: str, device: Device) -> float:
        shares = {"card": LAW.card, "link": LAW.link, "memory": LAW.elementwise}
        rate = shares[way] * self._peaks(device)[way]
        is_message = not TRANSPORTS[self._config.weights.transport].is_mapped
        if device.gpu is None and way == "link" and is_message:
            return min(rate, LOOPBACK_BYTES_PER_S)
        return rate

    def _peaks(self, device: Device) -> Mapping[str, float]:
        kind = device.gpu_kind or self._config.cluster.planned_gpu
        card: Gpu = GPUS[CPU] if device.gpu is None else gpu(kind)
        return {
            "card": card.card_bytes_per_s,
            "link": card.link_bytes_per_s,
            "memory": card.memory_bytes_per_s / 2,  # read and written
            "host": card.host_link_bytes_per_s,
        }
