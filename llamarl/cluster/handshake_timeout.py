"""Closes connections to a worker daemon that do not get through their TLS handshake.

Owns: finding, in the daemon's own process, connections whose TLS handshake cannot be over, and
closing them. Does not own: accepting and the handshake, which Monarch does, without a time limit.
Invariant: nothing is read from a connection; a controller whose connection is closed reconnects.

The kernel shows how many bytes the peer of a connection has sent. A client with a certificate has
sent more than MIN_BYTES when its handshake is over, so a connection with less after
HANDSHAKE_LIMIT_S is closed. A client that sends more and then stops in its handshake looks like a
quiet controller: such connections are closed, the oldest first, before descriptors run out. This
covers the daemon's port, not those of a run's controller.
"""

import os
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

HANDSHAKE_LIMIT_S = 10.0
POLL_S = 1.0
MIN_BYTES = 600  # the client's part of a handshake is longer
MAX_BYTES = 80_000  # no handshake is longer
MAX_DESCRIPTORS = 65536  # of the daemon, if the system allows them
INFO_BYTES = 256
RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info of Linux


def limit_handshakes(port: int) -> None:
    """Watch the connections to `port` of this process in a thread, and raise the process's limit
    of descriptors. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    most = max(soft, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def watch() -> None:
        first_seen: dict[int, float] = {}
        while True:
            with suppress(OSError):  # out of descriptors: some may be free next time
                close_unfinished(port, first_seen, HANDSHAKE_LIMIT_S, most // 2)
            time.sleep(POLL_S)

    threading.Thread(target=watch, name="handshake timeout", daemon=True).start()


def close_unfinished(
    port: int, first_seen: dict[int, float], limit_s: float, max_connections: int
) -> int:
    """Close connections to `port` that are too old for what they sent; how many were closed.

    `first_seen` keeps between calls when each inode was seen first (seconds, monotonic).
    """
    now_s = time.monotonic()
    received: dict[int, int] = {}
    for inode, connection in _connections(port):
        with connection:
            first_seen.setdefault(inode, now_s)
            received[inode] = _num_received(connection)
    for inode in first_seen.keys() - received:
        del first_seen[inode]
    old = sorted(
        (seen_s, inode) for inode, seen_s in first_seen.items() if now_s - seen_s > limit_s
    )
    chosen = {inode for _, inode in old if received[inode] < MIN_BYTES}
    surplus = max(0, len(received) - len(chosen) - max_connections)
    maybe = [inode for _, inode in old if MIN_BYTES <= received[inode] < MAX_BYTES]
    chosen.update(maybe[:surplus])
    for inode, connection in _connections(port) if chosen else ():
        with connection:
            if inode in chosen:
                _close(connection)
    return len(chosen)


def _connections(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Accepted connections to `port` of this process: inode, and a duplicate that the caller
    closes."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no connection
            duplicate = os.dup(int(name))
            try:
                status = os.fstat(duplicate)
                if not stat.S_ISSOCK(status.st_mode):
                    raise OSError
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            if _is_peer(connection, port):
                yield status.st_ino, connection
            else:
                connection.close()


def _is_peer(connection: socket.socket, port: int) -> bool:
    try:
        return (
            connection.family in (socket.AF_INET, socket.AF_INET6)
            and connection.type == socket.SOCK_STREAM
            and connection.getsockname()[1] == port
            and bool(connection.getpeername())  # the listening one has none
        )
    except OSError:
        return False


def _num_received(connection: socket.socket) -> int:
    """Bytes that the peer has sent; MAX_BYTES where the kernel does not say."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    if len(info) < RECEIVED_AT + 8:
        return MAX_BYTES
    received: int = struct.unpack_from("Q", info, RECEIVED_AT)[0]
    return received


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # Monarch sees the end of the stream and closes it
