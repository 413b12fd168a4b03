"""Stretches of decode steps, against the same decoded step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.scheduler import QueuedRequest
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.slots import Slot, Slots

COSTS = Costs(decode_step_s=1e-3, decode_row_s=1e-4, decode_context_s=1e-5)
PROMPT_TOKENS = 3


def make_slots(lengths: list[int]) -> Slots:
    slots = Slots(len(lengths), COSTS)
    for row_id, length in enumerate(lengths):
        request = Request(
            row_id=row_id,
            prompt_ids=(0,) * PROMPT_TOKENS,
            sampling=Sampling(max_tokens=100),
            seed=row_id,
        )
        slot = Slot(QueuedRequest(request=request), number=row_id, start=0)
        slot.total = length
        slots.add(slot)
    return slots


def decode(lengths: list[int], num_steps: int) -> tuple[float, int, list[int]]:
    """Step by step: seconds, tokens cached of those that still run, and who has ended."""
    seconds = 0.0
    for step in range(num_steps):
        running = [length for length in lengths if length > step]
        seconds += COSTS.decode_s(len(running), len(running) * (PROMPT_TOKENS - 1 + step))
    running = [length for length in lengths if length > num_steps]
    context = len(running) * (PROMPT_TOKENS - 1 + num_steps)
    return seconds, context, [i for i, length in enumerate(lengths) if length <= num_steps]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_a_stretch_takes_what_its_steps_take(lengths: list[int], data: st.DataObject) -> None:
    slots = make_slots(lengths)
    last = data.draw(st.sampled_from(range(len(lengths))))
    pieces = slots.plan(lambda slot, num_left: slot.request.row_id == last)
    assert (slots.steps, len(slots)) == (0, len(lengths))
    assert pieces[-1].steps == lengths[last]
    for piece in pieces:
        assert piece.done_s == pytest.approx(decode(lengths, piece.steps)[0])
    ended = [slot.request.row_id for slot in slots.advance(pieces[-1].steps)]
    assert ended == sorted(ended, key=lambda i: (lengths[i], i))
    _, context, known = decode(lengths, pieces[-1].steps)
    assert (slots.context, sorted(ended)) == (context, known)


@settings(deadline=None)
@given(LENGTHS, st.floats(0, 1))
def test_a_stretch_is_cut_at_the_end_of_the_step_at_work(lengths: list[int], part: float) -> None:
    slots = make_slots(lengths)
    pieces = slots.plan(lambda slot, num_left: num_left == 0)
    now_s = part * pieces[-1].done_s
    done = [piece for piece in pieces[:-1] if piece.done_s <= now_s]
    if done:
        list(slots.advance(done[-1].steps))
    cut = slots.cut(done[-1].done_s if done else 0.0, now_s, pieces[len(done)])
    assert cut.done_s == pytest.approx(decode(lengths, cut.steps)[0])
    assert now_s <= cut.done_s + 1e-9
    assert decode(lengths, cut.steps - 1)[0] <= now_s + 1e-9


def test_what_is_taken_out_leaves_the_cache() -> None:
    slots = make_slots([5, 9, 2])
    assert [slot.request.row_id for slot in slots.advance(3)] == [2]
    assert [slot.request.row_id for slot in slots.remove({0, 2})] == [0]
    assert (len(slots), slots.context) == (1, PROMPT_TOKENS - 1 + 3)
