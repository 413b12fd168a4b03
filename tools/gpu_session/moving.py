"""What moves between memories and processes: pinned host memory, memory that another process maps,
and process groups."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpu_bench.setting import Setting, synchronize
from sections import Facts
from torch import Tensor

from gpu_session.timing import median_s
from llamarl.core.device.devices import platform_of, use_device
from llamarl.core.process_group import form_group, meet
from llamarl.publish.transports.mapped import MappedBlock, opened

T = TypeVar("T")
PINNED_BYTES = 2**31 + 2**27  # just above a power of two, to which torch rounds
NUM_TURNS = 3
GROUP_LIMIT_S = 5.0


def pinned(setting: Setting) -> Iterator[Facts]:
    """Seconds to get pinned memory, for the first time, from torch's cache, and after a graph was
    captured, which empties that cache; and how fast copies are."""
    host, took_s = _timed(_pinned)
    rounded_bytes = 2 ** math.ceil(math.log2(PINNED_BYTES))
    yield Facts({"asked_bytes": PINNED_BYTES, "rounded_bytes": rounded_bytes, "first_s": took_s})
    memory = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=setting.device)
    for name, target, source in (("to_host", host, memory), ("to_device", memory, host)):
        copy_s = median_s(setting, partial(target.copy_, source, non_blocking=True), 3)
        yield Facts({f"{name}_gb_per_s": PINNED_BYTES / copy_s / 1e9})
    del host, target, source
    synchronize(setting)
    host, took_s = _timed(_pinned)
    yield Facts({"cached_s": took_s})
    del host
    ones = torch.zeros(8, device=setting.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ones.add_(1)
    _, took_s = _timed(_pinned)
    yield Facts({"after_a_capture_s": took_s})


def _pinned() -> Tensor:
    return torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)


def ipc(setting: Setting) -> Iterator[Facts]:
    """A weight buffer that another process opens and fills: CUDA IPC, or shared memory on a CPU.
    What this process frees must come back although the other one had it open."""
    device = torch.device(setting.device, 0) if setting.is_cuda else torch.device("cpu")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    peer = context.Process(target=_be_peer, args=(there,), daemon=True)
    peer.start()
    there.close()
    for turn in range(1, NUM_TURNS + 1):
        block = MappedBlock("probe", setting.offload_bytes // 32, torch.bfloat16, device, False)
        here.send((block.address, block.num_bytes, turn))
        open_s, write_s = here.recv()
        is_there = bool((block.flat == turn).all())
        yield Facts(
            {"arrived": is_there, "open_ms": open_s * 1e3, "write_ms": write_s * 1e3},
            f"turn {turn}",
        )
        if setting.is_cuda:
            yield Facts({"freed_bytes": _freed(block.flat)}, f"turn {turn}")
        block.close()
    here.send(None)
    peer.join()


def _freed(flat: Tensor) -> int:
    """What the card has free once this memory is given up, beyond what it had before."""
    before_bytes, _ = torch.cuda.mem_get_info()
    flat.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] - before_bytes


def _be_peer(pipe: Connection) -> None:
    """Fill each block that comes, and give it up again."""
    while (asked := pipe.recv()) is not None:
        address, num_bytes, value = asked
        flat, open_s = _timed(partial(opened, address, num_bytes))
        _, write_s = _timed(partial(_fill, flat, value))
        del flat
        pipe.send((open_s, write_s))


def _fill(flat: Tensor, value: int) -> None:
    flat.view(torch.bfloat16).fill_(value)
    platform_of(flat.device).synchronize(flat.device)


def nccl(setting: Setting) -> Iterator[Facts]:
    """A group of one rank: how long it takes to form, what memory it takes, its sum, how long it
    takes to end. Then the first of two ranks, of which the other never comes: that must raise about
    as soon as its limit is over. gloo on a CPU."""
    device = torch.device(setting.device, 0) if setting.is_cuda else torch.device("cpu")
    use_device(device)
    ones = torch.ones(4, device=device)
    synchronize(setting)
    before_bytes = torch.cuda.mem_get_info()[0] if setting.is_cuda else 0
    group, form_s = _timed(lambda: _formed(setting, device, num_ranks=1))
    group.allreduce([ones]).wait()
    yield Facts({"backend": group.name(), "form_s": form_s, "sum": float(ones.sum())}, "one rank")
    if setting.is_cuda:
        after_bytes, _ = torch.cuda.mem_get_info()
        _, end_s = _timed(group.abort)
        yield Facts({"group_bytes": before_bytes - after_bytes, "end_s": end_s}, "one rank")
    start_s = time.perf_counter()
    try:
        _formed(setting, device, num_ranks=2)
        said = "nothing"
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    took_s = time.perf_counter() - start_s
    yield Facts({"raised": said, "limit_s": GROUP_LIMIT_S, "raised_after_s": took_s}, "no peer")


def _formed(setting: Setting, device: torch.device, num_ranks: int) -> Any:
    rendezvous = Path(setting.folder, f"ranks-{num_ranks}")
    limit = timedelta(seconds=GROUP_LIMIT_S)
    store = meet(str(rendezvous), 0, num_ranks, limit)
    return form_group(device, store, 0, num_ranks, limit, fails_alone=True)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start_s
