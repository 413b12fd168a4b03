"""A pool of processes that runs user code.

Owns: the worker processes, one thread for each, the queue in front of them, the time limit. Does
not own: what is called or what an answer means (rewards, stages), or what failures mean for the
run. Invariant: every call gets exactly one result; a failure carries its cause; and whatever user
code does to its process, the pool goes on.

There is a thread per process for two reasons: the kernel ends a worker with the thread that started
it, so that thread must live as long as the pool; and a blocking thread measures the time of its
worker however busy the event loop is.
"""

import asyncio
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from llamarl.types import Prompt, StageStatus
from llamarl.user_code.process import MAX_ANSWER_BYTES, WorkerError, WorkerProcess

T = TypeVar("T")

CHUNK_CALLS = 16  # per message: small enough to spread over workers, large enough to be cheap
TOKEN_BYTES = 8
PROMPT_FIELDS = tuple(field.name for field in fields(Prompt))
START_S = 120.0  # imports are slow on a busy machine; this limit only ends a start that hangs
SHOWN_PROMPT_CHARS = 60
FAILURES = {status.value: status for status in StageStatus if status is not StageStatus.OK}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """What the processes of a pool run, and how messages name it.

    `service` is the module they serve and `setup` what its `load` gets (`worker.py`). A call may
    take `timeout_s`, which the user sets by `timeout_key`. `label` is whose code it is ("reward"),
    `call` one call of it ("a reward"), `functions` what has to load ("the reward functions").
    """

    service: str
    setup: dict[str, Any]
    timeout_s: float
    timeout_key: str
    label: str
    call: str
    functions: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the service's function gets the prompt, then the arguments, which must be JSON."""

    prompt: Prompt | None
    arguments: tuple[Any, ...]
    max_answer_bytes: int = MAX_ANSWER_BYTES


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a result: how it failed, and why, with the user's own stack."""

    status: StageStatus
    error: str


_Job = tuple[Sequence[Call], "Future[list[T | Failure]]"]


class WorkerPool(Generic[T]):
    """Runs calls in `num_workers` processes.

    `read` makes the result of a call from the dictionary that the service returned; what it raises
    says that user code has changed the service. A worker that needs longer than the time limit for
    one call is killed and replaced, and that call is HUNG. Calls behind it in its message, at most
    `CHUNK_CALLS`, wait until then; the new worker runs them, each with a time limit of its own. If
    a worker dies (segmentation fault, out of memory) the call is RAISED, and so it is if the worker
    writes anything but its answer, which must repeat the call's random token.
    """

    def __init__(
        self,
        code: UserCode,
        num_workers: int,
        read: Callable[[Call, dict[str, Any]], T | Failure],
    ) -> None:
        self._code = code
        self._num_workers = num_workers
        self._read = read
        self._jobs: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, WorkerProcess] = {}
        self._closed = threading.Event()

    async def start(self) -> None:
        """Start the processes and wait until all are ready. ValueError if their service does not
        load."""
        ready: list[Future[None]] = [Future() for _ in range(self._num_workers)]
        for index, future in enumerate(ready):
            thread = threading.Thread(
                target=self._serve,
                args=(index, future),
                name=f"{self._code.label}-{index}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            await asyncio.gather(*map(asyncio.wrap_future, ready))
            on_failure.pop_all()

    async def run(self, calls: Sequence[Call]) -> list[T | Failure]:
        """One result per call, in order. RuntimeError if the pool is closed."""
        if not self._threads or self._closed.is_set():
            raise RuntimeError(
                f"a {self._code.label} pool must be started, and not closed, before it runs calls"
            )
        share = -(-len(calls) // self._num_workers)
        size = max(1, min(CHUNK_CALLS, share))
        futures: list[Future[list[T | Failure]]] = []
        for start in range(0, len(calls), size):
            futures.append(Future())
            self._jobs.put((calls[start : start + size], futures[-1]))
        chunks = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [result for chunk in chunks for result in chunk]

    def close(self) -> None:
        """End every process at once; a second call does nothing."""
        self._closed.set()
        for process in list(self._processes.values()):
            process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [process.pid for process in list(self._processes.values())]

    def _serve(self, index: int, ready: Future[None]) -> None:
        """Run one thread: start a process, then run chunks of calls until `close`."""
        try:
            self._start_process(index)
            ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            ready.set_exception(error)
        while (job := self._jobs.get()) is not None:
            calls, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._run_chunk(index, calls))
            except BaseException as error:  # noqa: BLE001 - passed on to the caller
                future.set_exception(error)
        self._end_process(index)

    def _run_chunk(self, index: int, calls: Sequence[Call]) -> list[T | Failure]:
        results: list[T | Failure] = []
        label = self._code.label
        while len(results) < len(calls):
            rest = calls[len(results) :]
            try:
                process = self._ready_process(index)
            except (OSError, RuntimeError, ValueError) as error:
                if self._closed.is_set():
                    raise RuntimeError(f"the {label} pool was closed while it worked") from error
                why = f"the {label} process could not be started again: {error}"
                return results + [_failure(call, StageStatus.RAISED, why) for call in rest]
            tokens = [secrets.token_hex(TOKEN_BYTES) for _ in rest]
            process.send(_message(rest, tokens))
            for call, token in zip(rest, tokens, strict=True):
                result = self._await_result(process, call, token)
                if self._closed.is_set():  # `close` killed the process: the result means nothing
                    raise RuntimeError(f"the {label} pool was closed while it worked")
                results.append(result)
                hung = isinstance(result, Failure) and result.status is StageStatus.HUNG
                if hung or process.ended:
                    self._end_process(index)
                    break
        return results

    def _await_result(self, process: WorkerProcess, call: Call, token: str) -> T | Failure:
        code = self._code
        try:
            answer = process.receive(code.timeout_s, token, call.max_answer_bytes)
            if answer is not None:
                if "error" in answer:
                    return _failure(call, FAILURES[answer["status"]], str(answer["error"]))
                result = self._read(call, answer)
                if isinstance(result, Failure):
                    return _failure(call, result.status, result.error)
                return result
        except WorkerError as error:
            return _failure(call, StageStatus.RAISED, str(error))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            process.close()
            must = f"{code.label} code must leave the answers of its process alone"
            return _failure(call, StageStatus.RAISED, f"{must}, got {error!r} from one")
        return _failure(
            call,
            StageStatus.HUNG,
            f"{code.call} must end within {code.timeout_s:g} s ({code.timeout_key}), "
            f"got no answer; it was at\n{process.stack()}",
        )

    def _ready_process(self, index: int) -> WorkerProcess:
        """The worker; a new one if it ended, or wrote something without a request. RuntimeError
        once the pool is closed."""
        if self._closed.is_set():
            raise RuntimeError("closed")
        process = self._processes.get(index)
        if process is not None and not process.is_quiet():
            logger.warning(
                "%s worker %d ended, or wrote unasked, between two calls: replaced",
                self._code.label,
                process.pid,
            )
            self._end_process(index)
            process = None
        return process or self._start_process(index)

    def _start_process(self, index: int) -> WorkerProcess:
        process = WorkerProcess(self._code.label, self._code.service)
        self._processes[index] = process
        if self._closed.is_set():  # `close` may have read the processes before the line above
            process.kill()
        with ExitStack() as on_failure:
            on_failure.callback(self._end_process, index)
            _set_up(process, self._code)
            on_failure.pop_all()
        return process

    def _end_process(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.close()


def run_once(code: UserCode, call: Call) -> dict[str, Any]:
    """What one call returns, in a process that is gone afterwards. ValueError, in one line, if it
    does not load or gives no answer."""
    process = WorkerProcess(code.label, code.service)
    token = secrets.token_hex(TOKEN_BYTES)
    try:
        _set_up(process, code)
        process.send(_message([call], [token]))
        answer = process.receive(code.timeout_s, token, call.max_answer_bytes)
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{code.functions} must load, got {why}") from error
    finally:
        process.close()
    if answer is None:
        must = f"{code.call} must end within {code.timeout_s:g} s ({code.timeout_key})"
        raise ValueError(f"{must}, got no answer")
    return answer


def _set_up(process: WorkerProcess, code: UserCode) -> None:
    """Wait until the worker serves. ValueError if its service does not load."""
    token = secrets.token_hex(TOKEN_BYTES)
    process.send({"token": token, "service": code.service, "setup": code.setup})
    answer = process.receive(START_S, token)
    if answer is None:
        raise RuntimeError(
            f"a {code.label} process must be ready within {START_S:g} s, got no answer; "
            f"it was at\n{process.stack()}"
        )
    if "error" in answer:
        raise ValueError(f"{code.functions} must load, got {answer['error']}")
    process.pid = int(answer["pid"])


def _failure(call: Call, status: StageStatus, why: str) -> Failure:
    if call.prompt is None:
        return Failure(status, why)
    text = call.prompt.text
    shown = text if len(text) <= SHOWN_PROMPT_CHARS else text[:SHOWN_PROMPT_CHARS] + "..."
    return Failure(status, f"on the prompt of line {call.prompt.prompt_id} ({shown!r}):\n{why}")


def _message(calls: Sequence[Call], tokens: Sequence[str]) -> dict[str, Any]:
    """The request for these calls; a prompt that several share is sent once."""
    places: dict[int, int | None] = {id(None): None}
    prompts: list[dict[str, Any]] = []
    for call in calls:
        if id(call.prompt) not in places:
            places[id(call.prompt)] = len(prompts)
            prompts.append({name: getattr(call.prompt, name) for name in PROMPT_FIELDS})
    return {
        "prompts": prompts,
        "calls": [
            (places[id(call.prompt)], call.arguments, token)
            for call, token in zip(calls, tokens, strict=True)
        ],
    }
