"""Generator replicas and sampling. Invariant: training samples the model's full distribution, for
else pi/mu would be wrong even on-policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.config.check import require, require_choice


@dataclass(kw_only=True)
class SamplingConfig:
    """How rollouts are drawn."""

    rollouts_per_prompt: int = 8
    """Rollouts in a group (n)."""
    temperature: float = 1.0
    """Softmax temperature of training rollouts; trainer log-probs use the same."""
    top_k: int = 0
    """Keep only the k likeliest tokens; must be 0 (off) in training."""
    top_p: float = 1.0
    """Keep only the likeliest tokens with this total probability; must be 1 (off) in training."""
    max_tokens: int = 512
    """Longest completion."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a completion, besides the tokenizer's end-of-sequence token."""
    segment_tokens: int = 0
    """Cut a running rollout after this many new tokens and resume it on any replica; 0 never."""
    replay_lengths: str | None = None
    """JSON file with a list of lengths: rollout after rollout writes exactly that many tokens, so
    that two systems can be timed on one workload; None lets rollouts end by themselves."""

    def __post_init__(self) -> None:
        require(
            self.rollouts_per_prompt >= 1,
            "sampling.rollouts_per_prompt",
            "be at least 1",
            self.rollouts_per_prompt,
        )
        require(
            self.temperature > 0, "sampling.temperature", "be above 0 in training", self.temperature
        )
        require(
            self.top_k == 0, "sampling.top_k", "be 0 in training (pi/mu would be wrong)", self.top_k
        )
        require(
            self.top_p == 1.0,
            "sampling.top_p",
            "be 1 in training (pi/mu would be wrong)",
            self.top_p,
        )
        require(self.max_tokens >= 1, "sampling.max_tokens", "be at least 1", self.max_tokens)
        require(
            self.segment_tokens >= 0,
            "sampling.segment_tokens",
            "be at least 0",
            self.segment_tokens,
        )


@dataclass(kw_only=True)
class GeneratorConfig:
    """Fields that every engine shares."""

    num_replicas: int = 1
    """Independent engines, each in processes of its own."""
    num_ranks: int = 1
    """Tensor-parallel processes of one replica."""
    device: str = "cpu"
    """Where the engine computes: cpu | cuda."""
    max_running: int = 64
    """Rollouts decoded together per replica."""
    max_context_tokens: int = 1024
    """Longest prompt plus completion; sizes the KV cache."""
    dtype: str = "float32"
    """Activations, KV cache and unquantised weights: float32 | bfloat16."""
    quantization: str = "none"
    """Weights of the linear layers, quantised in the generator after each publish; `none` or what
    the engine offers. AIPO takes mu from this quantised sampler."""
    kv_after_flip: str = "keep"
    """After new weights: keep the KV cache, or recompute it."""
    num_collectors: int = 0
    """Processes that ask the replicas which rollouts stopped, and tell the controller of all
    together; worth one where there are hundreds of replicas. 0: the controller asks each."""
    heartbeat_s: float = 30.0
    """Longest time until a replica tells which rollouts have stopped, or that none has; of a prompt
    whose rollouts have all stopped it tells at once."""

    def __post_init__(self) -> None:
        require(
            self.num_replicas >= 1, "generator.num_replicas", "be at least 1", self.num_replicas
        )
        require(self.num_ranks >= 1, "generator.num_ranks", "be at least 1", self.num_ranks)
        require_choice("generator.device", self.device, ("cpu", "cuda"))
        require(self.max_running >= 1, "generator.max_running", "be at least 1", self.max_running)
        require(
            self.max_context_tokens >= 2,
            "generator.max_context_tokens",
            "be at least 2",
            self.max_context_tokens,
        )
        require_choice("generator.dtype", self.dtype, ("float32", "bfloat16"))
        require_choice("generator.kv_after_flip", self.kv_after_flip, ("keep", "recompute"))
        require(
            self.num_collectors >= 0,
            "generator.num_collectors",
            "be at least 0",
            self.num_collectors,
        )
        require(self.heartbeat_s > 0, "generator.heartbeat_s", "be above 0", self.heartbeat_s)


@dataclass(kw_only=True)
class EmbeddedConfig(GeneratorConfig):
    """The embedded engine. `quantization`: none | int8 (weight-only, CPU) | fp8 (CUDA)."""

    cuda_graphs: bool = True
    """On CUDA with one rank, replay each decode step as a captured graph; else without effect."""

    def __post_init__(self) -> None:
        GeneratorConfig.__post_init__(self)
        allowed = {"cpu": ("none", "int8"), "cuda": ("none", "fp8")}[self.device]
        require(
            self.quantization in allowed,
            "generator.quantization",
            f"be one of {', '.join(allowed)} on {self.device} (embedded engine)",
            self.quantization,
        )


@dataclass(kw_only=True)
class VllmConfig(GeneratorConfig):
    """vLLM, in-process, one process per rank. `quantization`: none | fp8_per_channel (CPU) | fp8
    (CUDA)."""

    kv_cache_bytes: int = 1 << 30
    """Memory of the KV cache, per rank."""
    block_size: int = 32
    """Tokens per KV block; whole blocks of a prompt are shared among its rollouts."""
    enforce_eager: bool = True
    """Run without CUDA graphs and compilation; on CPU neither helps."""

    def __post_init__(self) -> None:
        GeneratorConfig.__post_init__(self)
        allowed = {"cpu": ("none", "fp8_per_channel"), "cuda": ("none", "fp8")}[self.device]
        require(
            self.quantization in allowed,
            "generator.quantization",
            f"be one of {', '.join(allowed)} on {self.device} (vLLM)",
            self.quantization,
        )
        require(
            self.quantization == "none" or self.dtype == "bfloat16",
            "generator.dtype",
            f"be bfloat16 with generator.quantization={self.quantization} (vLLM)",
            self.dtype,
        )
        require(
            self.kv_cache_bytes >= 1,
            "generator.kv_cache_bytes",
            "be at least 1",
            self.kv_cache_bytes,
        )
        unit = 32 if self.device == "cpu" else 16
        require(
            self.block_size >= 1 and self.block_size % unit == 0,
            "generator.block_size",
            f"be a multiple of {unit} on {self.device} (vLLM)",
            self.block_size,
        )
