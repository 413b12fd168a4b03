"""The parent of a contained program: it runs as a file of its own, below the same limits.

Owns: starting the program, cutting its output off, its time limit. Does not own: the container
(`contained.py`), which ends both. Invariant: it writes one line of JSON and no more than the limits
allow; it imports nothing of this package, which it cannot see.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

LOOK_S = 0.01  # between two looks whether the program has ended


def main(seconds: float, output_bytes: int) -> None:
    """Run program.py with input.txt, write how it ended."""
    out, err = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_program(out[1], err[1])
    for end in (out[1], err[1]):
        os.close(end)
    found = _follow(pid, {out[0]: b"", err[0]: b""}, seconds, output_bytes)
    sys.stdout.write(json.dumps(found))


def _become_program(out: int, err: int) -> None:
    os.dup2(os.open("input.txt", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 64)
    os.setpgid(0, 0)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "program.py"])


def _follow(pid: int, read: dict[int, bytes], seconds: float, output_bytes: int) -> dict[str, Any]:
    """Read until the program ends, whoever else holds its pipes, or is ended."""
    end_s, open_ends, ended_for, status = time.monotonic() + seconds, {*read}, "", None
    while status is None:
        status = _status(pid)
        ready = select.select([*open_ends], [], [], 0 if status is not None else LOOK_S)[0]
        for end in ready:
            data = os.read(end, 65536)
            if not data:
                open_ends.discard(end)
            read[end] += data[: max(0, output_bytes - len(read[end]))]
            if len(read[end]) >= output_bytes:
                ended_for = "output"
        if time.monotonic() > end_s:
            ended_for = ended_for or "time"
        if ended_for and status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
    out, err = (data.decode(errors="replace") for data in read.values())
    code = None if ended_for else os.waitstatus_to_exitcode(status)
    return {"exit_code": code, "stdout": out, "stderr": err, "ended_for": ended_for}


def _status(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
