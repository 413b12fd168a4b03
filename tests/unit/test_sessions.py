"""How often a run goes on without executors that it lost, and what it says then."""

import logging
import time

from llamarl.errors import GroupLost
from llamarl.sessions import WINDOW_S, Restarts, SessionLost, describe


def test_a_run_goes_on_so_often_within_an_hour_and_a_warning_names_the_key(monkeypatch, caplog):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    restarts = Restarts(2)
    assert [restarts.take() for _ in range(2)] == [True, True]
    with caplog.at_level(logging.WARNING):
        assert not restarts.take()
    assert "more often than cluster.max_restarts=2" in caplog.text
    now_s = WINDOW_S + 1
    assert restarts.take()


def test_without_restarts_nothing_is_said(caplog):
    assert not Restarts(0).take()
    assert not caplog.text


def test_one_line_names_what_was_lost_where_the_run_goes_on_and_how_many_steps_that_costs():
    losses = [GroupLost("trainer", 1, "killed\nlast lines of its log"), GroupLost("storage-0")]
    lost = SessionLost(losses, 27)
    start = {"version": 20}, "/runs/a/checkpoints/step-00000020"
    assert describe(lost, start) == (
        "lost trainer, storage-0 (killed): the run goes on from step-00000020, 7 steps are repeated"
    )
    assert describe(lost, ({}, None)).endswith("from its beginning, 27 steps are repeated")
    assert "no step is repeated" in describe(SessionLost(losses, 20), start)
