"""Publishing from one process into another's memory, and moving memory to the host and back."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from sections import Facts
from torch import Tensor

from gpu_bench.setting import Setting, best_s, make_checkpoint, synchronize
from llamarl.core.config import WeightsConfig
from llamarl.generator.engine.weights import DTYPES, BufferLayout
from llamarl.model.architecture import read_architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.offload import MemoryMover
from llamarl.publish.reshard import num_bytes, plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import WeightBuffer
from llamarl.publish.transports.mapped import this_host

NUM_VERSIONS = 4  # the first opens the memory and is not measured
LIMIT_S = 120


def measure(setting: Setting) -> Iterator[Facts]:
    """Seconds and GB/s of versions on their way from float32 masters in one process into the
    staging of another, against a copy within the device."""
    checkpoint = make_checkpoint(setting, setting.model, has_weights=False)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for work in (_be_trainer, _be_generator):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, setting, checkpoint), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    trainer, generator = pipes
    try:
        copies = plan([_answer(trainer)], [_answer(generator)])
        transport = "cuda_ipc" if setting.is_cuda else "shared_memory"
        route, _ = split(copies, source="trainer", replica=0, transport=transport)
        _ask(trainer, route.for_rank(0))
        times = [_publish(trainer, generator, version) for version in range(1, NUM_VERSIONS + 1)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    write_s, fingerprint_s, commit_s = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )
    copied_bytes = num_bytes(copies)
    dtype = DTYPES[setting.dtype]
    source = torch.empty(copied_bytes // dtype.itemsize, device=setting.device)
    target = torch.empty_like(source, dtype=dtype)
    cast_s = best_s(setting, lambda: target.copy_(source))
    other = torch.empty_like(target)
    copy_s = best_s(setting, lambda: other.copy_(target))
    yield Facts(
        {
            "copied_bytes": copied_bytes,
            "write_s": write_s,
            "fingerprint_s": fingerprint_s,
            "commit_s": commit_s,
            "publish_s": write_s + fingerprint_s + commit_s,
            "write_gb_per_s": copied_bytes / write_s / 1e9,
            "device_cast_gb_per_s": copied_bytes / cast_s / 1e9,
            "device_copy_gb_per_s": copied_bytes / copy_s / 1e9,
            "share_of_device_cast": cast_s / write_s,
        }
    )


def offload(setting: Setting) -> Iterator[Facts]:
    """Seconds to offload and to onload, and the GB/s."""
    kind = "pinned" if setting.is_cuda else "file"
    mover = MemoryMover(kind, setting.folder, "bench")
    memory = torch.empty(setting.offload_bytes, dtype=torch.uint8, device=setting.device)
    memory.random_(0, 256)
    yield Facts({"moved_bytes": memory.numel()})
    for turn in ("first", "later"):  # the first one gets pinned memory from the system
        for name, move in (
            ("offload", lambda: mover.offload("state", [memory])),
            ("onload", lambda: mover.onload("state")),
        ):
            synchronize(setting)
            start_s = time.perf_counter()
            move()
            synchronize(setting)
            seconds = time.perf_counter() - start_s
            rate = memory.numel() / seconds / 1e9
            yield Facts({f"{turn}_{name}_s": seconds, f"{turn}_{name}_gb_per_s": rate})
    mover.close()


def _publish(
    trainer: Connection, generator: Connection, version: int
) -> tuple[float, float, float]:
    handles = [_ask(generator, "prepare", version)]
    start_s = time.perf_counter()
    written = _ask(trainer, version, handles)
    written_s = time.perf_counter()
    found = _ask(generator, "verify", version)
    found_s = time.perf_counter()
    if dict(found) != dict(written):
        raise RuntimeError(f"version {version} did not arrive as it was sent")
    _ask(generator, "commit", version)
    return written_s - start_s, found_s - written_s, time.perf_counter() - found_s


def _ask(pipe: Connection, *question: Any) -> Any:
    pipe.send(question)
    return _answer(pipe)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise RuntimeError(f"a process of the publish was silent for {LIMIT_S} s")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _be_trainer(pipe: Connection, setting: Setting, checkpoint: str) -> None:
    """Float32 masters, written when asked."""
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, ParameterLayout] = {}
    for name, shape in parameter_shapes(read_architecture(checkpoint)).items():
        tensor = torch.randn(shape, device=setting.device)
        box = Box(
            start=(0,) * len(shape), stop=shape, buffer=name, offset=0, strides=tensor.stride()
        )
        tensors[name] = tensor
        layouts[name] = ParameterLayout(shape=shape, dtype="float32", boxes=(box,))
    writer = Writer(0, this_host(), tensors, layouts, timeout_s=LIMIT_S)
    pipe.send(writer.layout())
    (route,) = pipe.recv()
    writer.connect(0, route)
    pipe.send(None)
    while True:
        version, handles = pipe.recv()
        for tensor in tensors.values():
            tensor.add_(1e-3)
        writer.tensors.label(version)
        synchronize(setting)
        pipe.send(_attempt(lambda v=version, o=handles: writer.write(v, o)))


def _be_generator(pipe: Connection, setting: Setting, checkpoint: str) -> None:
    """Live and staging memory of one rank."""
    torch.set_num_threads(1)
    layout = BufferLayout(read_architecture(checkpoint), setting.dtype)
    weight_buffer = WeightBuffer(
        layout.memory,
        WeightsConfig(),
        replica=0,
        rank=0,
        run_id=f"bench-{os.getpid()}",
        device=setting.device,
    )
    pipe.send(weight_buffer.layout())
    while True:
        name, version = pipe.recv()
        answer = _attempt(lambda n=name, v=version: getattr(weight_buffer, n)(v))
        synchronize(setting)
        pipe.send(None if name == "commit" and not isinstance(answer, Exception) else answer)


def _attempt(call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the other process says it
        return RuntimeError(f"{type(error).__name__}: {error}")
