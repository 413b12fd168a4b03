"""Coroutines of task.py: many at once in a process, each with its own end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring.stages import Stage, as_data
from llamarl.scoring.user_code.pool import Call, Failure, UserCode, WorkerPool

pytestmark = pytest.mark.full

TASK = """
import asyncio, os, time

calls = 0

async def judge(completion):
    global calls
    calls += 1
    what, _, seconds = completion.partition(" ")
    if what == "wait":
        await asyncio.sleep(float(seconds))
    if what == "compute":
        time.sleep(float(seconds))
    if what == "raise":
        await asyncio.sleep(0)
        raise LookupError("no such word")
    if what == "late":
        raise TimeoutError("of its own")
    if what == "block":
        time.sleep(100)
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                pass
    if what == "leave":
        os._exit(7)
    return calls if what == "calls" else 1.0

async def rank(completions):
    return [await judge(each) for each in completions]

def unasked(completion):
    return asyncio.sleep(0.01)

def own_loop(completion):
    return asyncio.run(judge(completion))
"""
PROMPT = Prompt(prompt_id=7, text="what?", token_ids=(1,))
RAISED, HUNG, INVALID = StageStatus.RAISED, StageStatus.HUNG, StageStatus.INVALID
Values = list[float]


def run(
    *batches: list[Any],
    function: str = "judge",
    per: str = "rollout",
    pause_s: float = 0.0,
    num_workers: int = 1,
    timeout_s: float = 1.0,
) -> list[list[Values | Failure]]:
    """What comes of these batches of completions, each begun `pause_s` after the one before."""
    stage = Stage(function, function, ["completion"], ["value"], per=per)
    code = UserCode(
        service="llamarl.scoring.stage_function",
        setup={"stage": as_data(stage, function), "task_source": {"task.py": TASK}, "reward": None},
        timeout_s=timeout_s,
        label=f"stage {function}",
        keys="its ",
    )

    def read(call: Call, answer: dict[str, Any]) -> Values:
        assert len(answer["rows"]) == len(call.arguments[1])
        return [float(value) for (value,) in answer["rows"]]

    async def work() -> list[list[Values | Failure]]:
        pool: WorkerPool[Values] = WorkerPool(code, num_workers, read)
        await pool.start()
        try:
            going = []
            for batch in batches:
                lengths = [[1] * (1 if isinstance(each, str) else len(each)) for each in batch]
                pairs = zip(batch, lengths, strict=True)
                calls = [Call(PROMPT, ([each], length)) for each, length in pairs]
                going.append(asyncio.create_task(pool.run(calls)))
                await asyncio.sleep(pause_s)
            return await asyncio.gather(*going)
        finally:
            pool.close()

    return asyncio.run(work())


def errors(found: list[Values | Failure]) -> list[Failure]:
    return [each for each in found if isinstance(each, Failure)]


def test_two_hundred_calls_wait_in_one_process_at_once() -> None:
    start_s = time.monotonic()
    (found,) = run(["wait 0.5"] * 200, timeout_s=5.0)
    assert found == [[1.0]] * 200
    assert time.monotonic() - start_s < 20, "200 x 0.5 s one after another are 100 s"


def test_calls_that_come_later_do_not_wait_for_those_before() -> None:
    slow, *quick = run(["wait 2.5"], *[["calls"]] * 4, pause_s=0.2, timeout_s=10.0)
    assert slow == [[1.0]]
    assert quick == [[[2.0]], [[3.0]], [[4.0]], [[5.0]]], "each began while the first one waited"


def test_each_call_fails_by_itself_and_says_where_it_was() -> None:
    texts = ["a", "raise", "late", "wait 100", "wait 0.5", "b"]
    (found,) = run(texts)
    raised, late, hung = errors(found)
    assert [each for each in found if not isinstance(each, Failure)] == [[1.0]] * 3
    assert (raised.status, late.status, hung.status) == (RAISED, RAISED, HUNG)
    assert raised.error.startswith("on the prompt of line 7 ('what?'):\njudge: Traceback")
    assert "LookupError: no such word" in raised.error
    assert late.error.endswith("TimeoutError: of its own")
    assert "each stage judge call must end within 1 s (its timeout_s), got no answer" in hung.error
    assert 'File "task.py", line 11, in judge\n    await asyncio.sleep' in hung.error
    assert "stage_function" not in hung.error


@pytest.mark.parametrize(
    ("bad", "status", "why"),
    [
        pytest.param(*("block", HUNG, 'File "task.py", line 20 in judge'), marks=pytest.mark.long),
        pytest.param(
            *("leave", RAISED, "the stage judge process ended by itself (exit code 7)"),
            marks=pytest.mark.long,
        ),
        ("stubborn", HUNG, "(it went on when cancelled)"),
    ],
)
def test_one_that_ends_its_process_fails_alone_and_the_others_run_again(
    bad: str, status: StageStatus, why: str
) -> None:
    (found,) = run(["wait 0.1"] * 20 + [bad] + ["wait 0.6"] * 10)
    (failed,) = errors(found)
    assert found.index(failed) == 20
    assert failed.status is status
    assert why in failed.error
    assert len([each for each in found if each == [1.0]]) == 30


def test_coroutines_that_never_wait_run_one_by_one_each_with_the_whole_time_limit() -> None:
    (found,) = run(["compute 0.4"] * 6)
    assert found == [[1.0]] * 6


def test_a_function_may_run_an_event_loop_of_its_own_but_its_promise_is_no_value() -> None:
    (found,) = run(["wait 0.1", "a"], function="own_loop")
    assert found == [[1.0], [1.0]]
    (refused,) = run(["a"], function="unasked")
    (failure,) = errors(refused)
    assert failure.status is RAISED
    assert "no running event loop" in failure.error
