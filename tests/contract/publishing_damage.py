"""Transports that damage what they carry."""

import dataclasses

from llamarl.publish.reshard import pack


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
