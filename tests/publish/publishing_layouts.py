"""Small weights, and how the ranks of a publish hold them."""

import math
import zlib

import torch

from llamarl.publish.layout import Box, ParameterLayout

SHAPES = {
    "embed": (203, 96),
    "q": (64, 96),
    "k": (32, 96),
    "v": (32, 96),
    "norm": (96,),
    "down": (96, 300),
    "scale": (),
    "wide": (1024, 300),
}


LARGEST_BYTES = 4 * math.prod(SHAPES["wide"])


MESSAGE_BYTES = 1 << 18


TILE_BYTES = 1 << 16  # so that the parameters, small as they are here, have several tiles


KINDS = {  # of a replica: dtype, ranks
    "fused": (torch.float32, 1),
    "cast": (torch.bfloat16, 1),
    "sharded": (torch.float32, 2),  # with norm and scale on both ranks
    "transposed": (torch.float32, 1),
}


def weights(version):
    """All parameters of one version; the same numbers in every process."""
    return {
        name: torch.randn(
            shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + version)
        )
        for name, shape in SHAPES.items()
    }


def trainer_boxes(rank):
    """Name -> (start, stop): embed and down by uneven rows, the projections by columns."""
    cuts = {"embed": (0, 150), "down": (0, 7), "q": (1, 40), "k": (1, 40), "v": (1, 40)}
    cuts["wide"] = (1, 1)
    boxes = {}
    for name, shape in SHAPES.items():
        start, stop = [0] * len(shape), list(shape)
        if name in cuts:
            dim, cut = cuts[name]
            (start if rank else stop)[dim] = cut
        boxes[name] = tuple(start), tuple(stop)
    return boxes


def generator_layout(kind):
    """Per rank: parameters and weight buffer size. qkv is fused by kv head, with padding after
    embed."""
    dtype, num_ranks = KINDS[kind]
    layouts = []
    for rank in range(num_ranks):
        boxes, size = {name: [] for name in SHAPES}, 5

        def place(name, start, stop, offset=None, strides=None, boxes=boxes):
            nonlocal size
            extents = [b - a for a, b in zip(start, stop, strict=True)]
            strides = strides or torch.empty(extents, device="meta").stride()
            at = size if offset is None else offset
            boxes[name].append(
                Box(start=start, stop=stop, buffer="weights", offset=at, strides=strides)
            )
            size += box_numel(boxes[name][-1]) + 3 * (name == "embed")

        def mine(length, rank=rank):
            return length * rank // num_ranks, length * (rank + 1) // num_ranks

        if kind == "transposed":  # as in the embedded engine: [in, out], side by side
            begin = size
            for name, column in (("q", 0), ("k", 64), ("v", 96)):
                place(name, (0, 0), SHAPES[name], begin + column, (1, 128))
            place("down", (0, 0), (96, 300), None, (1, 96))
        else:
            for head in range(*mine(4)):
                place("q", (16 * head, 0), (16 * head + 16, 96))
                place("k", (8 * head, 0), (8 * head + 8, 96))
                place("v", (8 * head, 0), (8 * head + 8, 96))
            place("down", (0, mine(300)[0]), (96, mine(300)[1]))
        place("embed", (mine(203)[0], 0), (mine(203)[1], 96))
        place("norm", (0,), (96,))
        place("scale", (), ())
        num_rows, num_columns = SHAPES["wide"]
        place("wide", (mine(num_rows)[0], 0), (mine(num_rows)[1], num_columns))
        name = str(dtype).removeprefix("torch.")
        layouts.append(
            (
                {
                    each: ParameterLayout(shape=SHAPES[each], dtype=name, boxes=tuple(found))
                    for each, found in boxes.items()
                },
                size,
            )
        )
    return layouts


def box_numel(box):
    return torch.Size([b - a for a, b in zip(box.start, box.stop, strict=True)]).numel()


def bits(flat):
    return flat.view(torch.int16)
