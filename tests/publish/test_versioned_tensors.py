"""Versions of a source's tensors: snapshots, invalidated memory, and reads beside both."""

import threading
import time
import weakref

import pytest
import torch

from llamarl.core.errors import StaleVersion
from llamarl.publish.source import VersionedTensors


def held(version=1):
    versions = VersionedTensors({"w": torch.full((4,), float(version))})
    versions.label(version)
    return versions


def read(versions, version):
    with versions.reading(version) as tensors:
        return tensors["w"][0].item()


def step(versions, version):
    """An optimizer step in place: 1.0 per version."""
    versions.begin_step()
    with pytest.raises(StaleVersion), versions.reading(version):
        pass
    with versions._changed:
        versions._present.tensors["w"].fill_(version)
    versions.label(version)


def test_a_step_keeps_a_snapshot_only_for_readers_that_have_not_acknowledged_the_version() -> None:
    versions = held(1)
    versions.add_reader(0)
    versions.add_reader(1)
    step(versions, 2)  # no write of version 1 has begun, nor was it announced
    with pytest.raises(StaleVersion):
        read(versions, 1)
    read(versions, 2)
    versions.acknowledge(0, 2)
    step(versions, 3)  # replica 1 has not got version 2
    assert (read(versions, 2), read(versions, 3)) == (2, 3)
    memory = versions._older.tensors["w"].data_ptr()
    versions.announce()
    step(versions, 4)  # in the same memory
    assert versions._older.tensors["w"].data_ptr() == memory
    assert (read(versions, 3), read(versions, 4)) == (3, 4)
    with pytest.raises(StaleVersion):
        read(versions, 2)
    for replica in (0, 1):
        versions.acknowledge(replica, 4)
    step(versions, 5)  # all have it
    with pytest.raises(StaleVersion):
        read(versions, 4)
    versions.announce()
    versions.remove_reader(0)
    versions.remove_reader(1)
    step(versions, 6)  # no reader is left
    with pytest.raises(StaleVersion):
        read(versions, 5)


class Watched(torch.Tensor):
    """A tensor that calls `copied` when its values are copied."""

    copied = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.clone, torch.Tensor.copy_):
            cls.copied()
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_reader_that_leaves_while_a_snapshot_is_made_takes_no_part_of_it(monkeypatch) -> None:
    versions = VersionedTensors(
        {name: torch.ones(4).as_subclass(Watched) for name in ("first", "second", "third")}
    )
    versions.label(1)
    for replica in (0, 1):
        versions.add_reader(replica)
    versions.announce()
    versions.begin_step()  # the snapshot of version 1 is for both
    versions.acknowledge(1, 1)
    versions.label(2)
    versions.announce()
    monkeypatch.setattr(Watched, "copied", staticmethod(lambda: versions.remove_reader(0)))
    versions.begin_step()
    with versions.reading(2) as tensors:
        assert list(tensors) == ["first", "second", "third"]


@pytest.mark.parametrize("ending", ["acknowledge", "remove"])
def test_a_slow_reader_gets_a_version_that_takes_it_longer_than_a_step(ending) -> None:
    versions = held(1)
    versions.add_reader(0)
    versions.add_reader(7, is_slow=True)
    versions.announce()
    step(versions, 2)  # it has not begun: version 2 would do as well
    versions.announce()
    with versions.reading(2, 7):
        pass
    for version in (3, 4, 5):
        step(versions, version)
        assert read(versions, 2) == 2, "else it would begin with each version and get none"
        versions.announce()
    with pytest.raises(StaleVersion):
        read(versions, 4)
    if ending == "acknowledge":
        versions.acknowledge(7, 2)
    else:
        versions.remove_reader(7)
    step(versions, 6)
    assert (read(versions, 5), read(versions, 6)) == (5, 6)
    with pytest.raises(StaleVersion):
        read(versions, 2)
    with versions.reading(5, 0):
        pass
    step(versions, 7)
    versions.announce()
    step(versions, 8)
    with pytest.raises(StaleVersion):  # no other reader holds a snapshot
        read(versions, 5)


@pytest.mark.parametrize("ending", ["acknowledge", "acknowledge newer", "remove"])
def test_a_snapshot_that_no_reader_needs_any_more_gives_back_its_memory(ending) -> None:
    versions = held(1)
    for replica in (0, 1):
        versions.add_reader(replica)
    versions.announce()
    step(versions, 2)
    memory = weakref.ref(versions._older.tensors["w"])
    for replica in (0, 1):
        assert read(versions, 1) == 1
        assert memory() is not None
        if ending == "remove":
            versions.remove_reader(replica)
        else:
            versions.acknowledge(replica, 2 if ending == "acknowledge newer" else 1)
    assert memory() is None
    with pytest.raises(StaleVersion):
        read(versions, 1)
    assert read(versions, 2) == 2


def test_a_step_waits_for_the_copy_that_runs_and_no_longer() -> None:
    versions = held(1)
    versions.add_reader(0)
    begun, may_end, has_stepped = threading.Event(), threading.Event(), threading.Event()
    found = []

    def write():
        with versions.reading(1) as tensors:
            begun.set()
            may_end.wait()
            found.append(tensors["w"][0].item())
        has_stepped.wait()
        found.append(read(versions, 1))  # goes on from the snapshot

    def train():
        versions.begin_step()
        with versions._changed:
            versions._present.tensors["w"].fill_(2)
        has_stepped.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (write, train)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    assert not has_stepped.wait(0.1)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert found == [1, 1]


def test_a_relay_reads_the_memory_before_until_it_is_prepared_again() -> None:
    memory = [{"weights": torch.full((4,), float(i))} for i in range(2)]
    versions = VersionedTensors(memory[0])
    versions.label(0)
    with versions.reading(0) as tensors:
        versions.label(1, memory[1])
        assert tensors["weights"][0] == 0
        waiter = threading.Thread(target=versions.invalidate, args=(0,), daemon=True)
        waiter.start()
        time.sleep(0.05)
        assert waiter.is_alive()
    waiter.join(10)
    assert not waiter.is_alive()
    with pytest.raises(StaleVersion), versions.reading(0):
        pass
    with versions.reading(1) as tensors:
        assert tensors["weights"][0] == 1
    with pytest.raises(ValueError, match=r"buffers must be \['weights'\], got \['w'\]"):
        versions.label(2, {"w": torch.zeros(4)})
