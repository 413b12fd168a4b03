"""Runs a command that trains, and reads from /proc the processor seconds of its steps."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
POLL_S = 0.01
Seconds = dict[int, float]
"""By process id."""


def run_steps(
    command: list[str],
    environment: dict[str, str],
    metrics: Path,
    num_skipped: int,
    *,
    begin: Callable[[], None] | None = None,
    limit_s: float = math.inf,
) -> Seconds:
    """Run a command that trains; processor seconds of a step, by process, without the first ones.

    `metrics` is the file to which the run adds a line per step; `begin` is called in the new
    process. SystemExit, with what the command wrote, if it fails or has not ended after `limit_s`;
    its processes are gone then.
    """
    end_s = time.monotonic() + limit_s
    mark = f"LLAMARL_BENCH_{uuid.uuid4().hex}"
    samples: dict[int, Seconds] = {}  # by number of steps that have ended
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env={**environment, mark: "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=begin,
        )
        while process.poll() is None and time.monotonic() < end_s:
            num_steps = _num_steps(metrics)
            if num_steps >= num_skipped and num_steps not in samples:
                samples[num_steps] = _seconds(mark)
            time.sleep(POLL_S)
        if process.returncode != 0:
            is_late = process.returncode is None
            how = f"had not ended after {limit_s:g} s" if is_late else "failed"
            _kill(process, mark)
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read()}\nThis command {how}.")
    del samples[max(samples)]  # with the end of the run
    first, last = min(samples), max(samples)
    return {
        pid: (seconds - samples[first].get(pid, 0.0)) / (last - first)
        for pid, seconds in samples[last].items()
    }


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a command, if it has not ended, and all that it has started, in other sessions too."""
    process.kill()
    process.wait()
    for pid in _seconds(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _num_steps(metrics: Path) -> int:
    return metrics.read_text().count('"time/step_s"') if metrics.exists() else 0


def _seconds(mark: str) -> Seconds:
    """Of each process that has inherited `mark`."""
    found: Seconds = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = TICK_S * (int(fields[11]) + int(fields[12]))
        except OSError:  # it has ended meanwhile
            continue
    return found
