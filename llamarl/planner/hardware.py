"""What GPUs, links and hosts can do.

Owns: every hardware constant of the forecasts, each with its source. Does not own: what is
computed from them. Invariant: the constants are published peaks; EFFICIENCY is what forecasts use.
"""

from __future__ import annotations

from dataclasses import dataclass

EFFICIENCY = 0.7
"""Share of a published peak that forecasts use."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual host; bytes, and per second.

    `flops` are dense multiply-adds times two. `link_bytes_per_s` (NVLink) and `card_bytes_per_s`
    (the network card that each GPU has) count one direction; `host_link_bytes_per_s` is PCIe.
    `reserve_bytes` is what no tensor gets: context, communicators, graphs, allocator slack.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    link_bytes_per_s: float
    card_bytes_per_s: float
    host_link_bytes_per_s: float
    host_memory_bytes: int
    reserve_bytes: int


GPUS: dict[str, Gpu] = {
    # NVIDIA H100 SXM5 data sheet: 3.35 TB/s HBM3, 989 TFLOP/s bf16 and 1979 fp8 (dense), NVLink 4
    # 900 GB/s both ways, PCIe 5 x16 128 GB/s both ways. DGX H100 user guide: 80 GB (79.6 GiB seen
    # by CUDA), one ConnectX-7 of 400 Gb/s per GPU, 2 TB of host memory for 8 GPUs.
    "H100-80GB": Gpu(
        memory_bytes=79_600 * 2**20,
        memory_bytes_per_s=3.35e12,
        flops={"bfloat16": 989e12, "float32": 67e12, "fp8": 1979e12},
        link_bytes_per_s=450e9,
        card_bytes_per_s=50e9,
        host_link_bytes_per_s=64e9,
        host_memory_bytes=2 * 10**12 // 8,
        reserve_bytes=6 * 2**30,
    ),
}
