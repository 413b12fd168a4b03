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

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from weights_bench.model import model_of

from llamarl.executors.memory_mover import MemoryMover, trim
from llamarl.metrics.span import SpanReader, span_files

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
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


def timed(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def bench_offload(
    megabytes: float, repeats: int, folder: str
) -> tuple[dict[str, list[float]], float, float]:
    """(seconds of each way by repeat, bytes moved, share of them that was freed meanwhile)."""
    tensors = trainer_state(megabytes)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    twins = [tensor.clone() for tensor in tensors]
    mover = MemoryMover("file", folder, "bench")
    fd = os.open(Path(folder) / "floor.bin", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, num_bytes)
    checks = [float(tensor.double().sum()) for tensor in tensors]
    freed = []

    def offload() -> None:
        mover.offload("state", tensors)

    def copy() -> None:
        for twin, tensor in zip(twins, tensors, strict=True):
            twin.copy_(tensor)

    def read_anew() -> None:
        move(os.preadv, fd, [torch.empty_like(tensor) for tensor in tensors])

    seconds: dict[str, list[float]] = {}
    trim()
    for repeat in range(repeats + 1):  # the first one warms up
        before = resident_bytes()
        took = {"offload": timed(offload)}
        freed.append((before - resident_bytes()) / num_bytes)
        took["onload"] = timed(lambda: mover.onload("state"))
        took["write"] = timed(lambda: move(os.pwritev, fd, tensors))
        took["read"] = timed(lambda: move(os.preadv, fd, tensors))
        took["read, new memory"] = timed(read_anew)
        trim()
        took["memcpy"] = timed(copy)
        for name, value in took.items():
            seconds.setdefault(name, [])
            if repeat:
                seconds[name].append(value)
    if checks != [float(tensor.double().sum()) for tensor in tensors]:
        raise RuntimeError("what came back is not what left")
    mover.close()
    os.close(fd)
    return seconds, num_bytes, statistics.median(freed)


def bench_run(folder: str, num_steps: int) -> dict[str, float]:
    """Seconds of a colocated run's steps, and what each process spent on moving memory in them."""
    run_dir = Path(folder) / "run"
    command = [
        *(sys.executable, "-m", "llamarl", "train", f"--config-dir={RECIPE}", f"run_dir={run_dir}"),
        *("placement=colocated", f"num_steps={num_steps}", f"placement.offload_folder={folder}"),
        *("metrics.live=false", "checkpoint.export=false", "data.held_out=null"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {"steps, s": sum(line["time/step_s"] for line in lines if "time/step_s" in line)}
    for path in span_files(run_dir / "spans"):
        for span in SpanReader(path).read():
            if span.name in ("offload", "onload"):
                key = f"{path.stem}, {span.name}, s"
                found[key] = found.get(key, 0.0) + (span.end_ns - span.start_ns) / 1e9
    return found


def main() -> None:
    """Run everything, print it, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="a folder on a real disk (default: temporary)")
    parser.add_argument("--run", action="store_true", help="also a short training run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds, num_bytes, freed = bench_offload(arguments.megabytes, arguments.repeats, folder)
    print(f"{num_bytes / 1e6:.0f} MB of trainer state, {arguments.repeats} repeats")
    for name, values in seconds.items():
        median_s = statistics.median(values)
        print(f"    {name:18}{median_s:9.3f} s{num_bytes / median_s / 1e9:8.2f} GB/s")

    def share(floor: str, name: str) -> float:
        pairs = zip(seconds[floor], seconds[name], strict=True)
        return statistics.median(a / b for a, b in pairs)

    results = {
        "offload_share_of_write": share("write", "offload"),
        "onload_share_of_read": share("read", "onload"),
        "onload_share_of_read_new": share("read, new memory", "onload"),
        "freed_share": freed,
    }
    print(
        f"    offloading has {results['offload_share_of_write']:.0%} of the speed of plain writes,"
    )
    print(f"    onloading {results['onload_share_of_read']:.0%} of that of plain reads, and")
    print(f"    {results['onload_share_of_read_new']:.0%} of that of reads into new memory;")
    print(f"    {freed:.1%} of the memory was free in between")
    details: dict[str, object] = {"num_bytes": num_bytes, "seconds": seconds}
    if arguments.run:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            run = bench_run(folder, num_steps=5)
        details["run"] = run
        print("a colocated run of 5 steps, seconds")
        for name, value in run.items():
            print(f"    {name:28}{value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, **details}, indent=2) + "\n")


if __name__ == "__main__":
    main()
