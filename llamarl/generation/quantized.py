"""Weight matrices in eight bits.

Owns: the product with one matrix. Does not own: its numbers, which a publish writes
(`weights/layout/formats.py`), or which matrices are quantised. Invariant: every product uses
exactly `values * scales`, whatever the number of rows, so log-probs of prompts and of new tokens
come from one and the same model.

Only the weights are in eight bits, symmetric around 0, with one scale per output. A product widens
them tile by tile into a small scratch, multiplies, and scales the result. Measured on a CPU with
AVX-512, one thread, against torch's own `_weight_int8pack_mm`: that kernel is thirty times slower
with float32 and two to four times slower from 16 rows on with bfloat16, and with bfloat16 it gives
wrong results, or crashes, where the number of inputs is not a multiple of 16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.device.devices import platform_of

WIDENED_ELEMENTS = 1 << 21  # 8 MiB in float32: smaller tiles are slower, much larger ones too


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`values` [out, in] in eight bits, `scales` [out] in the activations' dtype.

    `scratch` is a flat tensor of that dtype, as large as a tile, shared by all matrices that one
    thread uses.
    """

    values: Tensor
    scales: Tensor
    scratch: Tensor

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`x` [n, in] times this matrix: [n, out] in `dtype`, float32 or (None) that of `x`."""
        num_outputs, num_inputs = self.values.shape
        step = len(self.scratch) // num_inputs
        multiply = torch.mm if dtype in (None, x.dtype) else widened_mm
        if num_outputs <= step:
            return multiply(x, self._widen(self.values).t()).mul_(self.scales)
        out = x.new_empty(len(x), num_outputs, dtype=dtype)
        for start in range(0, num_outputs, step):
            part = self._widen(self.values[start : start + step])
            out[:, start : start + step] = multiply(x, part.t())
        return out.mul_(self.scales)

    def dequantized(self) -> Tensor:
        """The matrix [in, out] that `product` multiplies with, float32."""
        return (self.values.float() * self.scales.float().unsqueeze(1)).t()

    def _widen(self, values: Tensor) -> Tensor:
        return self.scratch[: values.numel()].view(values.shape).copy_(values)


def widened_mm(x: Tensor, matrix: Tensor) -> Tensor:
    """`x` [n, in] times `matrix` [in, out], both of one dtype: float32 [n, out].

    On CPUs torch has no such product of bfloat16: there the matrix is widened a tile at a time.
    Measured with a matrix of 25 million elements and 64 rows on one core with AVX-512: 37 ms, as
    with a float32 matrix, where a product rounded to bfloat16 takes 10 ms.
    """
    if x.dtype == torch.float32:
        return torch.mm(x, matrix)
    if platform_of(x.device).has_wide_mm:
        return torch.mm(x, matrix, out_dtype=torch.float32)
    wide, out = x.float(), x.new_empty(len(x), matrix.shape[1], dtype=torch.float32)
    step = max(WIDENED_ELEMENTS // len(matrix), 1)
    for start in range(0, matrix.shape[1], step):
        part = slice(start, start + step)
        torch.mm(wide, matrix[:, part].float(), out=out[:, part])
    return out


def make_scratch(num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scratch for matrices of at most `num_inputs` inputs: a widened tile fits a cache."""
    num_elements = max(platform_of(device).num_tiled, num_inputs)
    return torch.empty(num_elements, dtype=dtype, device=device)
