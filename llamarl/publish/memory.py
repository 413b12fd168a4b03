"""The flat memory that a publish fills: which parameters lie where in it, and that they fit."""

from dataclasses import dataclass

import torch

from llamarl.publish.layout import BUFFER, Box, ParameterLayout
from llamarl.publish.reshard import DTYPE_BYTES

ALIGN_BYTES = 64  # a cache line, and the widest vector load


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The flat memory that a publish fills for this rank: `num_elements` of `dtype`, and the
    boxes of every parameter (Hugging Face names) that the rank holds.

    Where parameters differ in dtype, as quantised matrices and their scales do, the memory is bytes
    (uint8, a multiple of ALIGN_BYTES), and a parameter is found in a view of its own dtype.

    `is_staged`: the engine makes its own weights from this memory at a commit (packed, or copied to
    where captured graphs read them); else it decodes straight from it.
    """

    parameters: dict[str, ParameterLayout]
    num_elements: int
    dtype: torch.dtype
    is_staged: bool = False

    def check(self) -> None:
        """ValueError unless all boxes lie in a weight buffer of this size and dtype."""
        dtype, num_bytes = self.dtype, self.num_elements * self.dtype.itemsize
        is_mixed = dtype == torch.uint8
        if is_mixed and num_bytes % ALIGN_BYTES:
            raise ValueError(f"bytes must be a multiple of {ALIGN_BYTES}, got {num_bytes}")
        for name, layout in self.parameters.items():
            if not is_mixed and layout.dtype != str(dtype).removeprefix("torch."):
                raise ValueError(
                    f"dtype of {name} must be the weight buffer's {dtype}, got {layout.dtype}"
                )
            for box in layout.boxes:
                if box.buffer != BUFFER:
                    raise ValueError(f"buffer of {name} must be {BUFFER!r}, got {box.buffer!r}")
                begin, end = _extent(box)
                item = DTYPE_BYTES[layout.dtype]
                is_negative = begin < 0 or min(box.strides, default=0) < 0
                if end and (is_negative or end * item > num_bytes):
                    raise ValueError(
                        f"{name} must lie within the weight buffer's {num_bytes // item} elements, "
                        f"got elements {begin} to {end - 1}"
                    )


def _extent(box: Box) -> tuple[int, int]:
    """First element and the one behind the last; (0, 0) for an empty box."""
    if 0 in box.shape:
        return 0, 0
    return box.offset, box.offset_of(tuple(stop - 1 for stop in box.stop)) + 1
