"""Bounds on what code that a checkpoint brings, its chat template, may take.

Owns: the limits of time and memory, and how they are set. Does not own: what is run within them.
Invariant: the process's own limits are as before once the block has ended.
"""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

TIME_S = 10.0
MEMORY_BYTES = 4 * 1024**3  # beyond what the process has
STATISTICS = Path("/proc/self/statm")


@contextmanager
def bounded() -> Iterator[None]:
    """TimeoutError if the block takes over TIME_S (in the main thread, which alone can be
    interrupted), MemoryError if it needs over MEMORY_BYTES (on Linux)."""
    is_main = threading.current_thread() is threading.main_thread()
    _, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    if STATISTICS.exists() and most == resource.RLIM_INFINITY:
        num_pages = int(STATISTICS.read_text().split()[0])
        own_bytes = num_pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MEMORY_BYTES, most))
    before = signal.signal(signal.SIGALRM, _raise) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, TIME_S)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it took over {TIME_S:g} s")
