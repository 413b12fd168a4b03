"""Two differently sharded trainer processes write straight into a generator process's arenas."""

import asyncio
import dataclasses
import multiprocessing
import threading
import time
import traceback
import zlib

import pytest
import torch

from llamarl.metrics.span import Spans
from llamarl.weights.arena import Arena
from llamarl.weights.layout import Box, ParameterLayout, RankLayout
from llamarl.weights.publish import FingerprintMismatch, Publisher
from llamarl.weights.shared_memory import Segment
from llamarl.weights.writer import Writer
from tests.allocation import LargestAllocation

SHAPES = {
    "embed": (203, 96),
    "q": (64, 96),
    "k": (32, 96),
    "v": (32, 96),
    "norm": (96,),
    "down": (96, 300),
    "scale": (),
    "wide": (512, 600),
}
LARGEST_BYTES = 4 * 512 * 600
DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float32}
RANKS = {0: 1, 1: 1, 2: 2}  # replica 2 is sharded over two ranks, with norm and scale on both


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
    cuts = {
        "embed": (0, 150),
        "down": (0, 7),
        "q": (1, 40),
        "k": (1, 40),
        "v": (1, 40),
        "wide": (1, 1),
    }
    boxes = {}
    for name, shape in SHAPES.items():
        start, stop = [0] * len(shape), list(shape)
        if name in cuts:
            dim, cut = cuts[name]
            (start if rank else stop)[dim] = cut
        boxes[name] = tuple(start), tuple(stop)
    return boxes


class TrainerRank:
    """Holds its shards of one version; `down` lies transposed in its memory."""

    def __init__(self, rank):
        self._boxes = trainer_boxes(rank)
        self._shards = self._cut(-1)
        layouts = {}
        for name, (start, stop) in self._boxes.items():
            box = Box(
                start=start, stop=stop, buffer=name, offset=0, strides=self._shards[name].stride()
            )
            layouts[name] = ParameterLayout(shape=SHAPES[name], dtype="float32", boxes=(box,))
        self._writer = Writer(rank, "here", self._shards, layouts)
        self.layout, self.connect, self.write = (
            self._writer.layout, self._writer.connect, self._writer.write,
        )  # fmt: skip

    def _cut(self, version):
        shards = {}
        for name, weight in weights(version).items():
            start, stop = self._boxes[name]
            shard = weight[tuple(map(slice, start, stop))]
            shards[name] = shard.T.contiguous().T if name == "down" else shard.clone()
        return shards

    def train(self, version):
        for name, shard in self._cut(version).items():
            self._shards[name].copy_(shard)

    def watch_write(self, version, offers):
        with LargestAllocation() as watch:
            self._writer.write(version, offers)
        return watch.num_bytes, watch.names


def generator_layout(replica):
    """Per rank: parameters and arena size. qkv is fused by kv head, with padding before it."""
    dtype = str(DTYPES[replica]).removeprefix("torch.")
    layouts = []
    for rank in range(RANKS[replica]):
        boxes, size = {name: [] for name in SHAPES}, 5

        def place(name, start, stop, boxes=boxes):
            nonlocal size
            extents = [b - a for a, b in zip(start, stop, strict=True)]
            strides = torch.empty(extents, device="meta").stride()
            box = Box(start=start, stop=stop, buffer="arena", offset=size, strides=strides)
            boxes[name].append(box)
            size += box_numel(box) + 3 * (name == "embed")

        def mine(length, rank=rank):
            parts = RANKS[replica]
            return length * rank // parts, length * (rank + 1) // parts

        for head in range(*mine(4)):
            place("q", (16 * head, 0), (16 * head + 16, 96))
            place("k", (8 * head, 0), (8 * head + 8, 96))
            place("v", (8 * head, 0), (8 * head + 8, 96))
        place("embed", (mine(203)[0], 0), (mine(203)[1], 96))
        place("norm", (0,), (96,))
        place("scale", (), ())
        place("down", (0, mine(300)[0]), (96, mine(300)[1]))
        place("wide", (mine(512)[0], 0), (mine(512)[1], 600))
        parameters = {
            name: ParameterLayout(shape=SHAPES[name], dtype=dtype, boxes=tuple(found))
            for name, found in boxes.items()
        }
        layouts.append((parameters, size))
    return layouts


def bits(flat):
    return flat.view(torch.int16)


def box_numel(box):
    return torch.Size([b - a for a, b in zip(box.start, box.stop, strict=True)]).numel()


class GeneratorHost:
    """All arenas of all replicas, and a thread that keeps reading the live ones."""

    def __init__(self):
        self.arenas = {
            replica: [
                Arena(
                    parameters=parameters, num_elements=size, dtype=DTYPES[replica],
                    replica=replica, rank=rank, run_id="test", host="here",
                )
                for rank, (parameters, size) in enumerate(generator_layout(replica))
            ]
            for replica in RANKS
        }  # fmt: skip
        self.step = threading.Lock()  # held while "decoding": a flip waits for the boundary
        self.expected = {}
        self.num_reads, self.num_wrong = 0, 0
        for replica in RANKS:
            self.expect(replica, -1)
            for arena, flat in zip(self.arenas[replica], self.expected[replica], strict=True):
                arena.live.copy_(flat)
        threading.Thread(target=self._decode, daemon=True).start()

    def expect(self, replica, version):
        self.expected[replica] = []
        whole = weights(version)
        for (parameters, size), arena in zip(
            generator_layout(replica), self.arenas[replica], strict=True
        ):
            flat = torch.full((size,), torch.nan, dtype=arena.live.dtype)
            for name, layout in parameters.items():
                for box in layout.boxes:
                    part = whole[name][tuple(map(slice, box.start, box.stop))]
                    flat.as_strided(part.shape, box.strides, box.offset).copy_(part)
            self.expected[replica].append(flat)

    def _decode(self):
        while True:
            for replica, arenas in self.arenas.items():
                with self.step:
                    live = [arena.live for arena in arenas]
                    for flat, wanted in zip(live, self.expected[replica], strict=True):
                        found = torch.where(wanted.isnan(), wanted, flat)  # NaN: no parameter
                        self.num_wrong += not torch.equal(bits(found), bits(wanted))
                    self.num_reads += 1
                time.sleep(0.0005)

    def reads(self):
        with self.step:
            return self.num_reads, self.num_wrong

    def layout(self, replica):
        return [
            RankLayout(rank=rank, host="here", parameters=parameters)
            for rank, (parameters, _) in enumerate(generator_layout(replica))
        ]

    def offer(self, replica, version):
        return [arena.offer(version) for arena in self.arenas[replica]]

    def fingerprint(self, replica, version):
        return [arena.fingerprint(version) for arena in self.arenas[replica]]

    def watch_fingerprint(self, replica, version):
        with LargestAllocation() as watch:
            self.fingerprint(replica, version)
        return watch.num_bytes, watch.names

    def flip(self, replica, version):
        with self.step:
            self.expect(replica, version)
            for arena in self.arenas[replica]:
                arena.flip(version)
        return [3] * len(self.arenas[replica])

    def discard(self, replica, version):
        return [arena.discard(version) for arena in self.arenas[replica]]


def serve(make, args, pipe):
    torch.set_num_threads(1)
    target = make(*args)
    while True:
        name, args = pipe.recv()
        try:
            pipe.send((True, getattr(target, name)(*args)))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send((False, error))


class Remote:
    """An object in a process of its own; calls go one by one."""

    def __init__(self, make, *args):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(make, args, there), daemon=True)
        self._process.start()
        there.close()
        self._lock = threading.Lock()

    def call(self, name, *args):
        with self._lock:
            self._pipe.send((name, args))
            is_good, answer = self._pipe.recv()
        if not is_good:
            raise answer
        return answer

    async def ask(self, name, *args):
        return await asyncio.to_thread(self.call, name, *args)

    def close(self):
        self._process.kill()
        self._process.join()


class Sender:
    """The two trainer ranks. `bend` may change the copies, `after_write` the memory."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.bend = lambda replica, copies: copies
        self.after_write = lambda offers: None
        self.version_shift = 0

    async def _all(self, name, *args):
        return list(await asyncio.gather(*(rank.ask(name, *args) for rank in self.ranks)))

    async def source_layout(self):
        return [rank.call("layout") for rank in self.ranks]

    async def connect(self, replica, copies):
        return await self._all("connect", replica, self.bend(replica, copies))

    async def write(self, version, offers):
        written = await self._all("write", version + self.version_shift, offers)
        self.after_write(offers)
        return written


class Receiver:
    """One replica of the generator host."""

    def __init__(self, host, replica):
        self.host, self.replica = host, replica

    async def target_layout(self):
        return await self.host.ask("layout", self.replica)

    async def offer(self, version):
        return await self.host.ask("offer", self.replica, version)

    async def fingerprint(self, version):
        return await self.host.ask("fingerprint", self.replica, version)

    async def flip(self, version):
        return await self.host.ask("flip", self.replica, version)

    async def discard(self, version):
        return await self.host.ask("discard", self.replica, version)


class World:
    """The processes, and the last version tried."""

    def __init__(self):
        self.trainers = [Remote(TrainerRank, rank) for rank in range(2)]
        self.host = Remote(GeneratorHost)
        self.version = 0

    def publisher(self, sender, replicas):
        receivers = {replica: Receiver(self.host, replica) for replica in replicas}
        return Publisher(sender, receivers, Spans("controller", None), 60.0)

    def train(self):
        self.version += 1
        for trainer in self.trainers:
            trainer.call("train", self.version)
        return self.version


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    for remote in (*world.trainers, world.host):
        remote.close()


def test_every_version_arrives_bit_by_bit_while_the_live_weights_are_read(world) -> None:
    async def run():
        publisher = world.publisher(Sender(world.trainers), RANKS)
        await publisher.connect()
        reads_before, _ = world.host.call("reads")
        for _ in range(8):
            stats = await publisher.publish(world.train())
            assert stats.num_running == {0: 3, 1: 3, 2: 3}
            num_elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
            assert stats.num_bytes == (4 + 2 + 4) * num_elements + 4 * 97  # norm, scale twice
        reads, num_wrong = world.host.call("reads")
        assert num_wrong == 0
        assert reads - reads_before > 30

    asyncio.run(run())


def flip_bit(offers, rank, element):
    offer = next(offer for offer in offers if offer.rank == rank)
    segment = Segment.open(offer.segment, offer.num_bytes)
    segment.tensor(torch.int16)[element] ^= 1
    segment.close()


def element_of(replica, rank, name):
    """The int16 word of the arena where the last element of `name` begins."""
    box = generator_layout(replica)[rank][0][name].boxes[-1]
    return (box.offset + box_numel(box) - 1) * (DTYPES[replica].itemsize // 2)


def damage_one(copies, name, change):
    """`copies` with the largest one of `name` replaced by `change` of it, or left out."""
    victim = max(
        (copy for copy in copies if copy.name == name),
        key=lambda copy: torch.Size(copy.shape).numel(),
    )
    rest = [copy for copy in copies if copy is not victim]
    return rest + ([change(victim)] if change else [])


def one_row_further(copy):
    return dataclasses.replace(copy, target_offset=copy.target_offset + copy.target_strides[0])


def one_column_off(copy):
    return dataclasses.replace(copy, target_offset=copy.target_offset + copy.target_strides[-1])


@pytest.mark.parametrize(
    ("replica", "rank", "name"),
    [(0, 0, "wide"), (1, 0, "norm"), (2, 1, "norm"), (2, 0, "scale"), (2, 1, "v")],
)
def test_one_flipped_bit_anywhere_is_found_and_named(world, replica, rank, name) -> None:
    sender = Sender(world.trainers)
    sender.after_write = lambda offers: flip_bit(offers, rank, element_of(replica, rank, name))
    check_refused(world, sender, replica, name, FingerprintMismatch)


@pytest.mark.parametrize("replica", RANKS)
@pytest.mark.parametrize("name", ["embed", "q", "down"])
@pytest.mark.parametrize("change", [one_row_further, one_column_off, None])
def test_a_misplaced_or_skipped_slice_is_found_and_named(world, replica, name, change) -> None:
    sender = Sender(world.trainers)

    def bend(replica, copies):
        moved = [copy for copy in copies if copy.shape != SHAPES[copy.name]]
        assert any(copy.name == name for copy in moved)
        return damage_one(copies, name, change)

    sender.bend = bend
    check_refused(world, sender, replica, name, FingerprintMismatch)


def test_reading_from_another_place_than_the_layout_says_is_refused(world) -> None:
    def shift(copy):
        return dataclasses.replace(copy, source_offset=copy.source_offset - 1)

    sender = Sender(world.trainers)
    sender.bend = lambda replica, copies: damage_one(copies, "norm", shift)
    with pytest.raises(ValueError, match="copy of norm must read from where the layout has it"):
        asyncio.run(world.publisher(sender, [0]).connect())


def test_a_write_of_another_version_is_refused(world) -> None:
    sender = Sender(world.trainers)
    sender.version_shift = -1
    check_refused(world, sender, 0, "asked to write version", RuntimeError)


def check_refused(world, sender, replica, word, kind):
    """The publish fails and names `word`; what is live stays live; the next publish works."""

    async def run():
        publisher = world.publisher(sender, [replica])
        await publisher.connect()
        version = world.train()
        with pytest.raises(kind) as caught:
            await publisher.publish(version)
        assert word in str(caught.value)
        if kind is FingerprintMismatch:
            assert f"version {version} to generator {replica}: " in str(caught.value)
        assert world.host.call("reads")[1] == 0
        healthy = world.publisher(Sender(world.trainers), [replica])
        await healthy.connect()
        await healthy.publish(version)
        assert world.host.call("reads")[1] == 0

    asyncio.run(run())


def test_a_publish_allocates_little_and_gathers_nothing(world) -> None:
    async def run():
        for replica in RANKS:
            publisher = world.publisher(Sender(world.trainers), [replica])
            await publisher.connect()
            version = world.train()
            offers = world.host.call("offer", replica, version)
            watched = [rank.call("watch_write", version, offers) for rank in world.trainers]
            watched.append(world.host.call("watch_fingerprint", replica, version))
            world.host.call("flip", replica, version)
            for num_bytes, names in watched:
                assert 0 < num_bytes < LARGEST_BYTES / 4
                assert not [name for name in names if "c10d" in name or "gather" in name]

    asyncio.run(run())
