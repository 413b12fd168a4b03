"""What GPUs, links and hosts can do.

Owns: every hardware constant of the forecasts, each with its source. Does not own: what is
computed from them. Invariant: the constants are published peaks; EFFICIENCY is what forecasts use.
"""

from dataclasses import dataclass, replace

EFFICIENCY = 0.7
"""Share of a published peak that forecasts use."""

GPU_RESERVE_BYTES = 6 * 2**30
"""Our own allowance, not a published figure: what the driver keeps (0.6 GiB of an H100), context
and kernels (0.5), NCCL's buffers of a few groups (1 to 2), cuBLAS workspaces and captured graphs
(1), fragments that the allocator cannot use (2)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual host; bytes, and per second.

    `flops` are dense multiply-adds times two. `link_bytes_per_s` (NVLink) and `card_bytes_per_s`
    (the network card that each GPU has) count one direction; `host_link_bytes_per_s` is PCIe.
    `reserve_bytes` is what no tensor gets: context, communicators, graphs, allocator slack. Each of
    a host's eight GPUs comes with an eighth of its 2 TB of memory. `price` is that of an hour, in
    hours of an H20; None without a source.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    link_bytes_per_s: float
    card_bytes_per_s: float
    host_link_bytes_per_s: float
    host_memory_bytes: int = 2 * 10**12 // 8
    reserve_bytes: int = GPU_RESERVE_BYTES
    price: float | None = None


CPU = "cpu"
"""The entry for ranks without a GPU."""

# Memory is what nvidia-smi (NVML) shows as total. Peaks are dense: data sheets that print them
# "with sparsity" print twice as much. Links and PCIe are halves of the "both ways" figures.

# NVIDIA H100 data sheet, SXM5: 3.35 TB/s HBM3, 989 TFLOP/s bf16, 1979 fp8, 67 fp32 (without
# tensor cores), NVLink 4 900 GB/s, PCIe 5 x16 128 GB/s. DGX H100 user guide: eight ConnectX-7
# of 400 Gb/s and 2 TB of host memory for 8 GPUs. NVML: 81,559 MiB.
H100 = Gpu(
    memory_bytes=81_559 * 2**20,
    memory_bytes_per_s=3.35e12,
    flops={"bfloat16": 989e12, "float32": 67e12, "fp8": 1979e12},
    link_bytes_per_s=450e9,
    card_bytes_per_s=50e9,
    host_link_bytes_per_s=64e9,
)

GPUS: dict[str, Gpu] = {
    "H100-80GB": H100,
    # NVIDIA H200 data sheet, SXM: 4.8 TB/s HBM3e, else as the H100. DGX H200 user guide: eight
    # ConnectX-7 of 400 Gb/s, 2 TB. NVML: 143,771 MiB.
    "H200-141GB": replace(H100, memory_bytes=143_771 * 2**20, memory_bytes_per_s=4.8e12),
    # NVIDIA A100 80GB data sheet, SXM4: 2.039 TB/s HBM2e, 312 TFLOP/s bf16, 19.5 fp32, no fp8,
    # NVLink 3 600 GB/s, PCIe 4 x16 64 GB/s. DGX A100 640GB user guide: eight ConnectX-6 or 7 of
    # 200 Gb/s and 2 TB for 8 GPUs. NVML: 81,920 MiB.
    "A100-80GB": Gpu(
        memory_bytes=81_920 * 2**20,
        memory_bytes_per_s=2.039e12,
        flops={"bfloat16": 312e12, "float32": 19.5e12},
        link_bytes_per_s=300e9,
        card_bytes_per_s=25e9,
        host_link_bytes_per_s=32e9,
    ),
    # Prices, memory sizes and bandwidths of both: digests of StreamRL (arXiv 2504.15930), not
    # compared with the paper itself. 80 GB at 3.35 TB/s, a machine of eight at 2.85 times the price
    # of one with H20. NVLink 400 GB/s is unconfirmed: public pages say only that it is reduced. All
    # else is an H100's, which is the same chip.
    "H800-80GB": replace(H100, link_bytes_per_s=200e9, price=2.85),
    # 96 GB at 4.0 TB/s, price 1.00. Peaks as vendors print them: 148 TFLOP/s bf16, 296 fp8, 44
    # fp32. NVML: 97,871 MiB. NVLink and the host are taken to be an H100's.
    "H20-96GB": replace(
        H100,
        memory_bytes=97_871 * 2**20,
        memory_bytes_per_s=4.0e12,
        flops={"bfloat16": 148e12, "float32": 44e12, "fp8": 296e12},
        price=1.00,
    ),
    # One core of a laptop and its share of the memory. Two channels of DDR4-3200: 51.2 GB/s (JEDEC
    # JESD79-4); a copy within the host reads and writes, so half. AVX2 at 3 GHz: two 8-wide fused
    # multiply-adds per cycle (Intel 64 and IA-32 optimization manual), in bfloat16 no faster.
    # Ethernet of 10 Gb/s. The reserve is what one executor process has resident besides tensors.
    CPU: Gpu(
        memory_bytes=4 * 2**30,
        memory_bytes_per_s=51.2e9,
        flops={"bfloat16": 96e9, "float32": 96e9},
        link_bytes_per_s=25.6e9,
        card_bytes_per_s=1.25e9,
        host_link_bytes_per_s=25.6e9,
        host_memory_bytes=4 * 2**30,
        reserve_bytes=3 * 2**27,
    ),
}


def gpu(name: str, device: str = "cuda") -> Gpu:
    """What a rank on this kind of `device` has: the GPU of this name (`cluster.gpu`), or a CPU's
    share. ValueError that lists the names if there is no such GPU."""
    if device == "cpu":
        return GPUS[CPU]
    if name not in GPUS or name == CPU:
        known = ", ".join(known for known in GPUS if known != CPU)
        raise ValueError(f"cluster.gpu must be one of {known}, got {name!r}")
    return GPUS[name]
