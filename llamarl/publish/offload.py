"""The offload of tensors from a device that another executor uses, and their onload."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from llamarl.core.config import PlacementConfig
from llamarl.core.device.devices import platform_of
from llamarl.core.device.platform import Platform
from llamarl.core.faces import Offloadable
from llamarl.metrics.span import Spans
from llamarl.publish.source import SourcePart

CHUNK_BYTES = 1 << 26  # of one read or write: as fast as larger ones, and the bounce buffer's size
READ_AHEAD_BYTES = 1 << 17  # what Linux reads ahead on devices that ask for nothing else
HUGE_PAGE_BYTES = 1 << 21
MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Offloaded:
    """The record of one offloaded name; `tensors` keeps the memory from being freed."""

    tensors: list[Tensor]
    ranges: list[tuple[int, int]]
    storages: list[tuple[torch.UntypedStorage, int]]
    num_bytes: int
    is_kept: bool


class MemoryMover:
    """Moves named sets of tensors of one executor rank out of memory and back.

    `mode`: "file" (to files in `folder`), "pinned" (tensors of a GPU, to pinned host memory) or
    "none" (nothing ever moves). `label` is unique in the folder, such as `trainer-0`. Raises
    ValueError if `folder` is missing or lies in memory. It is not thread-safe."""

    def __init__(self, mode: str, folder: str, label: str) -> None:
        if mode == "file":
            _require_disk(folder)
        self._mode, self._folder, self._label = mode, folder, label
        self._files: dict[str, int] = {}
        # Pinned uint8 host memory with its platform, kept as pinning takes longer than a copy.
        self._pinned: dict[str, tuple[Tensor, Platform]] = {}
        self._away: dict[str, _Offloaded] = {}
        self._readers = ThreadPoolExecutor(thread_name_prefix="read-ahead")

    @classmethod
    def placed(cls, placement: PlacementConfig, run_dir: str, label: str) -> Self:
        """Make a mover as `placement` says; without colocation nothing ever moves."""
        mode = placement.offload if placement.colocated else "none"
        return cls(mode, placement.offload_folder or run_dir, label)

    def offload(self, name: str, tensors: Iterable[Tensor], keep: bool = True) -> int:
        """Save the contents of these tensors and free their memory. Returns the number of bytes.

        Tensors that share memory are moved once. They must not be read or written until `onload`.
        `keep` False saves nothing: they come back as zeros. It has no effect if `name` is offloaded
        already. Raises ValueError if the disk is too full."""
        if self._mode == "none" or name in self._away:
            return 0
        tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
        on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if on_cpu and self._mode == "pinned":
            raise ValueError("placement.offload must be file or none for CPU memory, got pinned")
        ranges = _ranges(on_cpu)
        storages = _storages([tensor for tensor in tensors if tensor.device.type != "cpu"])
        num_bytes = sum(stop - start for start, stop in ranges)
        num_bytes += sum(size for _, size in storages)
        drops = _drops(ranges)
        away = _Offloaded(tensors, ranges, storages, num_bytes, keep)
        if keep:
            self._save(name, away)
        for start, stop, advice in drops:
            _drop(start, stop, advice)
        for storage, _ in storages:
            storage.resize_(0)
        if storages:
            _platform(storages).free_cached()  # else the allocator keeps it from the other process
        trim()
        self._away[name] = away
        return num_bytes

    def prefetch(self, name: str) -> None:
        """Start reading the file into the page cache, and return at once. Device memory is not
        touched, as another executor uses it."""
        away = self._away.get(name)
        if away is not None and away.is_kept and name in self._files:
            self._readers.submit(self._read_ahead, name, away)

    def onload(self, name: str) -> int:
        """Bring the tensors back. Returns the number of bytes, 0 if `name` is not offloaded."""
        away = self._away.get(name)
        if away is None:
            return 0
        for storage, size in away.storages:
            storage.resize_(size)
        if away.is_kept:
            self._load(name, away)
        elif away.storages:
            for flat in _flat(away.storages):
                flat.zero_()
        del self._away[name]
        return away.num_bytes

    def is_away(self, name: str) -> bool:
        """Return True from `offload` to `onload`."""
        return name in self._away

    def close(self) -> None:
        """Free the disk space, or the pinned memory."""
        self._away.clear()  # which ends the readers
        self._readers.shutdown()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        for name in [*self._pinned]:
            self._unpin(name)

    def _read_ahead(self, name: str, away: _Offloaded) -> None:
        """Read the file ahead in many calls, as the kernel reads no more per call than a device's
        read-ahead."""
        for place in range(0, away.num_bytes, READ_AHEAD_BYTES):
            if self._away.get(name) is not away:
                return
            os.posix_fadvise(self._files[name], place, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def _save(self, name: str, away: _Offloaded) -> None:
        if self._mode == "pinned":
            for flat, host in self._pinned_parts(name, away):
                host.copy_(flat, non_blocking=True)
            _synchronize(away.storages)
            return
        fd = self._file(name, away.num_bytes)
        place = 0
        for start, stop in away.ranges:
            place = _transfer(os.pwritev, fd, place, start, stop)
        for part, bounce in _bounced(away.storages):
            bounce.copy_(part)
            first = bounce.data_ptr()
            place = _transfer(os.pwritev, fd, place, first, first + bounce.numel())

    def _load(self, name: str, away: _Offloaded) -> None:
        if self._mode == "pinned":
            for flat, host in self._pinned_parts(name, away):
                flat.copy_(host, non_blocking=True)
            _synchronize(away.storages)
            return
        fd = self._files[name]
        place = 0
        for start, stop in away.ranges:
            _ask_for_huge_pages(start, stop)
            place = _transfer(os.preadv, fd, place, start, stop)
        for part, bounce in _bounced(away.storages):
            first = bounce.data_ptr()
            place = _transfer(os.preadv, fd, place, first, first + bounce.numel())
            part.copy_(bounce)

    def _pinned_parts(self, name: str, away: _Offloaded) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the device memory of `name`, each storage with its place in host memory that is
        pinned once and kept: torch's own pinned memory is given back whenever a graph is captured.
        Raises ValueError if it cannot be pinned."""
        if not away.storages:
            return
        sizes = [size for _, size in away.storages]
        if name not in self._pinned or len(self._pinned[name][0]) < sum(sizes):
            self._unpin(name)
            platform, host = _platform(away.storages), torch.empty(sum(sizes), dtype=torch.uint8)
            platform.pin(host, f"{self._label}'s {name}, {sum(sizes)} bytes,")
            self._pinned[name] = host, platform
        parts = self._pinned[name][0][: sum(sizes)].split(sizes)
        yield from zip(_flat(away.storages), parts, strict=True)

    def _unpin(self, name: str) -> None:
        if name in self._pinned:
            host, platform = self._pinned.pop(name)
            platform.unpin(host.data_ptr())

    def _file(self, name: str, num_bytes: int) -> int:
        """Return the descriptor of the file of `name`, with its blocks reserved: a full disk shows
        before anything has moved."""
        if name not in self._files:
            path = Path(self._folder) / f"{self._label}-{name}.bin"
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
            path.unlink()
        fd = self._files[name]
        if num_bytes > os.fstat(fd).st_size:
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            except OSError as error:
                os.ftruncate(fd, 0)  # give back what was reserved on the way
                disk = os.statvfs(self._folder)
                raise ValueError(
                    f"placement.offload_folder must hold {num_bytes} bytes for {self._label}'s "
                    f"{name}, got {disk.f_bavail * disk.f_frsize} free in {self._folder}: "
                    f"{error.strerror}"
                ) from error
        return fd


def trim() -> None:
    """Give freed memory back to the kernel; glibc keeps it otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _require_disk(folder: str) -> None:
    """Raise ValueError unless `folder` is a folder whose files do not lie in memory."""
    if not os.path.isdir(folder):
        raise ValueError(f"placement.offload_folder must be a folder, got {folder}")
    answer = (ctypes.c_ulong * 32)()  # struct statfs, which is shorter; it begins with the type
    if _libc.statfs(os.fsencode(folder), answer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    filesystem = MEMORY_FILESYSTEMS.get(answer[0])
    if filesystem is not None:
        raise ValueError(
            f"placement.offload_folder must be on a real filesystem, got {folder} on {filesystem}, "
            "which is memory itself"
        )


def _ranges(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the address ranges [start, stop) that the tensors span, in order; overlapping ones are
    merged."""
    spans = []
    for tensor in tensors:
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        spans.append((start, start + (last + 1) * tensor.element_size()))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _storages(tensors: Sequence[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return (storage, bytes) of device tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage, storage.nbytes())
    return list(found.values())


def _platform(storages: Sequence[tuple[torch.UntypedStorage, int]]) -> Platform:
    return platform_of(storages[0][0].device)


def _synchronize(storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """Wait until all work begun on the devices of the memory is done."""
    for device in {storage.device for storage, _ in storages}:
        platform_of(device).synchronize(device)


def _flat(storages: Sequence[tuple[torch.UntypedStorage, int]]) -> Iterator[Tensor]:
    for storage, _ in storages:
        yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bounced(
    storages: Sequence[tuple[torch.UntypedStorage, int]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of device memory, each with as much of one pinned host buffer."""
    if not storages:
        return
    bounce = _platform(storages).empty_host([CHUNK_BYTES], torch.uint8)
    for flat in _flat(storages):
        for part in flat.split(CHUNK_BYTES):
            yield part, bounce[: part.numel()]


def _transfer(move: Callable[..., int], fd: int, place: int, start: int, stop: int) -> int:
    """Write or read the memory [start, stop) at file offset `place`. Returns the offset after
    it."""
    while start < stop:
        size = min(CHUNK_BYTES, stop - start)
        done = move(fd, [(ctypes.c_char * size).from_address(start)], place)
        if done == 0:
            raise OSError(f"offload file ended at byte {place}")
        start, place = start + done, place + done
    return place


def _drops(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (start, stop, the `madvise` that frees its pages) of each range. Raises ValueError if
    one belongs to a real file, in which it would punch a hole."""
    shared = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _, _, _, *path = line.split(maxsplit=5)
            if permissions[3] == "s":
                start, stop = (int(text, 16) for text in span.split("-"))
                shared.append((start, stop, "".join(path).strip()))
    drops = []
    for start, stop in ranges:
        file = next((path for first, last, path in shared if first < stop and start < last), None)
        if file is not None and not file.startswith(("/memfd:", "/dev/zero")):
            raise ValueError(f"shared memory must be anonymous to be offloaded, got {file}")
        drops.append((start, stop, mmap.MADV_DONTNEED if file is None else mmap.MADV_REMOVE))
    return drops


def _ask_for_huge_pages(start: int, stop: int) -> None:
    """Let the range be faulted in by large pages, which takes a quarter of the time; the kernel may
    refuse, so its answer is ignored."""
    first, last = _whole_pages(start, stop)
    if last - first >= HUGE_PAGE_BYTES:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


def _whole_pages(start: int, stop: int) -> tuple[int, int]:
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE


def _drop(start: int, stop: int, advice: int) -> None:
    """Free the whole pages inside [start, stop), and zero what remains of it at the ends."""
    first, last = _whole_pages(start, stop)
    if first >= last:
        ctypes.memset(start, 0, stop - start)
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise({advice}) of {last - first} bytes: {os.strerror(error)}")
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)


class TaggedMemory(Protocol):
    """The memory that an executor keeps on the device, by tag. A move of a tag that is already
    where it should go moves 0 bytes."""

    tags: tuple[str, ...]

    def offload(self, tag: str) -> int:
        """Move the memory off the device. Returns the number of bytes."""

    def prefetch(self, tag: str) -> None:
        """Start bringing the memory nearer, and return at once."""

    def onload(self, tag: str) -> int:
        """Move the memory back. Returns the number of bytes."""


class OffloadPart(Offloadable):
    """Offloads one rank.

    `run(call, key)` runs a move on the compute thread when its turn comes. While the weights are
    away `source` has nothing to read."""

    def __init__(
        self,
        memory: TaggedMemory,
        run: Callable[[Callable[[], None], Any], Awaitable[None]],
        spans: Spans,
        source: SourcePart,
    ) -> None:
        self._memory, self._run, self._spans, self._source = memory, run, spans, source

    async def offload(self, tags: list[str]) -> None:
        for tag in self._known(tags):
            await self._run(partial(self._offload, tag), ("offload", tag))

    async def prefetch(self, tags: list[str]) -> None:
        for tag in self._known(tags):
            self._memory.prefetch(tag)

    async def onload(self, tags: list[str]) -> None:
        for tag in self._known(tags):
            await self._run(partial(self._onload, tag), ("onload", tag))

    def _known(self, tags: list[str]) -> list[str]:
        """Return `tags`; raise ValueError if one is unknown."""
        for tag in tags:
            if tag not in self._memory.tags:
                known = ", ".join(self._memory.tags)
                raise ValueError(f"tags must be among {known}, got {tag!r}")
        return tags

    def _offload(self, tag: str) -> None:
        if tag == "weights":
            self._source.withdraw()
        self._move("offload", tag, self._memory.offload)

    def _onload(self, tag: str) -> None:
        self._move("onload", tag, self._memory.onload)
        if tag == "weights":
            self._source.restore()

    def _move(self, name: str, tag: str, move: Callable[[str], int]) -> None:
        start_ns = time.monotonic_ns()
        if num_bytes := move(tag):
            end_ns = time.monotonic_ns()
            self._spans.record(name, start_ns, end_ns, "mark", tag=tag, bytes=num_bytes)
