"""The gate with other samplers: the bound, what may be taken again, and wrong samples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.gate import Gate
from llamarl.core.errors import TaskError
from llamarl.core.groups import Group
from llamarl.scoring.samplers import ReadyItem, Sample, Sampler, admission, group_complete
from llamarl.trainer.packing import make_batch
from tests.controller.test_gate import ids
from tests.controller.test_gate import make_gate as gate_with
from tests.fakes import stopped


def make_gate(
    sampler: Sampler, max_staleness: int = 1, late: str = "mask", size: int = 2, **more: Any
) -> Gate:
    fields = {"rollouts_per_group": 2, "max_drops_in_row": 10**6, "num_prompts": 7}
    return gate_with(max_staleness, size, late, sampler=sampler, **fields, **more)


def write(group: Group, versions: Sequence[int]) -> None:
    """The rollouts of `group`, one token by each of these versions."""
    spans = [(version, 1) for version in versions]
    for row_id in group.row_ids:
        group.rollouts[row_id] = stopped(row_id, *spans, num_prompt_tokens=3)


async def settle(gate: Gate, groups: list[Group]) -> None:
    for group in groups:
        write(group, [group.min_version])
        await gate.settle(group, (1.0, -1.0))


async def try_to_take(gate: Gate, at_least: int, at_most: int) -> list[Group]:
    """What can be taken at once; nothing if `take` waits."""
    taking = asyncio.create_task(gate.take(at_least, at_most))
    for _ in range(3):
        await asyncio.sleep(0)
    if not taking.done():
        taking.cancel()
        return []
    return taking.result()


def of_any_mind(chosen: random.Random, max_staleness: int) -> Sampler:
    """Takes any of the groups, consumes some of those, and waits at times."""

    def sample(ready: Sequence[ReadyItem], count: int) -> Sample:
        if max_staleness and len(ready) <= count and chosen.random() < 0.3:
            return [], []
        taken = chosen.sample([item.item_id for item in ready], count)
        return taken, [item_id for item_id in taken if chosen.random() < 0.6]

    return sample


@settings(max_examples=60, deadline=None)
@given(
    spare=st.integers(0, 3),
    size=st.integers(1, 4),
    shape=st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 2)]),
    looks_ahead=st.booleans(),
    kind=st.sampled_from(["admission wait", "admission mask", "group_complete wait", "any mask"]),
    seed=st.integers(0, 2**32),
)
def test_with_every_sampler_no_token_is_trained_too_late_and_no_group_is_lost_or_consumed_twice(
    spare: int, size: int, shape: tuple[int, int], looks_ahead: bool, kind: str, seed: int
) -> None:
    chosen = random.Random(seed)
    name, late = kind.split()
    samplers = {"admission": admission, "group_complete": group_complete}
    number, num_passes = (1, 1) if name == "any" else shape
    per_batch = number * num_passes
    max_staleness = per_batch - 1 + spare
    gate = make_gate(
        samplers.get(name) or of_any_mind(chosen, max_staleness),
        max_staleness,
        late,
        size,
        shape={"number": number, "num_passes": num_passes, "looks_ahead": looks_ahead},
    )
    open_, unsettled, consumed, dropped = list[int](), list[Group](), list[int](), list[int]()
    used, prompt_of = set[int](), dict[int, list[int]]()

    async def arrive() -> None:
        """Some groups are admitted, and some of those settle or are dropped, in any order."""
        if len(open_) < gate.capacity:
            new = await asyncio.wait_for(gate.admit(), 1)
            unsettled.extend(new)
            open_.extend(ids(new))
            prompt_of.update(
                (each.group_id, [each.prompt.epoch, each.prompt.prompt_id]) for each in new
            )
        assert len(open_) == gate.num_open == gate.capacity
        for group in chosen.sample(unsettled, len(unsettled)):
            if group.min_version <= gate.version and chosen.random() < 0.5:
                unsettled.remove(group)
                versions = range(group.min_version, gate.version + 1)
                write(group, sorted(chosen.choices(versions, k=3)))
                if chosen.random() < 0.2:
                    await gate.drop(group, "equal_rewards")
                    open_.remove(group.group_id)
                    dropped.append(group.group_id)
                else:
                    await gate.settle(group, (1.0, -1.0))

    async def take(num_missing: int) -> list[Group]:
        taken: list[Group] = []
        for _ in range(1000):
            await arrive()
            missing = num_missing - len(taken)
            taken += await try_to_take(gate, chosen.randint(1, missing), missing)
            if len(taken) == num_missing:
                break
        assert len({*ids(taken)}) == num_missing, "a step is never whole, or has a group twice"
        return taken

    def assert_pending(version: int) -> None:
        """What steps have used is done, if the run ends here, also amid a batch."""
        left = [prompt_of[group_id] for group_id in sorted({*open_} - used)]
        assert gate.state(version)["pending"] == left

    async def scenario() -> None:
        first_pass: dict[int, list[int]] = {}
        ahead: list[int] = []
        for version in range(3 * per_batch + 8):
            batch = await take(size)
            num_before, place = divmod(version % per_batch, number)
            if num_before == 0:
                first_pass[place] = ids(batch)
                if place and looks_ahead:
                    assert ids(batch) == ahead[:size]
                    del ahead[:size]
            assert ids(batch) == first_pass[place]
            assert {*ids(batch)}.isdisjoint(consumed), "trained again after it was consumed"
            if gate.num_ahead:
                ahead = sorted(ids(await take(gate.num_ahead)))
            assert gate.num_ahead == 0 or (looks_ahead and version % per_batch == 0)
            oldest = gate.oldest_version(version)
            rows = make_batch(batch, version, oldest, num_ranks=1, tokens_per_micro_batch=9).rows
            for row, group in zip(rows[::2], batch, strict=True):
                spans = group.rollouts[row.row_id].spans
                trained = [span for span in spans if span.version >= row.oldest_version]
                assert all(version - span.version <= max_staleness for span in trained)
                assert late == "mask" or len(trained) == len(spans), "needs the mask"
                assert late == "mask" or version <= group.step
            kept = {*ids(gate.kept)}
            done = [group_id for group_id in ids(batch) if group_id not in kept]
            is_last = num_before == num_passes - 1
            assert name == "any" or done == (ids(batch) if is_last else [])
            used.update(done if name == "any" else ids(batch))
            assert_pending(version + 1)
            await gate.advance(version + 1)
            consumed.extend(done)
            for group_id in done:
                open_.remove(group_id)
            assert_pending(version + 1)
        assert sorted([*open_, *consumed, *dropped]) == [*range(gate.next_group_id)]

    asyncio.run(scenario())


async def test_group_complete_trains_on_what_settles_first_but_not_on_groups_of_later_steps() -> (
    None
):
    gate = make_gate(group_complete, late="wait")
    groups = await gate.admit()
    await settle(gate, [groups[3], groups[1]])
    assert ids(await gate.take(1, 2)) == [1]
    assert await try_to_take(gate, 1, 1) == [], "group 3 is of the next step"
    await settle(gate, [groups[2]])
    await gate.drop(groups[0], "equal_rewards")
    assert ids(await gate.take(1, 1)) == [2], "it moved up"


async def test_a_group_that_was_not_consumed_keeps_its_slot_and_is_offered_in_the_next_step() -> (
    None
):
    seen: list[list[tuple[int, int]]] = []

    def twice(ready: Sequence[ReadyItem], count: int) -> Sample:
        """Consumes a group when it is taken for the second time."""
        seen.append([(item.item_id, item.times_taken) for item in ready])
        taken = ready[:count]
        return (
            [item.item_id for item in taken],
            [item.item_id for item in taken if item.times_taken == 1],
        )

    gate = make_gate(twice)
    await settle(gate, await gate.admit())
    assert ids(await gate.take(1, 1)) == [0]  # a part
    assert ids(await gate.take(1, 1)) == [1], "no group is in a step twice"
    assert ids(gate.kept) == [0, 1]
    assert len(gate.state(0)["pending"]) == 4  # type: ignore[arg-type]
    admitting = asyncio.create_task(gate.admit())
    await gate.advance(1)
    await asyncio.sleep(0)
    assert not admitting.done(), "no slot is free"
    assert len(gate.state(1)["pending"]) == 4  # type: ignore[arg-type]
    assert ids(await gate.take(2, 2)) == [0, 1]
    assert gate.kept == []
    assert len(gate.state(1)["pending"]) == 4  # type: ignore[arg-type]
    assert len(gate.state(2)["pending"]) == 2  # type: ignore[arg-type]
    await gate.advance(2)
    assert ids(await asyncio.wait_for(admitting, 1)) == [4, 5]
    assert seen[0] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert seen[2] == [(0, 1), (1, 1), (2, 0), (3, 0)]


async def test_a_sampler_may_wait_for_more_to_choose_from_but_not_for_what_cannot_come() -> None:
    def wants_three(ready: Sequence[ReadyItem], count: int) -> Sample:
        newest = [item.item_id for item in ready][-count:]
        return (newest, newest) if len(ready) >= 3 else ([], [])

    gate = make_gate(wants_three)
    groups = await gate.admit()
    await settle(gate, groups[:2])
    assert await try_to_take(gate, 1, 2) == []
    await settle(gate, groups[2:3])
    await asyncio.wait_for(gate.wait_for(2), 1)
    await settle(gate, groups[3:])
    assert ids(await gate.take(2, 2)) == [1, 2], "what `wait_for` promised"
    gate = make_gate(wants_three, max_staleness=0)
    await settle(gate, await gate.admit())
    wrong = r"sample of task\.py returns must take 2 groups once all that may be open are ready"
    with pytest.raises(TaskError, match=wrong + r" \(2\), got none"):
        await gate.take(2, 2)


async def test_a_sampler_that_takes_another_number_of_groups_is_named() -> None:
    gate = make_gate(lambda ready, count: ([ready[0].item_id], []))
    await settle(gate, await gate.admit())
    with pytest.raises(TaskError, match=r"returns must take 2 items or none, got 1"):
        await gate.take(2, 2)


def test_a_sampler_sees_the_sums_of_a_group() -> None:
    seen: list[ReadyItem] = []

    def look(ready: Sequence[ReadyItem], count: int) -> Sample:
        seen.extend(ready)
        return admission(ready, count)

    async def scenario() -> None:
        gate = make_gate(look, size=1)
        group, _ = await gate.admit()
        write(group, [4, 5])
        await gate.settle(group, (0.5, -0.5))
        await gate.take(1, 1)

    asyncio.run(scenario())
    assert seen == [
        ReadyItem(
            item_id=0,
            group_id=0,
            group_size=2,
            num_rollouts=2,
            num_prompt_tokens=6,
            num_tokens=4,
            oldest_version=4,
            advantages=(0.5, -0.5),
        )
    ]
