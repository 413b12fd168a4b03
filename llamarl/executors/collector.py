"""A collector: asks many replicas which rollouts stopped, so that the controller gets few messages
for all of them. Each replica's reports are passed on once, in their order.

A collector that is lost is not started again alone. Between a replica's answer and the controller's
next question a report is here and nowhere else, for a replica forgets what it has reported. Storage
cannot stand in for it as it does for a replica that is lost, since this one lives: of a rollout
that was cut, storage does not know whether it holds the segment of a report that was lost, after
which the rollout has to go on, or of one before, after which it goes on already. And a rollout that
was aborted is not in storage at all.
"""

import asyncio

from llamarl.executors.specs import CollectorSpec
from llamarl.metrics.span import Spans
from llamarl.protocols import Generator
from llamarl.types import RolloutInfo

MERGE_S = 0.1  # reports of hundreds of replicas go to the controller in one message


class CollectorExecutor:
    """Keeps one `collect` pending at each replica, from its own first `collect` on."""

    def __init__(self, spec: CollectorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._generators = dict(spec.generators)
        self._reports: list[tuple[int, list[RolloutInfo] | Exception]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_reports = asyncio.Event()

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()

    async def collect(self) -> list[tuple[int, list[RolloutInfo] | Exception]]:
        """See `protocols.Collector`."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._ask(i)) for i in self._generators]
        await self._has_reports.wait()
        await asyncio.sleep(MERGE_S)
        self._has_reports.clear()
        reports, self._reports = self._reports, []
        return reports

    async def follow(self, replica: int, generator: Generator) -> None:
        """See `protocols.Collector`."""
        self._generators[replica] = generator
        if self._tasks:
            self._tasks.append(asyncio.create_task(self._ask(replica)))

    async def _ask(self, replica: int) -> None:
        try:
            while True:
                self._report(replica, await self._generators[replica].collect())
        except Exception as error:  # noqa: BLE001 - passed on to the controller
            self._report(replica, error)

    def _report(self, replica: int, report: list[RolloutInfo] | Exception) -> None:
        if report != []:  # a heartbeat
            self._reports.append((replica, report))
            self._has_reports.set()
