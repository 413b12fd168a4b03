"""The two ends of a transport, as writer and weight buffer see them.

Owns: the interfaces. Does not own: any transport. Invariant: everything here blocks, and is called
from threads that may block.

An sender stands at a source rank, for one replica; an receiver at a target rank, if the transport
needs the target to take part. Mapped transports (`mapped.py`) need none: the source writes straight
into the target's staging. Packed ones (`collective.py`, `rdma.py`) carry messages (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from llamarl.weights.layout.boxes import Copy, StagingHandle

Carry = Callable[[Copy, Tensor], None]
"""Copies the values of a Copy, cast, into a tensor of its shape and target dtype; StaleVersion."""


class TransportSender(Protocol):
    """Writes one source rank's copies into one replica's memory."""

    def write(
        self,
        version: int,
        copies: Sequence[Copy],
        handles: Mapping[int, StagingHandle],
        copy_cast: Carry,
    ) -> None:
        """Carry `copies`, all of one part, into the memory of `staging handles` (by target rank).

        Returns once the targets can see the bytes. TargetLost; what `carry` raises is passed on,
        after the targets were told that nothing more will come.
        """

    def close(self) -> None:
        """Let go of the targets' memory: a write that runs ends with TargetLost, and what it still
        carries reaches no memory that is offered again."""


class TransportReceiver(Protocol):
    """Takes one target rank's messages apart into its staging."""

    def open(self, version: int, bucket: int, flat: Tensor) -> object:
        """Make ready for a part, which goes into `flat`; returns the address for the offer."""

    def arrive(self, version: int, bucket: int) -> None:
        """Wait until all of the part lies in the staging buffer. RuntimeError if it cannot any
        more."""

    def abort(self) -> None:
        """Let nothing of the open part reach the staging buffer any more."""

    def close(self) -> None:
        """Give everything back."""


class Rdma(Protocol):
    """One-sided writes into memory of another process (`cluster/rdma.py`, over Monarch)."""

    def register(self, memory: Tensor) -> object:
        """Let others write into `memory` (uint8 [bytes], host memory); a picklable handle.

        The caller keeps the memory as long as it is registered.
        """

    def write(self, handle: object, message: Tensor, timeout_s: float) -> None:
        """Write `message` (uint8 [bytes]) to the start of the memory behind `handle`; returns once
        it is there. RuntimeError or TimeoutError if that cannot be."""

    def forget(self, handle: object) -> None:
        """Let nobody write into the memory behind `handle`, which this process registered."""
