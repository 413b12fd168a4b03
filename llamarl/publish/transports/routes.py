"""The transports by name, and the routes that bring copies from a source to a replica."""

from __future__ import annotations

import os
import pkgutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarl.core.config import Config
from llamarl.core.device.names import CPU, GPU, has_driver, is_gpu
from llamarl.core.extensions import load_extensions
from llamarl.core.fields import require, require_choice
from llamarl.publish.layout import RankLayout
from llamarl.publish.reshard import (
    PackedCopies,
    SplitRoute,
    WeightKind,
    assign_sources,
    pack,
    plan,
    split,
)

if TYPE_CHECKING:
    import torch

    from llamarl.publish.layout import Route
    from llamarl.publish.transports.messages import MessageStore, TransportReceiver, TransportSender


PACKAGE = "llamarl.publish.transports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One value of `weights.transport`.

    `sender`, and `receiver` unless the source writes straight into the target's memory, are
    "module:Class" and are made with (route, end). `device` is the only one whose memory it reaches,
    None for all. `meets`: the ranks of a route meet at a path that all see. `is_inline`: both ends
    may be in one process."""

    sender: str
    receiver: str | None = None
    device: str | None = None
    crosses_hosts: bool = False
    meets: bool = False
    is_inline: bool = False

    @property
    def is_mapped(self) -> bool:
        """True if the source writes straight into the target's memory, without messages."""
        return self.receiver is None


TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(sender=f"{PACKAGE}.mapped:MappedSender", device=CPU, is_inline=True),
    "cuda_ipc": Transport(sender=f"{PACKAGE}.mapped:MappedSender", device=GPU),
    "collective": Transport(
        sender=f"{PACKAGE}.collective:CollectiveSender",
        receiver=f"{PACKAGE}.collective:CollectiveReceiver",
        crosses_hosts=True,
        meets=True,
    ),
}
"""The transports by their names in `weights.transport`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One rank's end of a route; `timeout_s` limits each wait for the other end. `messages` are
    those that a source rank has packed for several routes."""

    rank: int
    host: str
    device: torch.device
    timeout_s: float
    messages: MessageStore | None = None


def make_sender(route: Route, end: End) -> TransportSender:
    """Make a source rank's end of `route`."""
    sender: TransportSender = pkgutil.resolve_name(TRANSPORTS[route.transport].sender)(route, end)
    return sender


def make_receiver(route: Route, end: End) -> TransportReceiver | None:
    """Make a target rank's end of `route`; None if the transport has no receiver."""
    receiver = TRANSPORTS[route.transport].receiver
    return None if receiver is None else pkgutil.resolve_name(receiver)(route, end)


def mapped_on(device: str) -> str:
    """Return the name of the transport that maps memory of this device, within a host."""
    return next(name for name, t in TRANSPORTS.items() if t.is_mapped and t.device == device)


def named(quality: str) -> str:
    """Return in words the transports that have a quality, such as "crosses_hosts"."""
    return " or ".join(name for name, each in TRANSPORTS.items() if getattr(each, quality))


def check_transport(config: Config) -> None:
    """Raise ValueError unless cluster and devices are such that the transport can work."""
    name, num_hosts = config.weights.transport, config.cluster.size
    require_choice("weights.transport", name, TRANSPORTS)
    transport = TRANSPORTS[name]
    config.require(
        transport.is_inline or config.cluster.backend != "inline",
        "weights.transport",
        f"be {named('is_inline')} with cluster.backend=inline (others need two processes)",
    )
    config.require(
        transport.crosses_hosts or num_hosts == 1,
        "weights.transport",
        f"be {named('crosses_hosts')} on {num_hosts} hosts (the others share memory)",
    )
    devices = (config.generator.device, config.trainer.device)
    can_map = config.cluster.backend != "inline"
    others = f"; use weights={mapped_on(GPU)} or weights=collective" * can_map
    # The error says so, lest anybody look for a transport where there is no GPU.
    has_gpu = has_driver() or bool(config.cluster.hosts)
    here = "" if has_gpu else "; this machine has no GPU, so a run here has device=cpu"
    require(
        transport.device != GPU or all(map(is_gpu, devices)),
        "generator.device and trainer.device",
        f"be {GPU} with weights.transport={name}",
        " and ".join(devices),
    )
    config.require(
        transport.device != CPU or devices[0] == CPU or config.weights.staging == "host",
        "generator.device",
        f"be cpu with weights.transport={name} (which reaches a GPU only with "
        f"weights.staging=host{others}{here})",
    )


load_extensions("llamarl.transports")


class Routes:
    """Makes routes for one run; `rendezvous_folder` is created when a route needs it. `far_sites`
    are as in `assign_sources`: only the trainer sends to another site."""

    def __init__(
        self,
        transport: str,
        *,
        rendezvous_folder: str,
        kind_of: Callable[[int], WeightKind],
        far_sites: Mapping[str, str],
    ) -> None:
        self._transport, self._rendezvous_folder = transport, rendezvous_folder
        self._kind_of, self._far_sites = kind_of, far_sites
        self._planned: dict[tuple[bool, WeightKind], tuple[object, PackedCopies]] = {}

    def is_far(self, target: list[RankLayout]) -> bool:
        """Return whether a replica is at another site than the trainer."""
        return target[0].host in self._far_sites

    def sources(self, targets: Mapping[int, list[RankLayout]]) -> dict[int, int | None]:
        """Return replica -> the replica that feeds it, None for the trainer; see
        `assign_sources`."""
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
        """Return the route to `replica`, for the ranks of either end; a relay is a route from
        another replica.

        Raises ValueError if the layouts do not fit each other or the transport."""
        num_hosts = len(_hosts([*source_layout, *target]))
        kind = self._kind_of(replica)
        is_within = is_relay and num_hosts == 1
        name = mapped_on(kind.device) if is_within else self._transport
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
            source=source,
            replica=replica,
            transport=name,
            rendezvous=rendezvous,
            is_slow=not is_relay and self.is_far(target),
        )


def _hosts(layouts: list[RankLayout]) -> list[str]:
    return sorted({layout.host for layout in layouts})
