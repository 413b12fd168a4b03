"""The performance of GPUs, links and hosts: published peaks, each with its source, and the shares
of them that the fastest kernels measured on that card reach."""

from dataclasses import dataclass, field, replace

from llamarl.core.device.names import CPU, GPU, is_gpu, size_bytes

FLASH2, FLASH3 = "flash2", "flash3"

Kinds = dict[str, int]
"""Bytes of memory by what they are used for."""

GPU_RESERVE_BYTES = 6 * 2**30
"""Our own allowance, not a published figure, for what the driver keeps (0.6 GiB of an H100),
context and kernels (0.5), NCCL's buffers of a few groups (1 to 2), cuBLAS workspaces and captured
graphs (1), and fragments that the allocator cannot use (2)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual host; sizes in bytes, rates per second.

    `flops` are dense multiply-adds times two. `link_bytes_per_s` (NVLink) and `card_bytes_per_s`
    (the network card that each GPU has) count one direction; `host_link_bytes_per_s` is PCIe.
    `reserve_bytes` is what no tensor gets: context, communicators, graphs, allocator slack. Each of
    a host's eight GPUs comes with an eighth of its 2 TB of memory.

    `gemm` is the share of a peak that the fastest matrix product measured reaches, `attention` that
    of each attention kernel's forward pass with heads of 128 and long sequences; a kernel that a
    card does not have runs as FLASH2.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    link_bytes_per_s: float
    card_bytes_per_s: float
    host_link_bytes_per_s: float
    host_memory_bytes: int = 2 * 10**12 // 8
    reserve_bytes: int = GPU_RESERVE_BYTES
    gemm: float = 0.8
    attention: dict[str, float] = field(default_factory=lambda: {FLASH2: 0.65})

    def attention_flops(self, kernel: str, dtype: str) -> float:
        """Return the operations per second of attention in a forward pass."""
        share = self.attention.get(kernel, self.attention[FLASH2])
        return share * self.flops[dtype]


# Memory is what nvidia-smi (NVML) shows as total. Peaks are dense: data sheets that print them
# "with sparsity" print twice as much. Links and PCIe are halves of the "both ways" figures.

# NVIDIA H100 data sheet, SXM5: 3.35 TB/s HBM3, 989 TFLOP/s bf16, 1979 fp8, 67 fp32 (without
# tensor cores), NVLink 4 900 GB/s, PCIe 5 x16 128 GB/s. DGX H100 user guide: eight ConnectX-7
# of 400 Gb/s and 2 TB of host memory for 8 GPUs. NVML: 81,559 MiB. The fastest bf16 product: 792
# TFLOP/s (stas00/ml-engineering, table of maxima). Attention: 328 (Azure H100 v5 results,
# FlashAttention 2), 614 (pytorch/benchmark, commit ff65cb6, FlashAttention 3, 8,192 tokens).
H100 = Gpu(
    memory_bytes=81_559 * 2**20,
    memory_bytes_per_s=3.35e12,
    flops={"bfloat16": 989e12, "float32": 67e12, "fp8": 1979e12},
    link_bytes_per_s=450e9,
    card_bytes_per_s=50e9,
    host_link_bytes_per_s=64e9,
    gemm=0.801,
    attention={FLASH2: 0.332, FLASH3: 0.62},
)
# NVIDIA A100 80GB data sheet, SXM4: 2.039 TB/s HBM2e, 312 TFLOP/s bf16, 19.5 fp32, no fp8, NVLink 3
# 600 GB/s, PCIe 4 x16 64 GB/s. DGX A100 640GB user guide: eight ConnectX-6 or 7 of 200 Gb/s and 2
# TB for 8 GPUs. NVML: 81,920 MiB. The fastest bf16 product: 268 TFLOP/s (stas00/ml-engineering).
# Attention: 179.5 with heads of 64 (Azure A100 v4 results), up to 230 with 128
# (FlashAttention-2, arXiv 2307.08691): between. Other Ampere and Ada cards: the same share.
A100 = Gpu(
    memory_bytes=81_920 * 2**20,
    memory_bytes_per_s=2.039e12,
    flops={"bfloat16": 312e12, "float32": 19.5e12},
    link_bytes_per_s=300e9,
    card_bytes_per_s=25e9,
    host_link_bytes_per_s=32e9,
    gemm=0.859,
    attention={FLASH2: 0.65},
)


def _card(
    mib: int,
    gb_per_s: float,
    tflops: tuple[float, float],
    *,
    pcie_gb_per_s: float,
    fp8: float = 0,
    host_gb: int = 64,
) -> Gpu:
    """Return a card in a PCIe slot; `tflops` are those of bfloat16 (0: none) and float32, `mib` is
    the memory that NVML shows.

    Our assumptions: it talks to its neighbours over PCIe, as a bridge joins two cards at most; its
    host has a 10 Gb/s network, and `host_gb` of memory for each card.
    """
    flops = {"bfloat16": tflops[0] * 1e12, "float32": tflops[1] * 1e12, "fp8": fp8 * 1e12}
    return Gpu(
        memory_bytes=mib * 2**20,
        memory_bytes_per_s=gb_per_s * 1e9,
        flops={dtype: rate for dtype, rate in flops.items() if rate},
        link_bytes_per_s=pcie_gb_per_s * 1e9,
        card_bytes_per_s=1.25e9,
        host_link_bytes_per_s=pcie_gb_per_s * 1e9,
        host_memory_bytes=host_gb * 10**9,
    )


GPUS: dict[str, Gpu] = {
    "H100-80GB": H100,
    # NVIDIA H200 data sheet, SXM: 4.8 TB/s HBM3e, else as the H100. DGX H200 user guide: eight
    # ConnectX-7 of 400 Gb/s, 2 TB. NVML: 143,771 MiB.
    "H200-141GB": replace(H100, memory_bytes=143_771 * 2**20, memory_bytes_per_s=4.8e12),
    # The H100 of Meta's Grand Teton hosts (torchtitan,
    # benchmarks/llama3_h100_202412_torchtitan.md): 96 GB HBM2e at 2.4 TB/s, limited to 500 W; of
    # its peak they say that it lies between those of SXM5 and NVL, so here the mean of these. NVML:
    # 97,871 MiB, as others of 96 GB.
    "H100-HBM2E-96GB": replace(
        H100,
        memory_bytes=97_871 * 2**20,
        memory_bytes_per_s=2.4e12,
        flops={"bfloat16": 912e12, "float32": 63.5e12, "fp8": 1825e12},
    ),
    "A100-80GB": A100,
    # Memory sizes and bandwidths of both: digests of StreamRL (arXiv 2504.15930), not compared with
    # the paper itself. 80 GB at 3.35 TB/s. NVLink 400 GB/s is unconfirmed: public pages say only
    # that it is reduced. All else is an H100's, which is the same chip.
    "H800-80GB": replace(H100, link_bytes_per_s=200e9),
    # 96 GB at 4.0 TB/s. Peaks as vendors print them: 148 TFLOP/s bf16, 296 fp8, 44
    # fp32. NVML: 97,871 MiB. NVLink and the host are taken to be an H100's, and attention to be
    # bound by products, as no kernel is.
    "H20-96GB": replace(
        H100,
        memory_bytes=97_871 * 2**20,
        memory_bytes_per_s=4.0e12,
        flops={"bfloat16": 148e12, "float32": 44e12, "fp8": 296e12},
        attention={FLASH2: 0.62},
    ),
    # NVIDIA A100 40GB data sheet, SXM4: 1,555 GB/s HBM2, else as 80 GB. DGX A100 320GB: 1 TB of
    # host memory for 8 GPUs. NVML: 40,960 MiB.
    "A100-40GB": replace(
        A100,
        memory_bytes=40_960 * 2**20,
        memory_bytes_per_s=1.555e12,
        host_memory_bytes=125 * 10**9,
    ),
    # NVIDIA H100 data sheet, H100 NVL: 94 GB HBM3 at 3.9 TB/s, 1,671 TFLOP/s bf16 and 3,341 fp8
    # with sparsity, 60 fp32, PCIe 5 x16 128 GB/s. NVML: 95,830 MiB.
    "H100-NVL-94GB": _card(95_830, 3900, (835.5, 60), fp8=1670.5, pcie_gb_per_s=64, host_gb=250),
    # NVIDIA GH200 Grace Hopper Superchip data sheet: 96 GB HBM3 at 4 TB/s or 144 GB HBM3e at 4.9,
    # an H100's peaks, 900 GB/s NVLink-C2C to 480 GB of LPDDR5X. One GPU per host: what joins GPUs
    # is taken to be a card of 400 Gb/s. NVML: 97,871 MiB; 144 GB less the same share.
    "GH200-96GB": replace(
        H100,
        memory_bytes=97_871 * 2**20,
        memory_bytes_per_s=4e12,
        link_bytes_per_s=50e9,
        host_link_bytes_per_s=450e9,
        host_memory_bytes=480 * 10**9,
    ),
    "GH200-144GB": replace(
        H100,
        memory_bytes=146_806 * 2**20,
        memory_bytes_per_s=4.9e12,
        link_bytes_per_s=50e9,
        host_link_bytes_per_s=450e9,
        host_memory_bytes=480 * 10**9,
    ),
    # NVIDIA DGX B200 data sheet, an eighth of: 1,440 GB at 64 TB/s HBM3e, 72 PFLOP/s fp8 with
    # sparsity, NVLink 5 14.4 TB/s, eight ConnectX-7 of 400 Gb/s, 2 TB of host memory. HGX B200: 36
    # PFLOP/s bf16 with sparsity, 600 TFLOP/s fp32. NVML: 183,359 MiB. The fastest bf16 product:
    # 1,745 TFLOP/s (stas00/ml-engineering). FlashAttention 2 uses none of its instructions: an
    # H100's rate.
    "B200-180GB": replace(
        H100,
        memory_bytes=183_359 * 2**20,
        memory_bytes_per_s=8e12,
        flops={"bfloat16": 2250e12, "float32": 75e12, "fp8": 4500e12},
        link_bytes_per_s=900e9,
        gemm=0.776,
        attention={FLASH2: 0.146},
    ),
    # NVIDIA RTX Blackwell PRO architecture white paper, RTX PRO 6000 Workstation Edition: 1,792
    # GB/s GDDR7, 503.8 TFLOP/s bf16, 1,007.6 fp8, 126 fp32, PCIe 5 x16. The Server and Max-Q
    # editions pass as this kind, with lower peaks. NVML: 97,887 MiB.
    "RTX-PRO-6000-96GB": _card(
        97_887, 1792, (503.8, 126), fp8=1007.6, pcie_gb_per_s=64, host_gb=128
    ),
    # NVIDIA L40S data sheet: 864 GB/s GDDR6, 362 TFLOP/s bf16, 733 fp8, 91.6 fp32, PCIe 4 x16 64
    # GB/s. NVML: 46,068 MiB (ECC on).
    "L40S-48GB": _card(46_068, 864, (362.05, 91.6), fp8=733, pcie_gb_per_s=32),
    # NVIDIA RTX A6000 data sheet: 768 GB/s GDDR6, 309.7 TFLOP/s of tensor cores with sparsity, 38.7
    # fp32, PCIe 4 x16. NVML: 49,140 MiB (ECC off), 46,068 with ECC.
    "RTX-A6000-48GB": _card(46_068, 768, (154.8, 38.7), pcie_gb_per_s=32),
    # NVIDIA RTX Blackwell architecture white paper, GeForce RTX 5090: 1,792 GB/s GDDR7; bf16 and
    # fp8 with float32 sums 209.5 and 419 TFLOP/s, 104.8 fp32, PCIe 5 x16. NVML: 32,607 MiB.
    "RTX-5090-32GB": _card(32_607, 1792, (209.5, 104.8), fp8=419, pcie_gb_per_s=64),
    # NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 1,008 GB/s GDDR6X; bf16 and fp8
    # with float32 sums 165.2 and 330.3 TFLOP/s, 82.6 fp32, PCIe 4 x16. NVML: 24,564 MiB.
    "RTX-4090-24GB": _card(24_564, 1008, (165.2, 82.6), fp8=330.3, pcie_gb_per_s=32),
    # NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090: 936 GB/s GDDR6X, 71
    # TFLOP/s bf16 with float32 sums, 35.6 fp32, PCIe 4 x16. NVML: 24,576 MiB.
    "RTX-3090-24GB": _card(24_576, 936, (71, 35.6), pcie_gb_per_s=32),
    # NVIDIA A10G data sheet (at AWS): 600 GB/s GDDR6, 70 TFLOP/s bf16, 35 fp32, PCIe 4 x16 64
    # GB/s. NVML: 23,028 MiB (ECC on).
    "A10G-24GB": _card(23_028, 600, (70, 35), pcie_gb_per_s=32),
    # NVIDIA T4 data sheet: 320 GB/s GDDR6, 65 TFLOP/s fp16, 8.1 fp32, PCIe 3 x16 32 GB/s. Turing
    # (compute capability 7.5) has no arithmetic in bf16. NVML: 15,360 MiB (ECC on).
    "T4-16GB": _card(15_360, 320, (0, 8.1), pcie_gb_per_s=16),
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


def gpu(name: str, device: str = GPU) -> Gpu:
    """Return the hardware of a rank on this kind of `device`: the GPU of this name (`cluster.gpu`),
    or a CPU's share. For a size only the memory is known. ValueError that lists the names if there
    is no such GPU."""
    if not is_gpu(device):
        return GPUS[CPU]
    known = [each for each in GPUS if each != CPU]
    num_bytes = size_bytes(name)
    if num_bytes:
        return replace(H100, memory_bytes=int(num_bytes), flops={})
    if name not in known:
        wanted = f"be auto, a size such as 24GB, or one of {', '.join(known)}"
        raise ValueError(f"cluster.gpu must {wanted}, got {name!r}")
    return GPUS[name]
