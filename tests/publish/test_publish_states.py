"""The states that a replica moves through in a publish, and waits for calls that never answer."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

import pytest

from llamarl.publish.replica import LATE_S, TRANSITIONS, Event, State, attempt, failure, next_state

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


def walks(num_walks: int = 300, num_events: int = 60) -> list[list[tuple[State, Event, State]]]:
    """Random sequences of events; those that the table refuses must leave the state alone."""
    rng, found = random.Random(0), []
    for _ in range(num_walks):
        state, walk = State.DISCONNECTED, []
        for event in rng.choices(list(Event), [9] * (len(Event) - 1) + [1], k=num_events):
            if (state, event) in TRANSITIONS:
                walk.append((state, event, next_state(state, event)))
                state = walk[-1][2]
            else:
                with pytest.raises(RuntimeError, match=f"{event.value} must not .* {state.value}"):
                    next_state(state, event)
        found.append(walk)
    return found


def test_no_version_is_committed_that_was_not_verified() -> None:
    num_commits = 0
    for walk in walks():
        is_verified = False
        for before, event, after in walk:
            if event in (Event.PREPARE, Event.ABORT):
                is_verified = False
            is_verified |= event is Event.VERIFY
            if after is State.COMMITTING:
                assert is_verified, (before, event)
                num_commits += 1
    assert num_commits > 50


def test_a_replica_that_began_to_commit_reaches_the_new_version_or_is_gone() -> None:
    ends = set()
    for walk in walks():
        is_open = False
        for before, event, after in walk:
            is_open |= after is State.COMMITTING
            if is_open and after is not State.COMMITTING:
                ends.add((before, event, after))
                is_open = False
    assert {after for _, _, after in ends} == {State.IDLE, State.GONE}
    assert {event for _, event, after in ends if after is State.IDLE} == {Event.FINISH}


def test_a_replica_that_is_gone_stays_gone_and_every_state_can_be_reached_and_left() -> None:
    reached = {after for walk in walks() for _, _, after in walk}
    assert reached == set(State)
    for state in State:
        assert next_state(state, Event.LEAVE) is State.GONE
        outcomes = {after for (before, _), after in TRANSITIONS.items() if before is state}
        assert outcomes == {State.GONE} if state is State.GONE else outcomes > {State.GONE}


def test_the_picture_in_the_docs_is_the_table() -> None:
    (picture,) = re.findall(r"```mermaid\n(stateDiagram.*?)```", PAGE.read_text(), re.DOTALL)
    drawn = {
        (State(before), Event(event)): State(after)
        for before, after, event in re.findall(r"(\w+) --> (\w+): (\w+)", picture)
    }
    is_drawn = {
        move: after
        for move, after in TRANSITIONS.items()
        if move[1] is not Event.LEAVE and move[0] is not State.GONE
    }
    assert drawn == is_drawn, "`leave` leads from every state to gone, and the page says so"
    assert re.search(r"\[\*\] --> disconnected\n", picture)
    assert "From every state, a replica that raises" in PAGE.read_text()


async def answer_after(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return 7


async def test_a_call_that_takes_too_long_is_cancelled() -> None:
    task = await attempt(answer_after(60), 0.05)
    assert isinstance(failure(task, "it", 0.05), TimeoutError)


async def test_an_answer_counts_that_a_process_which_stood_still_has_not_read() -> None:
    """As after Ctrl-Z and fg: the timer is due long before the answer is read."""
    asyncio.get_running_loop().call_soon(time.sleep, LATE_S + 0.3)
    task = await attempt(answer_after(0.1), 0.2)
    assert failure(task, "it", 0.2) is None
    assert task.result() == 7
