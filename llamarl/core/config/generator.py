"""The config of generator replicas, sampling, dispatch, and pools of unlike replicas."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llamarl.core.device.names import DEVICES, dtype_for, is_gpu
from llamarl.core.fields import (
    Section,
    choice,
    choice_of,
    did_you_mean,
    number,
    require,
    require_choice,
)

MAX_KEPT_IDS = 1024  # that are stored with each token


@dataclass(kw_only=True)
class SamplingConfig(Section):
    """The sampling of rollouts."""

    rollouts_per_prompt: int = number(8, least=1, most=65536)
    """Rollouts in a group (n)."""
    temperature: float = number(1.0, least=1e-3, most=100)
    """Softmax temperature of training rollouts; trainer log-probs use the same."""
    top_k: int = number(0, least=0, most=MAX_KEPT_IDS)
    """Draw from the k likeliest tokens only; 0: from all. The ids of those that could be drawn are
    stored with each token, and the trainer's log-probs are renormalised over them."""
    top_p: float = number(1.0, above=0, most=1)
    """Draw from the likeliest of the top_k tokens that have this probability together."""
    min_p: float = number(0.0, least=0, most=0.99)
    """Draw from those of the top_k tokens that are at least this times as likely as the likeliest
    one."""
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
        is_open = self.top_p == 1.0 and self.min_p == 0.0
        must = f"be 1 to {MAX_KEPT_IDS} with top_p or min_p (pi/mu needs the tokens that are kept)"
        self.require(is_open or self.top_k > 0, "top_k", must)


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

    @property
    def is_exact(self) -> bool:
        """Whether the engine rounds nothing to fewer than 32 bits."""
        return self.dtype == "float32" and self.quantization == "none"

    def require_quantization(
        self, engine: str, *, on_cpu: tuple[str, ...], on_gpu: tuple[str, ...]
    ) -> None:
        """Raise ValueError unless `engine` has the quantization, which depends on the device."""
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
    expert_parallel: bool = False
    """Give each rank whole experts of a mixture of experts, instead of a part of every one; on CUDA
    alone."""

    @property
    def is_exact(self) -> bool:
        return super().is_exact and self.kv_cache_dtype == "auto"

    def check(self) -> None:
        GeneratorConfig.check(self)
        kinds = {"on_cpu": ("none", "fp8_per_channel"), "on_gpu": ("none", "fp8")}
        self.require_quantization("vLLM", **kinds)
        must = "be auto on cpu (vLLM)"
        is_able = self.kv_cache_dtype == "auto" or is_gpu(self.device)
        self.require(is_able, "kv_cache_dtype", must)
        must = "be false on cpu (vLLM has no kernel for it there)"
        is_able = not self.expert_parallel or is_gpu(self.device)
        self.require(is_able, "expert_parallel", must)
        must = f"be bfloat16 with generator.quantization={self.quantization} (vLLM)"
        self.require(self.quantization == "none" or self.dtype == "bfloat16", "dtype", must)
        unit = 16 if is_gpu(self.device) else 32
        must = f"be a multiple of {unit} on {self.device} (vLLM)"
        self.require(self.block_size % unit == 0, "block_size", must)


@dataclass(kw_only=True)
class DispatchConfig(Section):
    """The guess at the length of rollouts that are still to be written, and its use."""

    ranker: str = choice("none", "history", "model", "oracle")
    """Where the expected length of a rollout comes from: none (rollouts start in the order of
    admission) | history (from earlier rollouts of its prompt) | model (from these, and for new
    prompts from a linear model over the prompt's tokens that the run fits) | oracle (the true
    length; only with `sampling.replay_lengths`). With one, the longest rollouts of a step start
    first (`trainer.parts=batch`: all in order of length), and may get replicas of their own."""
    tail_share: float = number(0.2, least=0, most=1)
    """Share of a step's groups, the longest, that start before the others unless `trainer.parts` is
    batch, and may get replicas of their own where replicas are idle when a step begins
    (`staleness.max_staleness=0`); 0: none do."""


Recipe = TypeVar("Recipe")
"""The type of a whole `Config`, whose module imports this one."""
ENGINES: dict[str, type[GeneratorConfig]] = {"embedded": EmbeddedConfig, "vllm": VllmConfig}
PLACES = ("engine", "site", "gpu")
OF_ALL = ("pools", "num_collectors", "max_restarts", "elastic")
"""Fields of `generator` that belong to the run, not to a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of alike replicas of a run."""

    key: str
    """The name that errors use, such as generator.pools[1]."""
    generator: GeneratorConfig
    """The config of its replicas."""
    replicas: range
    """The indices of its replicas."""
    site: str = ""
    """One of `cluster.sites`; "": wherever there is room."""
    gpu: str = ""
    """The kind of GPU of its replicas; "": `cluster.gpu`."""


def pools_of(generator: GeneratorConfig) -> list[Pool]:
    """Return the pools in the order of their replicas. ValueError, naming the pool, for a
    mistake."""
    pools: list[Pool] = []
    for index, text in enumerate(generator.pools):
        begin = pools[-1].replicas.stop if pools else 0
        pools.append(_read(f"generator.pools[{index}]", text, generator, begin))
    whole = Pool(key="generator", generator=generator, replicas=range(generator.num_replicas))
    return pools or [whole]


def pool_at(generator: GeneratorConfig, replica: int) -> Pool:
    """Return the pool of a replica; one beyond those of the recipe belongs to the last pool."""
    pools = pools_of(generator)
    return pools[number_of(pools, replica)]


def number_of(pools: Sequence[Pool], replica: int) -> int:
    """Return the place of a replica's pool among all pools of a run, as `pools_of` gives them."""
    return sum(replica >= pool.replicas.stop for pool in pools[:-1])


def generator_of(generator: GeneratorConfig, replica: int) -> GeneratorConfig:
    """Return the config of one replica."""
    return pool_at(generator, replica).generator


def alone(config: Recipe, pool: Pool) -> Recipe:
    """Return the recipe with this pool as its only one. ValueError if they do not go together."""
    recipe: Any = config
    if not recipe.generator.pools:
        return config
    cluster = replace(recipe.cluster, gpu=pool.gpu or recipe.cluster.gpu)
    with named(pool):
        made: Recipe = replace(recipe, generator=pool.generator, cluster=cluster)
    return made


@contextmanager
def named(pool: Pool) -> Iterator[None]:
    """Let a ValueError about a field of `generator` name this pool."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        if not words.startswith("generator.") or pool.key == "generator":
            raise
        raise ValueError(f"{pool.key}{words.removeprefix('generator')}") from None


def _read(key: str, text: str, base: GeneratorConfig, begin: int) -> Pool:
    """Return the pool that `text` describes, whose first replica is `begin`."""
    words = dict(_pairs(key, text))
    own = "vllm" if isinstance(base, VllmConfig) else "embedded"
    engine = words.pop("engine", own)
    require_choice(f"{key}.engine", engine, ENGINES)
    kind = ENGINES[engine]
    places = {name: words.pop(name) for name in PLACES if name in words}
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind)} - {*OF_ALL}
    values: dict[str, Any] = {name: getattr(base, name) for name in fields if hasattr(base, name)}
    if words.get("device", base.device) != base.device:  # what followed from the other one
        values |= {"dtype": "auto", "enforce_eager": None}
    values |= {"num_replicas": 1}
    for name, value in words.items():
        if name not in fields:
            known = [*sorted(fields), *PLACES]
            close = did_you_mean([each for each in known if name in each][:1])
            raise ValueError(f"{key} must set any of {', '.join(known)}, got {name!r}{close}")
        values[name] = _parsed(f"{key}.{name}", value, hints[name])
    pool = Pool(key=key, generator=base, replicas=range(begin, begin), **places)
    with named(pool):
        generator = kind(**values)
    replicas = range(begin, begin + generator.num_replicas)
    return replace(pool, generator=generator, replicas=replicas)


def _pairs(key: str, text: str) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for word in text.split():
        name, equals, value = word.partition("=")
        is_pair = bool(name and equals and value)
        require(is_pair, key, "be KEY=VALUE each, set apart by blanks", word)
        require(name not in seen, key, f"set {name} once", text)
        seen.add(name)
        yield name, value


def _parsed(key: str, text: str, hint: Any) -> object:
    if hint is int or hint is float:
        try:
            return hint(text)
        except ValueError:
            wanted = "a whole number" if hint is int else "a number"
            raise ValueError(f"{key} must be {wanted}, got {text!r}") from None
    if hint is str:
        return text
    require_choice(key, text, ("true", "false"))
    return text == "true"
