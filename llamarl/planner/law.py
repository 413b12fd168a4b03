"""The law of the forecasts: the times of a trainer's passes, an engine's steps and a publish.

Every second follows from bytes or arithmetic, a peak of `hardware.py` and a constant of
`efficiency.py`. Kinds of work of one trainer rank add up, for one kernel after the other has the
GPU; only FSDP2's prefetched traffic goes on beside them. In an engine, a product whose reading of
weights and arithmetic take about as long takes longer than either (the root of the sum of their
squares); reading keys comes on top, as attention is a kernel of its own."""

import math
from dataclasses import dataclass, replace
from typing import Any

from llamarl.core.config import Config, EmbeddedConfig, GeneratorConfig, VllmConfig
from llamarl.core.config.generator import alone, pools_of
from llamarl.core.device import hardware
from llamarl.generator.memory import forecast_generator
from llamarl.generator.vllm.limits import kv_item_bytes, kv_tokens
from llamarl.model.adapter_inventory import trained_shapes
from llamarl.model.architecture import Architecture, is_stacked
from llamarl.model.inventory import parameter_shapes
from llamarl.planner import efficiency as law
from llamarl.planner.efficiency import LAW, Touches
from llamarl.planner.publish import forecast_publish, relays
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.workload import make_workload
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.trainer.memory import MASTER_BYTES, lasting_bytes

QUANTIZED_BYTES = 1


def hardware_costs(config: Config, architecture: Architecture) -> Costs:
    """Return the costs of `config` on its GPUs."""
    pools, siblings = pools_of(config.generator), relays(config)[1]
    publish = forecast_publish(config, architecture)
    parts = []
    for pool in pools:
        is_relayed = any(replica in pool.replicas for _, replica in siblings)
        passed = _publish(publish.pool_stages_s[pool.key], 1 + is_relayed)
        times = generator_times(alone(config, pool), architecture)
        parts.append(Costs(**times, **passed))
    return replace(
        parts[0],
        **trainer_costs(config, architecture),
        moves_s=_moves(config, architecture),
        score_row_s=law.REWARD_S,
        pools=tuple(parts) if len(parts) > 1 else (),
    )


def trainer_costs(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of `Costs` for the trainer and the reference on its GPUs."""
    times, trainer = trainer_times(config, architecture), config.trainer
    num_gathers = {"forward": 2, "backward": 1, "step": 0}[trainer.reshard_after]
    hidden_s = num_gathers * times.gather_s + times.reduce_s
    forward_s = times.token_s * times.forward_token_share
    forward_square_s = times.attention_s * times.forward_square_share
    # With adapters the policy is its own reference: one more forward pass in each micro-batch.
    is_own = config.algorithm.has_reference and not config.has_reference_model
    return {
        "token_s": times.token_s + is_own * forward_s,
        "square_s": times.attention_s + is_own * forward_square_s,
        "hidden_s": hidden_s,
        # The first layer's traffic has nothing to go on beside.
        "micro_batch_s": hidden_s / architecture.num_layers + times.latency_s,
        "launch_s": times.launch_s,
        "forward_share": times.forward_token_share,
        "optimizer_s": times.optimizer_s
        + (times.gather_s if trainer.reshard_after == "step" else 0.0),
        "snapshot_s": times.snapshot_s,
        "infer_token_s": forward_s / trainer.num_data_ranks,
        "infer_square_s": forward_square_s / trainer.num_data_ranks,
    }


def _publish(stages_s: dict[str, float], num_rounds: int) -> dict[str, Any]:
    """Return the fields of `Costs` for a publish: a version's way to the first replica of a host,
    from there to the others (in a second round), its check, and its commit in each. Together they
    take as long as its stages."""
    phases_s = stages_s["phases"] / num_rounds
    return {
        "write_s": stages_s["maxima"] + stages_s["transfer"] + phases_s,
        "relay_s": stages_s["relay"] + phases_s if num_rounds > 1 else 0.0,
        "check_s": stages_s["verify"] / num_rounds,
        "commit_s": stages_s["commit"] / num_rounds,
    }


def _moves(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the seconds of moving each kind of memory on or off a shared device, over the link to
    the host."""
    if not config.placement.colocated or config.placement.offload == "none":
        return {}
    gpu = hardware.gpu(config.cluster.planned_gpu, config.trainer.device)
    rate = gpu.host_link_bytes_per_s * LAW.link
    weights_bytes, state_bytes = lasting_bytes(config, architecture)
    kept_bytes = forecast_generator(config, architecture).kept
    return {
        "trainer weights": weights_bytes / rate,
        "trainer state": state_bytes.get("optimizer", 0) / rate,  # gradients are freed
        "generator weights": kept_bytes / rate,
        "generator kv": 0.0,  # nothing runs then, so nothing is kept
    }


# Trainer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of parameters: all of them, those of the layers that a token meets, those of the
    head; all of the experts, and those of experts that a token meets."""

    total: int
    layers: int
    head: int
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainerTimes:
    """The seconds of the slowest trainer rank.

    Per token of its micro-batches: `gemm_s`, `elementwise_s`, `loss_s` (the head's products and
    what reads logits, of response tokens, spread over all), `tensor_s` (tensor parallelism's
    collectives). `attention_s` is per square of a rollout's length. Per micro-batch: `gather_s` and
    `reduce_s` of FSDP2, which go on beside arithmetic, `launch_s` in which one CPU core launches
    its kernels, `latency_s` of collectives that nothing hides. The fields that begin with `forward`
    are the shares of the forward pass.
    """

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
    """Return the numbers of parameters of a model."""
    shapes = parameter_shapes(architecture)
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    layers = sum(n for name, n in counts.items() if ".layers." in name)
    head = architecture.vocab_size * architecture.hidden_size
    experts = sum(n for name, n in counts.items() if is_stacked(name))
    chosen = 0
    if (of := architecture.experts) is not None:
        chosen = experts // of.num_experts * of.num_chosen
    return Sizes(
        total=sum(counts.values()),
        layers=layers - experts + chosen,
        head=head,
        experts=experts,
        chosen=chosen,
    )


def gemm_flops(gpu: hardware.Gpu, dtype: str, architecture: Architecture, num_ranks: int) -> float:
    """Return the multiply-adds times two per second in the products of a layer that `num_ranks`
    ranks share."""
    a = architecture
    queries = a.num_heads * a.head_dim / num_ranks
    keys = max(1.0, a.num_kv_heads / num_ranks) * a.head_dim
    work = [a.hidden_size * side for side in (queries, queries, keys, keys)]
    if (of := a.experts) is None:
        work += [a.hidden_size * a.intermediate_size / num_ranks] * 3
    else:  # one expert's products are small ones
        work += [a.hidden_size * of.intermediate_size / num_ranks] * (3 * of.num_chosen)
    # In proportion: each product's work over its rate.
    seconds = sum(each * (1 + law.GEMM_HALF_SIZE / math.sqrt(each)) for each in work)
    return gpu.flops[dtype] * gpu.gemm * LAW.gemm * sum(work) / seconds


def pair_flops(architecture: Architecture) -> float:
    """Return the arithmetic of attention in a forward pass over a rollout, per square of its
    length: scores and values of all layers, causal, so half of all pairs."""
    a = architecture
    return 2 * a.num_layers * a.num_heads * a.head_dim


def touched_bytes(architecture: Architecture, touches: Touches, item: int) -> float:
    """Return the bytes that a forward pass reads and writes of one token beside its products and
    attention."""
    a = architecture
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    rotated = touches.rotated + (touches.hidden / 2 if a.qk_norm else 0.0)
    elements = touches.hidden * a.hidden_size + rotated * (queries + keys)
    elements += touches.copied * (2 * queries + 2 * keys) + touches.inner * a.active_channels
    if a.experts is not None:  # a token is copied to each of its experts, and their sum is taken
        elements += law.EXPERT_COPIES * a.experts.num_chosen * a.hidden_size
    return a.num_layers * item * elements


def trainer_times(config: Config, architecture: Architecture) -> TrainerTimes:
    """Return the times of the passes of `config`'s trainer."""
    a, trainer, count = architecture, config.trainer, sizes(architecture)
    gpu, tensor = hardware.gpu(config.cluster.planned_gpu, trainer.device), trainer.tensor_parallel
    dtype, item = trainer.compute_dtype, DTYPE_BYTES[trainer.compute_dtype]
    checkpointing, kernels = trainer.activation_checkpointing, config.plan.kernels
    is_fused = kernels == "fused" or (kernels == "auto" and trainer.compile == "inductor")
    num_trained = _num_trained(config, architecture)
    is_frozen = trainer.lora.is_used  # the gradient of a frozen matrix is that of its input alone
    products = (4 if checkpointing == "full" else 3) - is_frozen  # a backward is two
    again = int(checkpointing != "none")
    attention = 1 + law.BACKWARD_ATTENTION / LAW.backward_attention + (checkpointing == "full")
    touches = 1 + law.BACKWARD_TOUCHES + again
    flops, memory = gemm_flops(gpu, dtype, a, tensor), gpu.memory_bytes_per_s * LAW.elementwise
    work = products * count.layers + (products + 1) * num_trained * is_frozen
    gemm_s = 2 * work / tensor / flops
    head_products = 4 - is_frozen
    share = make_workload(config).response_share  # a prompt's tokens have no logits
    head_flops = 2 * head_products * count.head / tensor * share
    head_s = head_flops / (gpu.flops[dtype] * gpu.gemm * LAW.gemm)
    loss_s = head_s + law.LOSS_TOUCHES * 4 * a.vocab_size / tensor * share / memory
    form = law.FUSED if is_fused else law.EAGER
    elementwise_s = touches * touched_bytes(a, form, item) / tensor / memory
    # Sequence parallel: two gathers and two reduce-scatters of the tokens per layer, forward and
    # backward. Full checkpointing repeats those of the forward pass, selective its gathers.
    num_moves = {"none": 8, "selective": 10, "full": 12}[checkpointing]
    moved = num_moves * a.num_layers * a.hidden_size * item * (tensor - 1) / tensor
    tensor_s = moved / bytes_per_s(config, gpu, tensor)
    waits_s = num_moves * a.num_layers * latency_s(config, tensor, law.COLLECTIVE_S)
    if a.experts is not None and trainer.expert_parallel > 1:
        # Tokens go to their experts and back, forward and backward, and again if recomputed.
        ranks, num_trips = trainer.expert_parallel, 6 if checkpointing == "full" else 4
        rows = num_trips * len(a.sparse_layers) * a.experts.num_chosen / tensor
        away = rows * a.hidden_size * item * (ranks - 1) / ranks
        tensor_s += away / bytes_per_s(config, gpu, ranks)
        num_calls = len(a.sparse_layers) * (num_trips + num_trips // 2)  # with those of the counts
        waits_s += num_calls * latency_s(config, ranks, law.COLLECTIVE_S)
    gather_s, reduce_s = _sharding(config, architecture, gpu)
    num_kernels = law.FUSED_KERNELS if is_fused else law.EAGER_KERNELS
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
        launch_s=law.LAUNCH_S * num_kernels * a.num_layers * (3 + again),
        latency_s=waits_s,
        # AdamW reads weights, gradients and both moments, and writes all but the gradients, which
        # their norm reads once more.
        optimizer_s=8 * MASTER_BYTES * local / memory + law.STEP_S,
        snapshot_s=2 * MASTER_BYTES * local / memory,
        forward_token_share=forward_s / (gemm_s + elementwise_s + loss_s + tensor_s),
        forward_square_share=1 / attention,
    )


def _num_trained(config: Config, architecture: Architecture) -> int:
    """Return how many numbers have gradients and moments."""
    shapes = trained_shapes(architecture, config.trainer.lora)
    return sum(math.prod(shape) for shape in shapes.values())


def _attention(config: Config, gpu: hardware.Gpu, dtype: str) -> float:
    return gpu.attention_flops(config.plan.attention, dtype)


def _sharding(config: Config, architecture: Architecture, gpu: hardware.Gpu) -> tuple[float, float]:
    """Return the seconds of gathering all weights once, and of reducing all gradients once, on one
    rank."""
    trainer, count = config.trainer, sizes(architecture)
    shard, tensor = trainer.num_shard_ranks, trainer.tensor_parallel
    rate = bytes_per_s(config, gpu, shard, tensor)
    elements = (count.total - count.experts) / tensor * (shard - 1) / shard
    of_expert = trainer.num_expert_shard_ranks
    elements += count.experts / trainer.expert_parallel * (of_expert - 1) / of_expert
    start_s = architecture.num_layers * latency_s(config, shard, law.COLLECTIVE_S, tensor)
    gather_s = elements * DTYPE_BYTES[trainer.compute_dtype] / rate + start_s
    trained = _num_trained(config, architecture)
    reduce_s = elements * trained / count.total * MASTER_BYTES / rate + start_s
    if trainer.replicate > 1:
        local_bytes = trained / tensor / shard * MASTER_BYTES
        share = 2 * (trainer.replicate - 1) / trainer.replicate
        rate = bytes_per_s(config, gpu, trainer.replicate, shard * tensor)
        reduce_s += share * local_bytes / rate
    return gather_s, reduce_s


# Generator


def generator_bytes(config: Config, architecture: Architecture) -> tuple[float, float]:
    """Return the bytes of weights that one generator rank reads in every decode step, and those of
    all experts, of which it reads the ones that the step's tokens go to."""
    count, generator = sizes(architecture), config.generator
    dtype_bytes = DTYPE_BYTES[generator.dtype]
    layer_bytes = dtype_bytes if generator.quantization == "none" else QUANTIZED_BYTES
    plain = (count.layers - count.chosen) * layer_bytes + count.head * dtype_bytes
    return plain / generator.num_ranks, count.experts * layer_bytes / generator.num_ranks


def kv_bytes(config: Config, architecture: Architecture) -> float:
    """Return the bytes of keys and values of one token on one generator rank."""
    a, generator = architecture, config.generator
    num_heads = max(1.0, a.num_kv_heads / generator.num_ranks)
    item = DTYPE_BYTES[generator.dtype]
    if isinstance(generator, VllmConfig):
        item = kv_item_bytes(generator)
    return 2 * a.num_layers * num_heads * a.head_dim * item


def has_graphs(generator: GeneratorConfig) -> bool:
    """Return whether decode steps are replayed as captured graphs."""
    is_able = not isinstance(generator, EmbeddedConfig) or generator.num_ranks == 1
    return is_able and not generator.enforce_eager


def generator_times(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of `Costs` for a replica."""
    a, generator, count = architecture, config.generator, sizes(architecture)
    num_ranks, dtype = generator.num_ranks, generator.dtype
    gpu = hardware.gpu(config.cluster.planned_gpu, generator.device)
    memory = gpu.memory_bytes_per_s
    is_fp8 = generator.quantization.startswith("fp8") and "fp8" in gpu.flops
    flops = gemm_flops(gpu, "fp8" if is_fp8 else dtype, a, num_ranks)
    layers_s = 2 * count.layers / num_ranks / flops
    head_s = 2 * count.head / num_ranks / (gpu.flops[dtype] * gpu.gemm * LAW.gemm)
    # The residual stream is whole on every rank, all else is cut.
    item = DTYPE_BYTES[dtype]
    touched = touched_bytes(a, law.ENGINE, item) / num_ranks
    touched += a.num_layers * item * law.ENGINE.hidden * a.hidden_size * (1 - 1 / num_ranks)
    elementwise_s = touched / (memory * LAW.elementwise)
    # Logits are gathered, and every rank samples.
    sampling_s = law.SAMPLING_TOUCHES * 4 * a.vocab_size / (memory * LAW.elementwise)
    num_sums = 2 * a.num_layers if num_ranks > 1 else 0
    row_bytes = a.hidden_size * item
    rate = bytes_per_s(config, gpu, num_ranks)
    sums_s = num_sums * 2 * (num_ranks - 1) / num_ranks * row_bytes / rate
    is_graph = has_graphs(generator)
    start_s = law.ALL_REDUCE_S if is_graph else law.COLLECTIVE_S
    step_s = num_sums * latency_s(config, num_ranks, start_s) + law.ENGINE_STEP_S
    if is_graph:
        step_s += a.num_layers * law.FUSED_KERNELS * law.GRAPH_KERNEL_S
    read_bytes, expert_bytes = generator_bytes(config, architecture)
    share = 0.0 if a.experts is None else a.experts.num_chosen / a.experts.num_experts
    kernel = hardware.FLASH3 if isinstance(generator, VllmConfig) else hardware.FLASH2
    return {
        "decode_step_s": step_s,
        "decode_row_s": sums_s + elementwise_s + sampling_s + law.ENGINE_ROW_S,
        "decode_read_s": read_bytes / (memory * LAW.read),
        "decode_experts_s": expert_bytes / (memory * LAW.read),
        "expert_share": share,
        "decode_context_s": math.hypot(
            kv_bytes(config, architecture) / (memory * LAW.read),
            2 * pair_flops(a) / num_ranks / (gpu.flops[dtype] * LAW.decode_attention),
        ),
        "decode_flops_s": layers_s + head_s,
        "decode_launch_s": 0.0 if is_graph else a.num_layers * law.EAGER_KERNELS * law.LAUNCH_S,
        "prefill_call_s": step_s,
        "prefill_token_s": layers_s + sums_s + elementwise_s,
        "prefill_square_s": pair_flops(a) / num_ranks / gpu.attention_flops(kernel, dtype),
        "kv_tokens": kv_tokens(generator, a) if isinstance(generator, VllmConfig) else 0,
    }


# Collectives


def bytes_per_s(config: Config, gpu: hardware.Gpu, num_ranks: int, stride: int = 1) -> float:
    """Return the bytes per second that one rank gets in a collective of `num_ranks` ranks, `stride`
    devices apart.

    Within a host the links carry it. Between hosts the network cards of all the group's ranks on a
    host bring in what comes from others, and the links pass it on.
    """
    num_per_host = _num_per_host(config, stride)
    found = gpu.link_bytes_per_s * LAW.link
    if num_ranks > num_per_host:
        found = min(found, num_per_host * gpu.card_bytes_per_s * LAW.card)
    return found


def latency_s(config: Config, num_ranks: int, within_host_s: float, stride: int = 1) -> float:
    """Return the seconds of the smallest collective: `within_host_s`, or the time of crossing
    hosts."""
    if num_ranks == 1:
        return 0.0
    num_hosts = math.ceil(num_ranks / _num_per_host(config, stride))
    if num_hosts == 1:
        return within_host_s
    return max(within_host_s, law.BETWEEN_HOSTS_S) + law.HOP_S * (
        math.ceil(math.log2(num_hosts)) - 1
    )


def _num_per_host(config: Config, stride: int) -> int:
    """Return how many ranks of the group are on one host."""
    return max(1, config.cluster.num_gpus_per_host // stride)
