"""Weight matrices with an adapter beside them.

Owns: the product with one such matrix. Does not own: where its adapter lies (`adapter_layout.py`).
Invariant: a product is x W + scale * (x A) B, with A and B in the dtype of the activations and
never merged into W: rounded to bfloat16, W + B A is W itself for most of a run's first updates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.generation.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """`base` with an adapter: `down` [in, ranks], `up` [ranks, out], which is multiplied by
    `scale`."""

    base: Tensor | QuantizedMatrix
    down: Tensor
    up: Tensor
    scale: float

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`x` [n, in] times this matrix: [n, out] in the dtype of `x`."""
        assert dtype in (None, x.dtype), "heads have no adapter"
        base = self.base
        out = torch.mm(x, base) if isinstance(base, Tensor) else base.product(x)
        return self.add(out, x)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapter's part of the product to `out`, in place; returns it."""
        return out.addmm_(torch.mm(x, self.down), self.up, alpha=self.scale)
