"""The gate where prompts come to their end, and what it says of their signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from llamarl.controller.gate import Gate
from llamarl.core.records import Prompt
from llamarl.metrics.span import Spans
from llamarl.prompts.stream import PromptStream
from llamarl.scoring.samplers import ReadyItem, Sample


def make_gate(num_prompts: int, stream: dict[str, Any], **fields: Any) -> Gate:
    """Steps of two groups, four of them open."""
    prompts = [Prompt(prompt_id=i + 1, text="", token_ids=(i,)) for i in range(num_prompts)]
    options = {
        "max_staleness": 1,
        "groups_per_step": 2,
        "rollouts_per_group": 2,
        "late": "wait",
        "max_drops_in_row": 100,
        "spans": Spans("controller", None),
    }
    stream = {"seed": 0, "shuffle": True, **stream}
    return Gate(**options | {"prompts": PromptStream(prompts, **stream)} | fields)


def test_a_step_that_can_never_be_whole_is_not_waited_for() -> None:
    async def scenario() -> None:
        gate = make_gate(5, {"num_epochs": 1})
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

    asyncio.run(scenario())


def test_a_trainer_that_waits_is_told_that_all_prompts_left_are_passed_over() -> None:
    async def scenario() -> None:
        gate = make_gate(4, {"num_epochs": 2, "repeat_share": 1e-9})
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

    asyncio.run(scenario())


def test_a_sampler_that_wants_none_of_the_last_groups_ends_the_run() -> None:
    def wait_for_more(ready: Sequence[ReadyItem], count: int) -> Sample:
        return [], []

    async def scenario() -> None:
        gate = make_gate(3, {"num_epochs": 1}, late="mask", sampler=wait_for_more)
        first, *others = await gate.admit()
        taking = asyncio.create_task(gate.take(2, 2))
        for group in others:
            await gate.settle(group, (1.0, -1.0))
        await asyncio.sleep(0.01)
        assert not taking.done(), "another one may become ready"
        await gate.settle(first, (1.0, -1.0))
        assert await asyncio.wait_for(taking, 1) == []
        assert gate.ended == "num_epochs=1"

    asyncio.run(scenario())


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
def test_a_group_without_a_signal_makes_its_prompt_silent(
    reason: str, advantages: tuple[float, ...], num_silent: int
) -> None:
    async def scenario() -> None:
        gate = make_gate(9, {"repeat_share": 0.5})
        group = (await gate.admit())[0]
        if reason:
            await gate.drop(group, reason)
        else:
            await gate.settle(group, advantages)
        assert gate.prompts.take_metrics()["prompts/without_signal"] == num_silent

    asyncio.run(scenario())
