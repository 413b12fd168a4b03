"""Matrices in eight bits on their way from shards to a generator's memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llamarl.generator.engine.weights import BufferLayout, load_boxes
from llamarl.model.architecture import read_architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import RankLayout, Route, quantized_parameters
from llamarl.publish.reshard import num_bytes, plan
from llamarl.publish.shards import quantize, row_maxima, scales_of
from llamarl.publish.source import Writer
from tests.quantised_oracle import make_formats, quantise_whole
from tests.random_search import case, searched
from tests.tiny_checkpoints import LLAMA, write_checkpoint
from tests.uneven_publish import publish, uneven_source

FORMATS = make_formats()


def strange_matrix(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that are hard to round: halves of steps, zeros, very small and very large ones."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    matrix = torch.randn(shape, generator=generator)
    kind = rng.choice(["plain", "halves", "zeros", "small", "large", "spread"])
    if kind == "halves":
        return (matrix * 8).round() / 2
    if kind == "zeros":
        return matrix * (
            torch.rand((len(matrix), *[1] * (matrix.ndim - 1)), generator=generator) < 0.5
        )
    if kind == "spread":
        return matrix * torch.logspace(-12, 6, shape[-1])
    return matrix * {"plain": 1.0, "small": 1e-38, "large": 1e30}[kind]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.clone().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


@searched(few=1000, many=20000)
def test_any_matrix_becomes_what_the_formula_says(seeds: range) -> None:
    for seed in seeds:
        with case(seed):
            rng = random.Random(seed)
            form = FORMATS[rng.choice(sorted(FORMATS))]
            matrix = strange_matrix(rng, (rng.randint(1, 20), rng.randint(1, 40)))
            if form.is_per_tensor:
                matrix[0, 0] = 1.0  # the scale of zeros alone would be 0, and the values nan
            name = "model.layers.0.self_attn.o_proj.weight"
            values, scales = quantise_whole({name: matrix}, name, form)
            maxima = row_maxima(matrix)
            found = scales_of(maxima.amax().view(1) if form.is_per_tensor else maxima, form)
            assert same_bits(found, scales), form
            assert same_bits(quantize(matrix, found, form), values), form


@searched(few=150, many=1500)
def test_any_model_arrives_as_its_whole_matrices_are_quantised(seeds: range) -> None:
    """Uneven shards, any numbers of ranks and heads, odd sizes, tied and not."""
    for seed in seeds:
        with case(seed):
            publish_a_model(random.Random(seed))


def publish_a_model(rng: random.Random) -> None:
    form = FORMATS[rng.choice(sorted(FORMATS))]
    num_ranks, kv_heads = rng.choice([1, 2, 4]), rng.choice([4, 8])
    architecture = replace(
        LLAMA,
        num_layers=rng.randint(1, 3),
        hidden_size=rng.randint(1, 9),
        num_heads=kv_heads * rng.randint(1, 2),
        num_kv_heads=kv_heads,
        head_dim=2 * rng.randint(1, 3),
        intermediate_size=4 * rng.randint(1, 9),
        vocab_size=4 * rng.randint(1, 12),
        tie_embeddings=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
    )
    shapes = parameter_shapes(architecture)
    weights = {name: strange_matrix(rng, shape) for name, shape in shapes.items()}
    layouts = [
        BufferLayout(architecture, form.base_dtype, rank, num_ranks, form)
        for rank in range(num_ranks)
    ]
    flats = publish([layout.memory for layout in layouts], weights, (form,))
    expected = {name: w.to(getattr(torch, form.base_dtype)) for name, w in weights.items()}
    for each in quantized_parameters(weights, form):
        made = quantise_whole(weights, each.base, form)
        expected |= dict(zip((each.values, each.scales), made, strict=True))
    for layout, flat in zip(layouts, flats, strict=True):
        for name, parameter in layout.parameters.items():
            (box,) = parameter.boxes
            region = tuple(map(slice, box.start, box.stop))
            found = layout.parameter(flat, name)
            assert same_bits(found, expected[name][region]), (form, name)


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_is_loaded_as_published(kind: str, is_tied: bool, tmp_path: Path) -> None:
    form = FORMATS[kind]
    folder = write_checkpoint(tmp_path / "tiny", tie_word_embeddings=is_tied)
    architecture = read_architecture(folder)
    shapes = parameter_shapes(architecture)
    weights = {n: t for n, t in load_file(f"{folder}/model.safetensors").items() if n in shapes}
    for num_ranks in (1, 2):
        layouts = [
            BufferLayout(architecture, form.base_dtype, rank, num_ranks, form)
            for rank in range(num_ranks)
        ]
        published = publish([layout.memory for layout in layouts], weights, (form,))
        for layout, flat in zip(layouts, published, strict=True):
            loaded = torch.zeros_like(flat)
            load_boxes(layout.parameters, loaded, folder, architecture, form)
            assert torch.equal(loaded, flat)


def layouts_of(memory: BufferLayout) -> list[RankLayout]:
    return [RankLayout(rank=0, host="here", parameters=memory.parameters)]


def test_a_publish_in_eight_bits_moves_half_the_bytes_of_bfloat16() -> None:
    architecture = replace(LLAMA, hidden_size=256, intermediate_size=512, tie_embeddings=False)
    weights = {name: torch.ones(shape) for name, shape in parameter_shapes(architecture).items()}
    source, _ = uneven_source(weights)
    plain, eighths = (
        num_bytes(plan(source, layouts_of(BufferLayout(architecture, "bfloat16", 0, 1, form))))
        for form in (None, FORMATS["int8 bfloat16"])
    )
    table = 2 * architecture.vocab_size * architecture.hidden_size
    assert 0.5 < (eighths - table) / (plain - table) < 0.52


def test_what_a_source_does_not_make_is_refused_when_it_is_connected() -> None:
    weights = {name: torch.ones(shape) for name, shape in parameter_shapes(LLAMA).items()}
    source, held = uneven_source(weights)
    wanted = layouts_of(BufferLayout(LLAMA, "float32", 0, 1, FORMATS["int8 float32"]))
    copies = tuple(copy for copy in plan(source, wanted) if copy.source_rank == 0)
    route = Route(
        source="trainer",
        replica=0,
        transport="shared_memory",
        copies=copies,
        sources=(0, 1, 2),
        targets=(0,),
    )
    writer = Writer(0, "here", held[0], source[0].parameters)
    with pytest.raises(ValueError, match=r"copy of .*@rows-int8-float32.* must read from"):
        writer.connect(0, route)


def test_a_matrix_that_is_missing_is_named_whatever_the_target_wants() -> None:
    weights = {name: torch.ones(shape) for name, shape in parameter_shapes(LLAMA).items()}
    del weights["model.layers.1.mlp.up_proj.weight"]
    source, _ = uneven_source(weights)
    wanted = layouts_of(BufferLayout(LLAMA, "float32", 0, 1, FORMATS["int8 float32"]))
    with pytest.raises(ValueError, match=r"up_proj.weight@rows-int8-float32.* must be on both"):
        plan(source, wanted)
