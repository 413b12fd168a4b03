"""The shares of published peaks that real kernels reach: the constants of the forecasts' law, each
with its source.

No constant belongs to one model, layout or measured row; those marked "fitted" are chosen on the
three rows that tools/planner_bench/measurements.yaml marks `fit`, all others are kernel
measurements, counts of bytes, or allowances that say so."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares in (0, 1] of what the hardware could do."""

    gemm: float = 0.84
    """The share of the card's fastest matrix product (`Gpu.gemm`) that the products of a whole pass
    sustain, at real clocks and shapes. Fitted."""
    backward_attention: float = 0.8
    """The rate of attention's backward over its forward. FlashAttention-2 and 3 print 0.75 to
    0.85."""
    decode_attention: float = 0.1
    """The share of a peak that attention reaches in decode steps, whose few queries per key leave
    most of a tile empty. An allowance."""
    elementwise: float = 0.85
    """The share of memory bandwidth where kernels read and write. Azure, copy: H100 2.90 of 3.35
    TB/s, H200 4.01 of 4.8, A100 1.61 of 2.04."""
    read: float = 0.88
    """The share of memory bandwidth where a decode step reads weights and keys. Azure, dot: H100
    3.18 of 3.35 TB/s, A100 1.75 of 2.04, which is a bound. Fitted."""
    link: float = 0.77
    """The share of links within a host, for large messages. Azure, NCCL all-reduce of 8 GB: A100
    232 of 300 GB/s; H100 479 of 450, as its switches add up."""
    card: float = 0.77
    """The share of network cards. An allowance: the links' share."""


LAW = Efficiencies()


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The ratios of measured to forecast times over `num_rows` public measurements: the middle half
    of them lies between the two numbers of `half`, nine of ten between those of `most`."""

    num_rows: int
    half: tuple[float, float]
    most: tuple[float, float]


SPREADS = {
    "trainer": Spread(num_rows=38, half=(0.98, 1.22), most=(0.88, 1.65)),
    "generator": Spread(num_rows=105, half=(0.96, 1.21), most=(0.91, 1.5)),
    "step": Spread(num_rows=4, half=(0.96, 1.58), most=(0.96, 1.58)),
}
"""The spreads over the rows of tools/planner_bench/measurements.yaml, without those that constants
were fitted on and those on kinds of card that are not confirmed. Whole steps are those of another
system, with work that no key describes. A test checks these figures, and the next. No publish is in
that table."""

CONFIRMED = {
    "trainer": (
        "A100-80GB",
        "B200-180GB",
        "H100-80GB",
        "H100-HBM2E-96GB",
        "H200-141GB",
        "RTX-A6000-48GB",
    ),
    "generator": ("A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB"),
}
"""The kinds of card on which half of the rows or more are within a quarter of their forecast."""

GEMM_HALF_SIZE = 450
"""A product of matrices of size n (the geometric mean of a weight's two sides on one rank) reaches
n / (n + this) of the rate of the largest. Azure, square products over the largest: A100 fp16 0.86
at 2,048 and 0.89 at 4,096; H100 fp8 0.73 and 0.88."""

BACKWARD_ATTENTION = 2.5
"""The products in attention's backward over those of its forward: scores are computed again."""

OVERLAP = 0.12
"""The share of a collective's time by which it slows the arithmetic beside it down: NCCL holds 16
of an H100's 132 multiprocessors."""

COLLECTIVE_S = 25e-6
"""NCCL's smallest all-reduce on eight GPUs of a host: Azure, 1 KB at 0.04 GB/s."""
ALL_REDUCE_S = 12e-6
"""An engine's own all-reduce within a host, in a captured graph. An allowance."""
BETWEEN_HOSTS_S = 40e-6
"""The smallest collective between two hosts. An allowance, as the next: each doubling of the hosts
adds a hop."""
HOP_S = 10e-6

LAUNCH_S = 5e-6
"""The time from one kernel's launch to the next one's, in eager mode: a PyTorch operation on one
CPU core."""
CORE_SUM_BYTES_PER_S = 1.5e10
"""The bytes of weights in memory that one CPU core casts, sums and copies per second, as
measured."""
LOOPBACK_BYTES_PER_S = 4e9
"""The bytes per second of gloo's messages between two processes of a host without GPUs."""

BOX_S = 80e-6
"""The time for a box of a parameter that a GPU casts, sums and copies, however small: some 16
launches. `PLACE_S` is the time for one that it only copies, with the calls that find its places."""
PLACE_S = 13e-6
MESSAGE_S = 95e-6
"""The time to start one message and to see its end: a rendezvous and a round trip, and half of the
50 us between two polls with the 50 us of Linux's timer slack. An allowance."""
QUANTISING_BYTES = 40
"""The bytes that one element moves while it is quantised."""
PHASE_S = 10e-3
"""The time of a call from the controller to all ranks and back, with a busy event loop;
`NUM_PHASES` counts the calls of one bucket (prepare, write, verify, commit). An allowance."""
NUM_PHASES = 4

GRAPH_KERNEL_S = 2e-6
"""The time that a kernel costs in a captured graph beyond its work: draining and filling the
GPU."""

EAGER_KERNELS = 40
"""The kernels that one decoder layer launches in a forward pass in eager mode; `FUSED_KERNELS` are
those with torch.compile, or in a captured graph. Our own counts."""
FUSED_KERNELS = 12

ENGINE_STEP_S = 1e-3
"""The time that an engine's own process takes between two decode steps; `ENGINE_ROW_S` is the time
for each row of one."""
ENGINE_ROW_S = 2e-6

STEP_S = 30e-3
"""The time that a trainer's processes take for an optimizer step beside its arithmetic: gradients'
norm over all ranks, launches of many small kernels, learning rate, metrics. An allowance."""

REWARD_S = 5e-3
"""The time of one reward of a mathematical answer on one core."""


@dataclass(frozen=True, kw_only=True)
class Touches:
    """The number of times that a forward pass reads or writes each tensor of a layer, in elements
    of the compute dtype: the residual stream (two norms, two additions), queries and keys
    (rotation), queries, keys and values (copies around attention), the feed-forward's inner width
    (activation, product)."""

    hidden: float
    rotated: float
    copied: float
    inner: float


EAGER = Touches(hidden=42, rotated=15, copied=4, inner=5)
"""Each operation reads and writes. A norm in float32 (widen, square, mean, scale, narrow, weigh)
costs 18 touches, a rotation in float32 15."""
FUSED = Touches(hidden=16, rotated=6, copied=4, inner=4)
"""The touches of a layer that torch.compile has fused: fewer, but not the least there could be."""
ENGINE = Touches(hidden=8, rotated=3, copied=2, inner=3)
"""The touches of kernels written for inference, with quantisation of their results."""
EXPERT_COPIES = 8.0
"""The touches of a token's hidden state for each of its experts: it is brought into their order,
their results are brought back, widened, weighted and summed. An allowance."""
BACKWARD_TOUCHES = 2.0
"""The bytes of a backward pass over those of the forward."""

LOSS_TOUCHES = 24
"""The number of times that log-probs, entropy and their gradient read or write float32 logits,
counted in `model/head.py`."""
SAMPLING_TOUCHES = 10
"""The same number for an engine that scales, normalises and samples with log-probs."""
