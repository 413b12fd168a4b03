"""The arena: a generator rank's weights, twice: live (in use) and shadow (being written).

Owns: both memories and which of them is live. Does not own: the model over them or the protocol
(`publish.py`). Invariant: the live memory never changes; only `flip` after a complete `offer`
makes other memory live.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.weights.fingerprint import MODULUS, fingerprint
from llamarl.weights.layout import Offer, ParameterLayout
from llamarl.weights.shared_memory import Segment, require_memory, this_host

BUFFER = "arena"


class Arena:
    """Two shared-memory segments of `num_elements` elements of `dtype` each.

    `parameters` says where each parameter lies: boxes with buffer "arena" and this dtype. What
    the boxes leave out (padding) is never written by a publish; both memories start as zeros.
    Before the first flip the owner fills `live` itself.

    ValueError if a box does not fit or the host has too little memory; nothing is created then.
    RuntimeError if calls come in another order than offer, [fingerprint,] flip or discard. `flip`
    belongs on the executor's compute thread; `fingerprint` may run beside decoding on another
    thread, as it reads only the shadow.
    """

    def __init__(
        self,
        *,
        parameters: dict[str, ParameterLayout],
        num_elements: int,
        dtype: torch.dtype,
        replica: int,
        rank: int,
        run_id: str,
        host: str | None = None,
    ) -> None:
        if num_elements < 1:
            raise ValueError(f"num_elements must be at least 1, got {num_elements}")
        for name, layout in parameters.items():
            _check(name, layout, num_elements, dtype)
        self.version = -1  # nothing published yet; the label of `live` otherwise
        self._parameters = parameters
        self._replica, self._rank, self._host = replica, rank, host or this_host()
        self._offered: int | None = None
        self._live = 0
        num_bytes = num_elements * dtype.itemsize
        require_memory(
            f"two copies of the weights of generator {replica} rank {rank}", 2 * num_bytes
        )
        self._segments: list[Segment] = []
        try:
            for side in "ab":
                label = f"llamarl-{run_id}-generator-{replica}-{rank}-{side}"
                self._segments.append(Segment.create(label, num_bytes))
        except ValueError:
            self.close()
            raise
        self._flat = [segment.tensor(dtype) for segment in self._segments]

    @property
    def live(self) -> Tensor:
        """The flat memory [num_elements] that the model reads."""
        return self._flat[self._live]

    @property
    def shadow(self) -> Tensor:
        """The flat memory [num_elements] that a publish writes."""
        return self._flat[1 - self._live]

    def offer(self, version: int) -> Offer:
        """Open the shadow for `version`, which must be newer than the live one."""
        if self._offered is not None:
            raise RuntimeError(
                f"version {version} offered while version {self._offered} is still open"
            )
        if version <= self.version:
            raise RuntimeError(f"version {version} offered, but {self.version} is already live")
        segment = self._segments[1 - self._live]
        self._offered = version
        return Offer(
            version=version,
            replica=self._replica,
            rank=self._rank,
            host=self._host,
            segment=segment.path,
            num_bytes=segment.num_bytes,
        )

    def fingerprint(self, version: int) -> dict[str, int]:
        """Fingerprint of each parameter's boxes in the shadow: all that this rank holds."""
        self._require_offered(version)
        return {
            name: sum(
                fingerprint(name, self._view(layout, index), box.start, layout.shape)
                for index, box in enumerate(layout.boxes)
            )
            % MODULUS
            for name, layout in self._parameters.items()
        }

    def flip(self, version: int) -> Tensor:
        """Make the shadow live; returns the new live memory. The old one becomes the shadow."""
        self._require_offered(version)
        self._live = 1 - self._live
        self.version = version
        self._offered = None
        return self.live

    def discard(self, version: int) -> None:
        """Forget what was written for `version`; the live memory and its version stay."""
        self._require_offered(version)
        self._offered = None

    def close(self) -> None:
        """Release both memories; tensors handed out stay valid. May be called twice."""
        for segment in self._segments:
            segment.close()

    def _view(self, layout: ParameterLayout, index: int) -> Tensor:
        box = layout.boxes[index]
        extents = [b - a for a, b in zip(box.start, box.stop, strict=True)]
        return self.shadow.as_strided(extents, box.strides, box.offset)

    def _require_offered(self, version: int) -> None:
        if self._offered != version:
            state = "none is" if self._offered is None else f"version {self._offered} is"
            raise RuntimeError(f"version {version} was not offered: {state} open")


def _check(name: str, layout: ParameterLayout, num_elements: int, dtype: torch.dtype) -> None:
    """ValueError unless all boxes of the parameter lie in an arena of this size and dtype."""
    if layout.dtype != str(dtype).removeprefix("torch."):
        raise ValueError(f"dtype of {name} must be the arena's {dtype}, got {layout.dtype}")
    for box in layout.boxes:
        if box.buffer != BUFFER:
            raise ValueError(f"buffer of {name} must be {BUFFER!r}, got {box.buffer!r}")
        extents = [b - a for a, b in zip(box.start, box.stop, strict=True)]
        if 0 in extents:
            continue
        steps = zip(extents, box.strides, strict=True)
        last = box.offset + sum((extent - 1) * stride for extent, stride in steps)
        if box.offset < 0 or min(box.strides, default=0) < 0 or last >= num_elements:
            raise ValueError(
                f"{name} must lie within the arena's {num_elements} elements, "
                f"got elements {box.offset} to {last}"
            )
