"""One-sided writes between executor processes, over Monarch's RDMA buffers. Opens no port: without
RDMA hardware Monarch sends the bytes over its own channels, which on one host are unix sockets.

Any thread of an actor's process may call it, in a copy of the context of one of its endpoints, as
`asyncio.to_thread` makes it: elsewhere Monarch would start a client of its own. Needs a running
actor (`cluster.backend=monarch`).
"""

import warnings
from typing import Any

from monarch.rdma import RDMABuffer
from torch import Tensor

MIN_TIMEOUT_S = 1  # Monarch counts whole seconds


class MonarchRdma:
    """weights.transport.Rdma over Monarch. Picklable: it has no state."""

    def register(self, memory: Tensor) -> Any:
        """Let others write into `memory` (uint8 [bytes]); the handle travels in messages."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the fallback to its channels, each time
            return RDMABuffer(memory)

    def write(self, handle: Any, message: Tensor, timeout_s: float) -> None:
        """Write `message` (uint8 [bytes]) to the start of the memory behind `handle`.

        RuntimeError if its owner has called `forget`; that or TimeoutError if the owner is gone.
        """
        future = handle.write_from(message, timeout=max(MIN_TIMEOUT_S, round(timeout_s)))
        # Monarch itself notices a dead owner only after half a minute.
        error = future.exception(timeout_s)
        if error is not None:
            raise RuntimeError(f"RDMA write failed: {error}") from error

    def forget(self, handle: Any) -> None:
        """End all writes into the memory behind `handle`."""
        handle.drop().get()
