"""Executors in processes of their own, as Monarch actors on this host.

Owns: the actor that wraps an executor, its process mesh, its watchers and its end. Does not own:
what is called. Invariant: nothing an executor does raises inside an actor endpoint, for Monarch
would end the actor; outcomes travel as data.
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
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

# Read when monarch is imported; children inherit it. The default, 10 s, is how long a killed
# process would go unnoticed.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    HostMesh,
    concurrent_endpoint,
    current_rank,
    default_bootstrap_cmd,
    this_host,
)

from llamarl.cluster.errors import GroupLost, RemoteError
from llamarl.cluster.group import ExecutorGroup, process_name
from llamarl.cluster.outcome import Outcome, attempt, failure
from llamarl.cluster.process import end_marked, environment, log_path, log_tail, redirect_output
from llamarl.config import ClusterConfig
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0  # for an executor's own clean-up
STOP_LIMIT_S = 5.0  # for Monarch's
START_LIMIT_S = 120.0  # for imports and an executor's constructor
LOSS_GRACE_S = 1.0  # a death is reported this late; its consequences in other ranks come earlier
DIMENSION = "ranks"


class ExecutorActor(Actor):
    """One executor in its process. All endpoints run concurrently on one event loop."""

    def __init__(self) -> None:
        self._executor: object = None
        self._spans: Spans | None = None
        self._where = ""

    @concurrent_endpoint
    async def construct(
        self, name: str, num_ranks: int, factory: type, kwargs: Any, folders: tuple[str | None, str]
    ) -> Outcome:
        rank = current_rank().rank
        spans_folder, logs_folder = folders
        self._where = process_name(name, rank, num_ranks)
        try:
            redirect_output(logs_folder, self._where)
            self._spans = Spans(self._where, spans_folder)
            self._executor = factory(rank=rank, num_ranks=num_ranks, spans=self._spans, **kwargs)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            return failure(error, self._where, rank)
        return Outcome(rank, os.getpid())

    @concurrent_endpoint
    async def run(self, method: str, args: Any, kwargs: Any) -> Outcome:
        rank = current_rank().rank
        return await attempt(self._executor, self._where, rank, (method, args, kwargs))

    @concurrent_endpoint
    async def finish(self) -> Outcome:
        rank = current_rank().rank
        outcome = Outcome(rank)
        if hasattr(self._executor, "close"):
            outcome = await attempt(self._executor, self._where, rank, ("close", (), {}))
        if self._spans is not None:
            self._spans.close()
        return outcome

    @concurrent_endpoint
    async def ping(self) -> None:
        """Says that the event loop runs."""

    @concurrent_endpoint
    async def linger(self) -> None:
        """Never answers: the pending call is what learns of the process's end."""
        await asyncio.Event().wait()


class Methods:
    """Turns attribute access into calls on all ranks; travels to other processes.

    `lost` exists only in the controller: there a process that fell silent ends pending calls too.
    """

    def __init__(
        self,
        name: str,
        actors: Any,
        num_ranks: int,
        is_first: bool,
        lost: asyncio.Future[None] | None = None,
    ) -> None:
        self._name = name
        self._actors = actors
        self._num_ranks = num_ranks
        self._is_first = is_first
        self._lost = lost

    def __reduce__(self) -> Any:
        return Methods, (self._name, self._actors, self._num_ranks, self._is_first)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            answers = _send(self._actors.run, method, args, kwargs)
            results = await _results(self._name, answers, self._num_ranks, self._lost)
            return results[0] if self._is_first else results

        return call


def _send(endpoint: Any, *args: Any) -> Iterator[asyncio.Future[Any]]:
    """One future per rank, in the order the answers arrive."""
    for answer in endpoint.stream(*args):
        future = answer.as_asyncio()
        future.add_done_callback(_retrieve)
        yield future


async def _results(
    name: str,
    answers: Iterator[asyncio.Future[Outcome]],
    num_ranks: int,
    lost: asyncio.Future[None] | None,
) -> list[Any]:
    """Results by rank; raises the first failure to arrive."""
    results: dict[int, Any] = {}
    for answer in answers:
        waiting: list[asyncio.Future[Any]] = [answer] if lost is None else [answer, lost]
        await asyncio.wait(waiting, return_when=FIRST_COMPLETED)
        if not answer.done():
            assert lost is not None
            lost.result()
            raise GroupLost(name, None, "it was stopped during the call")
        try:
            outcome = answer.result()
        except SupervisionError as error:
            await _prefer_loss(lost)
            raise GroupLost(name, None, _last_line(error)) from error
        except ActorError as error:  # what was passed or returned does not pickle
            raise RemoteError(f"{name}: {error}") from error
        if outcome.error is not None and num_ranks > 1:
            await _prefer_loss(lost)
        results[outcome.rank] = outcome.result()
    return [results[rank] for rank in range(num_ranks)]


async def _prefer_loss(lost: asyncio.Future[None] | None) -> None:
    """Raise GroupLost if a rank of the group just died: other errors are its consequences."""
    if lost is not None:
        await asyncio.wait({lost}, timeout=LOSS_GRACE_S)
        if lost.done():
            lost.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen: nobody may be waiting for this answer any more."""
    if not future.cancelled():
        future.exception()


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip()


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
        self._lost.add_done_callback(_retrieve)
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
        executor: tuple[type, dict[str, Any]],
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
        answers = _send(self._actors.construct, self.name, self.num_ranks, factory, kwargs, folders)
        self.pids = await _results(self.name, answers, self.num_ranks, self._lost)
        constructed.set()

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
        answers = list(_send(self._actors.finish))
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
        (end,) = _send(actor.linger)
        # Imports block the event loop of a process that starts.
        ready = asyncio.create_task(constructed.wait())
        waiting: list[asyncio.Future[Any]] = [end, ready]
        await asyncio.wait(waiting, timeout=START_LIMIT_S, return_when=FIRST_COMPLETED)
        if not ready.done() and not end.done():
            return self._lose(rank, f"its constructor took over {START_LIMIT_S:g} s")
        while not end.done():
            (pong,) = _send(actor.ping)
            # Waiting in pieces: after a pause of the controller itself, answers that lie waiting
            # are read before the verdict.
            for _ in range(3):
                await asyncio.wait({end, pong}, timeout=silence_s / 4, return_when=FIRST_COMPLETED)
                if pong.done() or end.done():
                    break
            if not pong.done() and not end.done():
                return self._lose(rank, f"silent for {silence_s:g} s (cluster.silence_s)")
            await asyncio.wait({end}, timeout=silence_s / 4)
        error = end.exception()
        self._lose(rank, _last_line(error) if error is not None else "it left its endless call")

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
        self, name: str, factory: type, kwargs: dict[str, Any], num_ranks: int = 1
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
