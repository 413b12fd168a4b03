"""The cluster that runs its executors in this process, for debugging, and for tests that need no
second process.

The same calls give the same results and exceptions as with processes."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from llamarl.cluster.executor import (
    Call,
    Executor,
    Factory,
    RankCalls,
    attempt,
    failure,
    merged,
    process_name,
    resolve,
)
from llamarl.core.config.rank_assignment import Device
from llamarl.core.faces import Worker
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)


class InlineCluster:
    """Constructs executors in this process."""

    def __init__(self, make_spans: Callable[[str], Spans]) -> None:
        self._make_spans = make_spans
        self._executors: dict[str, InlineExecutor] = {}

    async def spawn(
        self,
        name: str,
        factory: Factory,
        spec: Any,
        num_ranks: int = 1,
        devices: Sequence[Device] | None = None,
    ) -> Executor:
        if name in self._executors and not self._executors[name].is_stopped:
            raise ValueError(f"executor name must not be in use in its cluster, got {name!r}")
        found = InlineExecutor(name)
        self._executors[name] = found
        for rank in range(num_ranks):
            where = process_name(name, rank, num_ranks)
            spans = self._make_spans(where)
            found.spans.append(spans)
            try:
                made = resolve(factory)(spec, rank=rank, num_ranks=num_ranks, spans=spans)
            except Exception as error:  # noqa: BLE001 - raised again in the shape all calls use
                await found.stop()
                failure(error, where, rank).result()
            found.workers.append(made)
        return found

    async def add_host(self, address: str) -> int:
        raise ValueError("cluster.backend must be monarch for a host to join, got inline")

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self._executors.values()))


class InlineExecutor(RankCalls):
    """An executor whose ranks are plain objects of this process."""

    def __init__(self, name: str, workers: Sequence[object] = (), spans: Sequence[Spans] = ()):
        self.name, self.writer = name, ""
        self.workers = list(workers)
        self.spans = list(spans)
        self._stopped = asyncio.Event()
        self._run = self._run_on_all

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    async def watch(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        for worker, spans in zip(self.workers, self.spans, strict=False):
            try:
                if isinstance(worker, Worker):
                    await worker.close()
            except OSError as error:  # such as a full disk
                log.warning("closing %s failed: %s", spans.process, error)
            except Exception:  # noqa: BLE001 - tear-down continues
                log.warning("closing %s failed: \n%s", spans.process, traceback.format_exc())
            spans.close()

    async def _run_on_all(self, call: Call, is_first: bool) -> list[Any]:
        """Return the results of all ranks; raise the first exception at once."""
        tasks = [
            asyncio.create_task(attempt(worker, spans.process, rank, call))
            for rank, (worker, spans) in enumerate(zip(self.workers, self.spans, strict=True))
        ]
        for next_result in asyncio.as_completed(tasks):
            (await next_result).result()
        return [result.value for result in merged([task.result() for task in tasks])]
