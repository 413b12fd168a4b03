"""The transports by name, and the ends of the routes over them."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarl.core.config import Config
from llamarl.core.device.names import CPU, GPU, has_driver, is_gpu
from llamarl.core.extensions import load_extensions
from llamarl.core.fields import require, require_choice

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
