"""Which replicas hold equal bytes, so that one may pass a version on to the other, and which does.

Owns: the kinds of weights, and which source feeds which replica. Invariant: a replica of another
kind may have fewer bits, or memory that cannot be mapped; each byte leaves the trainer once per
host of its site, and once per other site; where replicas differ in kind, once for each kind.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b
            -> head of the site of hosts c and d -> the other replicas of host c
                                                 -> head of host d -> the others of host d

A head is the replica of its host or site that joined first of those that are left, so when it
leaves the next one succeeds it. A replica over several hosts is a host of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llamarl.config import GeneratorConfig
from llamarl.config.pools import generator_of
from llamarl.weights.layout.boxes import RankLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """`device`, cpu or cuda, is where the weights are; `form` is all else that replicas of a kind
    have in common: engine, dtype, quantisation, ranks."""

    device: str
    form: tuple[str, ...] = ()


def weight_kind(generator: GeneratorConfig, replica: int) -> WeightKind:
    """Of one replica of a run with this `generator`."""
    own = generator_of(generator, replica)
    form = type(own).__name__, own.dtype, own.quantization, str(own.num_ranks)
    return WeightKind(device=own.device, form=form)


def assign_sources(
    layouts: Mapping[int, list[RankLayout]],
    far_sites: Mapping[str, str],
    kind_of: Callable[[int], WeightKind | None] = lambda replica: None,
) -> dict[int, int | None]:
    """Replica -> the replica that feeds it, None for the trainer.

    `layouts` are those of each replica's ranks, the replicas in the order they joined; `far_sites`
    host -> site, of hosts at other sites than the trainer's. A replica is fed by another of its own
    kind alone: a narrower one has fewer bits.
    """
    sources: dict[int, int | None] = {}
    heads: dict[tuple[str, WeightKind | None], int] = {}  # by host
    site_heads: dict[tuple[str, WeightKind | None], int] = {}
    for replica, ranks in layouts.items():
        hosts, kind = {layout.host for layout in ranks}, kind_of(replica)
        site = far_sites.get(ranks[0].host)
        head = heads.setdefault((hosts.pop(), kind), replica) if len(hosts) == 1 else replica
        if head == replica and site is not None:
            head = site_heads.setdefault((site, kind), replica)
        sources[replica] = None if head == replica else head
    return sources
