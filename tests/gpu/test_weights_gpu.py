"""Publishing between processes that share one GPU: CUDA IPC, and the other transports onto it.

NCCL cannot run here: it refuses two ranks on one GPU, so the collective transport takes gloo.
"""

import asyncio

import pytest
import torch

from llamarl.core.errors import FingerprintMismatch
from llamarl.publish.fingerprint import fingerprint, transfer
from llamarl.publish.transports.mapped import MappedBlock
from tests.publish.publishing import STAGINGS, Generator, GeneratorRanks, Trainer, World, connected
from tests.publish.publishing_damage import one_row_further
from tests.publish.publishing_layouts import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

WAYS = [("cuda_ipc", staging) for staging in STAGINGS]
WAYS += [("collective", "double_buffer")]
WAYS += [("shared_memory", "host")]  # the staging buffer is host memory, pinned


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("rendezvous"), "cuda")
    yield world
    world.close()


@pytest.mark.parametrize(("transport", "staging"), WAYS)
def test_every_version_arrives_bit_by_bit_and_is_passed_on(world, transport, staging) -> None:
    async def run(kind):
        for replica, host in enumerate(world.hosts):
            host.call("build", replica, kind, staging, "cuda")
        generators = [Generator(host) for host in world.hosts]
        async with connected(
            world, transport, staging, Trainer(world.trainers), generators
        ) as publisher:
            for _ in range(3):
                stats = await publisher.publish(world.train())
                assert stats.num_running == {0: 3, 1: 3}
        for host in world.hosts:
            assert host.call("reads")[1] == 0

    for kind in KINDS:
        asyncio.run(run(kind))


@pytest.mark.parametrize("damage", ["bit", "place"])
def test_damage_is_found_and_named(world, damage) -> None:
    def bend(copies):
        return [
            one_row_further(copy) if copy.name == "embed" and damage == "place" else copy
            for copy in copies
        ]

    async def run():
        host = world.hosts[0]
        host.call("build", 0, "fused", "double_buffer", "cuda")
        trainer = Trainer(world.trainers, bend)
        if damage == "bit":
            trainer.after = lambda: host.call("flip_bit", "embed")
        async with connected(
            world, "cuda_ipc", "double_buffer", trainer, [Generator(host)]
        ) as publisher:
            version = world.train()
            with pytest.raises(FingerprintMismatch, match="embed"):
                await publisher.publish(version)
        assert host.call("reads")[1] == 0

    asyncio.run(run())


@pytest.mark.parametrize("staging", ["double_buffer", "host"])
def test_the_live_memory_keeps_its_address(staging) -> None:
    ranks = GeneratorRanks()
    ranks.build(0, "fused", staging, "cuda")
    (weight_buffer,) = ranks._weight_buffers
    address = weight_buffer.active.data_ptr()
    for version in range(2):
        weight_buffer.prepare(version)
        weight_buffer.commit(version)
    assert weight_buffer.active.data_ptr() == address
    assert weight_buffer.active.is_cuda
    weight_buffer.close()


@pytest.mark.parametrize("num_openings", [0, 1, 3])
def test_shared_memory_is_freed_when_its_owner_says_so(world, num_openings) -> None:
    block = MappedBlock("shared", 1 << 24, torch.float32, torch.device("cuda", 0), is_host=False)
    address = block.address
    for _ in range(num_openings):
        world.hosts[0].call("peek", address, block.num_bytes)
    before_bytes = torch.cuda.memory_allocated()
    block.flat.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before_bytes - block.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (9000,), (3000, 2100), (3, 500, 600)])
def test_the_fingerprint_is_the_same_on_both_devices(shape, dtype) -> None:
    weights = torch.randn(shape)
    start = [0] * len(shape)
    cast = weights.to(dtype)
    for dim in (-1, -2)[: max(1, len(shape))]:
        on_cpu = fingerprint("w", cast, start, shape, dim)
        assert fingerprint("w", cast.cuda(), start, shape, dim) == on_cpu
        for source, device in (
            (weights.cuda(), "cuda"),
            (weights.cuda(), "cpu"),
            (weights, "cuda"),
        ):
            target = torch.empty(shape, dtype=dtype, device=device)
            assert transfer("w", source, target, start, shape, dim) == on_cpu
            assert torch.equal(target.cpu(), cast)
