"""What the loop does while storage has no room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamarl.controller.dispatch import Capacity
from llamarl.controller.gate import ROOM_PAUSE_S
from llamarl.planner.simulation.clock import run
from tests.fakes import WatchedStorage
from tests.simulation.loop import Loop


class FullStorage(WatchedStorage):
    """Is full from one time to another; `most_rows` are those it held then."""

    def __init__(self, since_s: float, until_s: float) -> None:
        super().__init__()
        self._since_s, self._until_s = since_s, until_s
        self.num_asked = self.most_rows = 0

    async def usage(self) -> dict[str, int]:
        self.num_asked += 1
        now_s = asyncio.get_running_loop().time()
        is_full = self._since_s <= now_s < self._until_s
        if now_s > self._since_s + 5.0 and is_full:  # what was open before is trained
            self.most_rows = max(self.most_rows, len(self._table))
        return {**await super().usage(), "is_full": int(is_full)}


def test_a_full_storage_takes_the_rollouts_of_one_step_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FullStorage(since_s=5.0, until_s=25.0)
    loop = Loop(max_staleness=3, groups_per_step=8, num_steps=60, storage=storage)
    run(loop.run(tmp_path))
    assert loop.trainer.version == 60
    assert max(loop.staleness()) <= 3
    assert 0 < storage.most_rows <= 8 * 2 + 2  # those of a step, and log-prob checks
    warnings = [each.message for each in caplog.records if "storage is full" in each.message]
    assert len(warnings) == 1
    free = Loop(max_staleness=3, groups_per_step=8, num_steps=60)
    run(free.run(tmp_path))
    assert max(len(free.trained_rows()), 1) == len(loop.trained_rows())


def test_storage_is_asked_once_a_second_at_most() -> None:
    async def main() -> None:
        storage = FullStorage(since_s=0.0, until_s=2.0)
        room = Capacity(storage)
        answers = []
        for _ in range(8):
            answers.append(await room())
            await asyncio.sleep(ROOM_PAUSE_S / 2)
        assert answers == [False] * 4 + [True] * 4
        assert storage.num_asked == 4

    run(main())
