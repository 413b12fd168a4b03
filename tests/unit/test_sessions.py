"""What a run says when it goes on without executors that it lost."""

from llamarl.controller.sessions import SessionLost, describe
from llamarl.core.errors import ExecutorLost


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
