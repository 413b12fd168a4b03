"""What `placement=colocated` costs: offloading a trainer's memory, and onloading it.

    python tools/bench_offload.py [--json FILE] [--megabytes 500] [--repeats 5] [--folder DIR]
                                  [--run]

A trainer's state (gradients and two moments of a Llama's parameters, float32, all pages touched)
is offloaded and onloaded by a `MemoryMover` of kind "file". The floors move the same bytes of the
same tensors and do nothing else: plain large writes to a file in the same folder; reads back into
memory that is there already, and into new memory, whose pages the kernel must first find (as after
an offload); and memcpy. Both files are reserved and stay in the page cache as far as the kernel
keeps them. All are measured by turns within a repeat; shares are medians over repeats.

With --run also a short training run of the quickstart recipe, colocated: how its time splits into
work and turns.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Bench, Values, ratio, seconds
from live_run import RECIPE, train
from torch import Tensor
from weights_bench.model import model_of

from llamarl.executors.memory_mover import MemoryMover, trim
from llamarl.metrics.span import SpanReader, span_files

WRITE_BYTES = 1 << 26
TENSORS_PER_PARAMETER = 3  # its gradient and two moments


def trainer_state(megabytes: float) -> list[Tensor]:
    """Touched tensors, as an optimizer would hold, of about so many megabytes."""
    shapes = model_of(megabytes / TENSORS_PER_PARAMETER, "float32").shapes.values()
    return [torch.randn(shape) for shape in shapes for _ in range(TENSORS_PER_PARAMETER)]


def move(call: Callable[..., int], fd: int, tensors: list[Tensor]) -> None:
    """`os.pwritev` or `os.preadv` of all tensors, one after the other in the file."""
    place = 0
    for tensor in tensors:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        while start < stop:
            size = min(WRITE_BYTES, stop - start)
            done = call(fd, [(ctypes.c_char * size).from_address(start)], place)
            start, place = start + done, place + done


def resident_bytes() -> int:
    """This process's memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no RssAnon")


def bench_offload(megabytes: float, repeats: int, folder: str) -> tuple[list[Values], float]:
    """(what each way took and which share of the bytes was freed, by repeat; bytes moved)."""
    tensors = trainer_state(megabytes)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    twins = [tensor.clone() for tensor in tensors]
    mover = MemoryMover("file", folder, "bench")
    fd = os.open(Path(folder) / "floor.bin", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, num_bytes)
    checks = [float(tensor.double().sum()) for tensor in tensors]

    def offload() -> None:
        mover.offload("state", tensors)

    def copy() -> None:
        for twin, tensor in zip(twins, tensors, strict=True):
            twin.copy_(tensor)

    def read_into_new() -> None:
        move(os.preadv, fd, [torch.empty_like(tensor) for tensor in tensors])

    rounds = []
    trim()
    for _ in range(repeats + 1):  # the first one warms up
        before = resident_bytes()
        took = {"offload_s": seconds(offload)}
        took["freed_share"] = (before - resident_bytes()) / num_bytes
        took["onload_s"] = seconds(lambda: mover.onload("state"))
        took["write_s"] = seconds(lambda: move(os.pwritev, fd, tensors))
        took["read_s"] = seconds(lambda: move(os.preadv, fd, tensors))
        took["read_new_s"] = seconds(read_into_new)
        trim()
        took["memcpy_s"] = seconds(copy)
        rounds.append(took)
    if checks != [float(tensor.double().sum()) for tensor in tensors]:
        raise RuntimeError("what came back is not what left")
    mover.close()
    os.close(fd)
    return rounds[1:], num_bytes


def bench_run(folder: str, num_steps: int) -> Values:
    """Seconds of a colocated run's steps, and what each process spent on moving memory in them."""
    options = ("placement=colocated", f"num_steps={num_steps}", "data.held_out=null")
    options += (f"placement.offload_folder={folder}", "metrics.live=false")
    found = train(RECIPE, Path(folder) / "run", *options, "checkpoint.export=false")
    values = {"steps_s": sum(found.steps_s)}
    for path in span_files(found.run_dir / "spans"):
        for span in SpanReader(path).read():
            if span.name in ("offload", "onload"):
                key = f"{path.stem}_{span.name}_s"
                values[key] = values.get(key, 0.0) + (span.end_ns - span.start_ns) / 1e9
    return values


def main() -> None:
    """Run everything."""
    bench = Bench(__doc__)
    bench.option("--megabytes", type=float, default=500)
    bench.option("--repeats", type=int, default=5)
    bench.option("--folder", help="a folder on a real disk (default: temporary)")
    bench.option("--run", action="store_true", help="also a short training run")
    arguments = bench.parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rounds, num_bytes = bench_offload(arguments.megabytes, arguments.repeats, folder)
    bench.add("moved_bytes", num_bytes)
    bench.add_medians({"": rounds})
    ways = {name: [each[name] for each in rounds] for name in rounds[0]}
    bench.add("offload_share_of_write", ratio(ways["write_s"], ways["offload_s"]))
    bench.add("onload_share_of_read", ratio(ways["read_s"], ways["onload_s"]))
    bench.add("onload_share_of_read_new", ratio(ways["read_new_s"], ways["onload_s"]))
    if arguments.run:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            bench.add_all(bench_run(folder, num_steps=5), "a colocated run of 5 steps")
    bench.write({"": rounds})


if __name__ == "__main__":
    main()
