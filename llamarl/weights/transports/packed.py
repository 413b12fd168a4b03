"""Messages: how packed transports cut the copies of a route into pieces and put them together.

Owns: the messages and their order. Does not own: sending them. Invariant: both ends derive the same
messages from the same route, so a message carries values and no description of them.

For a slow link the top byte of each number, sign and most of the exponent, is compressed, which
loses nothing:

    8 bytes: length of the compressed top bytes; these; the other bytes of all numbers as they are

Weights are near zero, so few exponents occur: their code has about 3 bits. That saves a sixth of
float32 and a third of bfloat16; the other bytes look random. The form says how long it is, so the
other end needs to know no more than the longest it can be.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.layout.boxes import Copy, Route
from llamarl.weights.layout.reshard import DTYPE_BYTES
from llamarl.weights.transports.ends import CopyCast

PREFIX_BYTES = 8  # of a compressed message: how long its top bytes are
ALIGN_BYTES = 16  # pieces begin where vector loads are fast
Side = Literal["source_rank", "target_rank"]


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces and the byte where each begins, its values in the order of the target's memory;
    `num_bytes` in all."""

    pieces: tuple[tuple[Copy, int], ...]
    num_bytes: int

    def each(self, memory: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """Each piece with its view of `memory` (uint8 [num_bytes or more])."""
        for copy, begin in self.pieces:
            dtype = getattr(torch, copy.target_dtype)
            end = begin + math.prod(copy.shape) * dtype.itemsize
            strides = _dense(copy.shape, copy.target_strides)
            yield copy, memory[begin:end].view(dtype).as_strided(copy.shape, strides)

    def fill(self, memory: Tensor, copy_cast: CopyCast) -> Fingerprints:
        """Copy the values of all pieces into `memory`; their partial fingerprints."""
        written = Fingerprints()
        for copy, values in self.each(memory):
            written.add(copy.name, copy_cast(copy, values))
        return written


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for this shape, with the dimensions in the order of other strides."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def messages(copies: Sequence[Copy], bucket_bytes: int) -> list[Message]:
    """Messages of at most `bucket_bytes` (or one element) that carry `copies`, each of one layer,
    in their order."""
    made: list[Message] = []
    pieces: list[tuple[Copy, int]] = []
    end = 0
    for whole in copies:
        itemsize = DTYPE_BYTES[whole.target_dtype]
        num_bytes = math.prod(whole.shape) * itemsize
        is_small = num_bytes <= bucket_bytes
        for copy in (whole,) if is_small else cut(whole, max(1, bucket_bytes // itemsize)):
            if not is_small:
                num_bytes = math.prod(copy.shape) * itemsize
            begin = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            if pieces and begin + num_bytes > bucket_bytes:
                made.append(Message(tuple(pieces), end))
                pieces, begin = [], 0
            pieces.append((copy, begin))
            end = begin + num_bytes
    return [*made, Message(tuple(pieces), end)] if pieces else made


def cut(copy: Copy, max_elements: int) -> Iterator[Copy]:
    """Pieces of at most `max_elements` (1 or more) each that make up `copy`."""
    if math.prod(copy.shape) <= max_elements:
        yield copy
        return
    dim = next(dim for dim, extent in enumerate(copy.shape) if extent > 1)
    step = max(1, max_elements // (math.prod(copy.shape) // copy.shape[dim]))
    for first in range(0, copy.shape[dim], step):
        yield from cut(copy.slab(dim, first, min(step, copy.shape[dim] - first)), max_elements)


def messages_by(side: Side, route: Route) -> list[dict[int, list[Message]]]:
    """By bucket, the messages of this rank to each target rank, or from each source rank.

    Both ends make the same messages, as the copies between them have the same order at both.
    """
    return [
        {rank: messages(found, route.bucket_bytes) for rank, found in sorted(by_rank.items())}
        for by_rank in (_by_rank(side, copies) for copies in route.by_bucket())
    ]


def _by_rank(side: Side, copies: Iterable[Copy]) -> dict[int, list[Copy]]:
    by_rank: dict[int, list[Copy]] = {}
    for copy in copies:
        by_rank.setdefault(getattr(copy, side), []).append(copy)
    return by_rank


def in_turns(by_rank: Mapping[int, list[Message]]) -> Iterator[tuple[int, int, Message]]:
    """(rank, index, message), the first ones of all ranks before the second ones."""
    for index in range(max(map(len, by_rank.values()), default=0)):
        for rank, made in by_rank.items():
            if index < len(made):
                yield rank, index, made[index]


def unpack(message: Message, memory: Tensor, flat: Tensor) -> None:
    """Copy the pieces of `memory` to their places in the target's `flat` memory; between devices
    they are there once both have been synchronised."""
    for copy, values in message.each(memory):
        held = flat.view(values.dtype)
        place = held.as_strided(copy.shape, copy.target_strides, copy.target_offset)
        place.copy_(values, non_blocking=True)


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
