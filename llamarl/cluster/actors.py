"""The actor around an executor, and calls on all its ranks from any process."""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import logging
import math
import os
import pickle
import re
import signal
import sys
import uuid
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor import config as monarch_config
from monarch.actor import Actor, ActorError, Channel, concurrent_endpoint, current_rank

from llamarl.cluster.executor import (
    LOSS_GRACE_S,
    Call,
    CallResult,
    Factory,
    attempt,
    describe,
    failure,
    merged,
    narrowed,
    process_name,
    resolve,
)
from llamarl.cluster.hosts import DIMENSION
from llamarl.cluster.os_process import hide_files, redirect_output
from llamarl.core.errors import ExecutorLost, RemoteError, mark_seen
from llamarl.core.faces import Worker
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)

monarch_config.prefix_python_logs_with_actor = False  # every log line has the process already

SWITCH_S = 0.001  # for which a thread that computes keeps the event loop waiting
FANOUT = 4  # ranks that one rank passes a call on to
_ROOTS: dict[str, Answers] = {}  # see `ExecutorActors.root`


class ExecutorActor(Actor):
    """Runs one executor in its process. All endpoints run concurrently on one event loop."""

    def __init__(self) -> None:
        atexit.register(end_process)
        self._worker: Worker | None = None
        self._spans: Spans | None = None
        self._where = ""
        self._name, self._rank = "", 0
        self._actors = ExecutorActors((), 0)
        # Kept by span and end: every new slice of a mesh subscribes to it in the controller.
        self._heads: dict[tuple[int, int], list[Answers]] = {}

    @concurrent_endpoint
    async def construct(
        self,
        actors: ExecutorActors,
        first_rank: int,
        name: str,
        factory: Factory,
        spec: Any,
        make_spans: Callable[[str], Spans],
        logs_folder: str,
    ) -> list[CallResult]:
        """Construct the executor; `first_rank` is the first one on this host. Return the pid."""
        rank = self._rank = first_rank + current_rank().rank
        self._actors, self._name, num_ranks = actors, name, actors.num_ranks
        self._where = process_name(name, rank, num_ranks)
        try:
            hide_files()
            redirect_output(logs_folder, self._where)
            self._spans = make_spans(self._where)
            sys.setswitchinterval(SWITCH_S)
            gc.disable()  # imports make next to no garbage: looking for it is a fifth of their time
            maker = resolve(factory)
            gc.enable()
            self._worker = maker(spec, rank=rank, num_ranks=num_ranks, spans=self._spans)
        except BaseException as error:  # noqa: BLE001 - sent to the caller, whatever it is
            return [failure(error, self._where, rank)]
        return [CallResult(rank, os.getpid())]

    @concurrent_endpoint
    async def run(self, port: Any, number: int, arguments: bytes) -> None:
        """Send `number` and the pickled results of `_results` with these pickled arguments."""
        try:
            results = await self._results(*pickle.loads(arguments))
            answer = pickle.dumps(results)
        except Exception as error:  # noqa: BLE001 - they fail to pickle in any way they like
            words = f"{self._where}: arguments or results do not pickle: {describe(error)}"
            answer = pickle.dumps([failure(RemoteError(words), self._where, self._rank)])
        port.send((number, answer))

    async def _results(self, call: Call, span: int, end: int, is_first: bool) -> list[CallResult]:
        """Run `call` on the `span` ranks from this one on that are below `end`.

        Returns their results, with `is_first` rank 0's only; or the first failure alone.
        """
        if self._worker is None:
            raise RuntimeError(f"{self._where} must be constructed before it is called")
        end = min(self._rank + span, end)
        own = asyncio.create_task(attempt(self._worker, self._where, self._rank, call))
        answers: list[asyncio.Future[Any]] = [own]
        if end > self._rank + 1:
            span = math.ceil((end - self._rank - 1) / FANOUT)
            if (span, end) not in self._heads:
                ranks = range(self._rank + 1, end, span)
                self._heads[span, end] = [
                    Answers(heads.run, heads.size(), send(heads.wait_exit))
                    for heads in self._actors.select(ranks)
                ]
            passed_on = narrowed(call, range(self._rank + 1, end))
            for heads in self._heads[span, end]:
                answers += heads.send(passed_on, span, end, is_first)
        results: list[CallResult] = []
        for answer in asyncio.as_completed(answers):
            try:
                found = await answer
            except Exception as error:  # noqa: BLE001 - nothing may leave an endpoint
                lost = lost_or_remote(self._name, error)
                found = CallResult(self._rank, error=pickle.dumps(lost))
            for result in [found] if isinstance(found, CallResult) else found:
                if result.error is not None:
                    return [result]
                if result.rank == 0 or not is_first:
                    results.append(result)
        return merged(results)

    @concurrent_endpoint
    async def finish(self) -> CallResult:
        """Close the executor and its spans."""
        result = CallResult(self._rank)
        if self._worker is not None:
            result = await attempt(self._worker, self._where, self._rank, ("close", (), {}))
            if result.error is not None:
                log.info("closing failed: %s", "\n".join(pickle.loads(result.error).__notes__))
        if self._spans is not None:
            self._spans.close()
        return result

    @concurrent_endpoint
    async def exit(self) -> None:
        """Run the exit functions, then end the process (`end_process`); never answers.

        Monarch's own end stops the actor before the process, and fails every actor that calls it
        in between. A call to a process that has been killed fails alone.
        """
        atexit._run_exitfuncs()

    @concurrent_endpoint
    async def ping(self) -> None:
        """Answer if the event loop runs."""

    @concurrent_endpoint
    async def monitor(self, rank: int, liveness_timeout_s: float) -> None:
        """Return once another rank has not answered for `liveness_timeout_s`."""
        await wait_silent(self._actors.one(rank), liveness_timeout_s)

    @concurrent_endpoint
    async def wait_exit(self) -> None:
        """Never answer: the pending call fails when the process ends."""
        await asyncio.Event().wait()


def end_process() -> None:
    """End the process, as the exit function that runs after those of an executor, its libraries and
    `task.py`.

    Monarch's, which would be next, may wait a second for its threads.
    """
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class ExecutorActors:
    """The actors of all ranks: per host one Monarch mesh, with the rank of its first actor, in rank
    order. Picklable; copies have the same `id`."""

    meshes: tuple[tuple[Any, int], ...]
    num_ranks: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def root(self) -> Answers:
        """Return the sender of calls to rank 0: one for all copies in this process, as long as rank
        0 lives."""
        if self.id not in _ROOTS:
            actor = self.one(0)
            (end,) = send(actor.wait_exit)
            end.add_done_callback(lambda _: _ROOTS.pop(self.id, None))
            _ROOTS[self.id] = Answers(actor.run, 1, [end])
        return _ROOTS[self.id]

    def one(self, rank: int) -> Any:
        """Return the actor of one rank."""
        return self.select(range(rank, rank + 1))[0]

    def select(self, ranks: range) -> list[Any]:
        """Return the actors of these ranks, as one mesh per host that has any."""
        found = []
        ends = [first for _, first in self.meshes[1:]] + [self.num_ranks]
        for (mesh, first), end in zip(self.meshes, ends, strict=True):
            inside = ranks[max(0, -((ranks.start - first) // ranks.step)) :]
            if inside and inside.start < end:
                last = min(inside.stop, end)
                places = slice(inside.start - first, last - first, inside.step)
                found.append(mesh.slice(**{DIMENSION: places}))
        return found


@dataclass(eq=False)
class RemoteRun:
    """Runs calls on all ranks of an executor, for `executor.Handle`. Picklable.

    Only in the controller it has `lost`, which ends pending calls when a process is silent, and
    `on_answer`, which is called at every answer: it shows that the executor lives.
    """

    name: str
    actors: ExecutorActors
    lost: asyncio.Future[None] | None = None
    on_answer: Callable[[], None] = lambda: None
    _root: Answers | None = None

    def __reduce__(self) -> Any:
        return RemoteRun, (self.name, self.actors)

    async def __call__(self, call: Call, is_first: bool = False) -> list[Any]:
        if self._root is None:
            self._root = self.actors.root()
        size = self.actors.num_ranks
        answers = self._root.send(call, size, size, is_first)
        results = await results_by_rank(self.name, answers, size, self.lost)
        self.on_answer()
        return results


def send(endpoint: Any, *args: Any) -> Iterator[asyncio.Future[Any]]:
    """Send a call to all actors of `endpoint`; yield one future per rank, in the order the answers
    arrive."""
    for answer in endpoint.stream(*args):
        future = answer.as_asyncio()
        future.add_done_callback(mark_seen)
        yield future


async def wait_silent(
    actor: Any, liveness_timeout_s: float, answered_s: Callable[[], float] = lambda: -math.inf
) -> None:
    """Return once the event loop of `actor` has answered nothing for `liveness_timeout_s`; if its
    process ends, never.

    It pings only after a quarter of that time without an answer; `answered_s` returns when the last
    one came, on this loop's clock.
    """
    loop = asyncio.get_running_loop()
    while True:
        while (pause_s := answered_s() + liveness_timeout_s / 4 - loop.time()) > 0:
            await asyncio.sleep(pause_s)
        (pong,) = send(actor.ping)
        # In three waits: after a pause of this process itself, answers that have arrived are read
        # before the time is judged to be over.
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
    answers: Iterable[asyncio.Future[list[CallResult]]],
    num_ranks: int,
    lost: asyncio.Future[None] | None,
) -> list[Any]:
    """Return the results that arrive, by rank; raise the first failure to arrive."""
    results: dict[int, Any] = {}
    for answer in answers:
        waiting: list[asyncio.Future[Any]] = [answer] if lost is None else [answer, lost]
        await asyncio.wait(waiting, return_when=FIRST_COMPLETED)
        if not answer.done():
            raise_loss(name, lost)
        try:
            found = answer.result()
        except ValueError as error:  # Monarch's own: what an executor raises travels as data
            raise ExecutorLost(name, None, last_line(error)) from None
        except (SupervisionError, ActorError, RemoteError) as error:
            if isinstance(error, SupervisionError):
                await _prefer_loss(name, lost)
            raise lost_or_remote(name, error) from error
        for result in found:
            if result.error is not None and num_ranks > 1:
                await _prefer_loss(name, lost)
            results[result.rank] = result.result()
    return [results[rank] for rank in sorted(results)]


def lost_or_remote(name: str, error: Exception) -> ExecutorLost | RemoteError:
    """Return the error that a failed call stands for: the process ended, or an argument or a result
    does not pickle."""
    if isinstance(error, SupervisionError):
        return ExecutorLost(name, None, last_line(error))
    return RemoteError(f"{name}: {error}")


async def _prefer_loss(name: str, lost: asyncio.Future[None] | None) -> None:
    """Raise ExecutorLost if a rank just died or the executor was stopped, which other errors follow
    from."""
    if lost is not None:
        await asyncio.wait({lost}, timeout=LOSS_GRACE_S)
        raise_loss(name, lost)


def raise_loss(name: str, lost: asyncio.Future[None] | None) -> None:
    """Raise ExecutorLost if `lost` is done: a rank died, or the executor was stopped."""
    if lost is not None and lost.done():
        lost.result()
        raise ExecutorLost(name, None, "it was stopped during the call")


def last_line(error: BaseException) -> str:
    """Return the cause in a Monarch error, whose text begins with the call; for another error
    without a text, return its type."""
    if "explicit stop request" in str(error):
        return "it was stopped, or a process of it was lost"
    line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
    if "failed to configure process" in line:
        signal = re.search(r"signal: (\d+)", line)
        return "a process ended while it started" + (f" (sig={signal[1]})" if signal else "")
    return line


class Answers:
    """Sends calls to one endpoint of `num_actors` actors, which takes a port, a number and the
    pickled arguments, and sends (number, pickled answer). A call whose arguments cannot be pickled
    or whose answer cannot be read fails alone.

    `ends` are calls of the same actors that never answer. They fail when a process ends, and then
    all calls fail, since a port that stays open would not show it. For one event loop.
    """

    def __init__(self, endpoint: Any, num_actors: int, ends: Iterable[asyncio.Future[Any]]) -> None:
        self._endpoint, self._num_actors = endpoint, num_actors
        self._waiting: dict[int, deque[asyncio.Future[Any]]] = {}  # by the number of the call
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._port, self._receiver = Channel[tuple[int, bytes]].open()
        for end in ends:
            end.add_done_callback(self._end)
        self._listen()

    def send(self, *args: Any) -> list[asyncio.Future[Any]]:
        """Send a call; return one future per actor, in the order the answers arrive."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(self._num_actors)]
        for future in futures:
            future.add_done_callback(mark_seen)
        data = pickle.dumps(args)
        number = next(self._numbers)
        self._waiting[number] = deque(futures)
        if self._failure is not None:
            self._fail(self._failure)
        else:
            self._endpoint.broadcast(self._port, number, data)
        return futures

    def _listen(self) -> None:
        # In a callback and not in a task: asyncio cancels all tasks at the end of its loop, and
        # some of those make calls as they end.
        self._receiver.recv().as_asyncio().add_done_callback(self._take)

    def _take(self, message: asyncio.Future[tuple[int, bytes]]) -> None:
        if message.cancelled() or message.exception() is not None:
            return self._end(message)
        self._listen()
        number, data = message.result()
        futures = self._waiting.get(number)
        if futures is None:
            return  # it has failed
        future = futures.popleft()
        if not futures:
            del self._waiting[number]
        if future.done():
            return  # nobody waits any more
        try:
            future.set_result(pickle.loads(data))
        except Exception as error:  # noqa: BLE001 - results fail in any way they like
            future.set_exception(RemoteError(f"an answer cannot be read: {describe(error)}"))

    def _end(self, end: asyncio.Future[Any]) -> None:
        if not end.cancelled():
            self._failure = end.exception() or RuntimeError("it left its endless call")
            self._fail(self._failure)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in itertools.chain.from_iterable(waiting.values()):
            if not future.done():
                future.set_exception(error)
