"""A collector in a process of its own: whose sender lives, dies or fails elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llamarl.cluster import ExecutorLost, make_cluster
from llamarl.core.config import ClusterConfig
from llamarl.core.faces import Collector, GeneratorReplica, Report, Worker
from llamarl.generator.collector import CollectorWorker
from llamarl.generator.decoding import KeptRows
from llamarl.generator.specs import CollectorSpec
from tests.fakes import stopped

pytestmark = pytest.mark.full


class Writing(Worker):
    """A replica that stops a rollout every 20 ms, and fails after the last of `row_ids`."""

    def __init__(self, row_ids: range, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._row_ids, self._kept = row_ids, KeptRows()
        self._writing: asyncio.Task[None] | None = None

    async def collect(self, received: int) -> Report:
        self._writing = self._writing or asyncio.create_task(self._write())
        self._kept.forget(received)
        while not (self._kept or self._writing.done()):
            await asyncio.sleep(0.01)
        if not self._kept:
            raise ArithmeticError("the engine broke")
        return self._kept.report()

    async def _write(self) -> None:
        for row_id in self._row_ids:
            await asyncio.sleep(0.02)
            self._kept.add([stopped(row_id, (0, 1))])


@pytest.mark.long
def test_a_collector_reports_all_rows_in_order_and_which_replica_failed_or_died(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        try:
            async with asyncio.timeout(60.0):
                await scenario(cluster)
        finally:
            await cluster.stop()

    async def scenario(cluster: Any) -> None:
        first = {0: 0, 1: 10_000, 2: 20_000}
        num_rows = {0: 100_000, 1: 100_000, 2: 5}
        groups = await asyncio.gather(
            *(
                cluster.spawn(f"generator-{i}", Writing, range(first[i], first[i] + num_rows[i]))
                for i in first
            )
        )
        generators = {i: group.one(GeneratorReplica) for i, group in enumerate(groups)}
        collector = await cluster.spawn(
            "collector-0", CollectorWorker, CollectorSpec(generators=generators)
        )
        rows: dict[int, list[int]] = {i: [] for i in first}
        errors: dict[int, Exception] = {}
        num_answers, is_killed, received = 0, False, 0
        while len(errors) < 2 or len(rows[1]) < 60:
            received, answer = await collector.one(Collector).collect(received)
            for index, report in answer:
                if isinstance(report, Exception):
                    assert index not in errors
                    errors[index] = report
                else:
                    rows[index] += [row.row_id for row in report[1]]
            num_answers += 1
            if len(rows[0]) >= 10 and not is_killed:
                is_killed = True
                os.kill(groups[0].pids[0], signal.SIGKILL)
        for i, found in rows.items():
            assert found == list(range(first[i], first[i] + len(found))), "each once, in order"
        assert len(rows[2]) == 5
        assert isinstance(errors[0], ExecutorLost)
        assert isinstance(errors[2], ArithmeticError)
        assert num_answers < sum(map(len, rows.values())) / 3, "together, not one by one"

    asyncio.run(main())
