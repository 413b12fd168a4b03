"""How long work takes on the device, what memory it takes there, and which kernels it launches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import torch
from gpu_bench.setting import Setting, best_s, gpu_kind
from sections import Facts

NUM_KERNELS = 14  # shown: the longest
Work = Callable[[], object]


def median_s(setting: Setting, work: Work, repeats: int = 20) -> float:
    """Seconds of one call on the card, by its own clock; on a CPU of one call."""
    if not setting.is_cuda:
        return best_s(setting, work, 1)
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graphed_s(setting: Setting, work: Work, repeats: int = 20) -> float:
    """Seconds of one call of many that are captured in one graph: nothing waits for launches."""
    if not setting.is_cuda:
        return median_s(setting, work)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            work()
    return median_s(setting, graph.replay, 5) / repeats


def peak_bytes(setting: Setting, work: Work) -> float:
    """What one call allocates at most on the card; not measured on a CPU."""
    if not setting.is_cuda:
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before_bytes


def read_us(setting: Setting, num_bytes: float) -> float:
    """Microseconds to read so many bytes at the card's published rate; not known for a card that
    the planner does not know."""
    try:
        _, gpu = gpu_kind(setting)
    except ValueError:
        return math.nan
    return num_bytes / gpu.memory_bytes_per_s * 1e6


def compute_ms(setting: Setting, flops: float) -> float:
    """Milliseconds of so many operations at the card's published rate in bfloat16, likewise."""
    try:
        _, gpu = gpu_kind(setting)
    except ValueError:
        return math.nan
    return flops / gpu.flops["bfloat16"] * 1e3


def kernels(setting: Setting, work: Work, num_steps: int, of: str) -> Iterator[Facts]:
    """Launches and busy time of a step, of `num_steps` that one call makes, and of the kernels
    that take longest. Nothing on a CPU."""
    if not setting.is_cuda:
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    found = [
        (event.self_device_time_total / num_steps, event.count / num_steps, event.key)
        for event in profile.key_averages()
        if event.self_device_time_total > 0 and "CUDA" in str(event.device_type)
    ]
    busy_us, launches = (sum(each[column] for each in found) for column in (0, 1))
    yield Facts({"busy_us": busy_us, "launches": launches}, of)
    for busy_us, launches, name in sorted(found, reverse=True)[:NUM_KERNELS]:
        yield Facts({"busy_us": busy_us, "launches": launches}, f"{of}, {name[:90]}")
