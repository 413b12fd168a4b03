"""What a process does at its end, and what its end does to those that call it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamarl.cluster import Cluster
from llamarl.core.errors import ExecutorLost
from tests.cluster.executors import AtExit, CancelledInClose, Probe
from tests.cluster.test_processes import run

pytestmark = pytest.mark.full


def test_a_close_that_fails_is_one_line_and_its_traceback_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.spawn("trainer", CancelledInClose, {})

    run(tmp_path, scenario)
    (said,) = [each.getMessage() for each in caplog.records if "closing" in each.getMessage()]
    assert said == "closing trainer failed: CancelledError"
    text = (tmp_path / "logs" / "trainer-0.log").read_text()
    assert "raised in trainer-0" in text
    assert "in close" in text


@pytest.mark.long
def test_an_executor_that_calls_one_that_is_being_stopped_gets_an_error_and_lives_on(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        storage = await cluster.spawn("storage", Probe, {})
        generator = await cluster.spawn("generator", Probe, {"peer": storage.one(Probe)})
        assert await generator.one(Probe).ask_peer("echo", 1) == 1
        stopping = asyncio.create_task(storage.stop())
        while not stopping.done():
            calls = [generator.one(Probe).ask_peer("echo", 1) for _ in range(8)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {each for each in found if not isinstance(each, ExecutorLost)} <= {1}
        with pytest.raises(ExecutorLost, match="storage"):
            await generator.one(Probe).ask_peer("echo", 1)
        assert await generator.one(Probe).echo(2) == 2

    run(tmp_path, scenario)


def test_a_process_runs_its_exit_functions_at_its_end(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.spawn("scorer", AtExit, {"folder": str(tmp_path)})

    run(tmp_path, scenario)
    assert (tmp_path / "exited").is_file()
