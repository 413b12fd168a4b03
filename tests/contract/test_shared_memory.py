"""Arena and writer in one process: order of calls, refusals, lifetime of the memory."""

import contextlib
import os
import pathlib
import threading
from dataclasses import replace

import pytest
import torch

from llamarl.weights import available
from llamarl.weights.arena import Arena
from llamarl.weights.comparison import MODULUS, compare
from llamarl.weights.errors import FingerprintMismatch, StaleVersion, TargetLost
from llamarl.weights.layout import Box, ParameterLayout, Route
from llamarl.weights.mapped import MappedOutlet
from llamarl.weights.plan import plan
from llamarl.weights.writer import Writer
from tests.distributed.ranks import FORKS

SHAPE = (6, 4)


def layout(start, stop, buffer, offset=0, dtype="float32"):
    box = Box(start=(start, 0), stop=(stop, 4), buffer=buffer, offset=offset, strides=(4, 1))
    return ParameterLayout(shape=SHAPE, dtype=dtype, boxes=(box,))


def route(writers, arena, transport="shared_memory"):
    copies = plan([writer.layout() for writer in writers], [arena.layout()])
    return Route(source="trainer", replica=0, transport=transport, copies=tuple(copies))


def make_arena(**changes):
    arguments = {
        "parameters": {"w": layout(0, 6, "arena", offset=8)},
        "num_elements": 40,
        "dtype": torch.float32,
        "replica": 0,
        "rank": 0,
        "run_id": "test",
        "host": "here",
    }
    return Arena(**(arguments | changes))


@pytest.fixture
def arena():
    arena = make_arena()
    yield arena
    arena.close()


class Ends:
    """Two trainer ranks, rows 0:2 and 2:6, connected to the arena."""

    def __init__(self, arena):
        self.weights = torch.randn(SHAPE)
        self.arena = arena
        self.writers = [
            Writer(rank, "here", {"w": self.weights[a:b]}, {"w": layout(a, b, "w")})
            for rank, (a, b) in enumerate([(0, 2), (2, 6)])
        ]
        self.route = route(self.writers, arena)
        for writer in self.writers:
            writer.connect(0, self.route)

    def present(self, version):
        for writer in self.writers:
            writer.present(version)

    def publish(self, version):
        self.present(version)
        offers = [self.arena.offer(version, 0)]
        written = [writer.write(version, offers)["w"] for writer in self.writers]
        compare({"w": sum(written) % MODULUS}, self.arena.fingerprint(version, 0), 0, version)
        self.arena.flip(version, 0)


@pytest.fixture
def ends(arena):
    ends = Ends(arena)
    yield ends
    for writer in ends.writers:
        writer.close()


def test_a_publish_fills_the_boxes_and_leaves_the_rest_alone(ends) -> None:
    ends.arena.live[:] = ends.arena.shadow[:] = 7.0
    ends.publish(0)
    live = ends.arena.live
    assert torch.equal(live[8:32].view(6, 4), ends.weights)
    assert set(live[:8].tolist() + live[32:].tolist()) == {7.0}
    assert (ends.arena.shadow == 7).all()


def test_a_thousand_healthy_publishes_raise_nothing(ends) -> None:
    for version in range(1000):
        ends.weights.normal_()
        ends.publish(version)
        assert torch.equal(ends.arena.live[8:32].view(6, 4), ends.weights)
    assert ends.arena.version == 999


def test_weights_that_change_between_fingerprint_and_copy_are_found(ends) -> None:
    ends.present(0)
    offers = [ends.arena.offer(0, 0)]
    written = [writer.write(0, offers)["w"] for writer in ends.writers]
    ends.weights += 1
    ends.writers[1].write(0, offers)
    with pytest.raises(FingerprintMismatch, match="w must arrive as written"):
        compare({"w": sum(written) % MODULUS}, ends.arena.fingerprint(0, 0), 0, 0)


def test_the_sender_casts(arena) -> None:
    parameters = {"w": layout(0, 6, "arena", dtype="bfloat16")}
    small = make_arena(parameters=parameters, num_elements=24, dtype=torch.bfloat16)
    weights = torch.randn(SHAPE)
    writer = Writer(0, "here", {"w": weights}, {"w": layout(0, 6, "w")})
    writer.connect(0, route([writer], small))
    writer.present(0)
    written = writer.write(0, [small.offer(0, 0)])
    assert written == small.fingerprint(0, 0)
    assert torch.equal(small.flip(0, 0).view(6, 4), weights.bfloat16())
    writer.close()
    small.close()


def test_nothing_is_written_any_more_once_the_writer_has_let_go(ends) -> None:
    """Not even by a copy that was on its way: the memory may be offered anew by then."""
    outlet, copies = MappedOutlet("here"), 2 * list(ends.route.copies)
    begun, may_end, outcome = threading.Event(), threading.Event(), []

    def carry(copy, target):
        begun.set()
        may_end.wait()
        target.fill_(7)

    def write():
        try:
            outlet.write(0, copies, {0: ends.arena.offer(0, 0)}, carry)
        except TargetLost:
            outcome.append("lost")

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    begun.wait()
    closing = threading.Thread(target=outlet.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
    closing.join(10)
    found = ends.arena.shadow.clone()
    ends.arena.shadow.zero_()
    writing.join(10)
    assert 0 < (found == 7).sum() < 24
    assert not ends.arena.shadow.any()
    assert outcome == ["lost"]


@pytest.mark.parametrize("may_be_freed", [False, True])
def test_memory_stays_mapped_from_publish_to_publish_unless_its_owner_may_free_it(
    ends, may_be_freed
) -> None:
    outlet, copies, num_mapped = MappedOutlet("here"), list(ends.route.copies), []
    for version in range(3):
        offer = replace(ends.arena.offer(version, 0), may_be_freed=may_be_freed)
        ends.arena.shadow.zero_()
        before = num_mappings()
        outlet.write(version, copies, {0: offer}, lambda copy, target: target.fill_(7))
        num_mapped.append(num_mappings() - before)
        assert (ends.arena.shadow == 7).sum() == 24
        ends.arena.flip(version, 0)
    # Two memories take turns.
    assert num_mapped == ([0, 0, 0] if may_be_freed else [1, 1, 0])
    outlet.close()


def num_mappings() -> int:
    """How often this process has mapped segments."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:llamarl-test")


def test_calls_in_a_wrong_order_are_refused_and_change_nothing(arena) -> None:
    live = arena.live
    calls = [(arena.fingerprint, 0), (arena.flip, 0), (arena.discard,)]
    for call, *part in calls:
        with pytest.raises(RuntimeError, match="version 1 was not offered: none is open"):
            call(1, *part)
    arena.offer(1, 0)
    with pytest.raises(RuntimeError, match="version 2 offered while version 1 is still open"):
        arena.offer(2, 0)
    for call, *part in calls:
        with pytest.raises(RuntimeError, match="version 2 was not offered: version 1 is open"):
            call(2, *part)
    assert arena.live.data_ptr() == live.data_ptr()
    arena.discard(1)
    with pytest.raises(RuntimeError, match="part 1 offered, the next one of 1 is 0"):
        arena.offer(1, 1)
    arena.offer(1, 0)
    flipped = arena.flip(1, 0)
    assert flipped.data_ptr() == arena.live.data_ptr() != live.data_ptr()
    assert arena.shadow.data_ptr() == live.data_ptr()
    for version in (1, 0):
        with pytest.raises(RuntimeError, match="1 is already live"):
            arena.offer(version, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_elements": 2**58}, r"two copies .* must fit into memory: needs \d+ bytes, got \d+"),
        ({"num_elements": 31}, r"w must lie within the arena's 31 elements, got elements 8 to 31"),
        ({"num_elements": 0}, "num_elements must be at least 1"),
        ({"dtype": torch.bfloat16}, "dtype of w must be the arena's torch.bfloat16, got float32"),
        ({"parameters": {"w": layout(0, 6, "other")}}, "buffer of w must be 'arena', got 'other'"),
    ],
)
def test_an_arena_that_cannot_be_is_refused_and_nothing_is_left_of_it(changes, message) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=message):
        make_arena(**changes)
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
        make_arena()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_container_limit_counts(tmp_path, monkeypatch) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 5\ninactive_file 20\nactive_file 30\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(available, "CGROUP", tmp_path)
    assert available.available_bytes() == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert available.available_bytes() > 1000


def test_writes_to_the_wrong_place_time_or_host_are_refused(arena, ends) -> None:
    writer = ends.writers[0]
    ends.present(3)
    offer = arena.offer(3, 0)
    with pytest.raises(RuntimeError, match="asked to write version 4, offered 3"):
        writer.write(4, [offer])
    other = Writer(0, "there", {"w": ends.weights[:2]}, {"w": layout(0, 2, "w")})
    other.connect(0, ends.route)
    other.present(3)
    with pytest.raises(RuntimeError, match=r"of host there to be mapped, got .* rank 0 on here"):
        other.write(3, [offer])
    ends.present(4)
    with pytest.raises(StaleVersion, match=r"version 3 is not there to be read, .* is 4"):
        writer.write(3, [offer])
    writer.connect(0, None)
    with pytest.raises(RuntimeError, match="generator 0 is not connected"):
        writer.write(3, [offer])
    assert not arena.shadow.any()
    assert not arena.live.any()


def mapped(label):
    return label in pathlib.Path("/proc/self/maps").read_text()


def own_an_arena(pipe):
    arena = make_arena(run_id="killed")
    pipe.send((arena.offer(0, 0), arena.layout()))
    pipe.recv()


def test_a_killed_owner_leaves_nothing_behind() -> None:
    here, there = FORKS.Pipe()
    owner = FORKS.Process(target=own_an_arena, args=(there,), daemon=True)
    owner.start()
    there.close()
    offer, target = here.recv()
    weights = torch.ones(SHAPE)
    writer = Writer(0, "here", {"w": weights}, {"w": layout(0, 6, "w")})
    copies = tuple(plan([writer.layout()], [target]))
    way = Route(source="trainer", replica=0, transport="shared_memory", copies=copies)
    writer.connect(0, way)
    writer.present(0)
    writer.write(0, [offer])
    assert mapped("llamarl-killed")
    owner.kill()
    owner.join()
    writer.write(0, [offer])  # into memory that nobody reads, but not into a fault
    writer.connect(0, way)  # as if the replica had been restarted
    assert not mapped("llamarl-killed")
    with pytest.raises(TargetLost, match="cannot be opened"):
        writer.write(0, [offer])
    with contextlib.suppress(FileNotFoundError):
        assert not [name for name in os.listdir("/dev/shm") if "llamarl" in name]
    writer.close()


def test_a_closed_arena_frees_its_memory() -> None:
    arena = make_arena(run_id="closed")
    assert mapped("llamarl-closed")
    arena.close()
    arena.close()
    del arena
    assert not mapped("llamarl-closed")


def test_an_arena_that_was_flipped_half_cannot_go_back(arena) -> None:
    parts = {"w": layout(0, 6, "arena"), "x": layout(0, 6, "arena", offset=24)}
    split = make_arena(parameters=parts, num_elements=48, shadow="bucket", bucket_bytes=96)
    assert split.layout().parts == (("w",), ("x",))
    assert split.shadow.numel() == 24
    assert split.layout().parameters["x"].boxes[0].offset == 0
    split.offer(0, 0)
    split.discard(0)  # nothing was flipped
    for part, live in ((0, None), (1, split.live)):
        split.offer(0, part)
        split.shadow.fill_(part + 1)
        assert split.flip(0, part) is live
    assert split.live.tolist() == [1.0] * 24 + [2.0] * 24
    split.offer(1, 0)
    split.flip(1, 0)
    with pytest.raises(RuntimeError, match="version 2 offered after part 0 of version 1 was"):
        split.offer(2, 0)
    split.offer(1, 1)
    for call in (lambda: split.discard(1), lambda: split.offer(2, 0), lambda: split.flip(1, 1)):
        with pytest.raises(RuntimeError, match="are of two versions: 1 of 2 parts of version 1"):
            call()
    split.close()


def test_a_bucket_leaves_padding_between_parameters_alone() -> None:
    parts = {"w": layout(0, 6, "arena"), "x": layout(0, 6, "arena", offset=30)}
    arena = make_arena(parameters=parts, num_elements=54, shadow="bucket", bucket_bytes=1000)
    arena.live.fill_(7)
    arena.offer(0, 0)
    for begin in (0, 30):
        arena.shadow[begin : begin + 24] = 1
    arena.flip(0, 0)
    assert arena.live.tolist() == [1.0] * 24 + [7.0] * 6 + [1.0] * 24
    arena.close()


def test_a_staged_arena_has_one_memory_and_no_bucket() -> None:
    with pytest.raises(ValueError, match=r"shadow must be full or host .* got 'bucket'"):
        make_arena(is_staged=True, shadow="bucket")
    for shadow in ("full", "host"):
        arena = make_arena(is_staged=True, shadow=shadow)
        retired = []
        arena.before_overwrite = retired.append
        assert arena.live.data_ptr() == arena.shadow.data_ptr()
        for version in range(3):
            arena.offer(version, 0)
            assert arena.flip(version, 0) is arena.live
        assert retired == [-1, 0, 1]  # what lay there when it was offered again
        arena.close()


@pytest.mark.parametrize(
    ("shadow", "expected"), [("full", [-1, -1, 0]), ("host", [-1, -1, -1, 0, -1, 1])]
)
def test_what_is_overwritten_is_announced(shadow, expected) -> None:
    arena = make_arena(shadow=shadow)
    retired = []
    arena.before_overwrite = retired.append
    for version in range(3):
        arena.offer(version, 0)
        arena.flip(version, 0)
    assert retired == expected
    arena.close()
