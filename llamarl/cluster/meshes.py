"""Executors in processes of their own: per executor and host one Monarch process mesh.

An executor is at every moment running, lost (for a stated reason) or stopped, and the future
`_lost` says which; after `stop` none of its processes is alive."""

import asyncio
import logging
import math
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llamarl.cluster.actors import (
    ExecutorActor,
    ExecutorActors,
    RemoteRun,
    last_line,
    results_by_rank,
    send,
    wait_silent,
)
from llamarl.cluster.executor import Executor, Factory, RankCalls, process_name
from llamarl.cluster.hosts import Host, attach, attach_late
from llamarl.cluster.os_process import environment, log_path, log_tail
from llamarl.core.config import ClusterConfig
from llamarl.core.config.rank_assignment import Device
from llamarl.core.errors import ExecutorLost, mark_seen
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0  # for an executor's own clean-up
STOP_LIMIT_S = 3.0  # for Monarch's
START_LIMIT_S = 120.0  # for imports and an executor's constructor; then for its first answer


@dataclass(frozen=True)
class HostRanks:
    """The ranks of an executor on one host, from `first_rank` on, and Monarch's meshes of them."""

    host: Host
    first_rank: int
    num_ranks: int
    processes: Any
    actors: Any


class MonarchExecutor(RankCalls):
    """An executor in processes of its own, one per rank, on one host or several."""

    def __init__(self, name: str, num_ranks: int, mark: str, logs_folder: str) -> None:
        self.name, self.writer = name, ""
        self.num_ranks = num_ranks
        self.mark = mark
        self._logs_folder = logs_folder
        # The result None means stopped on purpose.
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost.add_done_callback(mark_seen)
        self._answered_s = -math.inf  # when a call was answered last
        self._has_answered = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._by_host: list[HostRanks] = []
        self.pids: list[int] = []  # by rank

    async def start(
        self,
        hosts: list[Host],
        devices: Sequence[Device],
        config: ClusterConfig,
        executor: tuple[Factory, dict[str, Any]],
        make_spans: Callable[[str], Spans],
    ) -> None:
        """Start the processes and construct the executors; raises what a constructor raises."""
        self._by_host = [
            self._start_ranks(*place, config) for place in ranks_by_host(hosts, devices)
        ]
        meshes = tuple((ranks.actors, ranks.first_rank) for ranks in self._by_host)
        self._actors = actors = ExecutorActors(meshes, self.num_ranks)
        constructed = asyncio.Event()
        self._watch(
            self._watch_rank(rank, constructed, config.liveness_timeout_s)
            for rank in range(self.num_ranks)
        )
        self._watch(map(self._watch_host, self._by_host))
        self._run = RemoteRun(self.name, actors, self._lost, self._note_answer)
        arguments = (self.name, *executor, make_spans, self._logs_folder)
        pids = await asyncio.gather(
            *(
                results_by_rank(
                    self.name,
                    send(ranks.actors.construct, actors, ranks.first_rank, *arguments),
                    self.num_ranks,
                    self._lost,
                )
                for ranks in self._by_host
            )
        )
        self.pids = [pid for found in pids for pid in found]
        constructed.set()
        self._watch(map(self._watch_pids, self._by_host))

    def _watch(self, watchers: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._watchers += map(asyncio.create_task, watchers)

    def _start_ranks(
        self, host: Host, first: int, devices: Sequence[Device], config: ClusterConfig
    ) -> HostRanks:
        common = environment(self.mark, config.threads_per_process) | host.environment
        environments = [common | gpu_environment(device, config) for device in devices]
        mesh_name = f"{self.name}-{first}-{uuid.uuid4().hex[:8]}"  # the name alone may come again
        processes = host.spawn(mesh_name, environments)
        actors = processes.spawn(mesh_name, ExecutorActor)
        return HostRanks(host, first, len(devices), processes, actors)

    def _pids(self, ranks: HostRanks) -> list[int]:
        return self.pids[ranks.first_rank : ranks.first_rank + ranks.num_ranks]

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` has ended all processes."""
        return self._stopping is not None and self._stopping.done()

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
        await asyncio.gather(*(self._stop_ranks(ranks, is_clean) for ranks in self._by_host))

    async def _stop_ranks(self, ranks: HostRanks, is_clean: bool) -> None:
        if ranks.host.is_lost:  # they died with its daemon
            return _fail_calls(ranks)
        if is_clean:
            for _ in send(ranks.actors.exit):
                pass  # it never answers
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_LIMIT_S):
                    await self._wait_exits(ranks)
        await ranks.host.kill(self.mark)  # Monarch waits long for a process that hangs
        _fail_calls(ranks)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await ranks.processes.stop().as_asyncio()
        except Exception as error:  # noqa: BLE001 - tear-down continues
            log.debug("stopping %s: %s", self.name, error)
        left = await ranks.host.kill(self.mark)
        if left:
            log.error("processes of %s could not be killed: %s", self.name, left)

    async def _wait_exits(self, ranks: HostRanks) -> None:
        """Wait until all processes of these ranks have ended."""
        pids = self._pids(ranks)
        while pids:
            index, _ = await ranks.host.wait_first_exit(pids)
            del pids[index]

    async def _finish(self) -> bool:
        """Close the executors; return False if one did not answer in time."""
        if not self.pids:
            return False  # not constructed: nothing to close
        answers = [each for ranks in self._by_host for each in send(ranks.actors.finish)]
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                for answer in answers:
                    (await answer).result()
        except TimeoutError:
            log.warning("closing %s took over %g s; killed", self.name, CLOSE_LIMIT_S)
            return False
        except Exception as error:  # noqa: BLE001 - tear-down continues
            # One line: the executor's log has the traceback, if it is the executor's.
            log.warning("closing %s failed: %s", self.name, last_line(error))
        return True

    async def _watch_rank(
        self, rank: int, constructed: asyncio.Event, liveness_timeout_s: float
    ) -> None:
        """Report the rank lost when its process ends, or when its event loop is silent too long.

        Until it has answered its first call, imports, loads and builds may block its event loop for
        longer than that.
        """
        actor = self._actors.one(rank)
        (end,) = send(actor.wait_exit)
        for event in (constructed, self._has_answered):
            reached = asyncio.create_task(event.wait())
            waiting: list[asyncio.Future[Any]] = [end, reached]
            await asyncio.wait(waiting, timeout=START_LIMIT_S, return_when=FIRST_COMPLETED)
            if not constructed.is_set() and not end.done():
                return self._set_lost(rank, f"its constructor took over {START_LIMIT_S:g} s")
            reached.cancel()
        # Each rank monitors the next one, so that the controller need not ping them all.
        (silence,) = (
            [asyncio.create_task(wait_silent(actor, liveness_timeout_s, lambda: self._answered_s))]
            if rank == 0
            else send(self._actors.one(rank - 1).monitor, rank, liveness_timeout_s)
        )
        try:
            await asyncio.wait({end, silence}, return_when=FIRST_COMPLETED)
            if silence.done() and silence.exception() is not None:
                await asyncio.wait({end})  # the rank before has ended, which its watcher reports
            if not end.done():
                return self._set_lost(
                    rank, f"silent for {liveness_timeout_s:g} s (cluster.liveness_timeout_s)"
                )
        finally:
            silence.cancel()
        error = end.exception()
        self._set_lost(rank, last_line(error) if error is not None else "it left its endless call")

    def _note_answer(self) -> None:
        self._answered_s = asyncio.get_running_loop().time()
        self._has_answered.set()

    async def _watch_pids(self, ranks: HostRanks) -> None:
        """Report a rank lost when its process ends: Monarch looks only every 10 s, as it keeps 6 kB
        of each look (docs/limits.md)."""
        index, how = await ranks.host.wait_first_exit(self._pids(ranks))
        self._set_lost(ranks.first_rank + index, f"its process ended{how}")

    async def _watch_host(self, ranks: HostRanks) -> None:
        """Report the first rank on a host lost when the host is."""
        self._set_lost(ranks.first_rank, await ranks.host.wait_lost())

    def _set_lost(self, rank: int, reason: str) -> None:
        if self._lost.done():
            return
        process = process_name(self.name, rank, self.num_ranks)
        if "SIGKILL" in reason or "sig=9" in reason:  # the words of this module, and Monarch's
            reason += " (killed; unless a user did it, the machine ran out of memory)"
        tail = log_tail(self._logs_folder, process)
        if tail:
            reason += f"\nlast lines of {log_path(self._logs_folder, process)}:\n{tail}"
        self._lost.set_exception(ExecutorLost(self.name, rank, reason))
        if self._stopping is None:  # what is left of it is of no use
            self._stopping = asyncio.create_task(self._stop())


def _fail_calls(ranks: HostRanks) -> None:
    """Let calls of these ranks from other executors fail now, and not when Monarch next looks.

    Their processes must have ended: a call to an actor that was stopped in a process that lives
    would end its caller.
    """
    ranks.actors.stop().as_asyncio().add_done_callback(mark_seen)


class MonarchCluster:
    """Starts executors on this machine, or on the hosts of worker daemons."""

    def __init__(
        self, config: ClusterConfig, make_spans: Callable[[str], Spans], *, logs_folder: str
    ) -> None:
        self._config = config
        self._make_spans = make_spans
        self._logs_folder = logs_folder
        self._id = uuid.uuid4().hex
        self._executors: dict[str, MonarchExecutor] = {}
        self._attaching: asyncio.Task[list[Host]] | None = None
        self._is_stopped = False

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
        if self._is_stopped:
            raise RuntimeError("the cluster was stopped")
        mark = f"{self._id}/{name}"
        found = MonarchExecutor(name, num_ranks, mark, self._logs_folder)
        self._executors[name] = found
        if self._attaching is None:
            self._attaching = asyncio.create_task(attach(self._config, self._logs_folder))
        hosts = await asyncio.shield(self._attaching)
        places = devices or [Device(host=0, gpu=None)] * num_ranks
        try:
            await found.start(hosts, places, self._config, (factory, spec), self._make_spans)
        except BaseException:  # its name is free for the next one
            await found.stop()
            raise
        return found

    async def add_host(self, address: str) -> int:
        if self._attaching is None:
            raise RuntimeError("a host must be added after the first spawn")
        hosts = await asyncio.shield(self._attaching)
        await attach_late(self._config, address, self._logs_folder, hosts)
        return len(hosts) - 1

    async def stop(self) -> None:
        self._is_stopped = True
        await asyncio.gather(*(each.stop() for each in self._executors.values()))
        if self._attaching is None:
            return
        self._attaching.cancel()
        try:
            hosts = await self._attaching
        except (ValueError, asyncio.CancelledError):  # raised by the spawn
            return
        await asyncio.gather(*(host.detach() for host in hosts))


def ranks_by_host(
    hosts: list[Host], devices: Sequence[Device]
) -> Iterator[tuple[Host, int, Sequence[Device]]]:
    """Yield, per host of an executor, the host, the first rank there, and the devices of its ranks.

    ValueError for a host that the run does not have, or whose ranks are not consecutive.
    """
    first, seen = 0, set[int]()
    for number, some in groupby(devices, key=lambda device: device.host):
        if number >= len(hosts) or number in seen:
            raise ValueError(
                f"devices must be on the run's {len(hosts)} hosts, host after host, got {number}"
            )
        seen.add(number)
        places = list(some)
        yield hosts[number], first, places
        first += len(places)


def gpu_environment(device: Device, config: ClusterConfig) -> dict[str, str]:
    """Return the variables that say which GPU a process uses, and of what kind that must be."""
    if device.gpu is None:
        return {}
    return {"LOCAL_RANK": str(device.gpu), "LLAMARL_GPU": device.gpu_kind or config.gpu}
