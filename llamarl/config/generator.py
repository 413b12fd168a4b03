"""Generator replicas and sampling. Invariant: training samples the model's full distribution, for
else pi/mu would be wrong even on-policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.config.check import (
    DAY_S,
    check_fields,
    dtype_for,
    number,
    require,
    require_choice,
)


@dataclass(kw_only=True)
class SamplingConfig:
    """How rollouts are drawn."""

    rollouts_per_prompt: int = number(8, least=1, most=65536)
    """Rollouts in a group (n)."""
    temperature: float = number(1.0, least=1e-3, most=100)
    """Softmax temperature of training rollouts; trainer log-probs use the same."""
    top_k: int = 0
    """Keep only the k likeliest tokens; must be 0 (off) in training."""
    top_p: float = 1.0
    """Keep only the likeliest tokens with this total probability; must be 1 (off) in training."""
    max_tokens: int = number(512, least=1, most=2**24)
    """Longest completion."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a completion, besides the tokenizer's end-of-sequence token."""
    segment_tokens: int = number(0, least=0, most=2**24)
    """Cut a running rollout after this many new tokens and resume it on any replica; 0 never."""
    replay_lengths: str | None = None
    """JSON file with a list of lengths: rollout after rollout writes exactly that many tokens, so
    that two systems can be timed on one workload; None lets rollouts end by themselves."""

    def __post_init__(self) -> None:
        check_fields("sampling", self)
        require(
            self.top_k == 0, "sampling.top_k", "be 0 in training (pi/mu would be wrong)", self.top_k
        )
        require(
            self.top_p == 1.0,
            "sampling.top_p",
            "be 1 in training (pi/mu would be wrong)",
            self.top_p,
        )


@dataclass(kw_only=True)
class GeneratorConfig:
    """Fields that every engine shares."""

    num_replicas: int = number(1, least=1, most=65536)
    """Independent engines, each in processes of its own."""
    num_ranks: int = number(1, least=1, most=1024)
    """Tensor-parallel processes of one replica."""
    device: str = "cpu"
    """Where the engine computes: cpu | cuda."""
    max_num_seqs: int = number(64, least=1, most=2**20)
    """Rollouts decoded together per replica."""
    max_model_len: int = number(1024, least=2, most=2**24)
    """Longest prompt plus completion; sizes the KV cache."""
    dtype: str = "auto"
    """Activations, KV cache and unquantised weights: float32 | bfloat16 | auto (bfloat16 on cuda,
    float32 on cpu)."""
    quantization: str = "none"
    """Weights of the linear layers, quantised in the generator after each publish; `none` or what
    the engine staging handles. AIPO takes mu from this quantised sampler."""
    kv_after_commit: str = "keep"
    """After new weights: keep the KV cache, or recompute it."""
    num_collectors: int = number(0, least=0, most=65536)
    """Processes that ask the replicas which rollouts stopped, and tell the controller of all
    together; worth one where there are hundreds of replicas. 0: the controller asks each."""
    heartbeat_s: float = number(30.0, least=0.001, most=DAY_S)
    """Longest time until a replica tells which rollouts have stopped, or that none has; of a prompt
    whose rollouts have all stopped it tells at once."""

    def __post_init__(self) -> None:
        check_fields("generator", self)
        require_choice("generator.device", self.device, ("cpu", "cuda"))
        self.dtype = dtype_for(self.device, self.dtype)
        require_choice("generator.dtype", self.dtype, ("float32", "bfloat16"))
        require_choice("generator.kv_after_commit", self.kv_after_commit, ("keep", "recompute"))


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

    kv_cache_bytes: int = number(1 << 30, least=1, most=2**44)
    """Memory of the KV cache, per rank."""
    block_size: int = number(32, least=1, most=2**16)
    """Tokens per KV block; whole blocks of a prompt are shared among its rollouts."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs and compilation; must be true on cpu, which has no graphs. null: true
    on cpu, false on cuda."""

    def __post_init__(self) -> None:
        GeneratorConfig.__post_init__(self)
        allowed = {"cpu": ("none", "fp8_per_channel"), "cuda": ("none", "fp8")}[self.device]
        require(
            self.quantization in allowed,
            "generator.quantization",
            f"be one of {', '.join(allowed)} on {self.device} (vLLM)",
            self.quantization,
        )
        if self.enforce_eager is None:
            self.enforce_eager = self.device == "cpu"
        require(
            self.enforce_eager or self.device == "cuda",
            "generator.enforce_eager",
            "be true with generator.device=cpu (vLLM)",
            self.enforce_eager,
        )
        require(
            self.quantization == "none" or self.dtype == "bfloat16",
            "generator.dtype",
            f"be bfloat16 with generator.quantization={self.quantization} (vLLM)",
            self.dtype,
        )
        unit = 32 if self.device == "cpu" else 16
        require(
            self.block_size % unit == 0,
            "generator.block_size",
            f"be a multiple of {unit} on {self.device} (vLLM)",
            self.block_size,
        )
