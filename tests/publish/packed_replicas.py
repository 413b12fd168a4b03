"""A trainer of two ranks and replicas of two kinds, each on a host of its own, in this process: for
the tests of messages that are packed once."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from llamarl.core.config import WeightsConfig
from llamarl.core.errors import TargetLost
from llamarl.publish.comparison import Fingerprints, add_up
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.reshard import plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports.messages import (
    MessageStore,
    PackedMessage,
    TransportReceiver,
    TransportSender,
    in_turns,
    messages_by,
    unpack,
)
from llamarl.publish.transports.routes import Transport

SHAPES = {"w": (24, 10), "embed": (9, 6), "norm": (7,)}
ROWS = {"w": (0, 11, 24), "embed": (0, 9, 9), "norm": (0, 4, 7)}  # of the trainer's two ranks
MESSAGE_BYTES = 200
SEALED_BYTES = 208 + 24  # of the longest message, with what the collective transport adds
KINDS = {"columns": (torch.float32, 2), "turned": (torch.bfloat16, 1)}
TIMEOUT_S = 20.0


class Wire:
    """What happens when a message is sent: `before` is called with the replica that it goes to."""

    def __init__(self):
        self.before = lambda replica: None


WIRE = Wire()
LOCAL = Transport(
    sender=f"{__name__}:LocalSender", receiver=f"{__name__}:LocalReceiver", crosses_hosts=True
)
"""A transport within this process, without a connection: a message is put into an inbox."""


class LocalSender(TransportSender):
    def __init__(self, route, end):
        self._rank, self._messages = end.rank, messages_by("target_rank", route)
        self._store = end.messages or MessageStore(0)
        self._taker = self._store.join(route, torch.device("cpu"))

    def write(self, handles, copy_cast):
        written = Fingerprints()
        for turn, (rank, index, message) in enumerate(in_turns(self._messages)):
            pack = partial(message.fill, copy_cast=copy_cast)
            place = handles[rank].version, turn
            packed = self._store.take(self._taker, place, message.num_bytes, pack)
            if packed is None:
                memory = torch.empty(message.num_bytes, dtype=torch.uint8)
                packed = PackedMessage(memory, pack(memory))
            written.merge(packed.sums)
            handles[rank].address.put(self._rank, index, packed.memory[: message.num_bytes])
        return written

    def close(self):
        self._store.leave(self._taker)


class LocalReceiver(TransportReceiver):
    def __init__(self, route, end):
        self._replica, self._messages = route.replica, messages_by("source_rank", route)
        self._inbox, self._is_closed = {}, False

    def open(self, version, flat, arrived):
        self._flat = flat
        return self

    def put(self, source, index, message):
        WIRE.before(self._replica)
        if self._is_closed:
            raise TargetLost("nobody is there")
        self._inbox[source, index] = message.clone()

    def arrive(self, version):
        for source, index, message in in_turns(self._messages):
            unpack(message, self._inbox[source, index], self._flat)

    def abort(self):
        self._inbox.clear()

    def close(self):
        self._is_closed = True


def weights(version):
    """The whole parameters of a version."""
    random = torch.Generator().manual_seed(version + 100)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


class Trainer:
    """Source ranks, two or one, that train in place. Versions count from 0."""

    def __init__(self, packed_bytes, num_ranks=2):
        self.shards, self.writers, self.num_ranks = [], [], num_ranks
        for rank in range(num_ranks):
            shards = {name: weights(0)[name][self.rows(name, rank)].clone() for name in SHAPES}
            layouts = {}
            for name, shard in shards.items():
                rows = self.rows(name, rank)
                box = Box(
                    start=(rows.start, *(0 for _ in SHAPES[name][1:])),
                    stop=(rows.stop, *SHAPES[name][1:]),
                    buffer=name, offset=0, strides=shard.stride(),
                )  # fmt: skip
                boxes = (box,) if shard.numel() else ()
                layouts[name] = ParameterLayout(shape=SHAPES[name], dtype="float32", boxes=boxes)
            self.shards.append(shards)
            self.writers.append(
                Writer(
                    rank,
                    "trainer",
                    shards,
                    layouts,
                    timeout_s=TIMEOUT_S,
                    packed_bytes=packed_bytes,
                )
            )
        self.version = 0
        for writer in self.writers:
            writer.tensors.label(0)

    def rows(self, name, rank):
        """Of a parameter, those that a rank holds."""
        ends = ROWS[name] if self.num_ranks == 2 else (0, SHAPES[name][0])
        return slice(ends[rank], ends[rank + 1])

    def step(self):
        for rank, writer in enumerate(self.writers):
            writer.tensors.begin_step()
            for name, weight in weights(self.version + 1).items():
                self.shards[rank][name].copy_(weight[self.rows(name, rank)])
            writer.tensors.label(self.version + 1)
            writer.tensors.announce()
        self.version += 1

    def forget(self, replica):
        for writer in self.writers:
            writer.connect(replica, None)

    def kept_bytes(self):
        return [writer.messages._num_bytes for writer in self.writers]


def layout(kind, rank):
    """Where a rank of this kind has its parameters, and how many elements that takes."""
    dtype, num_ranks = KINDS[kind]
    layouts, end = {}, 0
    for name, shape in SHAPES.items():
        start, stop = [0] * len(shape), list(shape)
        start[-1], stop[-1] = (shape[-1] * each // num_ranks for each in (rank, rank + 1))
        size = [b - a for a, b in zip(start, stop, strict=True)]
        strides = torch.empty(size, device="meta").stride()
        if kind == "turned":
            strides = torch.empty(size[::-1], device="meta").stride()[::-1]
        box = Box(
            start=tuple(start), stop=tuple(stop), buffer="weights", offset=end, strides=strides
        )
        dtype_name = str(dtype).removeprefix("torch.")
        layouts[name] = ParameterLayout(shape=shape, dtype=dtype_name, boxes=(box,))
        end += torch.Size(size).numel()
    return layouts, end


class Replica:
    """The weight buffers of one replica, and its part of a publish."""

    def __init__(self, number, kind, staging="double_buffer"):
        dtype, num_ranks = KINDS[kind]
        self.number, self.kind = number, kind
        self.buffers = []
        for rank in range(num_ranks):
            parameters, size = layout(kind, rank)
            self.buffers.append(
                WeightBuffer(
                    Memory(parameters=parameters, num_elements=size, dtype=dtype),
                    WeightsConfig(staging=staging, timeout_s=TIMEOUT_S),
                    replica=number,
                    rank=rank,
                    run_id="test",
                    host=f"host-{number}",
                )
            )

    def routes(self, layouts, transport="local", rendezvous=""):
        """(for the source's ranks, for the ranks of this replica)"""
        targets = [buffer.layout() for buffer in self.buffers]
        return split(
            plan(layouts, targets), source="trainer",
            replica=self.number, transport=transport, rendezvous=rendezvous,
            message_bytes=MESSAGE_BYTES,
        )  # fmt: skip

    def connect(self, trainer, transport="local", rendezvous=""):
        layouts = [writer.layout() for writer in trainer.writers]
        sending, receiving = self.routes(layouts, transport, rendezvous)
        each = list(enumerate(trainer.writers))
        calls = [(w.connect, self.number, sending.for_rank(i)) for i, w in each]
        calls += [(b.connect, receiving.for_rank(i)) for i, b in enumerate(self.buffers)]
        at_once(calls)

    def take(self, trainer, version):
        """Bring a version here, and look at every bit."""
        self.bring(trainer, version)
        self.check(version)

    def bring(self, trainer, version):
        """The publish; raises what one of the writers did, once both have ended."""
        handles = [buffer.prepare(version) for buffer in self.buffers]
        written = add_up(at_once([(w.write, version, handles) for w in trainer.writers]))
        found = add_up(at_once([(b.verify, version) for b in self.buffers]))
        assert written == found, f"fingerprints of version {version}"
        for buffer in self.buffers:
            buffer.commit(version)

    def abort(self, version):
        for buffer in self.buffers:
            buffer.abort(version)

    def check(self, version):
        """Each bit is what a copy of its own would have brought."""
        for rank, buffer in enumerate(self.buffers):
            for name, parameter in layout(self.kind, rank)[0].items():
                (box,) = parameter.boxes
                found = buffer.active.as_strided(box.shape, box.strides, box.offset)
                whole = weights(version)[name][tuple(map(slice, box.start, box.stop))]
                assert torch.equal(found, whole.to(found.dtype)), f"{name}, version {version}"

    def close(self):
        for buffer in self.buffers:
            buffer.close()


def at_once(calls):
    """The results of calls, each on a thread; the first error once all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call, *args) for call, *args in calls]
    return [future.result() for future in futures]
