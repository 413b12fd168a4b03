"""Measure what one GPU does, against what it could do and what the planner says.

    python tools/bench_gpu.py [--json FILE] [--device cuda|cpu] [--tiny] [--only SECTION ...]

Needs torch, numpy, safetensors, rich and tokenizers; no Monarch, no vLLM, no installed llamarl.

generation  tokens per second of the embedded engine with a model of Llama 3.2 1B's shape and random
            weights, bfloat16, against the bandwidth bound, with and without CUDA graphs
training    tokens per second and model FLOP utilisation of one trainer rank, rows of 1024 tokens,
            and its peak memory against the planner's
memory      the generator's peak memory against the planner's
publish     float32 masters of one process into the bfloat16 staging of another, over CUDA IPC,
            against a cast within the device
offload     4 GiB to pinned host memory and back
loop        whole runs in one process (cluster=inline), synchronous and asynchronous, same lengths

Every section runs in a process of its own; one that fails says why, and the others go on. With
--tiny it takes seconds; --device cpu then tries everything but what needs a GPU.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from harness import Bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SECTIONS = {
    "generation": "gpu_bench.generation:measure",
    "training": "gpu_bench.training:measure",
    "memory": "gpu_bench.generation:memory",
    "publish": "gpu_bench.publishing:measure",
    "offload": "gpu_bench.publishing:offload",
    "loop": "gpu_bench.loop:measure",
}
LIMIT_S = 150  # of one section


def main() -> None:
    bench = Bench(__doc__)
    bench.option("--device", choices=("cuda", "cpu"), default="cuda")
    bench.option("--tiny", action="store_true", help="sizes that a CPU takes seconds for")
    bench.option("--only", nargs="+", choices=SECTIONS, help="sections to run")
    arguments = bench.parse()
    import torch  # noqa: F401 - so that the machine's description names the GPU

    errors = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name in arguments.only or SECTIONS:
            if (name, arguments.device) == ("memory", "cpu"):
                continue  # a CPU's allocator keeps no peak
            start_s = time.monotonic()
            figures, error = run(name, arguments.device, arguments.tiny, folder)
            took_s = time.monotonic() - start_s
            bench.add_all({**figures, "error": error, "section_s": took_s}, name)
            errors.append(error)
            bench.write()  # what is measured stays, should a later section end this process
    if all(errors):
        sys.exit(1)


def run(name: str, device: str, is_tiny: bool, folder: str) -> tuple[dict[str, float], str]:
    """(figures, error) of one section; no error: ""."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, name, device, is_tiny, folder))
    process.start()
    there.close()
    figures: dict[str, float] = {}
    try:
        if here.poll(LIMIT_S):
            figures, error = here.recv()
        else:
            error = f"took longer than {LIMIT_S} s"
    except EOFError:
        process.join()
        error = f"the process ended with code {process.exitcode}"
    process.kill()
    process.join()
    return figures, error


def _work(pipe: Connection, name: str, device: str, is_tiny: bool, folder: str) -> None:
    import torch
    from gpu_bench.setting import full, tiny

    if device == "cpu":
        torch.set_num_threads(1)
    module, _, function = SECTIONS[name].partition(":")
    place = Path(folder, name)
    place.mkdir()
    try:
        measure: Callable[..., dict[str, float]] = getattr(import_module(module), function)
        pipe.send((measure((tiny if is_tiny else full)(device, str(place))), ""))
    except Exception as error:  # noqa: BLE001 - said in the result; the other sections go on
        traceback.print_exc()
        pipe.send(({}, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
