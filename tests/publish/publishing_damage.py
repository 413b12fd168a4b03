"""Transports that damage what they carry."""

import dataclasses

from llamarl.publish.reshard import split
from tests.publish.publishing_layouts import MESSAGE_BYTES


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
    changed, all together; in several messages."""
    copies = [copy for rank in route.packed for copy in route.for_rank(rank).copies]
    in_short = dataclasses.replace(route.route, message_bytes=MESSAGE_BYTES)
    ends = split(bend(copies), source="trainer", replica=0, transport="")
    return dataclasses.replace(ends[side == "by_target"], route=in_short)
