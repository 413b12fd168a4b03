"""Messages that go to several replicas are packed once, and no replica feels what another does."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llamarl.core.errors import StaleVersion, TargetLost
from llamarl.publish.comparison import add_up
from llamarl.publish.fingerprint import line_dim, transfer
from llamarl.publish.transports import routes
from llamarl.publish.transports.messages import MessageStore
from llamarl.publish.transports.routes import End, make_sender
from tests.publish.packed_replicas import (
    LOCAL,
    SEALED_BYTES,
    SHAPES,
    TIMEOUT_S,
    WIRE,
    Replica,
    Trainer,
    at_once,
    weights,
)

AMPLE = 1 << 20


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setitem(routes.TRANSPORTS, "local", LOCAL)
    monkeypatch.setattr(WIRE, "before", lambda replica: None)


def life(trainer, replica, wire_down, random_of, versions_end):
    """A replica comes, takes versions, lags, leaves, is cut off and comes again, until the end."""
    replica.connect(trainer)
    had, num_refused = -1, 0
    while had < versions_end:
        time.sleep(random_of.choice((0, 0, 0.002, 0.01)))
        version, chance = trainer.version, random_of.random()
        if chance < 0.1:
            trainer.forget(replica.number)
            replica.connect(trainer)
        if version <= had:
            continue
        if 0.1 < chance < 0.2:
            wire_down.add(replica.number)
        try:
            replica.take(trainer, version)
            had = version
        except (StaleVersion, TargetLost):
            num_refused += 1
            wire_down.discard(replica.number)
            replica.abort(version)
            replica.connect(trainer)
    trainer.forget(replica.number)
    return num_refused


def search(seed, packed_bytes):
    """One run of replicas on threads of their own beside a trainer that goes on."""
    random_of = random.Random(seed)
    trainer, down = Trainer(packed_bytes), set()

    def before(replica):
        assert all(kept <= packed_bytes for kept in trainer.kept_bytes())
        if random.random() < 0.1:
            time.sleep(0.001)
        if replica in down and random.random() < 0.3:
            raise TargetLost("it is gone")

    WIRE.before = before
    kinds = [random_of.choice(("columns", "columns", "turned")) for _ in range(4)]
    replicas = [Replica(number, kind) for number, kind in enumerate(kinds)]
    end = random_of.randint(2, 5)
    with ThreadPoolExecutor(len(replicas)) as pool:
        lives = [
            pool.submit(life, trainer, each, down, random.Random(f"{seed}-{each.number}"), end)
            for each in replicas
        ]
        while trainer.version < end:
            time.sleep(random_of.choice((0, 0.003, 0.02)))
            trainer.step()
    for each in lives:
        each.result()
    assert trainer.kept_bytes() == [0, 0]
    for replica in replicas:
        replica.check(end)
        replica.close()


@pytest.mark.parametrize("packed_bytes", [0, 64, SEALED_BYTES, 3 * SEALED_BYTES, AMPLE])
def test_a_search_finds_no_wrong_bit_or_sum_whatever_replicas_and_trainer_do(packed_bytes) -> None:
    for seed in range(8):
        try:
            search(seed, packed_bytes)
        except Exception as error:
            raise AssertionError(f"seed {seed}, packed_bytes {packed_bytes}") from error


class Source:
    """One source rank's senders to some replicas, which count how often a piece is packed."""

    def __init__(self, replicas, packed_bytes, transport, folder):
        self.store, self.replicas = MessageStore(packed_bytes), replicas
        self.counts = Counter()
        self.before = lambda replica: None
        (writer,) = Trainer(0, num_ranks=1).writers
        end = End(
            rank=0, host="trainer", device=torch.device("cpu"), timeout_s=TIMEOUT_S,
            messages=self.store,
        )  # fmt: skip
        self.senders, calls = {}, []
        for replica in replicas:
            sending, receiving = replica.routes(
                [writer.layout()], transport, f"{folder}/{replica.number}"
            )
            calls.append((self._send_to, replica.number, sending.for_rank(0), end))
            for rank, buffer in enumerate(replica.buffers):
                calls.append((buffer.connect, receiving.for_rank(rank)))
        at_once(calls)

    def _send_to(self, number, route, end):
        self.senders[number] = make_sender(route, end)

    def write(self, replica, version, handles):
        def copy_cast(copy, target):
            self.before(replica.number)
            self.counts[version, copy] += 1
            whole = weights(version)[copy.name]
            values = whole.as_strided(copy.shape, copy.source_strides, copy.source_offset)
            shape = SHAPES[copy.name]
            dim = line_dim(shape, copy.target_strides)
            return transfer(copy.name, values, target, copy.start, shape, dim)

        by_rank = {handle.rank: handle for handle in handles}
        return self.senders[replica.number].write(by_rank, copy_cast)

    def take(self, replica, version):
        """Bring a version to a replica."""
        handles = [buffer.prepare(version) for buffer in replica.buffers]
        written = self.write(replica, version, handles)
        found = add_up(at_once([(b.verify, version) for b in replica.buffers]))
        assert written == found
        for buffer in replica.buffers:
            buffer.commit(version)
        replica.check(version)

    def close(self):
        for sender in self.senders.values():
            sender.close()
        for replica in self.replicas:
            replica.close()


@pytest.fixture
def source_of(tmp_path):
    """Makes a Source and closes it in the end."""
    made = []

    def make(kinds, packed_bytes=AMPLE, transport="local", staging="double_buffer"):
        replicas = [Replica(number, kind, staging) for number, kind in enumerate(kinds)]
        made.append(Source(replicas, packed_bytes, transport, tmp_path))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.mark.parametrize("staging", ["double_buffer", "host"])
@pytest.mark.parametrize("transport", ["local", "collective"])
def test_each_piece_is_packed_once_a_version_for_all_replicas_of_a_kind(
    source_of, transport, staging
) -> None:
    source = source_of(
        ("columns", "turned", "columns", "columns", "turned"), AMPLE, transport, staging
    )
    for version in range(3):
        source.counts.clear()
        at_once([(source.take, replica, version) for replica in source.replicas])
        assert set(source.counts.values()) == {1}
        assert source.store._num_bytes == 0


@pytest.mark.parametrize(
    ("kinds", "packed_bytes", "times"),
    [(("columns", "turned"), AMPLE, 1), (("columns", "columns"), 0, 2)],
)
def test_nothing_is_kept_for_one_replica_of_a_kind_or_without_memory(
    source_of, kinds, packed_bytes, times
) -> None:
    source, kept = source_of(kinds, packed_bytes), []
    WIRE.before = lambda replica: kept.append(source.store._num_bytes)
    for replica in source.replicas:
        source.take(replica, 0)
    assert set(kept) == {0}
    assert set(source.counts.values()) == {times}


def test_a_replica_far_behind_packs_again_and_the_memory_keeps_its_limit(source_of) -> None:
    source = source_of(("columns", "columns"), SEALED_BYTES)
    source.take(source.replicas[0], 0)
    assert 0 < source.store._num_bytes <= SEALED_BYTES
    source.take(source.replicas[1], 0)
    assert set(source.counts.values()) <= {1, 2}
    assert 2 in source.counts.values()


def in_background(call, *args):
    """What a call on a thread will return or raise."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args)
    pool.shutdown(wait=False)
    return future


def test_a_replica_that_takes_nothing_more_holds_no_other_up(source_of) -> None:
    source, is_stuck, may_go_on = source_of(("columns",) * 3), threading.Event(), threading.Event()

    def before(replica):
        if replica == 0:
            is_stuck.set()
            assert may_go_on.wait(TIMEOUT_S)

    WIRE.before = before
    stuck = in_background(source.take, source.replicas[0], 0)
    assert is_stuck.wait(TIMEOUT_S)
    for version in (0, 1):
        source.take(source.replicas[1], version)
        source.take(source.replicas[2], version)
    may_go_on.set()
    stuck.result()
    assert max(source.counts.values()) == 2  # version 0 was not kept for the one behind


@pytest.mark.parametrize("error", [StaleVersion("it went on"), MemoryError("no room to cast")])
def test_an_error_while_packing_is_that_replicas_alone_and_who_waited_packs(
    source_of, error
) -> None:
    source, is_packing, may_fail = source_of(("columns",) * 3), threading.Event(), threading.Event()

    def before(replica):
        if replica == 0:
            is_packing.set()
            assert may_fail.wait(TIMEOUT_S)
            raise error

    source.before = before
    failing = in_background(source.take, source.replicas[0], 0)
    assert is_packing.wait(TIMEOUT_S)
    others = [in_background(source.take, replica, 0) for replica in source.replicas[1:]]
    time.sleep(0.05)
    assert not any(other.done() for other in others)  # they wait for what is being packed
    may_fail.set()
    with pytest.raises(type(error)):
        failing.result()
    for other in others:
        other.result()
    assert set(source.counts.values()) == {1}


@pytest.mark.parametrize("transport", ["local", "collective"])
def test_a_receiver_that_dies_amid_a_version_is_lost_alone(source_of, transport) -> None:
    source = source_of(("columns",) * 3, AMPLE, transport)
    for replica in source.replicas:
        source.take(replica, 0)
    victim = source.replicas[0]
    handles = [buffer.prepare(1) for buffer in victim.buffers]
    source.counts.clear()
    for buffer in victim.buffers:
        buffer.close()
    lost = in_background(source.write, victim, 1, handles)
    at_once([(source.take, replica, 1) for replica in source.replicas[1:]])
    with pytest.raises(TargetLost):
        lost.result()
    assert set(source.counts.values()) == {1}
    at_once([(source.take, replica, 2) for replica in source.replicas[1:]])


def test_a_version_that_the_trainer_left_still_comes_to_a_replica_just_behind() -> None:
    """It was packed while it could be read; with no memory for messages it is refused."""
    for packed_bytes in (AMPLE, 0):
        trainer = Trainer(packed_bytes)
        ahead, behind = (Replica(number, "columns") for number in range(2))
        for replica in (ahead, behind):
            replica.connect(trainer)
        ahead.take(trainer, 0)
        for writer in trainer.writers:
            writer.tensors.invalidate(0)
        if packed_bytes:
            behind.take(trainer, 0)
        else:
            with pytest.raises(StaleVersion, match="version 0 is not there to be read"):
                behind.take(trainer, 0)
        for replica in (ahead, behind):
            trainer.forget(replica.number)
            replica.close()


def test_once_all_have_left_a_version_may_come_again_with_other_bytes() -> None:
    """As after a reset: nothing is kept from before, and what comes is shared again."""
    trainer = Trainer(AMPLE)
    for value in (0.5, 0.25):
        replicas = [Replica(number, "columns") for number in range(2)]
        for replica in replicas:
            replica.connect(trainer)
        for shards in trainer.shards:
            for shard in shards.values():
                shard.fill_(value)
        for version in (0, 1):
            for writer in trainer.writers:
                writer.tensors.label(version)
            replicas[0].bring(trainer, version)
            assert min(trainer.kept_bytes()) > 0
        for replica in replicas:
            trainer.forget(replica.number)
        assert trainer.kept_bytes() == [0, 0]
        assert all((buffer.active == value).all() for buffer in replicas[0].buffers)
        for replica in replicas:
            replica.close()
