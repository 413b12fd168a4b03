"""Versions of a source's tensors: snapshots, retired memory, and reads beside both."""

import threading
import time
import weakref

import pytest
import torch

from llamarl.errors import StaleVersion
from llamarl.weights.integrity.versioned_tensors import VersionedTensors


def held(version=1):
    holdings = VersionedTensors({"w": torch.full((4,), float(version))})
    holdings.label(version)
    return holdings


def read(holdings, version):
    with holdings.reading(version) as tensors:
        return tensors["w"][0].item()


def step(holdings, version):
    """An optimizer step in place: 1.0 per version."""
    holdings.begin_step()
    with pytest.raises(StaleVersion), holdings.reading(version):
        pass
    with holdings._changed:
        holdings._present.tensors["w"].fill_(version)
    holdings.label(version)


def test_only_a_version_that_is_there_can_be_read() -> None:
    holdings = held(3)
    assert read(holdings, 3) == 3
    for version in (2, 4):
        with pytest.raises(StaleVersion, match=f"version {version} is not there .* one is 3"):
            read(holdings, version)


def test_a_step_keeps_a_snapshot_only_for_replicas_that_are_owed_the_version() -> None:
    holdings = held(1)
    holdings.add_reader(0)
    holdings.add_reader(1)
    step(holdings, 2)  # nobody has asked for version 1, nor was it announced
    with pytest.raises(StaleVersion):
        read(holdings, 1)
    read(holdings, 2)
    holdings.acknowledge(0, 2)
    step(holdings, 3)  # replica 1 has not got version 2
    assert (read(holdings, 2), read(holdings, 3)) == (2, 3)
    memory = holdings._older.tensors["w"].data_ptr()
    holdings.announce()
    step(holdings, 4)  # in the same memory
    assert holdings._older.tensors["w"].data_ptr() == memory
    assert (read(holdings, 3), read(holdings, 4)) == (3, 4)
    with pytest.raises(StaleVersion):
        read(holdings, 2)
    for replica in (0, 1):
        holdings.acknowledge(replica, 4)
    step(holdings, 5)  # all have it
    with pytest.raises(StaleVersion):
        read(holdings, 4)
    holdings.announce()
    holdings.remove_reader(0)
    holdings.remove_reader(1)
    step(holdings, 6)  # nobody is left
    with pytest.raises(StaleVersion):
        read(holdings, 5)


@pytest.mark.parametrize("ending", ["settle", "settle newer", "forget"])
def test_a_snapshot_that_nobody_is_owed_any_more_gives_back_its_memory(ending) -> None:
    holdings = held(1)
    for replica in (0, 1):
        holdings.add_reader(replica)
    holdings.announce()
    step(holdings, 2)
    memory = weakref.ref(holdings._older.tensors["w"])
    for replica in (0, 1):
        assert read(holdings, 1) == 1
        assert memory() is not None
        if ending == "forget":
            holdings.remove_reader(replica)
        else:
            holdings.acknowledge(replica, 2 if ending == "settle newer" else 1)
    assert memory() is None
    with pytest.raises(StaleVersion):
        read(holdings, 1)
    assert read(holdings, 2) == 2


def test_a_step_waits_for_the_copy_that_runs_and_no_longer() -> None:
    holdings = held(1)
    holdings.add_reader(0)
    begun, may_end, has_stepped = threading.Event(), threading.Event(), threading.Event()
    found = []

    def write():
        with holdings.reading(1) as tensors:
            begun.set()
            may_end.wait()
            found.append(tensors["w"][0].item())
        has_stepped.wait()
        found.append(read(holdings, 1))  # goes on from the snapshot

    def train():
        holdings.begin_step()
        with holdings._changed:
            holdings._present.tensors["w"].fill_(2)
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


def test_a_relay_reads_the_memory_before_until_it_is_offered_again() -> None:
    memory = [{"weights": torch.full((4,), float(i))} for i in range(2)]
    holdings = VersionedTensors(memory[0])
    holdings.label(0)
    with holdings.reading(0) as tensors:
        holdings.label(1, memory[1])
        assert tensors["weights"][0] == 0
        waiter = threading.Thread(target=holdings.invalidate, args=(0,), daemon=True)
        waiter.start()
        time.sleep(0.05)
        assert waiter.is_alive()
    waiter.join(10)
    assert not waiter.is_alive()
    with pytest.raises(StaleVersion), holdings.reading(0):
        pass
    with holdings.reading(1) as tensors:
        assert tensors["weights"][0] == 1
    with pytest.raises(ValueError, match=r"buffers must be \['weights'\], got \['w'\]"):
        holdings.label(2, {"w": torch.zeros(4)})


def test_readers_beside_many_steps_see_whole_versions_or_none() -> None:
    holdings = held(1)
    for replica in range(3):
        holdings.add_reader(replica)
    wrong, num_read = [], [0, 0, 0]
    is_over = threading.Event()

    def write(replica):
        while not is_over.is_set():
            version = holdings.version
            if version is None:
                continue
            try:
                for _ in range(3):  # copies
                    with holdings.reading(version) as tensors:
                        values = tensors["w"].clone()
                    if not (values == version).all():
                        wrong.append((version, values))
                holdings.acknowledge(replica, version)
                num_read[replica] += 1
            except StaleVersion:
                continue

    threads = [threading.Thread(target=write, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 300):
        holdings.begin_step()
        holdings._present.tensors["w"].fill_(version)
        holdings.label(version)
    is_over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not wrong
    assert min(num_read) > 0
