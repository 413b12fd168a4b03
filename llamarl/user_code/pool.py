"""A pool of processes that runs user code.

Owns: the worker processes, the queue in front of them, what is called again when one is lost. Does
not own: what is called or what an answer means (stages), or what failures mean for the run.
Invariant: every call gets exactly one result; a failure carries its cause; and whatever user code
does to its process, the pool goes on.

There is a thread per process for two reasons: the kernel ends a worker with the thread that started
it, so that thread must live as long as the pool; and a blocking thread measures the time of its
worker however busy the event loop is.
"""

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from llamarl.repeated_warnings import RepeatedWarnings
from llamarl.types import StageStatus
from llamarl.user_code.calls import Call, Chunk, Failure, UserCode, message
from llamarl.user_code.process import WorkerError, WorkerProcess
from llamarl.user_code.worker import CANCEL_S

T = TypeVar("T")

CHUNK_CALLS = 16  # per message: small enough to spread over workers, large enough to be cheap
MAX_COROUTINES = 256  # in a process at once
SPLIT = 8  # coroutines of a lost process run again in so many parts, one after another
TICK_S = 0.1  # at most between two looks into the queue while coroutines run
TOKEN_BYTES = 8
START_S = 120.0  # imports are slow on a busy machine; this limit only ends a start that hangs
FAILURES = {status.value: status for status in StageStatus if status is not StageStatus.OK}

logger = logging.getLogger(__name__)

Asked = tuple[Chunk[T], int]
"""A call: what it was sent with, and its place there."""


class WorkerPool(Generic[T]):
    """Runs calls in `num_workers` processes.

    `read` makes the result of a call from the dictionary that the service returned; what it raises
    says that user code has changed the service. A worker that needs longer than the time limit for
    one call is killed and replaced, and that call is HUNG. If a worker dies (segmentation fault,
    out of memory) the call is RAISED, and so it is if the worker writes anything but its answer,
    which must repeat the call's random token. The new worker runs the calls that waited behind it.

    Coroutines run up to 256 at once in a worker. One that takes too long is cancelled, one that
    holds up the others is interrupted (`watchdog.py`), and either is HUNG alone. If one cannot be
    interrupted, does not end when cancelled, or kills its process, the others that ran there run
    again from their beginning: in ever smaller parts if it is not known which one it was, so that
    only that one fails.
    """

    def __init__(
        self, code: UserCode, num_workers: int, read: Callable[[Call, dict[str, Any]], T | Failure]
    ) -> None:
        self._code, self._num_workers = code, num_workers
        self._chunks: queue.SimpleQueue[Chunk[T] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.shared = code, read, self._chunks, self._closed
        """What its workers get."""
        self._workers: list[_Worker[T]] = []

    async def start(self) -> None:
        """Start the processes and wait until all are ready. ValueError if their service does not
        load."""
        self._workers += (_Worker(self, index) for index in range(self._num_workers))
        for worker in self._workers:
            worker.start()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            await asyncio.gather(*(asyncio.wrap_future(worker.ready) for worker in self._workers))
            on_failure.pop_all()

    async def run(self, calls: Sequence[Call]) -> list[T | Failure]:
        """One result per call, in order. RuntimeError if the pool is closed."""
        if not self._workers or self._closed.is_set():
            must = "must be started, and not closed, before it runs calls"
            raise RuntimeError(f"a {self._code.label} pool {must}")
        share = -(-len(calls) // self._num_workers)
        size = max(1, min(CHUNK_CALLS, share))
        chunks = [Chunk[T](calls[start : start + size]) for start in range(0, len(calls), size)]
        for chunk in chunks:
            self._chunks.put(chunk)
        for worker in self._workers:
            worker.wake()
        each = await asyncio.gather(*(asyncio.wrap_future(chunk.future) for chunk in chunks))
        return [result for results in each for result in results]

    def close(self) -> None:
        """End every process at once; a second call does nothing."""
        self._closed.set()
        for worker in self._workers:
            if (process := worker.process) is not None:
                process.kill()
            self._chunks.put(None)
        for worker in self._workers:
            worker.join()
        while not self._chunks.empty():
            if (chunk := self._chunks.get()) is not None:
                chunk.give_up(self._code.label)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [w.process.pid for w in self._workers if w.process is not None]


class _Worker(threading.Thread, Generic[T]):
    """The thread of one process: sends it calls until the pool is closed."""

    def __init__(self, pool: WorkerPool[T], index: int) -> None:
        self._code, self._read, self._chunks, self._closed = pool.shared
        super().__init__(name=f"{self._code.label}-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self.process: WorkerProcess | None = None
        self._in_flight: dict[str, Asked[T]] = {}  # by token, in order
        self._again: deque[list[Asked[T]]] = deque()  # each part runs without other calls
        self._silent_since_s = 0.0  # when it answered last, or was asked after a pause
        self._warnings = RepeatedWarnings(logger)

    def run(self) -> None:
        """What the thread does."""
        try:
            self._start_process()
            self.ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            self.ready.set_exception(error)
        while not self._closed.is_set():
            if asked := self._next():
                self._send(asked)
            if self._in_flight:
                self._receive()
        for part in (self._in_flight.values(), *self._again):
            for chunk, _ in part:
                chunk.give_up(self._code.label)
        self._end_process()

    def wake(self) -> None:
        """Look into the queue; may be called in any thread."""
        if (process := self.process) is not None and process.runs_coroutines:
            process.wake()

    def _next(self) -> list[Asked[T]]:
        """What is to be sent now, if anything."""
        is_idle = not self._in_flight
        if self._again:
            return self._again.popleft() if is_idle else []
        most = MAX_COROUTINES if self._runs_coroutines else CHUNK_CALLS
        if not is_idle and len(self._in_flight) > most - CHUNK_CALLS:
            return []
        try:
            chunk = self._chunks.get(block=is_idle)
        except queue.Empty:
            return []
        if chunk is None or not chunk.future.set_running_or_notify_cancel():
            return []
        return [(chunk, place) for place in range(len(chunk.calls))]

    @property
    def _runs_coroutines(self) -> bool:
        return self.process is not None and self.process.runs_coroutines

    def _send(self, asked: list[Asked[T]]) -> None:
        try:
            process = self._ready_process()
        except (OSError, RuntimeError, ValueError) as error:
            if self._closed.is_set():
                self._again.append(asked)
                return
            why = f"the {self._code.label} process could not be started again: {error}"
            for chunk, place in asked:
                chunk.settle(place, Failure(StageStatus.RAISED, why))
            return
        tokens = secrets.token_bytes(TOKEN_BYTES * len(asked)).hex(" ", TOKEN_BYTES).split()
        if not self._in_flight:
            self._silent_since_s = time.monotonic()
        self._in_flight.update(zip(tokens, asked, strict=True))
        process.send(message([chunk.calls[place] for chunk, place in asked], tokens))

    def _receive(self) -> None:
        """One answer, or the end of a process that is silent for too long.

        While it answers, no coroutine in it is overdue: it ends those itself.
        """
        process = self.process
        assert process is not None, "calls are in flight in a process"
        waits_for = self._in_flight if self._runs_coroutines else [next(iter(self._in_flight))]
        limit_s = self._code.timeout_s + (2 * CANCEL_S if self._runs_coroutines else 0)
        since_s = max(self._silent_since_s, process.alive_s)
        left_s = since_s + limit_s - time.monotonic()
        most = max(chunk.calls[place].max_answer_bytes for chunk, place in self._in_flight.values())
        try:
            wait_s = min(left_s, TICK_S) if self._runs_coroutines else left_s
            answer = process.receive(wait_s, waits_for, most)
        except WorkerError as error:
            self._lose(Failure(StageStatus.RAISED, str(error), is_lost=True))
            return
        if answer is not None:
            self._silent_since_s = time.monotonic()
            chunk, place = self._in_flight.pop(answer["token"])
            chunk.settle(place, self._result(chunk.calls[place], answer))
            if process.ended:
                self._lose(None)
        elif time.monotonic() >= max(since_s, process.alive_s) + limit_s:
            stack = process.stack()
            held_up_by = [token for token in process.named_calls if token in self._in_flight]
            self._lose(Failure(StageStatus.HUNG, self._code.overdue(stack)), held_up_by[:1])

    def _result(self, call: Call, answer: dict[str, Any]) -> T | Failure:
        try:
            if "error" not in answer:
                return self._read(call, answer)
            status, error = FAILURES[answer["status"]], str(answer["error"])
            is_hung = status is StageStatus.HUNG
            return Failure(status, self._code.overdue(error) if is_hung else error)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if self.process is not None:
                self.process.close()
            must = f"{self._code.label} code must leave the answers of its process alone"
            return Failure(StageStatus.RAISED, f"{must}, got {error!r} from one")

    def _lose(self, failure: Failure | None, caused_by: Sequence[str] = ()) -> None:
        """End the process. Functions run one by one, so the first one has the `failure`; of several
        coroutines each may have caused it, if it is not known that one has."""
        causes = [self._in_flight.pop(token) for token in caused_by]
        lost = [*causes, *self._in_flight.values()]
        is_known = not self._runs_coroutines or len(lost) == 1 or bool(causes)
        num_parts = SPLIT if self._runs_coroutines and not causes else 1
        self._end_process()
        if self._closed.is_set():  # `close` killed the process
            return
        self._in_flight = {}
        if failure is not None and is_known:
            chunk, place = lost.pop(0)
            chunk.settle(place, failure)
        size = max(1, -(-len(lost) // num_parts))
        parts = [lost[start : start + size] for start in range(0, len(lost), size)]
        self._again.extendleft(reversed(parts))

    def _ready_process(self) -> WorkerProcess:
        """The worker; a new one if it ended, or wrote something without a request."""
        if self.process is not None and not self._in_flight and not self.process.is_quiet():
            self._warnings.warn(
                "%s worker %d ended, or wrote unasked, between two calls: replaced",
                self._code.label,
                self.process.pid,
            )
            self._end_process()
        return self.process or self._start_process()

    def _start_process(self) -> WorkerProcess:
        process = self.process = WorkerProcess(self._code.label)
        if self._closed.is_set():  # `close` may have looked before the line above
            process.kill()
        with ExitStack() as on_failure:
            on_failure.callback(self._end_process)
            _set_up(process, self._code)
            on_failure.pop_all()
        return process

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()


def run_once(code: UserCode, call: Call) -> dict[str, Any]:
    """What one call returns, in a process that is gone afterwards. ValueError, in one line, if it
    does not load or gives no answer."""
    process = WorkerProcess(code.label)
    token = secrets.token_hex(TOKEN_BYTES)
    try:
        _set_up(process, code)
        process.send(message([call], [token]))
        answer = process.receive(code.timeout_s, [token], call.max_answer_bytes)
        if answer is None:
            raise RuntimeError(code.overdue(process.stack()))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{code.label} must load, got {why}") from error
    finally:
        process.close()
    return answer


def _set_up(process: WorkerProcess, code: UserCode) -> None:
    """Wait until the worker serves. ValueError if its service does not load."""
    token = secrets.token_hex(TOKEN_BYTES)
    limits = {"timeout_s": code.timeout_s}
    process.send({"token": token, "service": code.service, "setup": code.setup, **limits})
    answer = process.receive(START_S, [token])
    if answer is None:
        must = f"a {code.label} process must be ready within {START_S:g} s"
        raise RuntimeError(f"{must}, got no answer; it was at\n{process.stack()}")
    if "error" in answer:
        raise ValueError(f"{code.label} must load, got {answer['error']}")
    process.pid = int(answer["pid"])
    process.runs_coroutines = bool(answer["coroutines"])
