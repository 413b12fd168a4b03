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

import sections
from harness import Bench
from sections import Section

LIMIT_S = 150
SECTIONS = {
    "generation": Section(measure="gpu_bench.generation:measure", limit_s=LIMIT_S),
    "training": Section(measure="gpu_bench.training:measure", limit_s=LIMIT_S),
    # A CPU's allocator keeps no peak.
    "memory": Section(measure="gpu_bench.generation:memory", limit_s=LIMIT_S, needs_gpu=True),
    "publish": Section(measure="gpu_bench.publishing:measure", limit_s=LIMIT_S),
    "offload": Section(measure="gpu_bench.publishing:offload", limit_s=LIMIT_S),
    "loop": Section(measure="gpu_bench.loop:measure", limit_s=LIMIT_S),
}


def main() -> None:
    bench = Bench(__doc__)
    sections.add_options(bench, SECTIONS)
    bench.option("--tiny", action="store_true", help="sizes that a CPU takes seconds for")
    arguments = bench.parse()
    names = arguments.only or list(SECTIONS)
    sections.run(bench, SECTIONS, names, device=arguments.device, is_tiny=arguments.tiny)


if __name__ == "__main__":
    main()
