"""Cutting routes into messages."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.publish.layout import Copy
from llamarl.publish.transports.messages import Message, cut, in_turns, messages


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(2, 200),
    st.booleans(),
)
def test_messages_carry_every_element_once_and_keep_their_size(shapes, max_bytes, turned) -> None:
    dtype = "bfloat16"
    copies, offset = [], 0
    for shape in shapes:
        strides = torch.empty(shape, device="meta").stride()
        if turned:
            strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
        copies.append(
            Copy(
                name="w", start=(0,) * len(shape), shape=shape, source_rank=0, source_buffer="w",
                source_offset=offset, source_strides=strides, target_rank=0,
                target_offset=offset, target_strides=strides,
                target_dtype=dtype,
            )
        )  # fmt: skip
        offset += math.prod(shape)
    source = torch.arange(offset)
    target = torch.full((offset,), -1)
    for message in messages(copies, max_bytes):
        assert message.num_bytes <= max_bytes
        ends = [0]
        for copy, values in message.each(torch.empty(message.num_bytes, dtype=torch.uint8)):
            long = [dim for dim, extent in enumerate(copy.shape) if extent > 1]
            order = sorted(long, key=copy.target_strides.__getitem__)
            assert order == sorted(long, key=values.stride().__getitem__)
        for copy, begin in message.pieces:
            assert begin >= ends[-1]
            ends.append(begin + 2 * math.prod(copy.shape))
            piece = source.as_strided(copy.shape, copy.source_strides, copy.source_offset)
            place = target.as_strided(copy.shape, copy.target_strides, copy.target_offset)
            assert (place == -1).all()
            place.copy_(piece)
        assert ends[-1] == message.num_bytes
    assert torch.equal(source, target)


def test_a_piece_knows_its_global_index() -> None:
    whole = Copy(
        name="w", start=(3, 5), shape=(4, 6), source_rank=0, source_buffer="w", source_offset=7,
        source_strides=(6, 1), target_rank=1, target_offset=2,
        target_strides=(1, 4), target_dtype="float32",
    )  # fmt: skip
    pieces = list(cut(whole, 4))
    assert [piece.start for piece in pieces[:3]] == [(3, 5), (3, 9), (4, 5)]
    assert pieces[1] == whole._replace(
        start=(3, 9), shape=(1, 2), source_offset=11, target_offset=18
    )


@pytest.mark.parametrize("limit", [1, 23, 24, 1000])
def test_pieces_keep_the_limit(limit) -> None:
    whole = Copy(
        name="w", start=(0, 0), shape=(4, 6), source_rank=0, source_buffer="w", source_offset=0,
        source_strides=(6, 1), target_rank=0, target_offset=0,
        target_strides=(6, 1), target_dtype="float32",
    )  # fmt: skip
    sizes = [math.prod(piece.shape) for piece in cut(whole, limit)]
    assert sum(sizes) == 24
    assert max(sizes) <= limit


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_messages_that_go_one_by_one_at_either_end_all_arrive(data) -> None:
    """Each end begins its next message only when the one before has arrived, as over one
    communicator; a source may end early, in place of the next message to each target."""
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)
    )
    message = Message((), 0)
    sent, received = {}, {}
    for source, row in enumerate(counts):
        to_all = {target: [message] * count for target, count in enumerate(row)}
        turns = [(index, source, target) for target, index, _ in in_turns(to_all)]
        done = turns[: data.draw(st.integers(0, len(turns)))]
        num_sent = Counter(target for _, _, target in done)
        sent[source] = done + [turn for turn in turns if turn[0] == num_sent[turn[2]]]
    for target in range(3):
        from_all = {source: [message] * row[target] for source, row in enumerate(counts)}
        turns = [(index, source, target) for source, index, _ in in_turns(from_all)]
        received[target] = [turn for turn in turns if turn in sent[turn[1]]]
    while left := [queue[0] for queue in sent.values() if queue]:
        ready = [turn for turn in left if received[turn[2]][0] == turn]
        assert ready, f"all wait for each other: {counts}, {sent}"
        for turn in ready:
            sent[turn[1]].pop(0)
            received[turn[2]].pop(0)
    assert not any(received.values())
