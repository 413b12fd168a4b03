"""Bounds on what a checkpoint's chat template and the rules of its tokenizer may take.

Owns: the limits of time and memory, how they are set, and how long the rules can make a text. Does
not own: what is run within the limits. Invariant: the process's own limits are as before once the
block has ended.
"""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment

TIME_S = 10.0
MEMORY_BYTES = 1024**3  # beyond what the process has
MOST_CHARS = 2**24  # of a rendered conversation: tokens of more would take minutes
MOST_GROWTH = 10_000  # of a text, by rules of a tokenizer; by those of real ones about 2
STATISTICS = Path("/proc/self/statm")


@contextmanager
def bounded() -> Iterator[None]:
    """TimeoutError if the block takes over TIME_S (in the main thread, which alone can be
    interrupted), MemoryError if it needs over MEMORY_BYTES (on Linux)."""
    is_main = threading.current_thread() is threading.main_thread()
    now, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    if STATISTICS.exists():
        num_pages = int(STATISTICS.read_text().split()[0])
        wanted = num_pages * resource.getpagesize() + MEMORY_BYTES
        less = wanted if now == resource.RLIM_INFINITY else min(wanted, now)
        resource.setrlimit(resource.RLIMIT_AS, (less, most))
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


def has_powers(template: str) -> bool:
    """Whether a chat template raises numbers to powers. No template needs that, and one such step
    may take for ever, which no signal ends. `**` before keywords of a call is none."""
    before = ""
    for _, kind, text in Environment().lex(template) if "**" in template else ():
        if kind == "operator" and text == "**" and before not in ("(", ","):
            return True
        before = before if kind == "whitespace" else text
    return False


def growth(rules: Any) -> float:
    """How many times as long a text can become by the Replace rules of a normalizer or decoder, as
    tokenizer.json holds it. The library that applies them ends the process if memory runs out."""
    times, waiting = 1.0, [rules]
    while waiting:
        rule = waiting.pop()
        if not isinstance(rule, dict):
            continue
        for name in ("normalizers", "decoders"):  # of a Sequence
            waiting += some if isinstance(some := rule.get(name), list) else []
        pattern, content = rule.get("pattern"), rule.get("content")
        if rule.get("type") == "Replace" and isinstance(content, str):
            found = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match between two characters; an empty text does.
            width = len(found) if isinstance(found, str) else 0
            times *= max(1.0, len(content) / width) if width else 1 + len(content)
    return times


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it took over {TIME_S:g} s")
