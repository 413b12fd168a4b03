"""Connections whose handshake never ends, with real sockets in this process."""

import socket
import sys
import time
from contextlib import ExitStack

import pytest

from llamarl.cluster.handshake_timeout import MAX_BYTES, MIN_BYTES, close_unfinished

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")


class Crowd:
    """A server in this process, and clients that have sent some bytes and wait."""

    def __init__(self, stack):
        self._stack = stack
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._server.getsockname()[1]
        self._first_seen = {}

    def join(self, num_clients, num_bytes):
        return [self._join(num_bytes) for _ in range(num_clients)]

    def look(self, limit_s=0.0, max_connections=10_000):
        time.sleep(0.002)  # so that all are older than no time at all
        return close_unfinished(self.port, self._first_seen, limit_s, max_connections)

    def _join(self, num_bytes):
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        accepted, _ = self._server.accept()
        self._stack.enter_context(accepted)
        client.sendall(b"x" * num_bytes)
        left = num_bytes
        while left:
            left -= len(accepted.recv(left))
        client.setblocking(False)
        return client


def is_closed(client):
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def crowd():
    with ExitStack() as stack:
        yield Crowd(stack)


def test_dozens_of_silent_connections_are_closed_and_the_others_stay(crowd):
    silent, stuck = crowd.join(40, 0), crowd.join(20, MIN_BYTES - 1)
    speaking = crowd.join(5, MIN_BYTES)
    assert crowd.look() == 0, "they have just come"
    assert crowd.look(limit_s=60.0) == 0
    assert not any(map(is_closed, silent))
    assert crowd.look() == 60
    assert all(map(is_closed, silent + stuck))
    assert not any(map(is_closed, speaking))
    assert crowd.join(1, 1), "the server listens on"


def test_too_many_that_may_be_in_a_handshake_are_closed_the_oldest_first(crowd):
    old = crowd.join(15, MIN_BYTES)
    crowd.look()
    busy, young = crowd.join(3, MAX_BYTES), crowd.join(15, MIN_BYTES)
    crowd.look()
    assert crowd.look(max_connections=33) == 0
    assert crowd.look(max_connections=13) == 20
    assert all(map(is_closed, old))
    assert sum(map(is_closed, young)) == 5
    assert not any(map(is_closed, busy))


def test_connections_of_other_ports_are_left_alone(crowd):
    with ExitStack() as stack:
        other = Crowd(stack)
        (client,) = other.join(1, 0)
        crowd.look()
        assert crowd.look() == 0
        assert not is_closed(client)
