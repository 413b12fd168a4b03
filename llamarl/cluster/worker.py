"""`llamarl worker`: the daemon that serves one host to the controllers of runs.

Owns: the daemon's options, and that it listens only where only the invited can connect. Does not
own: what runs on the host, which a controller decides. Invariant: over tls:// both ends show
certificates; tcp:// needs a word of trust.

The daemon outlives the runs; it serves one controller after the other. When a controller dies, its
processes here are ended; when the daemon dies, so are they.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading

from llamarl.cluster.credentials import SHORT_LIMITS, Address, Credentials, reach
from llamarl.cluster.process import import_path, quiet_stderr

LISTEN_LIMIT_S = 20.0


def main(arguments: list[str]) -> None:
    """Serve until killed. ValueError for options that are wrong, or an address that is taken."""
    options = _parser().parse_args(arguments)
    address = with_port(Address.parse(options.address, "--address"))
    credentials = Credentials(options.ca, options.certificate, options.private_key)
    if address.scheme == "tls":
        credentials.context("--")
        os.environ.update(credentials.environment())
    elif not options.trusted_network:
        raise ValueError(
            f"--address must be tls://, or tcp:// with --trusted-network, got {address}: whoever "
            "reaches it may run code here"
        )
    for name, value in SHORT_LIMITS.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = import_path()  # of this host's processes
    _serve(address, credentials)


def with_port(address: Address) -> Address:
    """The address itself, or for port 0 one with a port that is free."""
    if address.port != 0:
        return address
    with socket.create_server((address.host, 0)) as server:
        return Address(address.scheme, address.host, server.getsockname()[1])


def _serve(address: Address, credentials: Credentials) -> None:
    with quiet_stderr():
        from monarch.actor import start_worker_loop_forever

        lifetime = start_worker_loop_forever(address=str(address), ca="trust_all_connections")
    threading.Thread(target=_announce, args=(address, credentials), daemon=True).start()
    try:
        lifetime.get()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--address must be one to listen on, got {address}: {error}") from error


def _announce(address: Address, credentials: Credentials) -> None:
    """Say that the daemon listens, once it answers us as it would a controller; or end it."""
    try:
        reach(address, credentials, LISTEN_LIMIT_S)
    except ValueError as error:
        sys.stderr.write(f"llamarl: no controller could connect: {error}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.stdout.write(f"llamarl: worker listens on {address}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "llamarl worker", description="Serve this host to the runs of a controller elsewhere."
    )
    parser.add_argument(
        "--address",
        default="tls://127.0.0.1:0",
        help="where to listen, as controllers reach this host; port 0 takes a free one "
        "(default %(default)s)",
    )
    parser.add_argument("--ca", default="", help="PEM file of the authority of both ends")
    parser.add_argument("--certificate", default="", help="PEM file of this host's certificate")
    parser.add_argument("--private-key", default="", help="PEM file of its key")
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="allow a tcp:// address, over which whoever reaches it may run code here",
    )
    return parser
