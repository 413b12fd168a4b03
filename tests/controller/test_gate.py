"""The gate: how many groups may be open, in which order they are trained, how a run ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from llamarl.controller.gate import Gate
from llamarl.core.groups import Group
from llamarl.core.records import Prompt
from llamarl.metrics.span import Spans
from llamarl.prompts.stream import PromptStream
from llamarl.scoring.samplers import ReadyItem, Sample
from llamarl.trainer.packing import MiniBatches
from tests.fakes import stopped

PROMPTS = [Prompt(prompt_id=i, text=str(i), token_ids=(i,)) for i in range(1, 8)]


def make_gate(
    max_staleness: int = 1,
    groups_per_step: int = 2,
    late: str = "wait",
    max_drops_in_row: int = 4,
    num_prompts: int = 100,
    prompts: PromptStream | None = None,
    version: int = 0,
    shape: dict[str, Any] | None = None,
    **fields: Any,
) -> Gate:
    prompts = prompts or make_prompts()
    shape = {"groups_per_step": groups_per_step, "first_version": version} | (shape or {})
    prompts.num_prompts = num_prompts
    return Gate(
        max_staleness=max_staleness,
        steps=MiniBatches(**shape),
        late=late,
        max_drops_in_row=max_drops_in_row,
        prompts=prompts,
        spans=Spans("controller", None),
        plan_units=lambda num_groups: [None] * num_groups,
        has_room=has_room,
        **({"rollouts_per_group": 3} | fields),
    )


async def has_room() -> bool:
    return True


def make_prompts(
    state: dict[str, list[list[int]]] | None = None, position: int = 0
) -> PromptStream:
    open_prompts = [*(state or {}).get("pending", []), *(state or {}).get("backlog", [])]
    first = [(epoch, number) for epoch, number in open_prompts]
    return PromptStream(PROMPTS, seed=3, shuffle=True, position=position, first=first)


async def must_wait(call: object) -> None:
    """The call is still waiting after the event loop had time to go on with it."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.005)  # type: ignore[arg-type]


def ids(groups: list[Group]) -> list[int]:
    return [group.group_id for group in groups]


async def settle(gate: Gate, groups: list[Group]) -> None:
    for group in groups:
        await gate.settle(group, ())


async def test_s_plus_one_steps_of_groups_are_admitted_and_the_next_waits_for_a_version() -> None:
    gate = make_gate(max_staleness=1, groups_per_step=2)
    groups = await gate.admit()
    assert ids(groups) == [0, 1, 2, 3]
    assert [group.step for group in groups] == [0, 0, 1, 1]
    assert [group.row_ids for group in groups[:2]] == [(0, 1, 2), (3, 4, 5)]
    await settle(gate, groups)
    assert ids(await gate.take(2, 2)) == [0, 1]
    await must_wait(gate.admit())  # consumed, their version is not made
    await gate.advance(1)
    assert ids(await asyncio.wait_for(gate.admit(), 1)) == [4, 5]


async def test_groups_are_taken_in_admission_order_however_they_settle() -> None:
    gate = make_gate()
    groups = await gate.admit()
    await settle(gate, [groups[1], groups[3]])
    await must_wait(gate.take(1, 2))
    await gate.settle(groups[0], ())
    assert ids(await gate.take(1, 4)) == [0, 1]
    await gate.settle(groups[2], ())
    assert ids(await gate.take(1, 1)) == [2]


async def test_late_mask_passes_over_a_group_that_is_not_ready_and_takes_it_later() -> None:
    gate = make_gate(late="mask")
    groups = await gate.admit()
    await settle(gate, groups[1:3])
    assert ids(await gate.take(2, 2)) == [1, 2]
    await settle(gate, [groups[3], groups[0]])
    assert ids(await gate.take(2, 2)) == [0, 3]


async def test_a_part_waits_for_tokens_or_for_all_that_its_step_misses() -> None:
    gate = make_gate(max_staleness=0, groups_per_step=4)
    groups = await gate.admit()
    for group in groups:
        (row,) = group.row_ids[:1]
        group.rollouts[row] = stopped(row, (0, 8), num_prompt_tokens=2)
    await settle(gate, groups[:1])
    await must_wait(gate.take(1, 4, 11))
    await gate.settle(groups[1], ())
    assert ids(await gate.take(1, 4, 11)) == [0, 1]
    await gate.settle(groups[2], ())
    await must_wait(gate.take(1, 2, 1000))
    await gate.settle(groups[3], ())
    assert ids(await gate.take(1, 2, 1000)) == [2, 3]


async def test_a_drop_frees_its_slot_at_once_and_lets_the_next_group_come_forward() -> None:
    gate = make_gate(max_staleness=0, groups_per_step=2)
    groups = await gate.admit()
    admitting = asyncio.create_task(gate.admit())
    await asyncio.sleep(0)
    assert not admitting.done()
    await gate.drop(groups[0], "equal_rewards")
    (new,) = await asyncio.wait_for(admitting, 1)
    assert (new.group_id, new.min_version) == (2, 0)
    await settle(gate, [groups[1], new])
    assert ids(await gate.take(2, 2)) == [1, 2]


async def test_too_many_drops_in_a_row_stop_the_run_with_their_reasons() -> None:
    gate = make_gate(max_staleness=1, groups_per_step=4)
    groups = await gate.admit()
    for group in groups[:3]:
        await gate.drop(group, "equal_rewards")
    await gate.settle(groups[3], ())  # one trainable group starts the count again
    for group in groups[4:7]:
        await gate.drop(group, "failed_reward")
    with pytest.raises(RuntimeError, match=r"among the last 4 \(3 x failed_reward, 1 x equal"):
        await gate.drop(groups[7], "equal_rewards")


@pytest.mark.parametrize(
    ("num_prompts", "reasons", "solved"),
    [
        (3, ["solved"] * 4, "all of the last 4 groups"),  # as many as may be open, at least
        (6, ["solved"] * 6, "all of the last 6 groups"),
        (100, ["solved"] * 8, "all of the last 8 groups"),  # max_drops_in_row
        (6, ["solved"] * 5, ""),
        (6, ["equal_rewards", *["solved"] * 6], ""),  # not all of those in a row
        (6, [*["solved"] * 5, *["equal_rewards"] * 3], "5 of the last 8 groups (the others"),
    ],
)
async def test_solved_groups_in_a_row_end_admission_and_training_without_an_error(
    num_prompts: int, reasons: list[str], solved: str
) -> None:
    gate = make_gate(num_prompts=num_prompts, max_drops_in_row=8)
    taking = asyncio.create_task(gate.take(2, 2))
    settled, *groups = await gate.admit()
    await gate.settle(settled, ())  # there is signal still, but less than a step
    for reason in reasons:
        if not groups:
            groups = await gate.admit()
        await gate.drop(groups.pop(), reason)
    assert gate.solved.startswith(solved)
    assert bool(gate.solved) == bool(solved)
    if not solved:
        return taking.cancel() and None
    assert await asyncio.wait_for(taking, 1) == []
    await asyncio.wait_for(gate.wait_for(2), 1)
    await must_wait(gate.admit())
    assert [settled.prompt.epoch, settled.prompt.prompt_id] in gate.state(0)["pending"]


async def test_a_whole_step_that_is_ready_when_the_prompts_are_solved_is_trained() -> None:
    """The trainer was busy while, behind the step that waited for it, all others were solved."""
    gate = make_gate(max_staleness=2, groups_per_step=2, num_prompts=2, max_drops_in_row=100)
    groups = await gate.admit()
    await settle(gate, groups[:3])
    dropped = groups[3:]
    for _ in range(2):
        for group in dropped:
            await gate.drop(group, "solved")
        dropped = [] if gate.solved else await gate.admit()
    assert gate.solved
    await gate.wait_for(2)
    assert ids(await gate.take(1, 2)) == [0, 1]
    assert await gate.take(1, 2) == [], "one group makes no step"
    assert len(gate.state(0)["pending"]) == 3  # type: ignore[arg-type]
    assert len(gate.state(1)["pending"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("num_solved", [0, 4])
async def test_a_row_of_drops_that_are_not_mostly_solved_is_an_error(num_solved: int) -> None:
    gate = make_gate(num_prompts=6, max_drops_in_row=8)
    reasons = ["solved"] * num_solved + ["equal_rewards"] * (8 - num_solved)
    groups = await gate.admit()
    for reason in reasons[:4]:
        await gate.drop(groups.pop(), reason)
    groups = await gate.admit()
    for reason in reasons[4:7]:
        await gate.drop(groups.pop(), reason)
    with pytest.raises(RuntimeError, match=r"last 8 .*most of them not correct"):
        await gate.drop(groups.pop(), reasons[7])
    assert not gate.solved


@pytest.mark.parametrize("is_killed_twice", [False, True])
async def test_after_a_resume_the_open_prompts_come_first_in_order_then_the_stream(
    is_killed_twice: bool,
) -> None:
    def resume(state: dict, max_staleness: int) -> tuple[Gate, PromptStream]:
        state = json.loads(json.dumps(state))  # as a checkpoint keeps it
        ids = {name: state[name] for name in ("next_group_id", "next_row_id")}
        prompts = make_prompts(state, state["position"])
        return make_gate(max_staleness=max_staleness, version=1, prompts=prompts, **ids), prompts

    gate = make_gate()
    groups = await gate.admit()
    await settle(gate, groups)
    await gate.take(2, 2)
    gate.allocate_rows(5)  # an evaluation's
    await gate.advance(1)
    await gate.admit()
    state = gate.state(1)
    if is_killed_twice:  # before all of the open prompts were admitted again
        gate, prompts = resume(state, max_staleness=0)
        assert len(await gate.admit()) == 2
        state = gate.state(1)
    gate, prompts = resume(state, max_staleness=1)
    again = await gate.admit()
    first_id = 8 if is_killed_twice else 6
    assert [again[0].group_id, again[0].row_ids[0]] == [first_id, first_id * 3 + 5]
    seen = [group.prompt for group in groups[:2] + again]
    seen += itertools.islice(prompts, 8)
    undisturbed = list(itertools.islice(make_prompts(), len(seen)))
    assert seen == undisturbed


def test_a_backlog_half_walked_keeps_its_rest_in_its_state() -> None:
    whole = list(itertools.islice(make_prompts(), 10))
    first = [[prompt.epoch, prompt.prompt_id] for prompt in whole[:4]]
    prompts = make_prompts({"pending": first}, position=4)
    assert [next(prompts), next(prompts)] == whole[:2]
    state = prompts.state()
    assert (state["position"], state["backlog"]) == (4, first[2:])
    resumed = make_prompts({"backlog": first[2:]}, position=4)
    assert list(itertools.islice(resumed, 8)) == whole[2:10]


def gate_of(num_prompts: int, stream: dict[str, Any], **fields: Any) -> Gate:
    """Steps of two groups, four of them open."""
    prompts = [Prompt(prompt_id=i + 1, text="", token_ids=(i,)) for i in range(num_prompts)]
    return make_gate(
        max_drops_in_row=100,
        num_prompts=num_prompts,
        prompts=PromptStream(prompts, **{"seed": 0, "shuffle": True, **stream}),
        rollouts_per_group=2,
        **fields,
    )


async def test_a_step_that_can_never_be_whole_is_not_waited_for() -> None:
    gate = gate_of(5, {"num_epochs": 1})
    first = await gate.admit()
    for group in first:
        await gate.settle(group, (1.0, -1.0))
    assert len(await gate.take(2, 2)) == 2
    await gate.advance(1)
    (last,) = await gate.admit()
    assert not gate.ended
    assert len(await gate.take(1, 2)) == 2, "the last whole step"
    await gate.advance(2)
    taking = asyncio.create_task(gate.take(1, 2))
    await asyncio.sleep(0.01)
    assert taking.done()
    assert not taking.result(), "its group is still being written"
    assert gate.ended == "num_epochs=1"
    await gate.drop(last, "failed_reward")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.admit(), 0.01)


async def test_a_trainer_that_waits_is_told_that_all_prompts_left_are_passed_over() -> None:
    gate = gate_of(4, {"num_epochs": 2, "repeat_share": 1e-9})
    groups = await gate.admit()
    taking = asyncio.create_task(gate.take(1, 2))
    for group in groups:
        await gate.drop(group, "equal_rewards")
    await asyncio.sleep(0)
    assert not taking.done(), "more may come"
    admitting = asyncio.create_task(gate.admit())
    assert await asyncio.wait_for(taking, 1) == []
    assert gate.ended == "num_epochs=2"
    admitting.cancel()


async def test_a_sampler_that_wants_none_of_the_last_groups_ends_the_run() -> None:
    def wait_for_more(ready: Sequence[ReadyItem], count: int) -> Sample:
        return [], []

    gate = gate_of(3, {"num_epochs": 1}, late="mask", sampler=wait_for_more)
    first, *others = await gate.admit()
    taking = asyncio.create_task(gate.take(2, 2))
    for group in others:
        await gate.settle(group, (1.0, -1.0))
    await asyncio.sleep(0.01)
    assert not taking.done(), "another one may become ready"
    await gate.settle(first, (1.0, -1.0))
    assert await asyncio.wait_for(taking, 1) == []
    assert gate.ended == "num_epochs=1"


@pytest.mark.parametrize(
    ("reason", "advantages", "num_silent"),
    [
        ("solved", (), 1),
        ("equal_rewards", (), 1),
        ("failed_reward", (), 0),
        ("", (0.0, 0.0), 1),
        ("", (0.5, -0.5), 0),
    ],
)
async def test_a_group_without_a_signal_makes_its_prompt_silent(
    reason: str, advantages: tuple[float, ...], num_silent: int
) -> None:
    gate = gate_of(9, {"repeat_share": 0.5})
    group = (await gate.admit())[0]
    if reason:
        await gate.drop(group, reason)
    else:
        await gate.settle(group, advantages)
    assert gate.prompts.take_metrics()["prompts/without_signal"] == num_silent
