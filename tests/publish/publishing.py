"""The two ends of a publish in real processes: trainer ranks, generator replicas, the publisher."""

import asyncio
import contextlib
import threading
import time
import traceback

import torch

from llamarl.core.config import WeightsConfig
from llamarl.core.device.devices import PLATFORMS
from llamarl.metrics.span import Spans
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import WeightKind
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports.mapped import opened
from tests.allocation import LargestAllocation
from tests.publish.publishing_damage import BitFlip, bent
from tests.publish.publishing_layouts import (
    KINDS,
    SHAPES,
    TILE_BYTES,
    bits,
    generator_layout,
    trainer_boxes,
    weights,
)
from tests.trainer.ranks import FORKS

TRANSPORTS = ("shared_memory", "collective")
STAGINGS = ("double_buffer", "host", "staged")


def weights_config(staging, transport="shared_memory"):
    """`staged` is a weight buffer with one memory, whatever the config says."""
    return WeightsConfig(
        transport=transport, staging="double_buffer" if staging == "staged" else staging,
        timeout_s=20.0, straggler_timeout_s=20.0,
    )  # fmt: skip


class TrainerRank:
    """Holds its shards of one version; `down` lies transposed in its memory."""

    def __init__(self, rank, device="cpu"):
        self._boxes, self._device = trainer_boxes(rank), device
        self._shards = self._cut(-1)
        layouts = {}
        for name, (start, stop) in self._boxes.items():
            box = Box(
                start=start, stop=stop, buffer=name, offset=0, strides=self._shards[name].stride()
            )
            layouts[name] = ParameterLayout(shape=SHAPES[name], dtype="float32", boxes=(box,))
        self._writer = Writer(rank, "here", self._shards, layouts, timeout_s=20)
        self.layout, self.write = self._writer.layout, self._writer.write
        self.label, self.invalidate = self._writer.tensors.label, self._writer.tensors.invalidate

    def _cut(self, version):
        shards = {}
        for name, weight in weights(version).items():
            start, stop = self._boxes[name]
            shard = weight[tuple(map(slice, start, stop))]
            shard = shard.T.contiguous().T if name == "down" else shard.clone()
            shards[name] = shard.to(self._device)
        return shards

    def connect(self, replica, route):
        self._writer.connect(replica, route)

    def train(self, version):
        self._writer.tensors.begin_step()
        for name, shard in self._cut(version).items():
            self._shards[name].copy_(shard)
        self._writer.tensors.label(version)

    def damage(self):
        for sender in self._writer._senders.values():
            sender.group = BitFlip(sender.group)

    def watch_write(self, version, handles):
        with LargestAllocation() as watch:
            self._writer.write(version, handles)
        return watch.num_bytes, watch.names


class GeneratorRanks:
    """All ranks of one replica in one process, and a thread that reads the active memory."""

    def __init__(self):
        self._step = threading.Lock()  # held while "decoding": a commit waits for the boundary
        self._weight_buffers, self._writers = [], []
        self._num_reads, self._num_wrong = 0, 0
        self._is_still = True
        threading.Thread(target=self._decode, daemon=True).start()

    def build(self, replica, kind, staging, device="cpu"):
        with self._step:
            for end in (*self._writers, *self._weight_buffers):
                end.close()
            dtype, _ = KINDS[kind]
            self._kind = kind
            self._weight_buffers = [
                WeightBuffer(
                    Memory(
                        parameters=parameters, num_elements=size, dtype=dtype,
                        is_staged=staging == "staged",
                    ),
                    weights_config(staging), replica=replica, rank=rank, run_id="test",
                    host="here", device=device,
                )
                for rank, (parameters, size) in enumerate(generator_layout(kind))
            ]  # fmt: skip
            self._writers = []
            for rank, (parameters, _) in enumerate(generator_layout(kind)):
                weight_buffer = self._weight_buffers[rank]
                writer = Writer(
                    rank, "here", {"weights": weight_buffer.active}, parameters, timeout_s=20
                )
                weight_buffer.before_overwrite = writer.tensors.invalidate
                self._writers.append(writer)
            self._expected = self._whole(-1)
            for weight_buffer, flat in zip(self._weight_buffers, self._expected, strict=True):
                weight_buffer.active.copy_(flat)
            self._is_staged = self._is_still = staging == "staged"
            self._num_reads, self._num_wrong = 0, 0

    def _whole(self, version):
        """What the weight buffers must hold: nan where a parameter leaves padding."""
        whole, found = weights(version), []
        for (parameters, size), weight_buffer in zip(
            generator_layout(self._kind), self._weight_buffers, strict=True
        ):
            flat = torch.full((size,), 7.0, dtype=weight_buffer.active.dtype)
            for name, layout in parameters.items():
                for box in layout.boxes:
                    slices = tuple(map(slice, box.start, box.stop))
                    values = whole[name][slices].to(flat.dtype)
                    flat.as_strided(values.shape, box.strides, box.offset).copy_(values)
            padding = flat == 7.0
            flat[padding] = weight_buffer.active.cpu()[padding]
            found.append(flat)
        return found

    def _decode(self):
        while True:
            with self._step:
                if not self._is_still:
                    self._look()
            time.sleep(0.005)

    def _look(self):
        self._num_reads += 1
        for weight_buffer, flat in zip(self._weight_buffers, self._expected, strict=True):
            self._num_wrong += not torch.equal(bits(weight_buffer.active.cpu()), bits(flat))

    def reads(self):
        with self._step:
            if not self._is_still:
                self._look()
            return self._num_reads, self._num_wrong

    def layout(self):
        return [weight_buffer.layout() for weight_buffer in self._weight_buffers]

    def source_layout(self):
        return [writer.layout() for writer in self._writers]

    def connect_source(self, route):
        self._each(lambda rank: self._weight_buffers[rank].connect(route.for_rank(rank)))

    def connect_target(self, replica, route):
        for rank, writer in enumerate(self._writers):
            writer.connect(replica, route and route.for_rank(rank))

    def write(self, version, handles):
        return [writer.write(version, handles) for writer in self._writers]

    def prepare(self, version):
        return [weight_buffer.prepare(version) for weight_buffer in self._weight_buffers]

    def verify(self, version):
        return self._each(lambda rank: self._weight_buffers[rank].verify(version))

    def watch_fingerprint(self, version):
        self.verify(version)  # over messages it sums on a thread that nothing watches
        with LargestAllocation() as watch:
            for weight_buffer in self._weight_buffers:
                list(map(weight_buffer._fingerprint, weight_buffer.layout().parameters))
        return watch.num_bytes, watch.names

    def commit(self, version):
        with self._step:
            self._is_still = True
            active = [weight_buffer.commit(version) for weight_buffer in self._weight_buffers]
            self._expected = self._whole(version)
            self._look()
            self._is_still = self._is_staged
            for writer, flat in zip(self._writers, active, strict=True):
                writer.tensors.label(version, {"weights": flat})
        return [3 for _ in self._weight_buffers]

    def abort(self, version):
        for weight_buffer in self._weight_buffers:
            weight_buffer.abort(version)

    def flip_bit(self, name):
        """Damage the last element of `name` in the last rank's staging, after it has arrived."""
        weight_buffer = self._weight_buffers[-1]
        box = weight_buffer.layout().parameters[name].boxes[-1]
        extents = [b - a for a, b in zip(box.start, box.stop, strict=True)]
        last = box.offset + sum((n - 1) * s for n, s in zip(extents, box.strides, strict=True))
        bits(weight_buffer.staging)[last * (weight_buffer.staging.element_size() // 2)] ^= 1

    def peek(self, address, num_bytes):
        """Open memory of another process, look at it, and let it go again."""
        opened(address, num_bytes)[0].item()

    def _each(self, call):
        """Of all ranks at once, as in processes of their own."""
        answers = {}
        threads = [
            threading.Thread(target=lambda i=i: answers.update({i: outcome(call, i)}))
            for i in range(len(self._weight_buffers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(len(threads)):
            if isinstance(answers[i], Exception):
                raise answers[i]
        return [answers[i] for i in range(len(threads))]


def outcome(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return error


def serve(make, args, pipe):
    torch.set_num_threads(1)
    PLATFORMS["cpu"].tile_bytes = PLATFORMS["cpu"].summed_bytes = TILE_BYTES
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
        self._pipe, there = FORKS.Pipe()
        self._process = FORKS.Process(target=serve, args=(make, args, there), daemon=True)
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


class Trainer:
    """The source: the two trainer ranks. `bend` changes copies, as a wrong plan would;
    `before` is called with the staging handles of a write, `after` when it has ended."""

    def __init__(self, ranks, bend=list):
        self.ranks, self.bend = ranks, bend
        self.before, self.after = lambda handles: None, lambda: None

    async def all(self, method, *args):
        return await getattr(self, method.__name__)(*args)

    async def _all(self, name, *args):
        return list(await asyncio.gather(*(rank.ask(name, *args) for rank in self.ranks)))

    async def source_layout(self):
        return await self._all("layout")

    async def connect_target(self, replica, route):
        bent_route = route and bent(route, "by_source", self.bend)
        parts = [route and bent_route.for_rank(i) for i in range(len(self.ranks))]
        asked = zip(self.ranks, parts, strict=True)
        return list(
            await asyncio.gather(*(rank.ask("connect", replica, part) for rank, part in asked))
        )

    async def write(self, version, handles):
        self.before(handles)
        written = await self._all("write", version, handles)
        self.after()
        return written


class Generator:
    """A replica in one process. `before` is called with the name of each call."""

    def __init__(self, host, bend=list):
        self.host, self.bend = host, bend
        self.before = lambda name: None

    async def all(self, method, *args):
        return await getattr(self, method.__name__)(*args)

    async def _ask(self, name, *args):
        self.before(name)
        return await self.host.ask(name, *args)

    async def source_layout(self):
        return await self._ask("source_layout")

    async def connect_target(self, replica, route):
        return await self._ask("connect_target", replica, route)

    async def write(self, version, handles):
        return await self._ask("write", version, handles)

    async def target_layout(self):
        return await self._ask("layout")

    async def connect_source(self, route):
        return await self._ask("connect_source", bent(route, "by_target", self.bend))

    async def prepare(self, version):
        return await self._ask("prepare", version)

    async def verify(self, version):
        return await self._ask("verify", version)

    async def commit(self, version):
        return await self._ask("commit", version)

    async def abort(self, version):
        return await self._ask("abort", version)


class World:
    """Two trainer ranks, two generator hosts, and the last version tried."""

    def __init__(self, folder, device="cpu"):
        self.device = device
        self.trainers = [Remote(TrainerRank, rank, device) for rank in range(2)]
        self.hosts = [Remote(GeneratorRanks) for _ in range(2)]
        self.version = 0
        self.folder = str(folder)

    def publisher(self, transport, staging, trainer, generators, **hooks):
        config = weights_config(staging, transport)
        return Publisher(
            trainer, dict(enumerate(generators)), Spans("controller", None), config,
            rendezvous_folder=self.folder, **hooks,
            kind_of=lambda replica: WeightKind(device=self.device),
        )  # fmt: skip

    def train(self):
        self.version += 1
        for trainer in self.trainers:
            trainer.call("train", self.version)
        return self.version

    def close(self):
        for remote in (*self.trainers, *self.hosts):
            remote.close()


@contextlib.asynccontextmanager
async def connected(world, transport, staging, trainer, generators):
    """The publisher, connected; both ends forget it afterwards, whatever happened."""
    publisher = world.publisher(transport, staging, trainer, generators)
    try:
        await publisher.connect()
        yield publisher
    finally:
        await publisher.close()
        for replica, _ in enumerate(generators):
            await trainer.connect_target(replica, None)
