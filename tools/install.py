"""`pip install` with these arguments, its progress in a few lines: the Makefile sets up with it.

In a terminal one line is renewed; elsewhere a line stands every ten seconds at most. What pip warns
of is shown, but for places it does not look in; if it fails, the end of its output.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

SILENT_S = 1.0  # then the installed packages are counted
EVERY_S = 10.0  # between two lines that cannot be renewed
NUM_SHOWN_AT_FAILURE = 40


def stages(
    lines: Iterable[str | None], num_wanted: int, packages: Path
) -> Iterator[tuple[str, bool]]:
    """What to show for pip's `lines`, and whether it must stay; None stands for a silence.

    `num_wanted` packages are asked for; installed ones are counted in the folder `packages`.
    """
    num_found, num_before, num_new = 0, _num_installed(packages), 0
    for line in lines:
        if line is None:
            if num_new:
                done = min(_num_installed(packages) - num_before, num_new)
                yield f"installing {num_new} packages: {max(done, 0)} done", False
        elif found := re.match(r"Collecting ([^\s=<>~!;\[]+)", line):
            num_found += 1
            total = max(num_found, num_wanted)
            yield f"finding and downloading {total} packages: {num_found}, {found[1]}", False
        elif line.startswith("Installing collected packages:"):
            num_new = line.count(",") + 1
            yield f"installing {num_new} packages", True
        elif re.match(r"WARNING|ERROR|DEPRECATION", line) and "is ignored" not in line:
            yield line.rstrip(), True


def _num_installed(packages: Path) -> int:
    return len(list(packages.glob("*.dist-info")))


def with_silences(stream: IO[str]) -> Iterator[str | None]:
    """The lines of `stream` as they come, and None after each second without one."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENT_S)
        except queue.Empty:
            yield None
            continue
        if not line:
            return
        yield line


def main() -> None:
    """Install; exits as pip does."""
    arguments = sys.argv[1:]
    files = [Path(name) for flag, name in pairwise(arguments) if flag == "-r"]
    num_wanted = sum(len(re.findall(r"^\S+==", file.read_text(), re.MULTILINE)) for file in files)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    options = ["--progress-bar", "off", *arguments]
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    command = [*pip, *options]
    started = subprocess.Popen(command, stdout=pipe, stderr=joined, text=True, errors="replace")
    stream = started.stdout
    assert stream is not None
    said: list[str] = []
    is_terminal = sys.stdout.isatty()
    shown_at = 0.0

    def output_lines() -> Iterator[str | None]:
        for line in with_silences(stream):
            said.extend([line] if line is not None else [])
            yield line

    for text, stays in stages(output_lines(), num_wanted, Path(sysconfig.get_path("purelib"))):
        if is_terminal:
            sys.stdout.write(f"\r\033[K  {text}" + ("\n" if stays else ""))
        elif stays or time.monotonic() - shown_at >= EVERY_S:
            sys.stdout.write(f"  {text}\n")
            shown_at = time.monotonic()
        sys.stdout.flush()
    sys.stdout.write("\r\033[K" if is_terminal else "")
    code = started.wait()
    if code:
        sys.stderr.writelines(said[-NUM_SHOWN_AT_FAILURE:])
    sys.exit(code)


if __name__ == "__main__":
    main()
