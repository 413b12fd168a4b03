"""The actor around an executor, and calls on all its ranks from any process.

Owns: endpoints, the proxies that travel, and what a failed call raises. Does not own: processes
(`meshes.py`). Invariant: nothing an executor does raises inside an endpoint, for Monarch would end
the actor; outcomes travel as data.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor import config as monarch_config
from monarch.actor import Actor, ActorError, concurrent_endpoint, current_rank

from llamarl.cluster.errors import GroupLost, RemoteError
from llamarl.cluster.group import Factory, process_name, resolve
from llamarl.cluster.outcome import Outcome, attempt, failure
from llamarl.cluster.process import redirect_output
from llamarl.metrics.span import Spans

monarch_config.prefix_python_logs_with_actor = False  # it would stand in every log line, twice

LOSS_GRACE_S = 1.0  # a death is reported this late; its consequences in other ranks come earlier


class ExecutorActor(Actor):
    """One executor in its process. All endpoints run concurrently on one event loop."""

    def __init__(self) -> None:
        self._executor: object = None
        self._spans: Spans | None = None
        self._where = ""

    @concurrent_endpoint
    async def construct(
        self,
        name: str,
        num_ranks: int,
        factory: Factory,
        kwargs: Any,
        folders: tuple[str | None, str],
    ) -> Outcome:
        rank = current_rank().rank
        spans_folder, logs_folder = folders
        self._where = process_name(name, rank, num_ranks)
        try:
            redirect_output(logs_folder, self._where)
            self._spans = Spans(self._where, spans_folder)
            maker = resolve(factory)
            self._executor = maker(rank=rank, num_ranks=num_ranks, spans=self._spans, **kwargs)
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
            answers = send(self._actors.run, method, args, kwargs)
            results = await results_by_rank(self._name, answers, self._num_ranks, self._lost)
            return results[0] if self._is_first else results

        return call


def send(endpoint: Any, *args: Any) -> Iterator[asyncio.Future[Any]]:
    """One future per rank, in the order the answers arrive."""
    for answer in endpoint.stream(*args):
        future = answer.as_asyncio()
        future.add_done_callback(mark_retrieved)
        yield future


async def results_by_rank(
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
            raise GroupLost(name, None, last_line(error)) from error
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


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen: nobody may be waiting for this answer any more."""
    if not future.cancelled():
        future.exception()


def last_line(error: BaseException) -> str:
    """The cause in a Monarch error, whose text begins with the call."""
    return str(error).strip().splitlines()[-1].strip()
