"""The parent of a worker: ends every process that user code has started.

Owns: the worker and all its descendants, and how they end. Does not own: requests and answers,
whose pipes it closes. Invariant (Linux): when the supervisor has ended, so have the worker and
every process that descends from it, even one in its own session whose parents have ended.

The kernel makes the supervisor the parent of descendants whose own parent has ended
(PR_SET_CHILD_SUBREAPER), so all of them stay its descendants. It ends with its pool, because the
kernel signals the pool's end (PR_SET_PDEATHSIG), even after kill -9. It cannot reach a process that
another service starts on request (a container daemon), nor what is left of code that first kills
the supervisor itself.
"""

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
KILL_LIMIT_S = 5.0  # a killed process that still exists then is stuck in the kernel
POLL_S = 0.005  # between two checks whether killed processes are gone
WATCHED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1}
OUT_OF_MEMORY_SCORE = 500  # of -1000 to 1000: the kernel kills this before trainer or generator


def supervise(pool: int) -> None:
    """Fork: returns in the child, the worker; this process becomes its supervisor.

    `pool` is the pid of the process that started this one. SIGTERM ends the worker and its
    descendants, SIGUSR1 is passed on to the worker. The supervisor exits as its worker did.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _call_kernel(PR_SET_CHILD_SUBREAPER, 1)
    _tie_to(pool, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps: each may take gigabytes
    own, worker = os.getpid(), os.fork()
    if worker:
        _watch(worker)
    _tie_to(own, signal.SIGKILL)
    os.setpgid(0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def end_descendants(root: int) -> None:
    """Kill every descendant of the live process `root`; returns once all are gone."""
    deadline = time.monotonic() + KILL_LIMIT_S
    seen: set[int] = set()
    while new := descendants(root) - seen:  # stopped first, so that none can fork and escape
        _signal(new, signal.SIGSTOP)
        seen |= new
        if time.monotonic() > deadline:
            break
    while (left := descendants(root)) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        if root == os.getpid():
            _reap()
        time.sleep(POLL_S)


def descendants(root: int) -> set[int]:
    """Pids of all processes below `root`, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
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
    """Wait for the end of the worker or the pool, end all descendants, and exit."""
    for descriptor in (0, 1):  # so that the pool sees them closed when the worker closes its own
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
    with suppress(ProcessLookupError):  # the only means where there is no /proc
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
    """Make the kernel send `number` to this process when the thread that started it ends."""
    _call_kernel(PR_SET_PDEATHSIG, number)
    if sys.platform == "linux" and os.getppid() != parent:  # it had ended before the call above
        os._exit(1)


def _call_kernel(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)
