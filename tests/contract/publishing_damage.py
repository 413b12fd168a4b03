"""Transports that damage what they carry, and a stand-in for RDMA."""

import dataclasses
import threading
from multiprocessing.connection import Client, Listener

import torch

from llamarl.publish.reshard import pack


class SocketRdma:
    """protocol.Rdma over a unix socket: the owner of the memory runs a thread that fills it.

    `damage` "flip" changes one bit of the next message, "skip" leaves it out.
    """

    def __init__(self):
        self._memory = {}
        self._listener = None
        self.damage = None

    def register(self, memory):
        if self._listener is None:
            self._listener = Listener(family="AF_UNIX")
            threading.Thread(target=self._accept, daemon=True).start()
        key = len(self._memory)
        self._memory[key] = memory
        return self._listener.address, key

    def write(self, handle, message, timeout_s):
        damage, self.damage = self.damage, None
        if damage == "skip":
            return
        message = message.clone()
        if damage == "flip":
            message[-1] ^= 1
        with Client(handle[0], family="AF_UNIX") as connection:
            connection.send((handle[1], bytes(message.numpy())))
            if not connection.poll(timeout_s):
                raise TimeoutError("no answer")
            connection.recv()

    def forget(self, handle):
        self._memory[handle[1]] = torch.empty(0, dtype=torch.uint8)

    def _accept(self):
        while True:
            with self._listener.accept() as connection:
                key, data = connection.recv()
                self._memory[key].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
                connection.send(None)


class BitFlip:
    """A process group whose next message has one bit changed."""

    def __init__(self, group):
        self._group, self._is_due = group, True
        self.device = group.device

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, memory, rank, tag):
        if self._is_due:
            memory[0] ^= 1
            self._is_due = False
        return self._group.send(memory, rank, tag)


def one_row_further(copy):
    """A copy to the wrong place."""
    return copy._replace(target_offset=copy.target_offset + copy.target_strides[0])


def bent(route, side, bend):
    """A split route for the ranks of a `side`, by_source or by_target, whose copies `bend` has
    changed, all together."""
    copies = [copy for rank in route.packed for copy in route.for_rank(rank).copies]
    return dataclasses.replace(route, packed=getattr(pack(bend(copies)), side))
