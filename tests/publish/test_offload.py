"""Offloaded memory: what comes back, and what the kernel has meanwhile."""

import ctypes
import mmap
import os
import resource
import time

import pytest
import torch

from llamarl.publish.offload import MemoryMover
from llamarl.publish.transports.mapped import MappedBlock
from tests.allocation import resident_bytes

PAGE = mmap.PAGESIZE


def filled(num_elements, dtype=torch.float32):
    return torch.arange(num_elements).to(dtype) + 1


@pytest.fixture
def offload(tmp_path):
    offload = MemoryMover("file", str(tmp_path), "trainer-0")
    yield offload
    offload.close()


def test_private_and_shared_memory_come_back_bit_for_bit_at_their_addresses(offload, tmp_path):
    segment = MappedBlock("weights", 6 << 20, torch.float32, torch.device("cpu"), is_host=False)
    shared = segment.flat
    shared.copy_(filled(len(shared)))
    private = filled(6 << 20)
    tensors = [private, private[100:].view(-1, 4), shared[: 5 << 20], shared[1 << 20 :]]
    tensors += [filled(7), filled(3 * PAGE // 2, torch.bfloat16), torch.empty(0)]
    expected = [tensor.clone() for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    own_bytes = 4 * len(private) + (24 << 20) + 7 * 4 + 3 * PAGE  # the views add nothing
    for _ in range(2):
        before = resident_bytes()
        assert offload.offload("weights", tensors) == own_bytes
        assert before - resident_bytes() >= 0.99 * own_bytes
        assert offload.offload("weights", tensors) == 0  # it has left
        assert all(not tensor.any() for tensor in tensors)
        offload.prefetch("weights")
        assert offload.onload("weights") == own_bytes
        assert offload.onload("weights") == 0
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        for tensor, want in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, want)
        tensors[0].mul_(3)  # a second round must not bring back the first one's bytes
        expected = [tensor.clone() for tensor in tensors]
    assert not list(tmp_path.iterdir())  # nothing to be left behind
    segment.close()


def test_names_leave_and_enter_independently_and_may_change_size(offload):
    first, second = filled(5 * PAGE), filled(3 * PAGE)
    want_first, want_second = first.clone(), second.clone()
    offload.offload("weights", [first])
    offload.offload("state", [second])
    offload.onload("weights")
    assert torch.equal(first, want_first)
    assert not second.any()
    offload.onload("state")
    assert torch.equal(second, want_second)
    offload.offload("state", [first, second])
    offload.onload("state")
    assert torch.equal(first, want_first)
    assert torch.equal(second, want_second)


def test_what_need_not_come_back_is_freed_unsaved_and_comes_back_as_zeros(offload, tmp_path):
    tensor = filled(4 << 20)
    small = filled(5)
    before = resident_bytes()
    assert offload.offload("kv", [tensor, small], keep=False) == (16 << 20) + 20
    assert before - resident_bytes() >= 0.99 * (16 << 20)
    offload.prefetch("kv")
    offload.onload("kv")
    assert not tensor.any()
    assert not small.any()


def file_below(folder):
    """The descriptor of the one file, which has no name, that this process has open there."""
    links = {int(name): f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    (found,) = [fd for fd, link in links.items() if os.path.realpath(link).startswith(str(folder))]
    return found


def resident_share(fd):
    """How much of a file lies in the page cache."""
    with mmap.mmap(fd, 0) as file:
        pages = (ctypes.c_ubyte * (len(file) // PAGE))()
        first = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(file)))
        assert ctypes.CDLL(None).mincore(first, ctypes.c_size_t(len(file)), pages) == 0
        return sum(page & 1 for page in pages) / len(pages)


def test_prefetch_brings_the_whole_file_nearer_meanwhile(offload, tmp_path):
    tensor = filled(8 << 20)
    offload.offload("weights", [tensor])
    fd = file_below(tmp_path)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_share(fd) < 0.5
    offload.prefetch("weights")
    deadline_s = time.monotonic() + 60
    while resident_share(fd) < 0.99:
        assert time.monotonic() < deadline_s, resident_share(fd)
        time.sleep(0.02)
    offload.onload("weights")
    assert torch.equal(tensor, filled(8 << 20))


def test_none_moves_nothing(tmp_path):
    offload = MemoryMover("none", "/nonexistent", "generator-0")
    tensor = filled(100)
    assert offload.offload("kv", [tensor], keep=False) == offload.onload("kv") == 0
    assert torch.equal(tensor, filled(100))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("/dev/shm", "must be on a real filesystem, got /dev/shm on tmpfs"),
        ("/missing", "must be a folder, got /missing"),
    ],
)
def test_a_folder_in_memory_or_a_missing_one_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        MemoryMover("file", wrong, "trainer-0")


def test_pinned_memory_is_not_for_tensors_of_the_cpu(tmp_path):
    with pytest.raises(ValueError, match="must be file or none for CPU memory, got pinned"):
        MemoryMover("pinned", str(tmp_path), "trainer-0").offload("state", [filled(9)])


def test_memory_of_a_real_file_is_not_punched_full_of_holes(offload, tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"x" * 8 * PAGE)
    with path.open("r+b") as file:
        tensor = torch.frombuffer(mmap.mmap(file.fileno(), 8 * PAGE), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"must be anonymous to be offloaded, got .*precious"):
        offload.offload("weights", [tensor])
    assert path.read_bytes() == b"x" * 8 * PAGE


def test_a_full_disk_is_an_error_at_once_and_nothing_has_moved(offload):
    """The limit on file sizes stands in for the end of the disk."""
    tensor = torch.arange(1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            ValueError, match="must hold 8388608 bytes for trainer-0's state"
        ) as full:
            offload.offload("state", [tensor])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(full.value).startswith("placement.offload_folder must ")
    assert str(full.value).endswith("File too large")
    assert torch.equal(tensor, torch.arange(1 << 20))
    assert offload.onload("state") == 0
    offload.offload("state", [tensor])
    offload.onload("state")
    assert torch.equal(tensor, torch.arange(1 << 20))
