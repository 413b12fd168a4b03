"""Executors in processes of their own on this host: one Monarch process mesh per group.

Owns: starting, watching and ending processes. Does not own: calls (`actors.py`). Invariant: a
group is at every moment running, lost (for a stated reason) or stopped, and the future `_lost`
says which; after `stop` none of its processes is alive.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import traceback
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from typing import Any

import monarch.actor
from monarch.actor import HostMesh, default_bootstrap_cmd, this_host

from llamarl.cluster.actors import (
    DIMENSION,
    ExecutorActor,
    Methods,
    last_line,
    mark_retrieved,
    results_by_rank,
    send,
    until_silent,
)
from llamarl.cluster.errors import GroupLost
from llamarl.cluster.group import ExecutorGroup, Factory, process_name
from llamarl.cluster.process import end_marked, environment, is_alive, log_path, log_tail
from llamarl.config import ClusterConfig

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0  # for an executor's own clean-up
STOP_LIMIT_S = 3.0  # for Monarch's
LOOK_S = 1.0  # between looks whether a process is there
WORD_LIMIT_S = 2.0  # for Monarch to say how a process ended
START_LIMIT_S = 120.0  # for imports and an executor's constructor


class MonarchGroup:
    """One process mesh with one executor on every rank."""

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
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._processes: Any = None
        self._actors: Any = None
        self.pids: list[int] = []
        self.first: Any = None
        self.every: Any = None

    async def start(
        self,
        host: HostMesh,
        config: ClusterConfig,
        executor: tuple[Factory, dict[str, Any]],
        spans_folder: str | None,
    ) -> None:
        """Start the processes and construct the executors; raises what a constructor raises."""
        variables = environment(self.mark, config.threads_per_process)
        self._processes = host.spawn_procs(
            {DIMENSION: self.num_ranks},
            name=self.name,
            bootstrap_command=default_bootstrap_cmd().with_env(variables),
        )
        self._actors = self._processes.spawn(self.name, ExecutorActor)
        constructed = asyncio.Event()
        self._watchers = [
            asyncio.create_task(self._watch_rank(rank, constructed, config.silence_s))
            for rank in range(self.num_ranks)
        ]
        mesh = (self.name, self._actors, self.num_ranks)
        self.first = Methods(*mesh, True, self._lost)
        self.every = Methods(*mesh, False, self._lost)
        factory, kwargs = executor
        folders = (spans_folder, self._logs_folder)
        told = (self._actors, self.name, self.num_ranks, factory, kwargs, folders)
        answers = send(self._actors.construct, *told)
        self.pids = await results_by_rank(self.name, answers, self.num_ranks, self._lost)
        constructed.set()
        self._watchers += [asyncio.create_task(self._watch_pid(i)) for i in range(self.num_ranks)]

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
            await end_marked(self.mark)
        if self._processes is not None:
            try:
                await asyncio.wait_for(self._processes.stop().as_asyncio(), STOP_LIMIT_S)
            except Exception as error:  # noqa: BLE001 - tear-down goes on
                log.debug("stopping %s: %s", self.name, error)
        left = await end_marked(self.mark)
        if left:
            log.error("processes of %s could not be killed: %s", self.name, left)

    async def _finish(self) -> bool:
        """Close the executors; False if one did not answer in time."""
        if not self.pids:
            return False  # not constructed: nothing worth closing
        answers = list(send(self._actors.finish))
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                for answer in answers:
                    (await answer).result()
        except TimeoutError:
            log.warning("closing %s took over %g s; killed", self.name, CLOSE_LIMIT_S)
            return False
        except Exception as error:  # noqa: BLE001 - tear-down goes on
            report = "".join(traceback.format_exception(error))
            log.warning("closing %s failed:\n%s", self.name, report)
        return True

    async def _watch_rank(self, rank: int, constructed: asyncio.Event, silence_s: float) -> None:
        """Report the rank lost once its process ended, or its event loop was silent too long."""
        actor = self._actors.slice(**{DIMENSION: rank})
        (end,) = send(actor.linger)
        # Imports block the event loop of a process that starts.
        ready = asyncio.create_task(constructed.wait())
        waiting: list[asyncio.Future[Any]] = [end, ready]
        await asyncio.wait(waiting, timeout=START_LIMIT_S, return_when=FIRST_COMPLETED)
        if not ready.done() and not end.done():
            return self._lose(rank, f"its constructor took over {START_LIMIT_S:g} s")
        # Each rank looks after the next, so that the controller need not ping them all.
        (word,) = (
            [asyncio.create_task(until_silent(actor, silence_s))]
            if rank == 0
            else send(self._actors.slice(**{DIMENSION: rank - 1}).look_after, rank, silence_s)
        )
        try:
            await asyncio.wait({end, word}, return_when=FIRST_COMPLETED)
            if word.done() and word.exception() is not None:
                await asyncio.wait({end})  # the rank before has ended, which its watcher tells
            if not end.done():
                return self._lose(rank, f"silent for {silence_s:g} s (cluster.silence_s)")
        finally:
            word.cancel()
        error = end.exception()
        self._lose(rank, last_line(error) if error is not None else "it left its endless call")

    async def _watch_pid(self, rank: int) -> None:
        """Report the rank lost if its process is gone and Monarch, now and then, says nothing."""
        while is_alive(self.pids[rank]):
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(WORD_LIMIT_S)
        self._lose(rank, "its process ended")

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
    """Starts executor groups on this host over abstract unix sockets; no port is opened."""

    def __init__(
        self, config: ClusterConfig, *, spans_folder: str | None, logs_folder: str
    ) -> None:
        self._config = config
        self._spans_folder = spans_folder
        self._logs_folder = logs_folder
        self._id = uuid.uuid4().hex
        self._groups: dict[str, MonarchGroup] = {}
        self._loss: GroupLost | None = None
        self._news = asyncio.Event()  # a loss, or the stop
        self._is_stopped = False

    async def spawn(
        self, name: str, factory: Factory, kwargs: dict[str, Any], num_ranks: int = 1
    ) -> ExecutorGroup:
        if name in self._groups:
            raise ValueError(f"executor name must be new in its cluster, got {name!r} again")
        if self._is_stopped:
            raise RuntimeError("the cluster was stopped")
        mark = f"{self._id}/{name}"
        group = MonarchGroup(name, num_ranks, mark, self._logs_folder, self._report)
        self._groups[name] = group
        await group.start(_host(), self._config, (factory, kwargs), self._spans_folder)
        return group

    async def watch(self) -> None:
        await self._news.wait()
        if self._loss is not None:
            raise self._loss

    async def stop(self) -> None:
        self._is_stopped = True
        await asyncio.gather(*(group.stop() for group in self._groups.values()))
        self._news.set()

    def _report(self, loss: GroupLost) -> None:
        self._loss = self._loss or loss
        self._news.set()


@functools.cache
def _host() -> HostMesh:
    """This machine; the first use starts Monarch's client, which announces itself on stderr."""
    monarch.actor.unhandled_fault_hook = _log_fault
    console = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(null, 2)
    try:
        return this_host()
    finally:
        os.dup2(console, 2)
        os.close(console)
        os.close(null)


def _log_fault(failure: Any) -> None:
    """Keep the controller alive (Monarch's own hook exits): the watchers report losses."""
    log.debug("monarch: %s", failure)
