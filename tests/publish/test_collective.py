"""The collective transport when one end is silent, gone or late; both ends in this process."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import WeightsConfig
from llamarl.core.errors import TargetLost
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.reshard import plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports.collective import RouteGroup
from llamarl.publish.transports.messages import expand, longest, squeeze
from llamarl.publish.transports.routes import End
from tests.trainer.ranks import FORKS

TIMEOUT_S = 1.0


def parameters(buffer):
    box = Box(start=(0, 0), stop=(6, 4), buffer=buffer, offset=0, strides=(4, 1))
    return {"w": ParameterLayout(shape=(6, 4), dtype="float32", boxes=(box,))}


class Ends:
    """A writer and a weight buffer that meet in a new file at each `connect`."""

    def __init__(self, folder, is_slow=False):
        self.folder, self.num_routes, self.is_slow = folder, 0, is_slow
        self.writer = Writer(0, "a", {"w": torch.randn(6, 4)}, parameters("w"), timeout_s=TIMEOUT_S)
        self.weight_buffer = WeightBuffer(
            Memory(parameters=parameters("weights"), num_elements=24, dtype=torch.float32),
            WeightsConfig(timeout_s=TIMEOUT_S), replica=0, rank=0, run_id="test", host="b",
        )  # fmt: skip
        self.writer.tensors.label(1)

    def route(self):
        self.num_routes += 1
        copies = plan([self.writer.layout()], [self.weight_buffer.layout()])
        sending, _ = split(
            copies, source="trainer", replica=0, transport="collective",
            rendezvous=f"{self.folder}/route-{self.num_routes}", message_bytes=40,
            is_slow=self.is_slow,
        )  # fmt: skip
        return sending.for_rank(0)  # the only one of either side: all copies

    def connect(self):
        route = self.route()
        receiving = threading.Thread(target=self.weight_buffer.connect, args=(route,))
        receiving.start()
        self.writer.connect(0, route)
        receiving.join()

    def publish(self, version):
        self.writer.tensors.label(version)
        handles = [self.weight_buffer.prepare(version)]
        assert self.writer.write(version, handles) == self.weight_buffer.verify(version)
        self.weight_buffer.commit(version)


@pytest.fixture
def ends(tmp_path):
    ends = Ends(tmp_path)
    yield ends
    ends.writer.close()
    ends.weight_buffer.close()


def test_only_loopback_listens(ends) -> None:
    ends.connect()
    ends.publish(1)
    lines = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    mine = [line.split()[3] for line in lines.splitlines() if f"pid={os.getpid()}," in line]
    assert mine
    assert all(address.startswith("127.0.0.1:") for address in mine), mine


def test_over_a_slow_link_the_same_weights_arrive(tmp_path) -> None:
    ends = Ends(tmp_path, is_slow=True)
    ends.connect()
    for version in (1, 2):
        ends.publish(version)
        with ends.writer.tensors.reading(version) as tensors:
            assert torch.equal(ends.weight_buffer.active, tensors["w"].flatten())
    ends.weight_buffer.prepare(3)
    ends.weight_buffer.abort(3)
    ends.connect()
    ends.publish(4)
    ends.writer.close()
    ends.weight_buffer.close()


@pytest.mark.full
def test_an_end_that_comes_alone_gets_an_error(ends) -> None:
    started_s = time.monotonic()
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(ends.writer.connect, 0, ends.route())
        receiving = pool.submit(ends.weight_buffer.connect, ends.route())
    with pytest.raises(TargetLost, match="generator 0 did not meet us"):
        writing.result()
    with pytest.raises(RuntimeError):
        receiving.result()
    assert time.monotonic() - started_s < 10 * TIMEOUT_S
    ends.connect()
    ends.publish(1)


def test_an_abort_ends_a_receive_without_a_sender_and_a_new_route_repairs_it(ends) -> None:
    ends.connect()
    ends.publish(1)
    started_s = time.monotonic()
    handles = [ends.weight_buffer.prepare(2)]
    ends.weight_buffer.abort(2)
    assert time.monotonic() - started_s < TIMEOUT_S
    ends.writer.tensors.label(2)
    for _ in range(2):
        with pytest.raises(TargetLost):
            ends.writer.write(2, handles)
    with pytest.raises(
        RuntimeError, match="trainer must be connected again: the connection was lost"
    ):
        ends.weight_buffer.prepare(2)
    ends.connect()
    ends.publish(2)
    assert ends.weight_buffer.version == 2


def test_a_target_that_never_receives_is_lost_in_bounded_time(ends) -> None:
    ends.connect()
    handles = [ends.weight_buffer.prepare(1)]
    assert ends.writer.write(1, handles) == ends.weight_buffer.verify(1)
    ends.weight_buffer.commit(1)
    ends.writer.tensors.label(2)
    stale = [ends.weight_buffer.prepare(2)]
    ends.writer.write(2, stale)
    started_s = time.monotonic()
    with pytest.raises(TargetLost, match="generator 0 is out of reach"):
        ends.writer.write(2, stale)  # all that was sent has been received
    assert time.monotonic() - started_s < 10 * TIMEOUT_S


def test_disconnecting_ends_a_write_that_hangs(ends) -> None:
    ends.connect()
    ends.publish(1)
    stale = [ends.weight_buffer.prepare(2)]
    ends.writer.tensors.label(2)
    ends.writer.write(2, stale)
    outcome = []

    def write():
        try:
            ends.writer.write(2, stale)
        except TargetLost as error:
            outcome.append(error)

    hanging = threading.Thread(target=write)
    hanging.start()
    time.sleep(0.1)
    started_s = time.monotonic()
    ends.writer.connect(0, None)
    hanging.join()
    assert time.monotonic() - started_s < TIMEOUT_S
    assert len(outcome) == 1


NUM_BYTES = 1 << 28  # takes longer than it takes to stop its other end
HERE = End(rank=0, host="here", device=torch.device("cpu"), timeout_s=60.0)


def copy_cast(route, side, memory=None, is_ready=None):
    """One message over a group of its own, from rank 0 to rank 0."""
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8) if memory is None else memory
    group = RouteGroup(route, side, HERE)
    if is_ready is not None:
        is_ready.set()
    if side == "target":
        group.receive(memory, 0, tag=1)()
    else:
        group.finish(group.send(memory, 0, tag=1))


@pytest.mark.full
@pytest.mark.parametrize("side", ["target", pytest.param("source", marks=pytest.mark.long)])
def test_the_death_of_the_other_end_amid_a_message_is_noticed_at_once(ends, side) -> None:
    route, memory, is_ready = ends.route(), torch.ones(NUM_BYTES, dtype=torch.uint8), Event()
    other = "target" if side == "source" else "source"
    victim = FORKS.Process(target=copy_cast, args=(route, other))
    victim.start()
    outcome = []

    def active():
        try:
            copy_cast(route, side, memory, is_ready)
        except RuntimeError as error:
            outcome.append(error)

    living = threading.Thread(target=active)
    living.start()
    try:
        assert is_ready.wait(30.0)
        time.sleep(0.02)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(0.2)
    finally:
        victim.kill()
        victim.join()
    started_s = time.monotonic()
    living.join()
    assert time.monotonic() - started_s < 10.0
    assert len(outcome) == 1, "the message had passed before its other end died"
    if side == "target":
        assert 0 < int(memory.count_nonzero()) < NUM_BYTES, "it was not amid the message"


def arrived(memory: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, int]:
    """What the other end has, and the bytes that were sent."""
    sent = squeeze(memory, itemsize)
    assert len(sent) <= longest(len(memory))
    there = torch.randint(256, (longest(len(memory)),), dtype=torch.uint8)
    there[: len(sent)] = sent  # into memory that was used before
    found = torch.zeros_like(memory)
    expand(there, found, itemsize)
    return found, len(sent)


@given(st.binary(min_size=1, max_size=64), st.sampled_from([1, 2, 4]), st.integers(1, 300))
def test_any_bytes_arrive_as_they_were(data: bytes, itemsize: int, times: int) -> None:
    memory = torch.frombuffer(bytearray(data * itemsize * times), dtype=torch.uint8)
    found, _ = arrived(memory, itemsize)
    assert torch.equal(found, memory)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.86), (torch.bfloat16, 0.72)])
def test_weights_become_shorter_and_noise_hardly_longer(dtype: torch.dtype, share: float) -> None:
    weights = (torch.randn(100_000, generator=torch.manual_seed(0)) / 20).to(dtype)
    for memory, most in (
        (weights.view(torch.uint8), share),
        (torch.randint(256, (400_000,), dtype=torch.uint8), 1.002),
    ):
        found, num_sent = arrived(memory, dtype.itemsize)
        assert torch.equal(found, memory)
        assert num_sent <= most * len(memory)
