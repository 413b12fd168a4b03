"""One worker process of a pool, as the thread that owns it sees it.

Owns: its start, its pipes, its stderr, its end. Does not own: the messages or the time limit.
Invariant: no call blocks longer than its `limit_s`, whatever the process does; an answer that does
not repeat the token of its request is refused and its process ended.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any, NoReturn

from llamarl.user_code.supervisor import end_descendants
from llamarl.user_code.watchdog import is_own_frame, named_calls
from llamarl.user_code.worker import MAX_ANSWER_BYTES

logger = logging.getLogger(__name__)

STACK_S = 0.5  # time for a hung worker to write its stack
READ_BYTES = 65536
STDERR_LINES = 40  # of the end of a process
STACK_LINES = 120  # faulthandler writes no more
STDERR_LINE_BYTES = 2000  # the rest of a longer line is dropped
LOGGED_LINES = 200  # per message: user code that prints endlessly must not fill the disk
SHOWN_BYTES = 100  # of an answer that is refused
END_LIMIT_S = 10.0  # for the supervisor to end the worker and all that it started
EXIT_S = 1.0  # for a worker that closed its channel to exit, so that its exit code is known


class WorkerError(RuntimeError):
    """The process ended or was ended; the text says how, with the last lines of its standard
    error."""


class WorkerProcess:
    """Lines of JSON to and from `python -m llamarl.user_code.worker`.

    `label` says in messages whose code it runs, such as "reward". Create it in a thread that lives
    as long as it is needed: the worker dies with that thread. The process started is the worker's
    supervisor, which ends the worker with all its descendants.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        # The worker imports from the same places as this process, in any working directory.
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llamarl.user_code.worker", str(os.getpid()), label],
            # Sets are in one order in all of them, so what user code makes can be made again.
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
        """When it said last that its coroutines are not held up."""
        self.named_calls: list[str] = []
        """Tokens of the calls in the last stack."""
        self.runs_coroutines = False
        """True if it answers calls as they end, else one by one."""

    @property
    def ended(self) -> bool:
        """True once `receive` has raised WorkerError, or after `close`."""
        return self._process.returncode is not None

    def is_quiet(self) -> bool:
        """False if it ended, or wrote something without a request."""
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
        """The next answer, which must repeat one of `tokens`, or None after `limit_s`, a `wake`, or
        a sign that it is alive.

        Raises WorkerError if the process ended, or if user code wrote into the answers, such as
        one of more than `max_bytes`.
        """
        end = time.monotonic() + limit_s
        self._max_answer_bytes, self._is_woken = max_bytes, False
        while not self._answers:
            left_s = max(0.0, end - time.monotonic())
            if not self._exchange(left_s) or self._is_woken or not (self._answers or left_s):
                break
        if not self._answers:
            return None
        answer = self._check_answer(self._answers.popleft(), tokens)
        if "alive" not in answer:
            return answer
        self.alive_s = time.monotonic()
        return None

    def stack(self) -> str:
        """The Python stack of the (hung) process."""
        self._stderr.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + STACK_S
        with contextlib.suppress(WorkerError):
            while (left_s := end - time.monotonic()) > 0 and self._exchange(
                min(left_s, 0.05 if self._stderr else left_s)
            ):
                pass
        self.named_calls = named_calls("\n".join(self._stderr))
        lines = [line for line in self._stderr if not is_own_frame(line)]
        return "\n".join(lines) or "(it gave no stack)"

    def wake(self) -> None:
        """End a `receive` that waits, or the next one; may be called in any thread."""
        with self._may_wake, contextlib.suppress(OSError):  # it is full, so it will end; or closed
            os.write(self._waking[1], b"w")

    def kill(self) -> None:
        """Make the supervisor end the worker and all it started; may be called in any thread."""
        if self._process.returncode is not None:  # reaped: its pid may be reused by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._process.pid, signal.SIGTERM)
            os.kill(self._process.pid, signal.SIGCONT)  # user code may have stopped it

    def close(self) -> None:
        """Kill, reap, and close the pipes; call it in the owning thread."""
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

    def _check_answer(self, line: bytes, tokens: Collection[str]) -> dict[str, Any]:
        try:
            answer = json.loads(line.decode())
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("token") not in tokens:
            self._refuse(line)
        return answer

    def _refuse(self, line: bytes | bytearray) -> NoReturn:
        self.close()
        shown = line[:SHOWN_BYTES].decode(errors="replace")
        raise WorkerError(
            f"{self._label} code must not write into descriptors that it did not open, got "
            f"{shown!r} among the answers of its process, which was ended"
        )

    def _exchange(self, limit_s: float) -> bool:
        """Read and write what the pipes allow; False if that is nothing within `limit_s`."""
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
            self._num_logged += 1
            if self._num_logged <= LOGGED_LINES:
                logger.info("%s worker %d: %s", self._label, self.pid, text)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            cause = f"the {self._label} process ended by itself ({how})"
        except subprocess.TimeoutExpired:  # it runs on, or what it started is being ended
            cause = f"the {self._label} process closed the pipe of its answers"
        self._end()
        while self._stderr_open and select.select([self._err], [], [], 0)[0]:
            self._read_stderr()
        return "\n".join([cause, *[*self._stderr][-STDERR_LINES:]])
