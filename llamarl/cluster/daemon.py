"""`llamarl worker`: the daemon that serves one host to the controllers of runs.

The daemon outlives the runs and serves one controller after the other. When a controller or the
daemon dies, the controller's processes on the host are ended. Over tls:// both ends show
certificates; tcp:// needs --trusted-network."""

import argparse
import os
import socket
import sys
from ipaddress import ip_address
from typing import NoReturn

from llamarl.cluster.credentials import SHORT_LIMITS, Address, Credentials, connect, reason_of
from llamarl.cluster.os_process import import_path, quiet_stderr
from llamarl.cluster.peer_check import private_sockets, refuse_other_users

LISTEN_LIMIT_S = 20.0


def main(arguments: list[str]) -> None:
    """Serve until killed. ValueError for wrong options or an address in use."""
    options = _parser().parse_args(arguments)
    address = with_port(Address.parse(options.address, "--address"))
    credentials = Credentials(options.ca, options.certificate, options.private_key)
    if address.scheme == "tls":
        credentials.context("--")
        if reason := credentials.refusal(address.host):
            raise ValueError(
                f"--certificate must be signed by --ca for the host of --address, got "
                f"{credentials.certificate} for {address.host}: {reason}"
            )
        os.environ.update(credentials.environment())
    elif not options.trusted_network:
        raise ValueError(
            f"--address must be tls://, or tcp:// with --trusted-network, got {address}: every "
            "client that reaches it can run code here"
        )
    for name, value in SHORT_LIMITS.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = import_path()  # of this host's processes
    _serve(address, credentials)


def with_port(address: Address) -> Address:
    """Return the address; with port 0 replaced by a free port.

    ValueError unless it is an address of this host, with a port that is not in use.
    """
    try:
        family, *_, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if ip_address(place[0]).is_unspecified:
            raise ValueError(
                f"--address must be the one at which controllers reach this host, got {address}"
            )
        with socket.create_server(place[:2], family=family) as server:
            return Address(address.scheme, address.host, server.getsockname()[1])
    except OSError as error:
        raise ValueError(
            f"--address must be one to listen on, got {address}: {reason_of(error)}"
        ) from error


def _serve(address: Address, credentials: Credentials) -> None:
    """Listen, and say so once the daemon answers this process as it would a controller."""
    with quiet_stderr(), private_sockets():
        from monarch.actor import start_worker_loop_forever

        refuse_other_users()
        lifetime = start_worker_loop_forever(address=str(address), ca="trust_all_connections")
        try:
            connect(address, credentials, LISTEN_LIMIT_S)
            refusal = ""
        except ValueError as error:
            refusal = str(error)
    if refusal:
        sys.stderr.write(f"llamarl: no controller could connect: {refusal}\n")
        sys.stderr.flush()
        os._exit(2)  # Monarch's threads would keep the process alive
    sys.stdout.write(f"llamarl: worker listens on {address}\n")
    sys.stdout.flush()
    lifetime.get()


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"worker: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
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
        help="allow a tcp:// address, over which every client can run code here",
    )
    return parser
