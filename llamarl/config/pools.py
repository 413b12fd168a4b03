"""Pools: the replicas of one run that share engine, precision, size limits, device and site.

Owns: what the texts of `generator.pools` mean, and which replica is of which pool. Does not own:
where a rank runs (`rank_assignment.py`) or how fast a pool is (`loop/speeds.py`). Invariant: pure;
a pool's own config is whole and checked; without pools there is one, of the generator's fields.
"""

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from llamarl.config.check import did_you_mean, require, require_choice
from llamarl.config.generator_keys import EmbeddedConfig, GeneratorConfig, VllmConfig

Recipe = TypeVar("Recipe")
"""A whole `Config`, whose module needs this one."""
ENGINES: dict[str, type[GeneratorConfig]] = {"embedded": EmbeddedConfig, "vllm": VllmConfig}
PLACES = ("engine", "site", "gpu")
OF_ALL = ("pools", "num_collectors", "max_restarts", "elastic", "heartbeat_s")
"""Fields of `generator` that belong to the run, not to a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One pool of a run."""

    key: str
    """What an error calls it: generator.pools[1]."""
    generator: GeneratorConfig
    """Of its replicas."""
    replicas: range
    """Their indices."""
    site: str = ""
    """One of `cluster.sites`; "": wherever there is room."""
    gpu: str = ""
    """The kind of their GPUs; "": `cluster.gpu`."""


def pools_of(generator: GeneratorConfig) -> list[Pool]:
    """The pools in the order of their replicas. ValueError, naming the pool, for a mistake."""
    pools: list[Pool] = []
    for number, text in enumerate(generator.pools):
        begin = pools[-1].replicas.stop if pools else 0
        pools.append(_read(f"generator.pools[{number}]", text, generator, begin))
    whole = Pool(key="generator", generator=generator, replicas=range(generator.num_replicas))
    return pools or [whole]


def pool_at(generator: GeneratorConfig, replica: int) -> Pool:
    """The pool of a replica; one beyond those of the recipe is of the last pool."""
    pools = pools_of(generator)
    return pools[number_of(pools, replica)]


def number_of(pools: Sequence[Pool], replica: int) -> int:
    """Which of all pools of a run, as `pools_of` has them, a replica is of."""
    return sum(replica >= pool.replicas.stop for pool in pools[:-1])


def generator_of(generator: GeneratorConfig, replica: int) -> GeneratorConfig:
    """The config of one replica."""
    return pool_at(generator, replica).generator


def alone(config: Recipe, pool: Pool) -> Recipe:
    """The recipe with this pool alone. ValueError if they do not go together."""
    recipe: Any = config
    if not recipe.generator.pools:
        return config
    cluster = replace(recipe.cluster, gpu=pool.gpu or recipe.cluster.gpu)
    with named(pool):
        made: Recipe = replace(recipe, generator=pool.generator, cluster=cluster)
    return made


@contextmanager
def named(pool: Pool) -> Iterator[None]:
    """A ValueError about a field of `generator` is about this pool's."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        if not words.startswith("generator.") or pool.key == "generator":
            raise
        raise ValueError(f"{pool.key}{words.removeprefix('generator')}") from None


def _read(key: str, text: str, base: GeneratorConfig, begin: int) -> Pool:
    """The pool that `text` describes, whose first replica is `begin`."""
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
    values |= {"num_replicas": 1, "heartbeat_s": base.heartbeat_s}
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
