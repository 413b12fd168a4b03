"""The collector, which asks many replicas for stopped rollouts, so that the controller gets few
messages for all of them.

A replica is asked for more, and so forgets what it reported, only once the controller has received
the report. So a collector may be lost at any moment: its successor gets the same reports again, and
the dispatcher ignores those that it has."""

import asyncio
import time

from llamarl.core.faces import Collector, GeneratorReplica, Report, Worker
from llamarl.generator.specs import CollectorSpec
from llamarl.metrics.span import Spans

MERGE_S = 0.1  # reports of hundreds of replicas go to the controller in one message


class CollectorWorker(Worker, Collector):
    """Keeps one `collect` pending at each replica, from its own first `collect` on."""

    def __init__(self, spec: CollectorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._generators = dict(spec.generators)
        self._is_asking = False
        self._tasks: dict[int, asyncio.Task[None]] = {}  # once it is
        self._number = time.time_ns()  # above the numbers of all collectors before
        self._answer: list[tuple[int, Report | Exception]] = []
        self._reports: list[tuple[int, Report | Exception]] = []  # of the next answer
        self._has_reports = asyncio.Event()
        self._has_arrived = self._will_arrive = asyncio.Event()  # the answer, the next one

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks.values():
            task.cancel()

    async def collect(self, received: int) -> tuple[int, list[tuple[int, Report | Exception]]]:
        """See `faces.Collector`."""
        if received == self._number:
            self._answer = []
            self._has_arrived.set()
        if not self._is_asking:
            self._is_asking = True
            self._tasks = {i: asyncio.create_task(self._ask(i)) for i in self._generators}
        if not self._answer:
            await self._has_reports.wait()
            await asyncio.sleep(MERGE_S)
        if not self._answer:  # else the same question had it meanwhile
            self._number += 1
            self._answer, self._reports = self._reports, []
            self._has_arrived, self._will_arrive = self._will_arrive, asyncio.Event()
            self._has_reports.clear()
        return self._number, self._answer

    async def follow(self, replica: int, generator: GeneratorReplica) -> None:
        """See `faces.Collector`."""
        self._generators[replica] = generator
        if self._is_asking:
            if replica in self._tasks:
                self._tasks[replica].cancel()
            self._tasks[replica] = asyncio.create_task(self._ask(replica))

    async def _ask(self, replica: int) -> None:
        received = 0
        try:
            while True:
                first, rows = await self._generators[replica].collect(received)
                if rows:  # else it was a heartbeat
                    await self._pass_on(replica, (first, rows))
                received = first + len(rows)
        except Exception as error:  # noqa: BLE001 - passed on to the controller
            await self._pass_on(replica, error)

    async def _pass_on(self, replica: int, report: Report | Exception) -> None:
        """Add a report to the next answer. Returns once the controller has received it."""
        self._reports.append((replica, report))
        self._has_reports.set()
        await self._will_arrive.wait()
