"""The parent of a reward worker: ends whatever reward code has started.

Owns: the worker and all its descendants, and how they end. Does not own: requests and answers,
whose pipes it does not hold. Invariant (Linux): when it has ended, so have the worker and every
process that descends from it, also one in a session of its own whose parents are gone.

The kernel makes the supervisor the parent of descendants whose own parent has ended
(PR_SET_CHILD_SUBREAPER), so all stay below it. It ends with its pool, whose end the kernel reports
to it (PR_SET_PDEATHSIG), even after kill -9. What it cannot reach: a process that another one
outside starts on request (a container daemon), and what is left of code that first kills the
supervisor itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 5.0  # a killed process that is still there then sits in the kernel
LOOK_S = 0.005  # between looks whether the killed are gone
WATCHED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}
OUT_OF_MEMORY_SCORE = 500  # of -1000 to 1000: the kernel takes a reward before trainer or generator


def supervise(pool: int) -> None:
    """Fork: returns in the child, the worker; this process stays as its supervisor.

    `pool` is the pid of the process that started this one. SIGTERM ends the worker and its
    descendants, SIGUSR1 is passed on to the worker. The supervisor ends as its worker did.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _call_kernel(PR_SET_CHILD_SUBREAPER, 1)
    _tie_to(pool, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # else each crash may write gigabytes
    own, worker = os.getpid(), os.fork()
    if worker:
        _watch(worker)
    _tie_to(own, signal.SIGKILL)
    os.setpgid(0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def end_descendants(root: int, limit_s: float = KILL_LIMIT_S) -> None:
    """Kill every process that descends from `root`, which lives; returns once all are gone."""
    deadline = time.monotonic() + limit_s
    seen: set[int] = set()
    while new := descendants(root) - seen:  # stopped first: a process that forks would get away
        _signal(new, signal.SIGSTOP)
        seen |= new
        if time.monotonic() > deadline:
            break
    while (left := descendants(root)) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        if root == os.getpid():
            _reap()
        time.sleep(LOOK_S)


def descendants(root: int) -> set[int]:
    """Pids of all processes below `root`, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(folder.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _watch(worker: int) -> NoReturn:
    """Wait for the end of the worker or the pool, end all descendants, and end."""
    for descriptor in (0, 1):  # the pool must see their ends when the worker's are closed
        os.close(descriptor)
    status = None
    while status is None:
        number = signal.sigwait(WATCHED)
        if number == signal.SIGUSR1:
            _signal({worker}, number)
        elif number == signal.SIGTERM:
            status = 0
        else:
            status = _reap().get(worker)
    with suppress(ProcessLookupError):  # all that can be done where there is no /proc
        os.killpg(worker, signal.SIGKILL)
    end_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap() -> dict[int, int]:
    """Wait statuses of the children that have ended since the last call, by pid."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _tie_to(parent: int, number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends."""
    _call_kernel(PR_SET_PDEATHSIG, number)
    if sys.platform == "linux" and os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def _call_kernel(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)
