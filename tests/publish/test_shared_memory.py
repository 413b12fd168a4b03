"""WeightBuffer and writer in one process: order of calls, refusals, lifetime of the memory."""

import contextlib
import os
import pathlib
import threading
from dataclasses import replace

import pytest
import torch

from llamarl.core import memory
from llamarl.core.config import WeightsConfig
from llamarl.core.errors import StaleVersion, TargetLost
from llamarl.publish.comparison import MODULUS, compare
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.reshard import plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports.mapped import MappedSender
from llamarl.publish.transports.routes import End
from tests.trainer.ranks import FORKS

SHAPE = (6, 4)
HERE = End(rank=0, host="here", device=torch.device("cpu"), timeout_s=60.0)


def layout(start, stop, buffer, offset=0, dtype="float32"):
    box = Box(start=(start, 0), stop=(stop, 4), buffer=buffer, offset=offset, strides=(4, 1))
    return ParameterLayout(shape=SHAPE, dtype=dtype, boxes=(box,))


def route(writers, target, transport="shared_memory"):
    copies = plan([writer.layout() for writer in writers], [target])
    sending, _ = split(copies, source="trainer", replica=0, transport=transport)
    return sending


def make_weight_buffer(run_id="test", staging="double_buffer", **changes):
    parameters = {"w": layout(0, 6, "weights", offset=8)}
    fields = {"parameters": parameters, "num_elements": 40, "dtype": torch.float32} | changes
    config = WeightsConfig(staging=staging)
    return WeightBuffer(Memory(**fields), config, replica=0, rank=0, run_id=run_id, host="here")


@pytest.fixture
def weight_buffer():
    weight_buffer = make_weight_buffer()
    yield weight_buffer
    weight_buffer.close()


class Ends:
    """Two trainer ranks, rows 0:2 and 2:6, connected to the weight buffer."""

    def __init__(self, weight_buffer):
        self.weights = torch.randn(SHAPE)
        self.weight_buffer = weight_buffer
        self.writers = [
            Writer(rank, "here", {"w": self.weights[a:b]}, {"w": layout(a, b, "w")})
            for rank, (a, b) in enumerate([(0, 2), (2, 6)])
        ]
        self.route = route(self.writers, weight_buffer.layout())
        for rank, writer in enumerate(self.writers):
            writer.connect(0, self.route.for_rank(rank))

    def label(self, version):
        for writer in self.writers:
            writer.tensors.label(version)

    def publish(self, version):
        self.label(version)
        handles = [self.weight_buffer.prepare(version)]
        written = [writer.write(version, handles)["w"] for writer in self.writers]
        compare({"w": sum(written) % MODULUS}, self.weight_buffer.verify(version), 0, version)
        self.weight_buffer.commit(version)


@pytest.fixture
def ends(weight_buffer):
    ends = Ends(weight_buffer)
    yield ends
    for writer in ends.writers:
        writer.close()


def test_a_publish_fills_the_boxes_and_leaves_the_rest_alone(ends) -> None:
    ends.weight_buffer.active[:] = ends.weight_buffer.staging[:] = 7.0
    ends.publish(0)
    active = ends.weight_buffer.active
    assert torch.equal(active[8:32].view(6, 4), ends.weights)
    assert set(active[:8].tolist() + active[32:].tolist()) == {7.0}
    assert (ends.weight_buffer.staging == 7).all()


def test_nothing_is_written_any_more_once_the_sender_is_closed(ends) -> None:
    """Not even by a copy that was on its way: the memory may be prepared again by then."""
    twice = ends.route.for_rank(0).copies + ends.route.for_rank(1).copies
    sender = MappedSender(replace(ends.route.for_rank(0), copies=2 * twice), HERE)
    begun, may_end, outcome = threading.Event(), threading.Event(), []

    def copy_cast(copy, target):
        begun.set()
        may_end.wait()
        target.fill_(7)
        return 0

    def write():
        try:
            sender.write({0: ends.weight_buffer.prepare(0)}, copy_cast)
        except TargetLost:
            outcome.append("lost")

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    begun.wait()
    closing = threading.Thread(target=sender.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
    closing.join(10)
    found = ends.weight_buffer.staging.clone()
    ends.weight_buffer.staging.zero_()
    writing.join(10)
    assert 0 < (found == 7).sum() < 24
    assert not ends.weight_buffer.staging.any()
    assert outcome == ["lost"]


@pytest.mark.parametrize("may_be_freed", [False, True])
def test_memory_stays_mapped_from_publish_to_publish_unless_its_owner_may_free_it(
    ends, may_be_freed
) -> None:
    every = ends.route.for_rank(0).copies + ends.route.for_rank(1).copies
    sender, num_mapped = MappedSender(replace(ends.route.for_rank(0), copies=every), HERE), []
    for version in range(3):
        handle = replace(ends.weight_buffer.prepare(version), may_be_freed=may_be_freed)
        ends.weight_buffer.staging.zero_()
        before = num_mappings()
        sender.write({0: handle}, lambda copy, target: int(target.fill_(7).sum()))
        num_mapped.append(num_mappings() - before)
        assert (ends.weight_buffer.staging == 7).sum() == 24
        ends.weight_buffer.commit(version)
    # Two memories alternate.
    assert num_mapped == ([0, 0, 0] if may_be_freed else [1, 1, 0])
    sender.close()


def num_mappings() -> int:
    """How often this process has mapped segments."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:llamarl-test")


def test_calls_in_a_wrong_order_are_refused_and_change_nothing(weight_buffer) -> None:
    active = weight_buffer.active
    calls = [weight_buffer.verify, weight_buffer.commit, weight_buffer.abort]
    for call in calls:
        with pytest.raises(RuntimeError, match="version 1 must be prepared, none is"):
            call(1)
    weight_buffer.prepare(1)
    with pytest.raises(
        RuntimeError, match="version 2 must not be prepared while version 1 is open"
    ):
        weight_buffer.prepare(2)
    for call in calls:
        with pytest.raises(RuntimeError, match="version 2 must be prepared, version 1 is"):
            call(2)
    assert weight_buffer.active.data_ptr() == active.data_ptr()
    weight_buffer.abort(1)
    weight_buffer.prepare(1)
    committed = weight_buffer.commit(1)
    assert committed.data_ptr() == weight_buffer.active.data_ptr() != active.data_ptr()
    assert weight_buffer.staging.data_ptr() == active.data_ptr()
    for version in (1, 0):
        with pytest.raises(RuntimeError, match="must be newer than 1, the active one"):
            weight_buffer.prepare(version)


def test_writes_to_the_wrong_place_time_or_host_are_refused(weight_buffer, ends) -> None:
    writer = ends.writers[0]
    ends.label(3)
    handle = weight_buffer.prepare(3)
    with pytest.raises(RuntimeError, match="version 4 must be prepared, got 3"):
        writer.write(4, [handle])
    other = Writer(0, "there", {"w": ends.weights[:2]}, {"w": layout(0, 2, "w")})
    other.connect(0, ends.route.for_rank(0))
    other.tensors.label(3)
    with pytest.raises(RuntimeError, match=r"of host there to be mapped, got .* rank 0 on here"):
        other.write(3, [handle])
    ends.label(4)
    with pytest.raises(StaleVersion, match=r"version 3 is not there to be read, .* is 4"):
        writer.write(3, [handle])
    writer.connect(0, None)
    with pytest.raises(RuntimeError, match="generator 0 is not connected"):
        writer.write(3, [handle])
    assert not weight_buffer.staging.any()
    assert not weight_buffer.active.any()


def mapped(label):
    return label in pathlib.Path("/proc/self/maps").read_text()


def own_a_weight_buffer(pipe):
    weight_buffer = make_weight_buffer(run_id="killed")
    pipe.send((weight_buffer.prepare(0), weight_buffer.layout()))
    pipe.recv()


@pytest.mark.full
def test_a_killed_owner_leaves_nothing_behind() -> None:
    here, there = FORKS.Pipe()
    owner = FORKS.Process(target=own_a_weight_buffer, args=(there,), daemon=True)
    owner.start()
    there.close()
    handle, target = here.recv()
    weights = torch.ones(SHAPE)
    writer = Writer(0, "here", {"w": weights}, {"w": layout(0, 6, "w")})
    writer.connect(0, route([writer], target).for_rank(0))
    writer.tensors.label(0)
    writer.write(0, [handle])
    assert mapped("llamarl-killed")
    owner.kill()
    owner.join()
    writer.write(0, [handle])  # into memory that no process reads, but without a fault
    writer.connect(0, route([writer], target).for_rank(0))  # as if the replica had been restarted
    assert not mapped("llamarl-killed")
    with pytest.raises(TargetLost, match="cannot be opened"):
        writer.write(0, [handle])
    with contextlib.suppress(FileNotFoundError):
        assert not [name for name in os.listdir("/dev/shm") if "llamarl" in name]
    writer.close()


def test_a_closed_weight_buffer_frees_its_memory() -> None:
    weight_buffer = make_weight_buffer(run_id="closed")
    assert mapped("llamarl-closed")
    weight_buffer.close()
    weight_buffer.close()
    del weight_buffer
    assert not mapped("llamarl-closed")


def test_a_staged_weight_buffer_has_one_memory() -> None:
    for staging in ("double_buffer", "host"):
        weight_buffer = make_weight_buffer(is_staged=True, staging=staging)
        overwritten = []
        weight_buffer.before_overwrite = overwritten.append
        assert weight_buffer.active.data_ptr() == weight_buffer.staging.data_ptr()
        for version in range(3):
            weight_buffer.prepare(version)
            assert weight_buffer.commit(version) is weight_buffer.active
        assert overwritten == [-1, 0, 1]  # what lay there when it was prepared again
        weight_buffer.close()


@pytest.mark.parametrize(
    ("staging", "expected"), [("double_buffer", [-1, -1, 0]), ("host", [-1, -1, -1, 0, -1, 1])]
)
def test_what_is_overwritten_is_announced(staging, expected) -> None:
    weight_buffer = make_weight_buffer(staging=staging)
    overwritten = []
    weight_buffer.before_overwrite = overwritten.append
    for version in range(3):
        weight_buffer.prepare(version)
        weight_buffer.commit(version)
    assert overwritten == expected
    weight_buffer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_elements": 2**58}, r"two copies .* must fit into memory: needs \d+ bytes, got \d+"),
        ({"num_elements": 31}, "w must lie within the weight buffer's 31 elements, got elements"),
        ({"dtype": torch.bfloat16}, "dtype of w must be the weight buffer's torch.bfloat16, got"),
        ({"parameters": {"w": layout(0, 6, "other")}}, "buffer of w must be 'weights', got"),
    ],
)
def test_a_weight_buffer_that_cannot_be_is_refused_and_nothing_is_left_of_it(
    changes, message
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=message):
        make_weight_buffer(**changes)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_runs_out_half_way_is_given_back(monkeypatch) -> None:
    real, calls = os.posix_fallocate, []

    def runs_out(fd, offset, num_bytes):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(fd, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", runs_out)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="must have 160 bytes, got: No space left on device"):
        make_weight_buffer()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_container_limit_counts(tmp_path, monkeypatch) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 5\ninactive_file 20\nactive_file 30\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes() == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1000
