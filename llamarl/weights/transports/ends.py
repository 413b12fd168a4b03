"""The two ends of a transport, as writer and weight buffer see them.

Owns: the interfaces. Does not own: any transport. Invariant: everything here blocks, and is called
from threads that may block.

A sender stands at a source rank, for one replica; a receiver at a target rank, if the transport
needs the target to take part. Mapped transports (`mapped.py`) need none: the source writes straight
into the target's staging memory. Packed ones (`collective.py`, `rdma.py`) send messages
(`packed.py`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.layout.boxes import Copy, StagingHandle

CopyCast = Callable[[Copy, Tensor], int]
"""Copies the values of a Copy, cast, into a tensor of its shape and target dtype; returns their
partial fingerprint. StaleVersion."""


class TransportSender(Protocol):
    """Writes one source rank's copies into one replica's memory."""

    def write(
        self, bucket: int, handles: Mapping[int, StagingHandle], copy_cast: CopyCast
    ) -> Fingerprints:
        """Copy what the rank sends of `bucket` into the memory of `handles` (by target rank).

        Returns once the targets can see the bytes: the partial fingerprints of all of them, as
        `copy_cast` gave them. TargetLost; or what `copy_cast` raises, once the targets know that
        nothing more will come.
        """

    def close(self) -> None:
        """Unmap or disconnect from the targets' memory: a write that runs ends with TargetLost, and
        nothing of it reaches memory that is prepared again."""


class TransportReceiver(Protocol):
    """Takes one target rank's messages apart into its staging memory."""

    def open(
        self, version: int, bucket: int, flat: Tensor, arrived: Callable[[str], None]
    ) -> object:
        """Get ready for a bucket, which goes into `flat`; returns the staging handle's address.

        `arrived(name)` may be called, from any thread and once, as soon as all of a parameter lies
        there; those of which nothing is said lie there when `arrive` returns.
        """

    def arrive(self, version: int, bucket: int) -> None:
        """Wait until all of the bucket lies in the staging memory. RuntimeError if it no longer
        can."""

    def abort(self) -> None:
        """Let nothing of the open bucket reach the staging memory any more."""

    def close(self) -> None:
        """Release connections and memory."""


class Rdma(Protocol):
    """One-sided writes into memory of another process (`cluster/rdma_buffers.py`, over Monarch)."""

    def register(self, memory: Tensor) -> object:
        """Let others write into `memory` (uint8 [bytes], host memory); a picklable handle.

        The caller keeps the memory as long as it is registered.
        """

    def write(self, handle: object, message: Tensor, timeout_s: float) -> None:
        """Write `message` (uint8 [bytes]) to the start of the memory behind `handle`; returns once
        it is there. RuntimeError or TimeoutError if that cannot be."""

    def forget(self, handle: object) -> None:
        """End the registration of the memory behind `handle`, made by this process."""
