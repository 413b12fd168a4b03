"""The display on a real terminal, and what Ctrl-C does to it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time

from tests.signals import restore_ctrl_c

PROGRAM = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from rich.console import Console
from llamarl.metrics.console import Progress
console = Console(force_terminal=True)
with Progress(4, live=True, console=console):
    try:
        sys.stdout.write("READY")
        sys.stdout.flush()
        for _ in range(600):  # a signal just before a sleep does not shorten that one
            time.sleep(0.1)
    except KeyboardInterrupt:
        pass
"""


def read_until(terminal: int, words: bytes, process: subprocess.Popen[bytes] | None) -> bytes:
    seen, limit_s = b"", time.monotonic() + 60
    while words not in seen and time.monotonic() < limit_s:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096)
        elif process is not None and process.poll() is not None:
            break
    return seen


def test_ctrl_c_is_not_drawn_into_the_display_and_the_terminal_is_left_as_it_was() -> None:
    terminal, child_end = pty.openpty()
    before = termios.tcgetattr(child_end)
    assert before[3] & termios.ECHOCTL
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + PROGRAM,
        ],
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        start_new_session=True,
        preexec_fn=restore_ctrl_c,
    )
    assert b"READY" in read_until(terminal, b"READY", process)
    os.write(terminal, b"\x03")
    assert b"^C" not in read_until(terminal, b"^C", process)
    assert process.wait(60) == 0
    assert termios.tcgetattr(child_end) == before
    os.close(terminal)
    os.close(child_end)
