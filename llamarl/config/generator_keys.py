"""Generator replicas, sampling, and which replica writes which rollouts.

Owns: the fields of `generator`, `sampling` and `dispatch`. Does not own: what an engine does with
them, the rankers (`lengths/`) or the choice (`loop/balance.py`). Invariant: training samples the
model's full distribution; else pi/mu would be wrong even on-policy. Nothing of `dispatch` changes
which rollouts are trained, or in which order.
"""

from dataclasses import dataclass, field

from llamarl.config.check import DAY_S, Section, choice, choice_of, number
from llamarl.device.names import DEVICES, dtype_for, is_gpu


@dataclass(kw_only=True)
class SamplingConfig(Section):
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
    """Longest completion, in tokens."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a completion, besides the tokenizer's end-of-sequence token. One may be a
    special token, such as <|im_end|>."""
    segment_tokens: int = number(0, least=0, most=2**24)
    """Interrupt a rollout after this many new tokens and continue it on any replica; 0 never
    does."""
    replay_lengths: str | None = None
    """JSON file with a list of lengths: rollout after rollout gets exactly that many tokens, so
    that two systems can be timed on one workload. As with answers that end by themselves, only the
    engine knows when. null lets rollouts end by themselves."""

    def check(self) -> None:
        self.require(self.top_k == 0, "top_k", "be 0 in training (pi/mu would be wrong)")
        self.require(self.top_p == 1.0, "top_p", "be 1 in training (pi/mu would be wrong)")


@dataclass(kw_only=True)
class GeneratorConfig(Section):
    """Fields that every engine shares."""

    num_replicas: int = number(1, least=1, most=65536)
    """Independent engines, each in processes of its own. With `pools` it is their sum, and need not
    be given."""
    num_ranks: int = number(1, least=1, most=1024)
    """Tensor-parallel processes of one replica."""
    device: str = choice_of(DEVICES)
    """Where the engine computes: cpu | cuda."""
    max_num_seqs: int = number(64, least=1, most=2**20)
    """Rollouts decoded together per replica."""
    max_model_len: int = number(1024, least=2, most=2**24)
    """Longest prompt plus completion, in tokens; sizes the KV cache."""
    dtype: str = choice("auto", "float32", "bfloat16")
    """Activations, KV cache and unquantised weights: float32 | bfloat16 | auto (bfloat16 on cuda,
    float32 on cpu)."""
    quantization: str = "none"
    """Eight bits for the matrices of the layers: `none` or what the engine offers. The trainer
    quantises its shards as the engine would, so a publish moves and verifies the bytes that decode.
    AIPO takes mu from this quantised sampler."""
    enforce_eager: bool | None = None
    """Launch every operation of a step by itself, without captured graphs (which the embedded
    engine has with one rank) and compilation (vLLM); must be true on cpu, which has no graphs.
    null: true on cpu, false on cuda."""
    kv_after_commit: str = choice("keep", "recompute")
    """What happens to the KV cache of running rollouts when new weights become active: keep |
    recompute (with the new weights)."""
    pools: list[str] = field(default_factory=list)
    """Replicas that differ, as one text of KEY=VALUE per pool: ["num_replicas=2",
    "num_replicas=4 quantization=int8 max_num_seqs=128"]. A pool may set the fields of a replica,
    `engine` (embedded | vllm), `site` (one of cluster.sites; then every pool names one) and `gpu`
    (another kind than cluster.gpu); all else is as in `generator`, and a pool has one replica
    unless it says how many. Requests go to pools by how fast they turn out to be. []: all replicas
    are alike."""
    num_collectors: int = number(0, least=0, most=65536)
    """Processes that collect from the replicas which rollouts stopped, and report them to the
    controller together; use one for hundreds of replicas. 0: the controller asks each replica."""
    max_restarts: int = number(10, least=0, most=10**6)
    """A replica that is lost is started again, while training goes on, but not more often than this
    within an hour: then the run ends. 0: never, the other replicas go on without it. With
    placement=colocated cluster.max_restarts counts instead."""
    elastic: list[int] = field(default_factory=list)
    """[fewest, most] replicas, such as [1, 4]: their number changes by itself between these. One is
    added when generation takes longer than training by at least what one more saves, and one
    removed when training takes longer by at least what one less costs, each after three such steps
    in a row. []: it does not change by itself."""
    heartbeat_s: float = number(30.0, least=0.001, most=DAY_S)
    """Longest time until a replica reports which rollouts have stopped, if any; when all rollouts
    of a prompt have stopped it reports them at once."""

    def check(self) -> None:
        self.dtype = dtype_for(self.device, self.dtype)
        if self.enforce_eager is None:
            self.enforce_eager = not is_gpu(self.device)
        must = "be true with generator.device=cpu"
        self.require(self.enforce_eager or is_gpu(self.device), "enforce_eager", must)
        if not self.elastic:
            return
        self.require(not self.pools, "elastic", "be [] with generator.pools (of which pool?)")
        must = "be [] or [fewest, most] with 1 <= fewest <= most"
        self.require(len(self.elastic) == 2, "elastic", must)
        fewest, most = self.elastic
        self.require(1 <= fewest <= most, "elastic", must)
        must = f"be from {fewest} to {most} with generator.elastic={self.elastic}"
        self.require(fewest <= self.num_replicas <= most, "num_replicas", must)

    def require_quantization(
        self, engine: str, *, on_cpu: tuple[str, ...], on_gpu: tuple[str, ...]
    ) -> None:
        """ValueError unless `engine` has the quantization, which depends on the device."""
        allowed = on_gpu if is_gpu(self.device) else on_cpu
        must = f"be one of {', '.join(allowed)} on {self.device} ({engine})"
        self.require(self.quantization in allowed, "quantization", must)


@dataclass(kw_only=True)
class EmbeddedConfig(GeneratorConfig):
    """The embedded engine. `quantization`: none | int8 (weight-only, CPU) | fp8 (CUDA)."""

    def check(self) -> None:
        GeneratorConfig.check(self)
        kinds = {"on_cpu": ("none", "int8"), "on_gpu": ("none", "fp8")}
        self.require_quantization("embedded engine", **kinds)


@dataclass(kw_only=True)
class VllmConfig(GeneratorConfig):
    """vLLM, in-process, one process per rank. `quantization`: none | fp8_per_channel (CPU) | fp8
    (CUDA)."""

    kv_cache_bytes: int = number(1 << 30, least=1, most=2**44)
    """Memory of the KV cache, per rank."""
    kv_cache_dtype: str = choice("auto", "fp8")
    """Keys and values in generator.dtype (auto), or in eight bits on CUDA (fp8): twice as many fit,
    and a decode step reads half. AIPO takes mu from this sampler."""
    block_size: int = number(32, least=1, most=2**16)
    """Tokens per KV block; whole blocks of a prompt are shared among its rollouts."""

    def check(self) -> None:
        GeneratorConfig.check(self)
        kinds = {"on_cpu": ("none", "fp8_per_channel"), "on_gpu": ("none", "fp8")}
        self.require_quantization("vLLM", **kinds)
        must = "be auto on cpu (vLLM)"
        is_able = self.kv_cache_dtype == "auto" or is_gpu(self.device)
        self.require(is_able, "kv_cache_dtype", must)
        must = f"be bfloat16 with generator.quantization={self.quantization} (vLLM)"
        self.require(self.quantization == "none" or self.dtype == "bfloat16", "dtype", must)
        unit = 16 if is_gpu(self.device) else 32
        must = f"be a multiple of {unit} on {self.device} (vLLM)"
        self.require(self.block_size % unit == 0, "block_size", must)


@dataclass(kw_only=True)
class DispatchConfig(Section):
    """How the length of rollouts that are still to be written is guessed, and used."""

    ranker: str = choice("none", "history", "model", "oracle")
    """Where the expected length of a rollout comes from: none (rollouts start in the order of
    admission) | history (from earlier rollouts of its prompt) | model (from these, and for new
    prompts from a linear model over the prompt's tokens that the run fits) | oracle (the true
    length; only with `sampling.replay_lengths`). With one, the longest rollouts of a step start
    first (`trainer.parts=batch`: all in order of length), and may get replicas of their own."""
    objective: str = choice("max", "sum")
    """What the split of the replicas between long and other rollouts minimises: max (the seconds of
    the side that ends last) | sum (of both sides)."""
    tail_share: float = number(0.2, least=0, most=1)
    """Share of a step's groups, the longest, that start before the others unless `trainer.parts` is
    batch, and may get replicas of their own where replicas are idle when a step begins
    (`staleness.max_staleness=0`); 0: none do."""
