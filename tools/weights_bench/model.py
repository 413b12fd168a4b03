"""The model that is published: a Llama of a wanted size, and how each side shards it.

Trainer: two ranks, every parameter cut by rows at an uneven place, the larger part alternating, so
that both ranks hold about as much. Generator: one replica of two tensor-parallel ranks, each with
one flat memory: q, k, v, gate, up, embedding and head by rows, o and down by columns, norms whole.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.model.architecture import Architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import Box, ParameterLayout

NUM_RANKS = 2  # of either side
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
ALIGN_ELEMENTS = 64
NARROW = {  # about 2 million parameters with one layer, where one layer of the usual is too much
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_heads": 4,
    "num_kv_heads": 2,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture whose weights take about as many bytes as wanted, in one dtype."""

    architecture: Architecture
    dtype: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> global shape, in the order of the layers."""
        return parameter_shapes(self.architecture)

    @property
    def num_bytes(self) -> int:
        """Of every parameter once."""
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return elements * DTYPES[self.dtype].itemsize


def llama(num_layers: int, **sizes: int) -> Architecture:
    """A Llama with untied embeddings; 12 million parameters a layer unless `sizes` says other."""
    defaults = {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 64,
        "max_positions": 2048,
    }
    return Architecture(
        model_type="llama",
        num_layers=num_layers,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        **(defaults | sizes),
    )


def config_json(architecture: Architecture, dtype: str) -> dict[str, object]:
    """The config.json of a checkpoint of this architecture."""
    a = architecture
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": a.max_positions,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def model_of(megabytes: float, dtype: str) -> Model:
    """The smallest model of at least so many megabytes (10^6): a narrow one below a
    quarter of what one layer of the usual width takes."""
    num_layers = 1
    sizes = NARROW if megabytes * 1e6 < Model(llama(1), dtype).num_bytes / 4 else {}
    while Model(llama(num_layers, **sizes), dtype).num_bytes < megabytes * 1e6:
        num_layers += 1
    return Model(llama(num_layers, **sizes), dtype)


def trainer_layouts(model: Model, rank: int) -> dict[str, ParameterLayout]:
    """One buffer per parameter, of its own name: the rows that trainer rank `rank` holds."""
    layouts = {}
    for index, (name, shape) in enumerate(model.shapes.items()):
        cut = shape[0] * (4 + index % 2) // 9
        start, stop = (0, cut) if rank == 0 else (cut, shape[0])
        box = Box(
            start=(start, *(0 for _ in shape[1:])),
            stop=(stop, *shape[1:]),
            buffer=name,
            offset=0,
            strides=strides_of(shape),
        )
        layouts[name] = ParameterLayout(shape=shape, dtype=model.dtype, boxes=(box,))
    return layouts


def generator_layouts(model: Model, rank: int) -> tuple[dict[str, ParameterLayout], int]:
    """Where generator rank `rank` keeps its slices in its flat memory, and how long that is."""
    layouts, end = {}, 0
    for name, shape in model.shapes.items():
        start, stop = [0] * len(shape), list(shape)
        if len(shape) == 2:
            dim = 1 if name.endswith(BY_COLUMNS) else 0
            start[dim] = shape[dim] * rank // NUM_RANKS
            stop[dim] = shape[dim] * (rank + 1) // NUM_RANKS
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        box = Box(
            start=tuple(start),
            stop=tuple(stop),
            buffer="weights",
            offset=end,
            strides=strides_of(size),
        )
        layouts[name] = ParameterLayout(shape=shape, dtype=model.dtype, boxes=(box,))
        end += -(-math.prod(size) // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return layouts, end


def box_view(flat: Tensor, box: Box) -> Tensor:
    """The box as a view of the memory that it lies in."""
    size = tuple(b - a for a, b in zip(box.start, box.stop, strict=True))
    return flat.as_strided(size, box.strides, box.offset)


def values(name: str, box: Box, dtype: torch.dtype) -> Tensor:
    """What the elements of the box hold: a function of name and global index, in all processes."""
    seed = zlib.crc32(name.encode()) % 65521
    numbers = torch.arange(box.start[-1], box.stop[-1]) * 17 + seed
    if len(box.start) == 2:
        numbers = numbers + (torch.arange(box.start[0], box.stop[0]) * 31)[:, None]
    return (numbers % 65521).to(torch.float32).div_(1 << 20).to(dtype)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
