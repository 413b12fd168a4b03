"""One worker process of the reward pool, seen from the thread that owns it.

Owns: starting it, its pipes, its stderr, its end. Does not own: what is sent or the time limit.
Invariant: no call blocks longer than its `limit_s`, whatever the process does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

STACK_S = 0.5  # a hung worker gets this long to write its stack
READ_BYTES = 65536
STDERR_LINES = 40


class WorkerError(RuntimeError):
    """The process ended; the text says how, with the last lines of its standard error."""


class WorkerProcess:
    """Lines of JSON to and from `python -m llamarl.rewards.worker`.

    Start it from a thread that lives as long as it is needed: the worker dies with that thread.
    """

    def __init__(self) -> None:
        # The worker imports from where this process does, wherever it was started.
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llamarl.rewards.worker", str(os.getpid())],
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's; `kill` reaches what user code started
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._in, False)
        self._unsent = memoryview(b"")
        self._answers: deque[bytes] = deque()
        self._answer_rest = b""
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._stderr_rest = b""
        self._stderr_open = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True once `receive` has raised WorkerError, or after `close`."""
        return self._process.returncode is not None

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; it leaves during `receive`. Values JSON lacks travel as text."""
        line = json.dumps(message, default=str).encode() + b"\n"
        self._unsent = memoryview(bytes(self._unsent) + line)

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        """The next answer, or None after `limit_s`. Raises WorkerError."""
        end = time.monotonic() + limit_s
        while not self._answers:
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._exchange(left_s):
                return None
        answer: dict[str, Any] = json.loads(self._answers.popleft())
        return answer

    def stack(self) -> str:
        """What the (hung) process is doing: its Python stack."""
        self._stderr.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + STACK_S
        with contextlib.suppress(WorkerError):
            while (left_s := end - time.monotonic()) > 0 and self._exchange(
                min(left_s, 0.05 if self._stderr else left_s)
            ):
                pass
        return "\n".join(self._stderr) or "(it gave no stack)"

    def kill(self) -> None:
        """End the process and everything it started in its session; from any thread."""
        if self._process.returncode is not None:  # reaped: the number may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill, reap, and close the pipes; for the owning thread."""
        self.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _exchange(self, limit_s: float) -> bool:
        """Move what can be moved through the pipes; False if nothing could within `limit_s`."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._stderr_open:
            poll.register(self._err, select.POLLIN)
        if self._unsent:
            poll.register(self._in, select.POLLOUT)
        ready = dict(poll.poll(limit_s * 1000))
        if self._err in ready:
            self._read_stderr()
        if self._in in ready:
            try:
                self._unsent = self._unsent[os.write(self._in, self._unsent) :]
            except BrokenPipeError:  # the end of its output says the rest
                self._unsent = memoryview(b"")
        if self._out in ready:
            data = os.read(self._out, READ_BYTES)
            if not data:
                raise WorkerError(self._last_words())
            *lines, self._answer_rest = (self._answer_rest + data).split(b"\n")
            self._answers.extend(lines)
        return bool(ready)

    def _read_stderr(self) -> None:
        data = os.read(self._err, READ_BYTES)
        self._stderr_open = bool(data)
        *lines, self._stderr_rest = (self._stderr_rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self._stderr.append(text)
            logger.info("reward worker %d: %s", self.pid, text)

    def _last_words(self) -> str:
        self.kill()  # it closed its output, but may still run
        code = self._process.wait()
        while self._stderr_open and select.select([self._err], [], [], 0)[0]:
            self._read_stderr()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([f"the reward process ended by itself ({how})", *self._stderr])
