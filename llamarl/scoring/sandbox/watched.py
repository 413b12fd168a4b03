"""Programs of sandboxes as processes of this machine: the ends of what they print, and the watch
over their time and their limits."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from llamarl.scoring.user_code.watchdog import end_descendants

TAIL_BYTES = 65536  # of what a program prints, which are kept
READ_BYTES = 65536
HEAD_BYTES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A program that runs; `wait` returns its exit code."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    wait: Callable[[], int]
    is_whole: bool = False  # all that it starts ends with it

    def end(self) -> None:
        """End it with all that it has started, also what has left its group."""
        if not self.is_whole:
            end_descendants(self.pid)
        for kill, number in ((os.killpg, self.pid), (os.kill, self.pid)):
            with suppress(ProcessLookupError):
                kill(number, signal.SIGKILL)

    def close(self) -> None:
        """Close its pipes."""
        self.stdout.close()
        self.stderr.close()


class Tail:
    """The end of what comes through a pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe, self.is_closed = pipe, False
        self._data, self._head = b"", b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> None:
        """Read what is there."""
        with suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), READ_BYTES):
                self._head = (self._head + data)[:HEAD_BYTES]
                self._data = (self._data + data)[-TAIL_BYTES:]
            self.is_closed = True

    def began_with(self, greeting: str) -> bool:
        """Return whether this was in what came first, also if it is not in the end any more."""
        return greeting.encode() in self._head

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")


def watch(
    pid: int, tails: Sequence[Tail], end_s: float, look: Callable[[], str], look_every_s: float
) -> str:
    """Read what the program prints until it has ended or must be ended: at the time `end_s`, or
    once `look` names a limit that it exceeds. Returns that limit; empty if none."""
    look_s = time.monotonic() + look_every_s
    with open(os.pidfd_open(pid), "rb", 0) as ended:
        while (now_s := time.monotonic()) < end_s:
            if now_s >= look_s:
                if what := look():
                    return what
                look_s = time.monotonic() + look_every_s
            files = [ended, *(tail.pipe for tail in tails if not tail.is_closed)]
            ready, _, _ = select.select(files, [], [], max(0.0, min(end_s, look_s) - now_s))
            for tail in tails:
                if tail.pipe in ready:
                    tail.read()
            if ended in ready:
                return ""
    return "time"
