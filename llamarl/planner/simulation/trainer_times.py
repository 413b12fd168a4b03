"""What a model's passes take: arithmetic, attention, bytes, collectives.

Owns: seconds per token, per square of a length and per micro-batch of one trainer rank, each kind
apart. Does not own: constants (`efficiency.py`, `hardware.py`) or how passes follow each other
(`executors.py`). Invariant: kinds add up, for one kernel after the other has the GPU; only FSDP2's
prefetched traffic goes on beside them.
"""

import math
from dataclasses import dataclass

from llamarl.core.config import Config
from llamarl.model.adapter_inventory import trained_shapes
from llamarl.model.architecture import Architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.planner import hardware
from llamarl.planner.efficiency import (
    BACKWARD_ATTENTION,
    BACKWARD_TOUCHES,
    COLLECTIVE_S,
    EAGER,
    EAGER_KERNELS,
    FUSED,
    FUSED_KERNELS,
    GEMM_HALF_SIZE,
    LAUNCH_S,
    LAW,
    LOSS_TOUCHES,
    STEP_S,
    Touches,
)
from llamarl.planner.memory.trainer_memory import MASTER_BYTES
from llamarl.planner.simulation import collectives
from llamarl.planner.simulation.workload import make_workload
from llamarl.publish.reshard import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters: all of them, those of the layers' matrices, those of the head's."""

    total: int
    layers: int
    head: int


@dataclass(frozen=True, kw_only=True)
class TrainerTimes:
    """Of the slowest trainer rank, in seconds.

    Per token of its micro-batches: `gemm_s`, `elementwise_s`, `loss_s` (the head's products and
    what reads logits, of response tokens, spread over all), `tensor_s` (tensor parallelism's
    collectives). `attention_s` is per square of a rollout's length. Per micro-batch: `gather_s` and
    `reduce_s` of FSDP2, which go on beside arithmetic, `launch_s` in which one CPU core launches
    its kernels, `latency_s` of collectives that nothing hides. `forward` are the shares of the
    forward pass."""

    gemm_s: float
    elementwise_s: float
    loss_s: float
    tensor_s: float
    attention_s: float
    gather_s: float
    reduce_s: float
    launch_s: float
    latency_s: float
    optimizer_s: float
    snapshot_s: float
    forward_token_share: float
    forward_square_share: float

    @property
    def token_s(self) -> float:
        return self.gemm_s + self.elementwise_s + self.loss_s + self.tensor_s


def sizes(architecture: Architecture) -> Sizes:
    """Numbers of parameters."""
    shapes = parameter_shapes(architecture)
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    layers = sum(n for name, n in counts.items() if ".layers." in name)
    head = architecture.vocab_size * architecture.hidden_size
    return Sizes(total=sum(counts.values()), layers=layers, head=head)


def gemm_flops(gpu: hardware.Gpu, dtype: str, architecture: Architecture, num_ranks: int) -> float:
    """Multiply-adds times two per second in the products of a layer that `num_ranks` ranks
    share."""
    a = architecture
    queries = a.num_heads * a.head_dim / num_ranks
    keys = max(1.0, a.num_kv_heads / num_ranks) * a.head_dim
    inner = a.intermediate_size / num_ranks
    work = [a.hidden_size * side for side in (queries, queries, keys, keys, inner, inner, inner)]
    # In proportion: each product's work over its rate.
    seconds = sum(each * (1 + GEMM_HALF_SIZE / math.sqrt(each)) for each in work)
    return gpu.flops[dtype] * gpu.gemm * LAW.gemm * sum(work) / seconds


def pair_flops(architecture: Architecture) -> float:
    """Arithmetic of attention in a forward pass over a rollout, by the square of its length:
    scores and values of all layers, causal, so half of all pairs."""
    a = architecture
    return 2 * a.num_layers * a.num_heads * a.head_dim


def touched_bytes(architecture: Architecture, touches: Touches, item: int) -> float:
    """Bytes that a forward pass reads and writes of one token beside its products and attention."""
    a = architecture
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    rotated = touches.rotated + (touches.hidden / 2 if a.qk_norm else 0.0)
    elements = touches.hidden * a.hidden_size + rotated * (queries + keys)
    elements += touches.copied * (2 * queries + 2 * keys) + touches.inner * a.intermediate_size
    return a.num_layers * item * elements


def trainer_times(config: Config, architecture: Architecture) -> TrainerTimes:
    """What passes of `config`'s trainer take."""
    a, trainer, count = architecture, config.trainer, sizes(architecture)
    gpu, tensor = hardware.gpu(config.cluster.planned_gpu, trainer.device), trainer.tensor_parallel
    dtype, item = trainer.compute_dtype, DTYPE_BYTES[trainer.compute_dtype]
    checkpointing, kernels = trainer.activation_checkpointing, config.plan.kernels
    is_fused = kernels == "fused" or (kernels == "auto" and trainer.compile == "inductor")
    num_trained = _num_trained(config, architecture)
    is_frozen = trainer.lora.is_used  # the gradient of a frozen matrix is that of its input alone
    products = (4 if checkpointing == "full" else 3) - is_frozen  # a backward is two
    again = int(checkpointing != "none")
    attention = 1 + BACKWARD_ATTENTION / LAW.backward_attention + (checkpointing == "full")
    touches = 1 + BACKWARD_TOUCHES + again
    flops, memory = gemm_flops(gpu, dtype, a, tensor), gpu.memory_bytes_per_s * LAW.elementwise
    work = products * count.layers + (products + 1) * num_trained * is_frozen
    gemm_s = 2 * work / tensor / flops
    head_products = 4 - is_frozen
    share = make_workload(config).response_share  # a prompt's tokens have no logits
    head_flops = 2 * head_products * count.head / tensor * share
    head_s = head_flops / (gpu.flops[dtype] * gpu.gemm * LAW.gemm)
    loss_s = head_s + LOSS_TOUCHES * 4 * a.vocab_size / tensor * share / memory
    form = FUSED if is_fused else EAGER
    elementwise_s = touches * touched_bytes(a, form, item) / tensor / memory
    # Sequence parallel: two gathers and two reduce-scatters of the tokens per layer, forward and
    # backward. Full checkpointing repeats those of the forward pass, selective its gathers.
    num_moves = {"none": 8, "selective": 10, "full": 12}[checkpointing]
    moved = num_moves * a.num_layers * a.hidden_size * item * (tensor - 1) / tensor
    tensor_s = moved / collectives.rate(config, gpu, tensor)
    latency_s = num_moves * a.num_layers * collectives.latency_s(config, tensor, COLLECTIVE_S)
    gather_s, reduce_s = _sharding(config, architecture, gpu)
    num_kernels = FUSED_KERNELS if is_fused else EAGER_KERNELS
    local = num_trained / (trainer.num_shard_ranks * tensor)
    forward_s = gemm_s / products + tensor_s / 3 + elementwise_s / touches + head_s / head_products
    return TrainerTimes(
        gemm_s=gemm_s,
        elementwise_s=elementwise_s,
        loss_s=loss_s,
        tensor_s=tensor_s,
        attention_s=attention * pair_flops(a) / tensor / _attention(config, gpu, dtype),
        gather_s=gather_s,
        reduce_s=reduce_s,
        launch_s=LAUNCH_S * num_kernels * a.num_layers * (3 + again),
        latency_s=latency_s,
        # AdamW reads weights, gradients and both moments, and writes all but the gradients, which
        # their norm reads once more.
        optimizer_s=8 * MASTER_BYTES * local / memory + STEP_S,
        snapshot_s=2 * MASTER_BYTES * local / memory,
        forward_token_share=forward_s / (gemm_s + elementwise_s + loss_s + tensor_s),
        forward_square_share=1 / attention,
    )


def _num_trained(config: Config, architecture: Architecture) -> int:
    """Numbers that have gradients and moments."""
    shapes = trained_shapes(architecture, config.trainer.lora)
    return sum(math.prod(shape) for shape in shapes.values())


def _attention(config: Config, gpu: hardware.Gpu, dtype: str) -> float:
    return gpu.attention_flops(config.plan.attention, dtype)


def _sharding(config: Config, architecture: Architecture, gpu: hardware.Gpu) -> tuple[float, float]:
    """(seconds of gathering all weights once, of reducing all gradients once) on one rank."""
    trainer, count = config.trainer, sizes(architecture)
    shard, tensor = trainer.num_shard_ranks, trainer.tensor_parallel
    rate = collectives.rate(config, gpu, shard, tensor)
    elements = count.total / tensor * (shard - 1) / shard
    start_s = architecture.num_layers * collectives.latency_s(config, shard, COLLECTIVE_S, tensor)
    gather_s = elements * DTYPE_BYTES[trainer.compute_dtype] / rate + start_s
    trained = _num_trained(config, architecture)
    reduce_s = elements * trained / count.total * MASTER_BYTES / rate + start_s
    if trainer.replicate > 1:
        local_bytes = trained / tensor / shard * MASTER_BYTES
        share = 2 * (trainer.replicate - 1) / trainer.replicate
        rate = collectives.rate(config, gpu, trainer.replicate, shard * tensor)
        reduce_s += share * local_bytes / rate
    return gather_s, reduce_s
