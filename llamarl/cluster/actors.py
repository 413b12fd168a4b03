"""The actor around an executor, and calls on all its ranks from any process.

Owns: endpoints, the proxies that travel, and what a failed call raises. Does not own: processes
(`meshes.py`). Invariant: nothing an executor does raises inside an endpoint, for Monarch would end
the actor; outcomes travel as data.

A message costs its sender and the receiver of the answer about 0.2 ms. So a call is one message to
rank 0, which passes it to the heads of FANOUT spans of the other ranks, and so on: nobody talks to
more than FANOUT others, and what a call costs the caller does not grow with the number of ranks.
Outcomes come back the same way, together; the first failure at once, and what can be merged
(`group.Mergeable`) as one.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import pickle
import re
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor import config as monarch_config
from monarch.actor import Actor, ActorError, concurrent_endpoint, current_rank

from llamarl.cluster.call_result import CallResult, attempt, failure, merged
from llamarl.cluster.group import Factory, process_name, resolve
from llamarl.cluster.hosts import DIMENSION
from llamarl.cluster.process import redirect_output
from llamarl.errors import GroupLost, RemoteError
from llamarl.metrics.span import Spans

monarch_config.prefix_python_logs_with_actor = False  # it would stand in every log line, twice

FANOUT = 4  # ranks that one rank passes a call on to
LOSS_GRACE_S = 1.0  # a death is reported this late; its consequences in other ranks come earlier


class ExecutorActor(Actor):
    """One executor in its process. All endpoints run concurrently on one event loop."""

    def __init__(self) -> None:
        self._executor: object = None
        self._spans: Spans | None = None
        self._where = ""
        self._name, self._rank = "", 0
        self._roster = Roster((), 0)
        # By span and end: a new slice subscribes to its mesh anew, in the controller's process.
        self._heads: dict[tuple[int, int], list[Any]] = {}

    @concurrent_endpoint
    async def construct(
        self,
        roster: Roster,
        first_rank: int,
        name: str,
        factory: Factory,
        spec: Any,
        make_spans: Callable[[str], Spans],
        logs_folder: str,
    ) -> list[CallResult]:
        """`first_rank` is that of this host's first rank."""
        rank = self._rank = first_rank + current_rank().rank
        self._roster, self._name, num_ranks = roster, name, roster.num_ranks
        self._where = process_name(name, rank, num_ranks)
        try:
            redirect_output(logs_folder, self._where)
            self._spans = make_spans(self._where)
            gc.disable()  # imports make next to no garbage: looking for it is a fifth of their time
            maker = resolve(factory)
            gc.enable()
            self._executor = maker(spec, rank=rank, num_ranks=num_ranks, spans=self._spans)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            return [failure(error, self._where, rank)]
        return [CallResult(rank, os.getpid())]

    @concurrent_endpoint
    async def run(
        self, call: tuple[str, Any, Any], span: int, end: int, is_first: bool
    ) -> list[CallResult]:
        """`call` (method, args, kwargs) on the `span` ranks from this one on that are below `end`.

        The outcomes, by rank 0 only if `is_first`; or the first failure alone.
        """
        end = min(self._rank + span, end)
        own = asyncio.create_task(attempt(self._executor, self._where, self._rank, call))
        answers: list[asyncio.Future[Any]] = [own]
        if end > self._rank + 1:
            span = math.ceil((end - self._rank - 1) / FANOUT)
            if (span, end) not in self._heads:
                ranks = range(self._rank + 1, end, span)
                self._heads[span, end] = [heads.run for heads in self._roster.select(ranks)]
            for run in self._heads[span, end]:
                answers += send(run, call, span, end, is_first)
        outcomes: list[CallResult] = []
        for answer in asyncio.as_completed(answers):
            try:
                found = await answer
            except (SupervisionError, ActorError) as error:
                lost = lost_or_remote(self._name, error)
                found = CallResult(self._rank, error=pickle.dumps(lost))
            for result in [found] if isinstance(found, CallResult) else found:
                if result.error is not None:
                    return [result]
                if result.rank == 0 or not is_first:
                    outcomes.append(result)
        return merged(outcomes)

    @concurrent_endpoint
    async def finish(self) -> CallResult:
        result = CallResult(self._rank)
        if hasattr(self._executor, "close"):
            result = await attempt(self._executor, self._where, self._rank, ("close", (), {}))
        if self._spans is not None:
            self._spans.close()
        gc.freeze()  # else the interpreter's end looks at all that was imported: most of a second
        return result

    @concurrent_endpoint
    async def ping(self) -> None:
        """Says that the event loop runs."""

    @concurrent_endpoint
    async def monitor(self, rank: int, liveness_timeout_s: float) -> None:
        """Returns once another rank is silent."""
        await until_silent(self._roster.one(rank), liveness_timeout_s)

    @concurrent_endpoint
    async def wait_exit(self) -> None:
        """Never answers: the pending call is what learns of the process's end."""
        await asyncio.Event().wait()


class Roster:
    """The actors of all ranks of a group: per host one Monarch mesh, in rank order. Travels."""

    def __init__(self, meshes: tuple[tuple[Any, int], ...], num_ranks: int) -> None:
        """`meshes` are those of the hosts, each with the rank of its first actor."""
        self.meshes = meshes
        self.num_ranks = num_ranks

    def one(self, rank: int) -> Any:
        """The actor of one rank."""
        return self.select(range(rank, rank + 1))[0]

    def select(self, ranks: range) -> list[Any]:
        """The actors of these ranks, as one mesh per host that has any."""
        found = []
        ends = [first for _, first in self.meshes[1:]] + [self.num_ranks]
        for (mesh, first), end in zip(self.meshes, ends, strict=True):
            inside = ranks[max(0, -((ranks.start - first) // ranks.step)) :]
            if inside and inside.start < end:
                last = min(inside.stop, end)
                part = slice(inside.start - first, last - first, inside.step)
                found.append(mesh.slice(**{DIMENSION: part}))
        return found


class Methods:
    """Turns attribute access into calls on all ranks; travels to other processes.

    `lost` exists only in the controller: there a process that fell silent ends pending calls too.
    So does `hear`, which is called at every answer: who answers need not be asked whether it lives.
    """

    def __init__(
        self,
        name: str,
        roster: Roster,
        is_first: bool,
        lost: asyncio.Future[None] | None = None,
        hear: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._roster = roster
        self._is_first = is_first
        self._lost = lost
        self._hear = hear
        self._root: Any = None

    def __reduce__(self) -> Any:
        return Methods, (self._name, self._roster, self._is_first)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._root is None:
                self._root = self._roster.one(0).run
            size = self._roster.num_ranks
            answers = send(self._root, (method, args, kwargs), size, size, self._is_first)
            results = await results_by_rank(self._name, answers, size, self._lost)
            self._hear()
            return results[0] if self._is_first else results

        return call


def send(endpoint: Any, *args: Any) -> Iterator[asyncio.Future[Any]]:
    """One future per rank, in the order the answers arrive."""
    for answer in endpoint.stream(*args):
        future = answer.as_asyncio()
        future.add_done_callback(mark_retrieved)
        yield future


async def until_silent(
    actor: Any, liveness_timeout_s: float, heard_s: Callable[[], float] = lambda: -math.inf
) -> None:
    """Return once the event loop of `actor` answers nothing for `liveness_timeout_s`; never if it
    ends.

    It is asked only after a quarter of that time without an answer; `heard_s` is when the last one
    came, on this loop's clock.
    """
    loop = asyncio.get_running_loop()
    while True:
        while (pause_s := heard_s() + liveness_timeout_s / 4 - loop.time()) > 0:
            await asyncio.sleep(pause_s)
        (pong,) = send(actor.ping)
        # Waiting in pieces: after a pause of this process itself, answers that lie waiting are
        # read before the verdict.
        for _ in range(3):
            await asyncio.wait({pong}, timeout=liveness_timeout_s / 4)
            if pong.done():
                break
        else:
            return
        if pong.exception() is not None:
            await asyncio.Event().wait()
        await asyncio.sleep(liveness_timeout_s / 4)


async def results_by_rank(
    name: str,
    answers: Iterator[asyncio.Future[list[CallResult]]],
    num_ranks: int,
    lost: asyncio.Future[None] | None,
) -> list[Any]:
    """Results by rank, of those that tell one; raises the first failure to arrive."""
    results: dict[int, Any] = {}
    for answer in answers:
        waiting: list[asyncio.Future[Any]] = [answer] if lost is None else [answer, lost]
        await asyncio.wait(waiting, return_when=FIRST_COMPLETED)
        if not answer.done():
            assert lost is not None
            lost.result()
            raise GroupLost(name, None, "it was stopped during the call")
        try:
            outcomes = answer.result()
        except ValueError as error:  # Monarch's own: what an executor raises travels as an outcome
            raise GroupLost(name, None, last_line(error)) from None
        except (SupervisionError, ActorError) as error:
            if isinstance(error, SupervisionError):
                await _prefer_loss(lost)
            raise lost_or_remote(name, error) from error
        for result in outcomes:
            if result.error is not None and num_ranks > 1:
                await _prefer_loss(lost)
            results[result.rank] = result.result()
    return [results[rank] for rank in sorted(results)]


def lost_or_remote(name: str, error: Exception) -> GroupLost | RemoteError:
    """What a Monarch error means: the process ended, or what was passed or returned does not
    pickle."""
    if isinstance(error, SupervisionError):
        return GroupLost(name, None, last_line(error))
    return RemoteError(f"{name}: {error}")


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
    line = str(error).strip().splitlines()[-1].strip()
    if "failed to configure process" in line:
        signal = re.search(r"signal: (\d+)", line)
        return "a process ended while it started" + (f" (sig={signal[1]})" if signal else "")
    return line
