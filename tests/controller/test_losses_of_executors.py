"""Executors: what each is made from, how its loss is mended by role, and how often."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from llamarl.cluster.executor import resolve
from llamarl.controller.sessions import SessionLost, describe
from llamarl.controller.starter import Spec, name_executor
from llamarl.controller.supervisor import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ON_LOSS,
    WINDOW_S,
    OnLoss,
    Restarts,
    role_of,
)
from llamarl.core.config import PlacementConfig
from llamarl.core.errors import ExecutorLost
from llamarl.core.records import RESPONSE_IDS
from llamarl.planner.simulation.clock import run
from llamarl.scoring.stages import External, FrozenModel, Stage, make_graph
from tests.planner.planner_recipes import make_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
OWN = (
    Stage("judge", "judge", [RESPONSE_IDS], ["quality"]),
    Stage("teacher", FrozenModel("checkpoint"), writes=["teacher_logprobs"]),
    Stage("outside", External(), [RESPONSE_IDS], ["seen"]),
)


def test_the_table_has_a_row_for_every_executor_that_a_run_can_have_and_for_nothing_else() -> None:
    config = make_recipe()
    colocated = replace(config, placement=PlacementConfig(colocated=True))
    between = [*make_graph(config).between, *OWN]
    stages = {name_executor(stage): stage for stage in between}
    assert stages.keys() == {"scorer", "judge", "teacher", "outside"}
    singles = ["generator-0", "generator-12", "storage-0", "collector-1", "environment", "trainer"]
    names = [*singles, *stages]
    both = config, colocated
    roles = {role_of(name, each, stages.get(name)) for name in names for each in both}
    assert roles == ON_LOSS.keys()


def documented() -> dict[str, tuple[OnLoss, OnLoss]]:
    """The table of docs/running.md, by role."""
    found: dict[str, tuple[OnLoss, OnLoss]] = {}
    text = (DOCS / "running.md").read_text().partition("## Lost executors")[2]
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("| ") and not line.startswith("| what"):
            roles, loss, with_host = (cell.strip() for cell in line.split("|")[1:4])
            for role in roles.split(", "):
                assert role not in found
                found[role] = OnLoss(loss), OnLoss(with_host)
    return found


def test_the_docs_say_what_the_table_says() -> None:
    assert documented() == ON_LOSS
    healing = (DOCS / "running.md").read_text().partition("## Healing")[2].partition("\n## ")[0]
    words = {"generator replica": "A replica that dies", "stage of the recipe's own": "own stages"}
    for role, (loss, _) in ON_LOSS.items():
        says_so = words.get(role, role).lower() in healing.lower()
        assert says_so or loss is not OnLoss.ALONE, role


def test_restarts_are_limited_and_a_warning_names_the_key(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        restarts = Restarts(0)
        assert restarts.take() is None
        restarts.warn()
        assert not caplog.text
        restarts = Restarts(2)
        assert restarts.take() is not None
        await asyncio.sleep(WINDOW_S / 2)
        assert restarts.take() is not None
        assert (restarts.take(), restarts.num_recent) == (None, 2)
        with caplog.at_level(logging.WARNING):
            restarts.warn()
        assert "more often than cluster.max_restarts=2 times in an hour" in caplog.text
        await asyncio.sleep(WINDOW_S / 2 + 1)
        assert restarts.num_recent == 1
        assert restarts.take() is not None
        assert restarts.take() is None

    run(main())


def test_the_pause_doubles_up_to_a_limit_until_a_start_succeeds() -> None:
    async def main() -> None:
        restarts = Restarts(100)
        pauses = [restarts.take() for _ in range(8)]
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
        restarts.succeeded()
        assert restarts.take() == FIRST_PAUSE_S

    run(main())


@pytest.mark.parametrize("spec", get_args(Spec), ids=lambda spec: spec.__name__)
def test_each_spec_names_the_executor_that_takes_it(spec: type) -> None:
    executor = resolve(spec.executor)  # type: ignore[attr-defined]
    assert get_type_hints(executor.__init__)["spec"] is spec


def test_one_line_names_what_was_lost_where_the_run_goes_on_and_how_many_steps_that_costs():
    losses = [
        ExecutorLost("trainer", 1, "killed\nlast lines of its log"),
        ExecutorLost("storage-0"),
    ]
    lost = SessionLost(losses, 27)
    start = {"version": 20}, "/runs/a/checkpoints/step-00000020"
    assert describe(lost, start) == (
        "lost trainer, storage-0 (killed): the run goes on from step-00000020, 7 steps are repeated"
    )
    assert describe(lost, ({}, None)).endswith("from its beginning, 27 steps are repeated")
    assert "no step is repeated" in describe(SessionLost(losses, 20), start)
