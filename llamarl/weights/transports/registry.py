"""The transports by name: what each can do, and the classes at its two ends.

Owns: the table, and the check of a recipe against it. Does not own: any transport. Invariant: free
of torch, because the process that composes recipes reads it; the classes are loaded where they are
used.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarl.config import Config
from llamarl.config.check import require, require_choice
from llamarl.device.driver import has_driver
from llamarl.device.names import CPU, GPU, is_gpu
from llamarl.extensions import load_extensions

if TYPE_CHECKING:
    import torch

    from llamarl.weights.layout.boxes import Route
    from llamarl.weights.transports.ends import Rdma, TransportReceiver, TransportSender
    from llamarl.weights.transports.message_store import MessageStore

WING = "llamarl.weights.transports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One value of `weights.transport`.

    `sender`, and `receiver` unless the source writes straight into the target's memory, are
    "module:Class" and are made with (route, end). `device` is the only
    one whose memory it reaches, None for all. `meets`: the ranks of a route meet at a path that all
    see. `uses_rdma`: its ends are given Monarch's RDMA buffers. `is_inline`: both ends may be in
    one process.
    """

    sender: str
    receiver: str | None = None
    device: str | None = None
    crosses_hosts: bool = False
    meets: bool = False
    uses_rdma: bool = False
    is_inline: bool = False

    @property
    def is_mapped(self) -> bool:
        """The source writes straight into the target's memory, without messages."""
        return self.receiver is None


TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(sender=f"{WING}.mapped:MappedSender", device=CPU, is_inline=True),
    "cuda_ipc": Transport(sender=f"{WING}.mapped:MappedSender", device=GPU),
    "collective": Transport(
        sender=f"{WING}.collective:CollectiveSender",
        receiver=f"{WING}.collective:CollectiveReceiver",
        crosses_hosts=True,
        meets=True,
    ),
    "rdma": Transport(
        sender=f"{WING}.rdma:RdmaSender",
        receiver=f"{WING}.rdma:RdmaReceiver",
        crosses_hosts=True,
        uses_rdma=True,
    ),
}
"""By the name that `weights.transport` selects them by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One rank's end of a route; `timeout_s` limits what waits for the other one. `messages` are
    those that a source rank has packed for several routes."""

    rank: int
    host: str
    device: torch.device
    timeout_s: float
    rdma: Rdma | None = None
    messages: MessageStore | None = None


def make_sender(route: Route, end: End) -> TransportSender:
    """A source rank's end of `route`."""
    sender: TransportSender = pkgutil.resolve_name(TRANSPORTS[route.transport].sender)(route, end)
    return sender


def make_receiver(route: Route, end: End) -> TransportReceiver | None:
    """A target rank's end of `route`, None if it takes no part."""
    receiver = TRANSPORTS[route.transport].receiver
    return None if receiver is None else pkgutil.resolve_name(receiver)(route, end)


def mapped_on(device: str) -> str:
    """The transport that maps memory of this device, within a host."""
    return next(name for name, t in TRANSPORTS.items() if t.is_mapped and t.device == device)


def named(quality: str) -> str:
    """The transports that have it, such as "crosses_hosts", in words."""
    return " or ".join(name for name, each in TRANSPORTS.items() if getattr(each, quality))


def check_transport(config: Config) -> None:
    """ValueError unless cluster and devices are such that the transport can work."""
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
    # So that nobody looks for a transport where no GPU is to be reached.
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
