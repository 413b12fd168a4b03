"""Ask a GPU about each assumption that llamarl's CUDA code rests on, one after the other.

    python tools/gpu_probe.py [--json FILE] [--device cuda|cpu] [--only SECTION ...]

Needs torch, numpy, safetensors and tokenizers; no Monarch, no vLLM, no installed llamarl. About
three minutes on an H100. Figures with "floor" are what the card's published rates allow.

ceilings      a copy within the device, a large product
int_mm        which shapes of int8 products are right, refused or wrong in either layout
fingerprints  sums of a copy on the device against the CPU's
gemm          products of a decode step, weights stored [in, out] and [out, in]
attend        the kernels of decode attention against float64
sdpa          time and memory of the forms of torch's attention
pinned        what pinned memory costs, first, again, and after a graph was captured
ipc           memory that another process opens, fills and gives up
nccl          a group of one rank, and of a rank whose peer never comes
decode        steps of the embedded engine with a model of Llama 3.2 1B's shape
trainer       layers and head of such a model, forward and backward

Every section runs in a process of its own with a limit of its own; one that fails says why, and
the others go on. A line is a fact. The file is written after each section. On a CPU sizes are tiny
and what needs a GPU is left out.
"""

from __future__ import annotations

import sections
from harness import Bench
from sections import Section

SECTIONS = {
    "ceilings": Section(measure="gpu_session.products:ceilings", limit_s=40),
    "int_mm": Section(measure="gpu_session.products:int_mm", limit_s=60),
    "fingerprints": Section(measure="gpu_session.products:fingerprints", limit_s=40),
    "gemm": Section(measure="gpu_session.products:gemm", limit_s=40),
    # Triton's kernels need a card.
    "attend": Section(measure="gpu_session.attention:attend", limit_s=60, needs_gpu=True),
    "sdpa": Section(measure="gpu_session.attention:sdpa", limit_s=45),
    # A CPU has no memory to pin for.
    "pinned": Section(measure="gpu_session.moving:pinned", limit_s=40, needs_gpu=True),
    "ipc": Section(measure="gpu_session.moving:ipc", limit_s=45),
    "nccl": Section(measure="gpu_session.moving:nccl", limit_s=60),
    "decode": Section(measure="gpu_session.models:decode", limit_s=90),
    "trainer": Section(measure="gpu_session.models:trainer", limit_s=120),
}


def main() -> None:
    bench = Bench(__doc__)
    sections.add_options(bench, SECTIONS)
    arguments = bench.parse()
    device, names = arguments.device, arguments.only or list(SECTIONS)
    sections.run(bench, SECTIONS, names, device=device, is_tiny=device == "cpu")


if __name__ == "__main__":
    main()
