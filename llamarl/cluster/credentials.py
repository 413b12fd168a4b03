"""Mutual TLS between the controller and the worker daemons.

Both ends show a certificate, and each checks that the other's is signed by the authority `ca` and
names the address that it connected to. A client that can connect can run code: protect the keys.
This module loads neither Monarch nor torch."""

import asyncio
import logging
import math
import os
import socket
import ssl
import time
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit

from llamarl.core.config import ClusterConfig
from llamarl.core.fields import require

log = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S = 5.0
RECONNECT_S = 1.0
SHORT_LIMITS = {  # after which Monarch itself notices a host's death; by default never
    # Of a message with a long row too, over a link that weights share: a call whose message took
    # longer would never end.
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "30s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "15s",
    # After which a daemon ends the processes of a controller that died:
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "15s",
}
KEEPALIVE_S, KEEPALIVE_COUNT = 3, 3  # a host is gone after 12 s, at another site later
TICKET_LIMIT_S = 0.5  # a server that accepts our certificate sends a session ticket


@dataclass(frozen=True)
class Address:
    """The address of a worker daemon: tls://host:port, or tcp://host:port on a trusted network."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str) -> Self:
        """Return the address in `text`; ValueError, naming the option `field`, if it is none."""
        url = urlsplit(text)
        try:
            port = url.port
        except ValueError:
            port = None
        if url.scheme not in ("tls", "tcp") or not url.hostname or port is None or url.path:
            raise ValueError(f"{field} must be like tls://10.0.0.7:24440, got {text!r}")
        return cls(url.scheme, url.hostname, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True)
class Credentials:
    """The paths of PEM files: the authority, this end's certificate and its key."""

    ca: str
    certificate: str
    private_key: str

    def context(self, prefix: str) -> ssl.SSLContext:
        """Return the context for a handshake. ValueError, naming the option with `prefix`, for
        unusable files."""
        for name, path in asdict(self).items():
            try:
                open(path, "rb").close()
            except OSError as error:
                spelled = f"{prefix}{name}".replace("_", "-" if prefix == "--" else "_")
                raise ValueError(
                    f"{spelled} must be a PEM file for tls:// addresses, got {path!r} "
                    f"({error.strerror})"
                ) from error
        try:
            context = ssl.create_default_context(cafile=self.ca)
            # Without a password given, openssl would ask for one on the terminal; Monarch cannot.
            context.load_cert_chain(self.certificate, self.private_key, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"certificate and private key must belong together, as PEM without a password, got "
                f"{self.certificate} and {self.private_key} (with authority {self.ca}): "
                f"{error.reason or error}"
            ) from error
        return context

    def environment(self) -> dict[str, str]:
        """Return the variables that Monarch reads the credentials from."""
        return {
            "HYPERACTOR_TLS_CA": os.path.abspath(self.ca),
            "HYPERACTOR_TLS_CERT": os.path.abspath(self.certificate),
            "HYPERACTOR_TLS_KEY": os.path.abspath(self.private_key),
        }

    def refusal(self, name: str) -> str:
        """Return why ends that trust `ca` would refuse our certificate for this name or address; ""
        if they would accept it. A handshake in memory between two ends of our own shows it."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self.certificate, self.private_key)
        there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            self.context("cluster.").wrap_bio(here, there, server_hostname=name),
            server.wrap_bio(there, here, server_side=True),
        ]
        for end in ends * 2:  # hello, answer, finish
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(getattr(error, "verify_message", "") or error.reason or error)
        return ""


def configure_monarch(config: ClusterConfig) -> None:
    """Set the variables that Monarch reads when it is imported, for a run on cluster.hosts.

    ValueError if the hosts' addresses do not fit the other fields.
    """
    if not config.hosts:
        must = f"name the {config.size} hosts of cluster.num_hosts (`llamarl launch` fills them in)"
        return require(config.size == 1, "cluster.hosts", must, [])
    addresses = [Address.parse(text, "cluster.hosts") for text in config.hosts]
    is_each_once = len(set(addresses)) == len(addresses)
    require(is_each_once, "cluster.hosts", "all differ", config.hosts)
    schemes = {address.scheme for address in addresses}
    is_safe = schemes == {"tls"} or (config.trusts_network and schemes == {"tcp"})
    must = "all be tls://, or tcp:// with cluster.trusts_network=true"
    require(is_safe, "cluster.hosts", must, config.hosts)
    num_local = sum(map(is_loopback, addresses))
    must = "be addresses at which the hosts reach each other (not loopback beside others)"
    require(num_local in (0, len(addresses)), "cluster.hosts", must, config.hosts)
    must = f"name the interface of tensor traffic, which is not encrypted, to {addresses[0]}"
    require(bool(config.data_interface or num_local), "cluster.data_interface", must, "")
    if schemes == {"tls"}:
        credentials = Credentials(config.ca, config.certificate, config.private_key)
        credentials.context("cluster.")
        os.environ.update(credentials.environment())
    for name, value in monarch_limits(config).items():
        os.environ.setdefault(name, value)


def monarch_limits(config: ClusterConfig) -> dict[str, str]:
    """Return the variables that say when Monarch gives up a process. Between sites a link may be
    broken for `cluster.liveness_timeout_s`."""
    if len({*config.sites}) < 2:
        return SHORT_LIMITS
    return dict.fromkeys(SHORT_LIMITS, f"{math.ceil(config.liveness_timeout_s)}s")


def is_loopback(address: Address) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def check_distinct(addresses: list[Address]) -> None:
    """Raise ValueError if two of these addresses, which all resolve, belong to the same daemon."""
    found: dict[object, Address] = {}
    for address in addresses:
        place = socket.getaddrinfo(address.host, address.port, proto=socket.IPPROTO_TCP)[0][4][:2]
        other = found.setdefault(place, address)
        if other is not address:
            raise ValueError(
                f"cluster.hosts must all differ, got {other} and {address}, which are one"
            )


def controller_name(own_address: str, address: Address, credentials: Credentials) -> str:
    """Return the name under which the daemon at `address` connects to this machine, whose IP
    address it knows as `own_address`.

    Our certificate must be for it, and it must resolve to `own_address`, where Monarch then
    listens. ValueError if there is no such name.
    """
    labels = socket.getfqdn().split(".")
    names = [".".join(labels[:end]) for end in range(1, len(labels) + 1)]
    for name in [own_address, socket.gethostname(), *names]:
        if resolves(name, own_address) and (
            address.scheme == "tcp" or not credentials.refusal(name)
        ):
            return name
    raise ValueError(
        f"cluster.certificate must be for this machine as {address} reaches it, {own_address} or "
        f"a name of it that resolves to that here, got {credentials.certificate}, which is for "
        f"others"
    )


def resolves(name: str, own_address: str) -> bool:
    """Return whether `name` resolves, on this machine, to the IP address `own_address`."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return False
    return found[0][4][0] == own_address


def connect(address: Address, credentials: Credentials, patience_s: float = 0.0) -> str:
    """Connect to a daemon, over TLS where the address says so, and disconnect.

    Returns this end's IP address, at which the daemon's host can reach it. ValueError with the
    reason if the daemon does not answer, or one end does not accept the other's certificate. Tries
    again for `patience_s`, as the daemon may still be starting.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return _connect(address, credentials)
        except ValueError as error:
            if isinstance(error.__cause__, ssl.SSLError) or time.monotonic() > deadline_s:
                raise
            time.sleep(RECONNECT_S)


def _connect(address: Address, credentials: Credentials) -> str:
    context = credentials.context("cluster.") if address.scheme == "tls" else None
    try:
        with socket.create_connection((address.host, address.port), HANDSHAKE_LIMIT_S) as plain:
            if context is not None:
                with context.wrap_socket(plain, server_hostname=address.host) as secured:
                    _wait_for_ticket(secured)
                    return secured.getsockname()[0]
            return plain.getsockname()[0]
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"cluster.ca must have signed the certificate of every host for its address, got "
            f"{credentials.ca} and {address}: {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            raise ValueError(
                f"cluster.hosts must name running `llamarl worker` daemons, got something at "
                f"{address} that does not speak TLS"
            ) from error
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise ValueError(
            f"cluster.certificate must be one that every host accepts, got "
            f"{credentials.certificate} refused by {address}: {reason}"
        ) from error
    except OSError as error:
        raise ValueError(
            f"cluster.hosts must name running `llamarl worker` daemons, got no answer from "
            f"{address} ({reason_of(error)}; waited at most {HANDSHAKE_LIMIT_S:g} s)"
        ) from error


async def wait_disconnected(
    address: Address, credentials: Credentials, patience_s: float = 0.0
) -> str:
    """Keep a connection to a daemon open; return the reason once it cannot be opened again.

    A daemon that ends closes it at once; keepalive notices the end of its host or the network, if
    that lasts for 12 s and for `patience_s`.
    """
    count = max(KEEPALIVE_COUNT, math.ceil(patience_s / KEEPALIVE_S) - 1)
    keepalive = {"TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": count}
    context = credentials.context("cluster.") if address.scheme == "tls" else None
    while True:
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=context
                )
        except OSError as error:
            return "its worker daemon does not answer: " + reason_of(error)
        try:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in keepalive.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            await reader.read()
        except OSError as error:
            log.debug("%s: %s", address, error)
        finally:
            writer.transport.abort()
        await asyncio.sleep(RECONNECT_S)


def reason_of(error: OSError) -> str:
    """Return the operating system's words for an error."""
    return "timed out" if isinstance(error, TimeoutError) else str(error.strerror or error)


def _wait_for_ticket(secured: ssl.SSLSocket) -> None:
    """Wait until the server has accepted our certificate: with TLS 1.3 our side of the handshake
    ends before the server has checked it."""
    secured.settimeout(TICKET_LIMIT_S)
    try:
        if not secured.recv(1):
            raise ssl.SSLError(1, "the host closed the connection")
    except TimeoutError:
        return
