"""Routes: which transport brings which copies from a source to a replica.

Owns: the choice of transport, the check of hosts and buckets, rendezvous paths. Does not own: which
source feeds which replica (`kinds.py`), copies (`reshard.py`). Invariant: shared memory and
CUDA IPC never leave a host, and no two routes meet at the same path.
"""

import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

from llamarl.config import WeightsConfig
from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.layout.kinds import WeightKind, assign_sources
from llamarl.weights.layout.reshard import plan
from llamarl.weights.layout.split_route import PackedCopies, SplitRoute, pack, split
from llamarl.weights.transports.registry import TRANSPORTS, mapped_on, named


class Routes:
    """Makes routes for one run; `rendezvous_folder` is created when a route needs it. `far_sites`
    are as in `assign_sources`: only the trainer sends to another site."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        rendezvous_folder: str,
        kind_of: Callable[[int], WeightKind],
        far_sites: Mapping[str, str],
    ) -> None:
        self._config, self._rendezvous_folder = config, rendezvous_folder
        self._kind_of, self._far_sites = kind_of, far_sites
        self._planned: dict[tuple[bool, WeightKind], tuple[object, PackedCopies]] = {}

    def is_far(self, target: list[RankLayout]) -> bool:
        """Whether a replica is at another site than the trainer."""
        return target[0].host in self._far_sites

    def sources(self, targets: Mapping[int, list[RankLayout]]) -> dict[int, int | None]:
        """Replica -> the replica that feeds it, None for the trainer; see `assign_sources`."""
        return assign_sources(targets, self._far_sites, self._kind_of)

    def make(
        self,
        source: str,
        source_layout: list[RankLayout],
        replica: int,
        target: list[RankLayout],
        *,
        is_relay: bool,
    ) -> tuple[SplitRoute, SplitRoute]:
        """The route to `replica`, for the ranks of either end; a relay is one from another replica.

        ValueError if the layouts do not fit each other or the transport.
        """
        num_hosts = len(_hosts([*source_layout, *target]))
        kind = self._kind_of(replica)
        is_within = is_relay and num_hosts == 1
        name = mapped_on(kind.device) if is_within else self._config.transport
        transport = TRANSPORTS[name]
        if not transport.crosses_hosts and num_hosts > 1:
            raise ValueError(
                f"weights.transport must be {named('crosses_hosts')} between hosts, got {name} "
                f"from {source} on {', '.join(_hosts(source_layout))} to generator {replica} on "
                f"{', '.join(_hosts(target))}"
            )
        boxes = [[(r.rank, r.parameters) for r in ranks] for ranks in (source_layout, target)]
        planned, copies = self._planned.get((is_relay, kind), (None, PackedCopies({}, {})))
        if planned != boxes:  # replicas of a kind mostly look alike, on whichever hosts they are
            copies = pack(plan(source_layout, target))
            self._planned[is_relay, kind] = boxes, copies
        rendezvous = ""
        if transport.meets:
            os.makedirs(self._rendezvous_folder, exist_ok=True)
            meeting = f"{source}-generator-{replica}-{uuid.uuid4().hex}"
            rendezvous = os.path.join(self._rendezvous_folder, meeting)
        return split(
            copies,
            target[0].buckets,
            source=source,
            replica=replica,
            transport=name,
            rendezvous=rendezvous,
            bucket_bytes=self._config.bucket_bytes,
            is_slow=not is_relay and self.is_far(target),
        )


def buckets_of(replica: int, target: list[RankLayout]) -> tuple[tuple[str, ...], ...]:
    """The buckets of a replica; ValueError unless its ranks agree and each parameter is in one."""
    buckets = target[0].buckets if target else ()
    for layout in target:
        if layout.buckets != buckets:
            raise ValueError(
                f"buckets must be equal on all ranks of generator {replica}, got others on rank "
                f"{layout.rank} than on rank {target[0].rank}"
            )
    num_buckets = Counter(chain.from_iterable(buckets))
    held = {name for layout in target for name in layout.parameters}
    for name in sorted(held | num_buckets.keys()):
        if num_buckets[name] != 1 or name not in held:
            raise ValueError(
                f"each parameter of generator {replica} must be in exactly one bucket, got {name} "
                f"in {num_buckets[name]}" + ("" if name in held else ", which no rank holds")
            )
    return buckets


def _hosts(layouts: list[RankLayout]) -> list[str]:
    return sorted({layout.host for layout in layouts})
