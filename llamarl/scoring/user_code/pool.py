"""A pool of processes that runs user code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar

from llamarl.core.errors import RepeatedWarnings
from llamarl.core.records import Prompt, StageStatus, as_json
from llamarl.scoring.user_code.watchdog import IT_WAS_AT, NAMED, end_descendants, is_own_frame
from llamarl.scoring.user_code.worker import CANCEL_S, MAX_ANSWER_BYTES

logger = logging.getLogger(__name__)

STACK_S = 0.5  # time for a hung worker to write its stack
READ_BYTES = 65536
STDERR_LINES = 40  # of the end of a process
STACK_LINES = 120  # faulthandler writes no more
STACK_LINE = re.compile(r'  File "|(Current thread|Thread|Stack) .*most recent call first')
STDERR_LINE_BYTES = 2000  # the rest of a longer line is dropped
LOGGED_LINES = 200  # per message: user code that prints endlessly must not fill the disk
SHOWN_BYTES = 100  # of an answer that is refused
END_LIMIT_S = 10.0  # for the supervisor to end the worker and all that it started
SHOWN_PROMPT_CHARS = 60
EXIT_S = 1.0  # for a worker that closed its channel to exit, so that its exit code is known
CHUNK_CALLS = 16  # per message: small enough to spread over workers, large enough to be cheap
MAX_COROUTINES = 256  # in a process at once
SPLIT = 8  # coroutines of a lost process run again in so many parts, one after another
TICK_S = 0.1  # at most between two looks into the queue while coroutines run
TOKEN_BYTES = 8
START_S = 120.0  # imports are slow on a busy machine; this limit only ends a start that hangs
FAILURES = {status.value: status for status in StageStatus if status is not StageStatus.OK}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The code that the processes of a pool run, and its name in messages.

    `service` is the module that they serve, whose `load` gets `setup` (`worker.py`). A call may
    take `timeout_s`; of coroutines, a process runs `max_calls` at once. `label` says whose code it
    is, such as "stage judge"; `keys` precedes the name of a limit in messages, such as
    "reward."."""

    service: str
    setup: dict[str, Any]
    timeout_s: float
    label: str
    keys: str
    max_calls: int = MAX_COROUTINES

    def overdue(self, stack: str) -> str:
        """Return the error of a call that took too long, with the stack where it was."""
        return (
            f"each {self.label} call must end within {self.timeout_s:g} s ({self.keys}timeout_s), "
            f"got no answer; {IT_WAS_AT}{stack}"
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the service's function, with the prompt, then the arguments, which must be
    JSON."""

    prompt: Prompt | None
    arguments: tuple[Any, ...]
    max_answer_bytes: int = MAX_ANSWER_BYTES


@dataclass(unsafe_hash=True)
class Failure(Exception):  # noqa: N818 - what became of a call
    """A call without a result: how it failed, and why, with the user's own stack. `is_lost`: its
    process ended by itself."""

    status: StageStatus
    error: str
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class Asked(Generic[T]):
    """A call that was asked for, and its result once there is one."""

    call: Call
    future: Future[T | Failure] = field(default_factory=Future)

    def settle(self, result: T | Failure) -> None:
        """Set the result; the error of a failure then names the call's prompt."""
        if isinstance(result, Failure) and (prompt := self.call.prompt) is not None:
            text = prompt.text
            shown = text if len(text) <= SHOWN_PROMPT_CHARS else text[:SHOWN_PROMPT_CHARS] + "..."
            where = f"on the prompt of line {prompt.line} ({shown!r}):\n"
            result = replace(result, error=where + result.error)
        self.future.set_result(result)

    def give_up(self, label: str) -> None:
        """Set a RuntimeError in place of the result unless there is one."""
        if not self.future.done():
            error = RuntimeError(f"the {label} pool was closed while it worked")
            self.future.set_exception(error)


def message(calls: Sequence[Call], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the request for these calls, in which a prompt that several share is sent once."""
    places: dict[int, int | None] = {id(None): None}
    prompts: list[dict[str, Any]] = []
    asked = []
    for call, token in zip(calls, tokens, strict=True):
        if call.prompt is not None and id(call.prompt) not in places:
            places[id(call.prompt)] = len(prompts)
            prompts.append(as_json(call.prompt))
        asked.append((places[id(call.prompt)], call.arguments, token, call.max_answer_bytes))
    return {"prompts": prompts, "calls": asked}


class WorkerError(RuntimeError):
    """The process ended or was ended; the text says how, with the last lines of its standard
    error."""


class WorkerProcess:
    """The client of a process `python -m llamarl.scoring.user_code.worker`, which it exchanges
    lines of JSON with.

    Create it in a thread that lives as long as it is needed: the worker dies with that thread. The
    process started is the worker's supervisor, which ends the worker with all its descendants."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        # The worker imports from the same places as this process, in any working directory.
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        module = "llamarl.scoring.user_code.worker"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), code.label],
            # One hash seed gives sets the same order in all workers, so results can be reproduced.
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the parent alone
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._in, False)
        self._unsent = memoryview(b"")
        self._waking = os.pipe()  # to read from, to write to
        for end in self._waking:
            os.set_blocking(end, False)
        self._may_wake = threading.Lock()  # its closed end may be the number of another file
        self._is_woken = False
        self._max_answer_bytes = MAX_ANSWER_BYTES
        self._answers: deque[bytes] = deque()
        self._answer_rest = bytearray()
        self._stderr: deque[str] = deque(maxlen=STACK_LINES)
        self._stderr_rest = b""
        self._stderr_open = True
        self._num_logged = 0
        self.pid = self._process.pid
        """The supervisor's pid, until the worker's is known."""
        self.alive_s = 0.0
        """The time when the process said last that its coroutines are not held up."""
        self.named_calls: list[str] = []
        """The tokens of the calls in the last stack."""
        self._writes_stack = False
        self.runs_coroutines = False
        """True if the process answers calls as they end, else one by one."""

    def set_up(self) -> None:
        """Wait until the worker serves. Raises ValueError if its service does not load,
        RuntimeError if it hangs or ends."""
        token, code = secrets.token_hex(TOKEN_BYTES), self._code
        limits = {"timeout_s": code.timeout_s}
        self.send({"token": token, "service": code.service, "setup": code.setup, **limits})
        answer = self.receive(START_S, [token])
        if answer is None:
            must = f"the {code.label} process must be ready within {START_S:g} s"
            raise RuntimeError(f"{must}, got no answer; {IT_WAS_AT}{self.stack()}")
        if "error" in answer:
            raise ValueError(f"{code.label} must load, got {answer['error']}")
        self.pid = int(answer["pid"])
        self.runs_coroutines = bool(answer["coroutines"])

    @property
    def has_ended(self) -> bool:
        """True once `receive` has raised WorkerError, or after `close`."""
        return self._process.returncode is not None

    def is_quiet(self) -> bool:
        """Return False if the process has ended, or wrote something without a request."""
        waiting = select.select([self._out], [], [], 0)[0]
        return not (self._answers or self._answer_rest or waiting)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, which `receive` sends. Values that JSON lacks become text."""
        line = json.dumps(message, default=str).encode() + b"\n"
        self._unsent = memoryview(bytes(self._unsent) + line)
        self._num_logged = 0

    def receive(
        self, limit_s: float, tokens: Collection[str], max_bytes: int = MAX_ANSWER_BYTES
    ) -> dict[str, Any] | None:
        """Return the next answer, which must repeat one of `tokens`, or None after `limit_s`, a
        `wake`, or a sign that the process is alive.

        Raises WorkerError if the process ended, or if user code wrote into the answers, such as one
        of more than `max_bytes`."""
        end = time.monotonic() + limit_s
        self._max_answer_bytes, self._is_woken = max_bytes, False
        while not self._answers:
            left_s = max(0.0, end - time.monotonic())
            if not self._exchange(left_s) or self._is_woken or not (self._answers or left_s):
                break
        if not self._answers:
            return None
        line = self._answers.popleft()
        try:
            answer = json.loads(line.decode())
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("token") not in tokens:
            self._refuse(line)
        if "alive" not in answer:
            return answer
        self.alive_s = time.monotonic()
        return None

    def stack(self) -> str:
        """Return the Python stack of the (hung) process."""
        self._stderr.clear()
        self._writes_stack = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + STACK_S
        with contextlib.suppress(WorkerError):
            while (left_s := end - time.monotonic()) > 0 and self._exchange(
                min(left_s, 0.05 if self._stderr else left_s)
            ):
                pass
        self._writes_stack = False
        self.named_calls = NAMED.findall("\n".join(self._stderr))
        lines = [line for line in self._stderr if not is_own_frame(line)]
        return "\n".join(lines) or "(it gave no stack)"

    def wake(self) -> None:
        """Make the `receive` that waits, or the next one, return; may be called in any thread."""
        with self._may_wake, contextlib.suppress(OSError):  # it is full, so it will end; or closed
            os.write(self._waking[1], b"w")

    def kill(self) -> None:
        """Make the supervisor end the worker and all it started; may be called in any thread."""
        if self.has_ended:  # reaped: its pid may be reused by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._process.pid, signal.SIGTERM)
            os.kill(self._process.pid, signal.SIGCONT)  # user code may have stopped it

    def close(self) -> None:
        """Kill and reap the process, and close the pipes. Call it in the owning thread."""
        self._end()
        for pipe in self._pipes:
            pipe.close()
        with self._may_wake:
            waking, self._waking = self._waking, (-1, -1)
            for end in waking:
                if end >= 0:
                    os.close(end)

    def _end(self) -> None:
        self.kill()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:  # user code has stopped the supervisor
            end_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()

    def _refuse(self, line: bytes | bytearray) -> NoReturn:
        self.close()
        shown = line[:SHOWN_BYTES].decode(errors="replace")
        raise WorkerError(
            f"{self._code.label} code must not write into descriptors that it did not open, got "
            f"{shown!r} among the answers of its process, which was ended"
        )

    def _exchange(self, limit_s: float) -> bool:
        """Read and write what the pipes allow. Returns False if that is nothing within
        `limit_s`."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        poll.register(self._waking[0], select.POLLIN)
        if self._stderr_open:
            poll.register(self._err, select.POLLIN)
        if self._unsent:
            poll.register(self._in, select.POLLOUT)
        ready = dict(poll.poll(limit_s * 1000))
        if self._waking[0] in ready:
            os.read(self._waking[0], READ_BYTES)
            self._is_woken = True
        if self._err in ready:
            self._read_stderr()
        if self._in in ready:
            try:
                self._unsent = self._unsent[os.write(self._in, self._unsent) :]
            except BrokenPipeError:  # the end of its output is handled below
                self._unsent = memoryview(b"")
        if self._out in ready:
            data = os.read(self._out, READ_BYTES)
            if not data:
                raise WorkerError(self._how_it_ended())
            self._answer_rest += data
            if b"\n" in data:
                *lines, self._answer_rest = self._answer_rest.split(b"\n")
                self._answers.extend(map(bytes, lines))
            if len(self._answer_rest) > self._max_answer_bytes:
                self._refuse(self._answer_rest)
        return bool(ready)

    def _read_stderr(self) -> None:
        data = os.read(self._err, READ_BYTES)
        self._stderr_open = bool(data)
        *lines, rest = (self._stderr_rest + data).split(b"\n")
        self._stderr_rest = rest[:STDERR_LINE_BYTES]
        for line in lines:
            text = line[:STDERR_LINE_BYTES].decode(errors="replace")
            self._stderr.append(text)
            if self._writes_stack and STACK_LINE.match(text):
                continue  # the error of the call has it
            self._num_logged += 1
            if self._num_logged <= LOGGED_LINES:
                logger.info("%s worker %d: %s", self._code.label, self.pid, text)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            cause = f"the {self._code.label} process ended by itself ({how})"
        except subprocess.TimeoutExpired:  # it runs on, or what it started is being ended
            cause = f"the {self._code.label} process closed the pipe of its answers"
        self._end()
        while self._stderr_open and select.select([self._err], [], [], 0)[0]:
            self._read_stderr()
        return "\n".join([cause, *[*self._stderr][-STDERR_LINES:]])


class WorkerPool(Generic[T]):
    """Runs calls in `num_workers` processes.

    `read` makes the result of a call from the dictionary that the service returned; if it raises,
    user code has changed the service. A worker that needs longer than the time limit for one call
    is killed and replaced, and that call is HUNG. If a worker dies (segmentation fault, out of
    memory) the call is RAISED, and so it is if the worker writes anything but its answer, which
    must repeat the call's random token. The new worker runs the calls that waited behind it.

    Coroutines run up to 256 at once in a worker. One that takes too long is cancelled, one that
    holds up the others is interrupted (`scoring/user_code/watchdog.py`), and either is HUNG
    alone. If one cannot be interrupted, does not end when cancelled, or kills its process, the
    others that ran there run again from their beginning: in ever smaller parts if it is not known
    which one it was, so that only that one fails."""

    def __init__(
        self, code: UserCode, num_workers: int, read: Callable[[Call, dict[str, Any]], T | Failure]
    ) -> None:
        self.code, self.read, self._num_workers = code, read, num_workers
        self.chunks: queue.SimpleQueue[list[Asked[T]]] = queue.SimpleQueue()
        """Calls that are sent together."""
        self.closed = threading.Event()
        self._workers: list[_Worker[T]] = []

    async def start(self) -> None:
        """Start the processes and wait until all are ready. Raises ValueError if their service does
        not load."""
        for index in range(self._num_workers):
            worker = _Worker(self, index)
            self._workers.append(worker)
            worker.start()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            await asyncio.gather(*(asyncio.wrap_future(worker.ready) for worker in self._workers))
            on_failure.pop_all()

    async def run(self, calls: Sequence[Call]) -> list[T | Failure]:
        """Return one result per call, in order. Raises RuntimeError if the pool is closed."""
        if not self._workers or self.closed.is_set():
            must = "must be started, and not closed, before it runs calls"
            raise RuntimeError(f"the {self.code.label} pool {must}")
        share = -(-len(calls) // self._num_workers)
        size = max(1, min(CHUNK_CALLS, share))
        asked = [Asked[T](call) for call in calls]
        for start in range(0, len(asked), size):
            self.chunks.put(asked[start : start + size])
        for worker in self._workers:
            worker.wake()
        return await asyncio.gather(*(asyncio.wrap_future(each.future) for each in asked))

    def close(self) -> None:
        """End every process at once; a second call does nothing."""
        self.closed.set()
        for worker in self._workers:
            if (process := worker.process) is not None:
                process.kill()
            self.chunks.put([])
        for worker in self._workers:
            worker.join()
        while not self.chunks.empty():
            for asked in self.chunks.get():
                asked.give_up(self.code.label)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are alive now."""
        return [w.process.pid for w in self._workers if w.process is not None]


class _Worker(threading.Thread, Generic[T]):
    """The thread of one process, which sends it calls until the pool is closed."""

    def __init__(self, pool: WorkerPool[T], index: int) -> None:
        self._pool, self._code = pool, pool.code
        super().__init__(name=f"{pool.code.label}-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self.process: WorkerProcess | None = None
        self._in_flight: dict[str, Asked[T]] = {}  # by token, in order
        self._again: deque[list[Asked[T]]] = deque()  # each part runs without other calls
        self._silent_since_s = 0.0  # when it answered last, or was asked after a pause
        self._warnings = RepeatedWarnings(logger)

    def run(self) -> None:
        """Start the process, and serve calls until the pool is closed."""
        try:
            self._start_process()
            self.ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            self.ready.set_exception(error)
        while not self._pool.closed.is_set():
            if asked := self._next():
                self._send(asked)
            if self._in_flight:
                self._receive()
        for part in (self._in_flight.values(), *self._again):
            for asked_for in part:
                asked_for.give_up(self._code.label)
        self._end_process()

    def wake(self) -> None:
        """Make the thread look into the queue; may be called in any thread."""
        if (process := self.process) is not None and process.runs_coroutines:
            process.wake()

    def _next(self) -> list[Asked[T]]:
        """Return the calls to send now, if any."""
        is_idle = not self._in_flight
        if self._again:
            return self._again.popleft() if is_idle else []
        most = self._code.max_calls if self._runs_coroutines else CHUNK_CALLS
        if not is_idle and len(self._in_flight) > most - CHUNK_CALLS:
            return []
        try:
            chunk = self._pool.chunks.get(block=is_idle)
        except queue.Empty:
            return []
        return [asked for asked in chunk if asked.future.set_running_or_notify_cancel()]

    @property
    def _runs_coroutines(self) -> bool:
        return self.process is not None and self.process.runs_coroutines

    def _send(self, asked: list[Asked[T]]) -> None:
        try:
            process = self._ready_process()
        except (OSError, RuntimeError, ValueError) as error:
            if self._pool.closed.is_set():
                self._again.append(asked)
                return
            why = f"the {self._code.label} process could not be started again: {error}"
            for each in asked:
                each.settle(Failure(StageStatus.RAISED, why))
            return
        tokens = secrets.token_bytes(TOKEN_BYTES * len(asked)).hex(" ", TOKEN_BYTES).split()
        if not self._in_flight:
            self._silent_since_s = time.monotonic()
        self._in_flight.update(zip(tokens, asked, strict=True))
        process.send(message([each.call for each in asked], tokens))

    def _receive(self) -> None:
        """Take one answer, or end a process that is silent for too long.

        While a process answers, no coroutine in it is overdue: it ends overdue ones itself."""
        process = self.process
        assert process is not None, "calls are in flight in a process"
        waits_for = self._in_flight if self._runs_coroutines else [next(iter(self._in_flight))]
        limit_s = self._code.timeout_s + (2 * CANCEL_S if self._runs_coroutines else 0)
        since_s = max(self._silent_since_s, process.alive_s)
        left_s = since_s + limit_s - time.monotonic()
        most = max(asked.call.max_answer_bytes for asked in self._in_flight.values())
        try:
            wait_s = min(left_s, TICK_S) if self._runs_coroutines else left_s
            answer = process.receive(wait_s, waits_for, most)
        except WorkerError as error:
            self._lose(Failure(StageStatus.RAISED, str(error), is_lost=True))
            return
        if answer is not None:
            self._silent_since_s = time.monotonic()
            asked = self._in_flight.pop(answer["token"])
            asked.settle(self._result(asked.call, answer))
            if process.has_ended:
                self._lose(None)
        elif time.monotonic() >= max(since_s, process.alive_s) + limit_s:
            stack = process.stack()
            held_up_by = [token for token in process.named_calls if token in self._in_flight]
            self._lose(Failure(StageStatus.HUNG, self._code.overdue(stack)), held_up_by[:1])

    def _result(self, call: Call, answer: dict[str, Any]) -> T | Failure:
        try:
            if "error" not in answer:
                return self._pool.read(call, answer)
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
        coroutines each may have caused it, unless it is known that one has."""
        causes = [self._in_flight.pop(token) for token in caused_by]
        lost = [*causes, *self._in_flight.values()]
        is_known = not self._runs_coroutines or len(lost) == 1 or bool(causes)
        num_parts = SPLIT if self._runs_coroutines and not causes else 1
        self._end_process()
        if self._pool.closed.is_set():  # `close` killed the process
            return
        self._in_flight = {}
        if failure is not None and is_known:
            lost.pop(0).settle(failure)
        size = max(1, -(-len(lost) // num_parts))
        parts = [lost[start : start + size] for start in range(0, len(lost), size)]
        self._again.extendleft(reversed(parts))

    def _ready_process(self) -> WorkerProcess:
        """Return the worker's process; a new one if it ended, or wrote something without a
        request."""
        if self.process is not None and not self._in_flight and not self.process.is_quiet():
            self._warnings.warn(
                "%s worker %d ended, or wrote unasked, between two calls: replaced",
                self._code.label,
                self.process.pid,
            )
            self._end_process()
        return self.process or self._start_process()

    def _start_process(self) -> WorkerProcess:
        process = self.process = WorkerProcess(self._code)
        if self._pool.closed.is_set():  # `close` may have looked before the line above
            process.kill()
        with ExitStack() as on_failure:
            on_failure.callback(self._end_process)
            process.set_up()
            on_failure.pop_all()
        return process

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()


def run_once(code: UserCode, call: Call) -> dict[str, Any]:
    """Return the result of one call, in a process that is gone afterwards. Raises ValueError, in
    one line, if it does not load or gives no answer."""
    process = WorkerProcess(code)
    token = secrets.token_hex(TOKEN_BYTES)
    try:
        process.set_up()
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
