"""Messages for a slow link: the top byte of each number, sign and most of the exponent, compressed.

Owns: that form, which loses nothing. Does not own: messages or sending them. Invariant: the form
says how long it is, so the other end needs to know no more than the longest it can be.

    8 bytes: length of the compressed top bytes; these; the other bytes of all numbers as they are

Weights are near zero, so few exponents occur: their code has about 3 bits. That saves a sixth of
float32 and a third of bfloat16; the other bytes look random.
"""

import zlib

import torch
from torch import Tensor

PREFIX_BYTES = 8


def longest(num_bytes: int) -> int:
    """Bytes that `squeeze` makes of so many at most."""
    return PREFIX_BYTES + num_bytes + num_bytes // 1000 + 64


def squeeze(memory: Tensor, itemsize: int) -> Tensor:
    """A new uint8 [at most `longest`] of `memory`, uint8 [a multiple of `itemsize`] of numbers."""
    numbers = memory.view(-1, itemsize)
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    top = coder.compress(numbers[:, -1].numpy().tobytes()) + coder.flush()
    packed = torch.empty(PREFIX_BYTES + len(top) + len(numbers) * (itemsize - 1), dtype=torch.uint8)
    packed[:PREFIX_BYTES].view(torch.int64)[0] = len(top)
    end = PREFIX_BYTES + len(top)
    packed[PREFIX_BYTES:end] = torch.frombuffer(bytearray(top), dtype=torch.uint8)
    if itemsize > 1:
        packed[end:].view(-1, itemsize - 1).copy_(numbers[:, :-1])
    return packed


def expand(packed: Tensor, memory: Tensor, itemsize: int) -> None:
    """Fill `memory` with what was squeezed into `packed`, which may be longer."""
    numbers = memory.view(-1, itemsize)
    end = PREFIX_BYTES + int(packed[:PREFIX_BYTES].view(torch.int64)[0])
    top = bytearray(zlib.decompress(packed[PREFIX_BYTES:end].numpy().data))
    numbers[:, -1].copy_(torch.frombuffer(top, dtype=torch.uint8))
    if itemsize > 1:
        rest = packed[end : end + len(numbers) * (itemsize - 1)]
        numbers[:, :-1].copy_(rest.view(-1, itemsize - 1))
