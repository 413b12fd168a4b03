"""Publishes from real ranks of every trainer layout into memory of every generator layout."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from llamarl.core.config import TrainerConfig, WeightsConfig
from llamarl.core.process_group import join, leave
from llamarl.generator.engine.weights import BufferLayout
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
from llamarl.publish.comparison import MODULUS
from llamarl.publish.layout import quantized_parameters
from llamarl.publish.reshard import plan, split
from llamarl.publish.shards import cut_rows, shard_boxes
from llamarl.publish.source import SourcePart
from llamarl.publish.target import WeightBuffer
from llamarl.trainer.parallel import make_mesh
from llamarl.trainer.policy import Policy
from tests.quantised_oracle import make_formats, quantise_whole
from tests.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.full

Target = tuple[str, int]  # dtype or format, tensor-parallel ranks
FORMATS = make_formats()
TARGETS: list[Target] = list(itertools.product(("float32", "bfloat16", *FORMATS), (1, 2, 4)))


def everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


async def publish(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    checkpoint: str,
    configs: list[TrainerConfig],
    targets: list[Target],
) -> list[list[dict[str, int]]]:
    """Publishes under each layout to each target; rank i also plays generator rank i.

    Asserts that what arrives is the checkpoint, bit by bit. Returns elements written, by source.
    """
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        return [
            [publish_one(rank, checkpoint, config, target) for target in targets]
            for config in configs
        ]
    finally:
        leave()


def publish_one(rank: int, checkpoint: str, config: TrainerConfig, target: Target) -> Any:
    policy = Policy.load(checkpoint, make_mesh("cpu", config), config, 0)
    kind, num_targets = target
    form = FORMATS.get(kind)
    source = SourcePart(
        rank,
        *shard_boxes(policy.parameters),
        config=WeightsConfig(),
        spans=Spans("trainer", None),
        formats=[form] if form else [],
        cut=cut_rows(policy.parameters),
        num_ranks=dist.get_world_size(),
    )
    source.label(0)
    writer = source._writer
    dtype = form.base_dtype if form else kind
    wanted = weight_buffer = None
    if rank < num_targets:
        wanted = BufferLayout(read_architecture(checkpoint), dtype, rank, num_targets, form)
        memory = wanted.memory
        run_id = uuid.uuid4().hex[:8]
        weight_buffer = WeightBuffer(memory, WeightsConfig(), replica=0, rank=rank, run_id=run_id)
    sources = everyone(writer.layout())
    places = [
        layout for layout in everyone(weight_buffer.layout() if weight_buffer else None) if layout
    ]
    copies = plan(sources, places)
    route, _ = split(copies, source="trainer", replica=0, transport="shared_memory")
    writer.connect(0, route.for_rank(writer.layout().rank))
    handles = [
        handle for handle in everyone(weight_buffer.prepare(0) if weight_buffer else None) if handle
    ]
    sent = everyone(writer.write(0, handles))
    received = everyone(weight_buffer.verify(0) if weight_buffer else {})
    for name in {name for layout in places for name in layout.parameters}:
        sums = [sum(found.get(name, 0) for found in end) % MODULUS for end in (sent, received)]
        assert sums[0] == sums[1], (config, target, name)
    if weight_buffer is not None and wanted is not None:
        weight_buffer.commit(0)
        file = load_file(f"{checkpoint}/model.safetensors")
        file = {name: file[name] for name in policy.parameters}
        expected_of = {name: tensor.to(getattr(torch, dtype)) for name, tensor in file.items()}
        for each in quantized_parameters(file, form) if form else ():
            made = quantise_whole(file, each.base, form)
            expected_of |= dict(zip((each.values, each.scales), made, strict=True))
        for name, layout in wanted.parameters.items():
            (box,) = layout.boxes
            region = tuple(map(slice, box.start, box.stop))
            expected = expected_of[name][region]
            found = wanted.parameter(weight_buffer.active, name)
            assert found.dtype == expected.dtype
            assert torch.equal(found.float(), expected.float()), (config, target, name)
    writer.close()
    dist.barrier()  # no rank frees what another still writes to
    if weight_buffer is not None:
        weight_buffer.close()
    loads: Counter[int] = Counter()
    for copy in (single for alike in copies for single in alike.each()):
        loads[copy.source_rank] += torch.Size(copy.shape).numel()
    return dict(loads)


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_checkpoint(
        folder,
        vocab_size=76,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=44,
        attention_bias=True,
        tie_word_embeddings=request.param == "tied",
    )


def layouts(num_ranks: int) -> list[TrainerConfig]:
    sizes = [size for size in (1, 2, 4) if size <= num_ranks]
    return [
        TrainerConfig(num_ranks=num_ranks, tensor_parallel=tensor, replicate=replicate)
        for tensor, replicate in itertools.product(sizes, sizes)
        if tensor * replicate <= num_ranks
    ]


def check(ranks: Any, checkpoint: str, configs: list[TrainerConfig], targets: list[Target]) -> None:
    num_ranks, rendezvous = configs[0].num_ranks, f"{checkpoint}-{uuid.uuid4()}"
    answers = ranks(num_ranks).run(publish, rendezvous, checkpoint, configs, targets)
    for config, by_target in zip(configs, answers[0], strict=True):
        for loads in by_target:
            assert set(loads) == set(range(num_ranks)), (config, loads)  # copies share the work
            assert max(loads.values()) <= 2 * min(loads.values()), (config, loads)


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_a_publish_between_split_ends_delivers_the_checkpoint_bit_by_bit(
    ranks: Any, checkpoint: str
) -> None:
    configs = [
        TrainerConfig(num_ranks=4, tensor_parallel=2),
        TrainerConfig(num_ranks=4, replicate=2),
    ]
    targets = [("bfloat16", 2), ("float32", 4), ("int8 bfloat16", 2), ("vllm tensor", 1)]
    check(ranks, checkpoint, configs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_publishes_between_all_layouts_deliver_the_checkpoint_bit_by_bit(
    ranks: Any, checkpoint: str, num_ranks: int
) -> None:
    targets = [target for target in TARGETS if target[1] <= num_ranks]
    check(ranks, checkpoint, layouts(num_ranks), targets)
