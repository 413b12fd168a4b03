"""Executors in processes of their own: per group and host one Monarch process mesh.

Owns: starting, watching and ending processes. Does not own: calls (`actors.py`), hosts
(`hosts.py`). Invariant: a group is at every moment running, lost (for a stated reason) or stopped,
and the future `_lost` says which; after `stop` none of its processes is alive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llamarl.cluster.actors import (
    ExecutorActor,
    Methods,
    Roster,
    last_line,
    mark_retrieved,
    results_by_rank,
    send,
    until_silent,
)
from llamarl.cluster.call_result import describe_failed_close
from llamarl.cluster.group import ExecutorGroup, Factory, process_name
from llamarl.cluster.hosts import Host, attach
from llamarl.cluster.process import environment, log_path, log_tail
from llamarl.config import ClusterConfig
from llamarl.config.rank_assignment import Device
from llamarl.errors import GroupLost
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0  # for an executor's own clean-up
STOP_LIMIT_S = 3.0  # for Monarch's
WORD_LIMIT_S = 2.0  # for Monarch to say how a process ended
START_LIMIT_S = 120.0  # for imports and an executor's constructor; then for its first answer


@dataclass(frozen=True)
class HostSpan:
    """The ranks of a group on one host, from `first_rank` on; Monarch's meshes of them."""

    host: Host
    first_rank: int
    num_ranks: int
    processes: Any
    actors: Any


class MonarchGroup:
    """Processes with one executor each, on one host or several."""

    def __init__(
        self,
        name: str,
        num_ranks: int,
        mark: str,
        logs_folder: str,
        report: Callable[[GroupLost], None],
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.mark = mark
        self._logs_folder = logs_folder
        self._report = report
        # The result None means stopped on purpose.
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost.add_done_callback(mark_retrieved)
        self._heard_s = -math.inf  # when a call was answered last
        self._has_started = asyncio.Event()  # it has answered one
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._parts: list[HostSpan] = []
        self.pids: list[int] = []
        self.call_one: Any = None
        self.call_all: Any = None

    async def start(
        self,
        hosts: list[Host],
        devices: Sequence[Device],
        config: ClusterConfig,
        executor: tuple[Factory, dict[str, Any]],
        make_spans: Callable[[str], Spans],
    ) -> None:
        """Start the processes and construct the executors; raises what a constructor raises."""
        self._parts = [self._start_part(*part, config) for part in parts_of(hosts, devices)]
        meshes = tuple((part.actors, part.first_rank) for part in self._parts)
        self._roster = roster = Roster(meshes, self.num_ranks)
        constructed = asyncio.Event()
        self._watchers = [
            asyncio.create_task(self._watch_rank(rank, constructed, config.liveness_timeout_s))
            for rank in range(self.num_ranks)
        ]
        self._watchers += [asyncio.create_task(self._watch_host(part)) for part in self._parts]
        self.call_one = Methods(self.name, roster, True, self._lost, self._hear)
        self.call_all = Methods(self.name, roster, False, self._lost, self._hear)
        told = (self.name, *executor, make_spans, self._logs_folder)
        pids = await asyncio.gather(
            *(
                results_by_rank(
                    self.name,
                    send(part.actors.construct, roster, part.first_rank, *told),
                    self.num_ranks,
                    self._lost,
                )
                for part in self._parts
            )
        )
        self.pids = [pid for found in pids for pid in found]
        constructed.set()
        self._watchers += [asyncio.create_task(self._watch_pids(part)) for part in self._parts]

    def _start_part(
        self, host: Host, first: int, devices: Sequence[Device], config: ClusterConfig
    ) -> HostSpan:
        common = environment(self.mark, config.threads_per_process)
        environments = [
            common | host.surroundings | gpu_environment(device, config) for device in devices
        ]
        processes = host.spawn(f"{self.name}-{first}", environments)
        actors = processes.spawn(f"{self.name}-{first}", ExecutorActor)
        return HostSpan(host, first, len(devices), processes, actors)

    async def watch(self) -> None:
        await asyncio.wait({self._lost})
        self._lost.result()

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        is_clean = not self._lost.done() and await self._finish()
        if not self._lost.done():
            self._lost.set_result(None)
        if not is_clean:  # Monarch waits long for a process that hangs
            await asyncio.gather(*(part.host.end(self.mark) for part in self._living_parts()))
        await asyncio.gather(*(self._stop_part(part) for part in self._living_parts()))

    def _living_parts(self) -> list[HostSpan]:
        """Those on hosts that can be reached: a dead daemon's processes die with it."""
        return [part for part in self._parts if not part.host.is_lost]

    async def _stop_part(self, part: HostSpan) -> None:
        try:
            await asyncio.wait_for(part.processes.stop().as_asyncio(), STOP_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - tear-down goes on
            log.debug("stopping %s: %s", self.name, error)
        left = await part.host.end(self.mark)
        if left:
            log.error("processes of %s could not be killed: %s", self.name, left)

    async def _finish(self) -> bool:
        """Close the executors; False if one did not answer in time."""
        if not self.pids:
            return False  # not constructed: nothing worth closing
        answers = [each for part in self._parts for each in send(part.actors.finish)]
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                for answer in answers:
                    (await answer).result()
        except TimeoutError:
            log.warning("closing %s took over %g s; killed", self.name, CLOSE_LIMIT_S)
            return False
        except Exception as error:  # noqa: BLE001 - tear-down goes on
            log.warning("closing %s failed: %s", self.name, describe_failed_close(error))
        return True

    async def _watch_rank(
        self, rank: int, constructed: asyncio.Event, liveness_timeout_s: float
    ) -> None:
        """Report the rank lost once its process ended, or its event loop was silent too long.

        A group that has answered no call yet is still starting: its imports, loads and builds may
        block its event loop for longer than silence may last.
        """
        actor = self._roster.one(rank)
        (end,) = send(actor.wait_exit)
        ready = asyncio.create_task(constructed.wait())
        waiting: list[asyncio.Future[Any]] = [end, ready]
        await asyncio.wait(waiting, timeout=START_LIMIT_S, return_when=FIRST_COMPLETED)
        if not ready.done() and not end.done():
            return self._lose(rank, f"its constructor took over {START_LIMIT_S:g} s")
        started = asyncio.create_task(self._has_started.wait())
        waiting = [end, started]
        await asyncio.wait(waiting, timeout=START_LIMIT_S, return_when=FIRST_COMPLETED)
        started.cancel()
        # Each rank looks after the next, so that the controller need not ping them all.
        (word,) = (
            [asyncio.create_task(until_silent(actor, liveness_timeout_s, lambda: self._heard_s))]
            if rank == 0
            else send(self._roster.one(rank - 1).monitor, rank, liveness_timeout_s)
        )
        try:
            await asyncio.wait({end, word}, return_when=FIRST_COMPLETED)
            if word.done() and word.exception() is not None:
                await asyncio.wait({end})  # the rank before has ended, which its watcher tells
            if not end.done():
                return self._lose(
                    rank, f"silent for {liveness_timeout_s:g} s (cluster.liveness_timeout_s)"
                )
        finally:
            word.cancel()
        error = end.exception()
        self._lose(rank, last_line(error) if error is not None else "it left its endless call")

    def _hear(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._has_started.set()

    async def _watch_pids(self, part: HostSpan) -> None:
        """Report a rank lost if its process is gone and Monarch, now and then, says nothing."""
        pids = self.pids[part.first_rank : part.first_rank + part.num_ranks]
        rank = part.first_rank + await part.host.first_ended(pids)
        await asyncio.sleep(WORD_LIMIT_S)
        self._lose(rank, "its process ended")

    async def _watch_host(self, part: HostSpan) -> None:
        """Report the part's first rank lost once its host is."""
        self._lose(part.first_rank, await part.host.until_lost())

    def _lose(self, rank: int, reason: str) -> None:
        if self._lost.done():
            return
        process = process_name(self.name, rank, self.num_ranks)
        if "sig=9" in reason:
            reason += " (killed; when nobody did it, the machine ran out of memory)"
        tail = log_tail(self._logs_folder, process)
        if tail:
            reason += f"\nlast lines of {log_path(self._logs_folder, process)}:\n{tail}"
        loss = GroupLost(self.name, rank, reason)
        self._lost.set_exception(loss)
        self._report(loss)


class MonarchCluster:
    """Starts executor groups on this machine, or on the hosts of worker daemons."""

    def __init__(
        self, config: ClusterConfig, make_spans: Callable[[str], Spans], *, logs_folder: str
    ) -> None:
        self._config = config
        self._make_spans = make_spans
        self._logs_folder = logs_folder
        self._id = uuid.uuid4().hex
        self._groups: dict[str, MonarchGroup] = {}
        self._attaching: asyncio.Task[list[Host]] | None = None
        self._loss: GroupLost | None = None
        self._news = asyncio.Event()  # a loss, or the stop
        self._is_stopped = False

    async def spawn(
        self,
        name: str,
        factory: Factory,
        spec: Any,
        num_ranks: int = 1,
        devices: Sequence[Device] | None = None,
    ) -> ExecutorGroup:
        if name in self._groups:
            raise ValueError(f"executor name must be new in its cluster, got {name!r} again")
        if self._is_stopped:
            raise RuntimeError("the cluster was stopped")
        mark = f"{self._id}/{name}"
        group = MonarchGroup(name, num_ranks, mark, self._logs_folder, self._report)
        self._groups[name] = group
        if self._attaching is None:
            self._attaching = asyncio.create_task(attach(self._config, self._logs_folder))
        hosts = await asyncio.shield(self._attaching)
        places = devices or [Device(host=0, gpu=None)] * num_ranks
        await group.start(hosts, places, self._config, (factory, spec), self._make_spans)
        return group

    async def watch(self) -> None:
        await self._news.wait()
        if self._loss is not None:
            raise self._loss

    async def stop(self) -> None:
        self._is_stopped = True
        await asyncio.gather(*(group.stop() for group in self._groups.values()))
        await self._detach()
        self._news.set()

    async def _detach(self) -> None:
        if self._attaching is None:
            return
        self._attaching.cancel()
        try:
            hosts = await self._attaching
        except (ValueError, asyncio.CancelledError):  # raised by the spawn
            return
        await asyncio.gather(*(host.detach() for host in hosts))

    def _report(self, loss: GroupLost) -> None:
        self._loss = self._loss or loss
        self._news.set()


def parts_of(
    hosts: list[Host], devices: Sequence[Device]
) -> Iterator[tuple[Host, int, Sequence[Device]]]:
    """Per host of a group: the host, the first rank there, the devices of its ranks.

    ValueError for a host that the run does not have, or whose ranks are not in one row.
    """
    first, seen = 0, set[int]()
    for number, row in groupby(devices, key=lambda device: device.host):
        if number >= len(hosts) or number in seen:
            raise ValueError(
                f"devices must be on the run's {len(hosts)} hosts, host after host, got {number}"
            )
        seen.add(number)
        places = list(row)
        yield hosts[number], first, places
        first += len(places)


def gpu_environment(device: Device, config: ClusterConfig) -> dict[str, str]:
    """What tells a process which GPU is its own, and of what kind it must be."""
    return {} if device.gpu is None else {"LOCAL_RANK": str(device.gpu), "LLAMARL_GPU": config.gpu}
