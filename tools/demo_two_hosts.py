"""Two worker daemons on this machine, as two hosts, and the quickstart over both.

Usage: python tools/demo_two_hosts.py [OVERRIDE ...]

Makes certificates in a temporary folder and starts two `llamarl worker` daemons that accept only
them. The trainer runs on the first, the generator on the second; weights travel over gloo. Both
daemons, and all they started, are gone when this ends; it fails if not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llamarl.cluster.certificates import make_certificates

ROOT = Path(__file__).resolve().parent.parent
LLAMARL = (sys.executable, "-m", "llamarl")
STOP_LIMIT_S = 10.0


def options(folder: Path, style: str) -> list[str]:
    """The PEM files in `folder` as options: style "--{}=" for the daemon, "cluster.{}=" else."""
    names = ("ca", "certificate", "private_key")
    spell = (lambda name: name.replace("_", "-")) if style.startswith("--") else str
    return [f"{style.format(spell(name))}{folder / name}.pem" for name in names]


@contextmanager
def worker(
    folder: Path, *, address: str = "127.0.0.1", within: Sequence[str] = (), **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A daemon with the certificates of `folder` on a free port; its address. `within` is what
    runs a command on the host of the IP `address`."""
    place = f"--address=tls://{address}:0"
    daemon = subprocess.Popen(
        [*within, *LLAMARL, "worker", place, *options(folder, "--{}=")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert daemon.stdout is not None
    try:
        line = daemon.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with exit code {daemon.wait()}")
        yield line.split()[-1], daemon
    finally:
        daemon.terminate()
        daemon.wait(STOP_LIMIT_S)


def children(pid: int) -> set[int]:
    """All processes that `pid` started, and they."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found |= {child, *children(child)}
    return found


def main(overrides: list[str]) -> int:
    """Run the demonstration; the exit code of `llamarl train`, or 3 if a process was left."""
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        certificates = Path(folder)
        make_certificates(folder, ["127.0.0.1"])
        with worker(certificates) as (first, one), worker(certificates) as (second, two):
            print(f"two hosts: {first} (trainer), {second} (generator)", flush=True)
            code = subprocess.run(
                [*LLAMARL, "train", "--config-dir", str(ROOT / "recipes/quickstart")]
                + [f"cluster.hosts={json.dumps([first, second])}", "weights=collective"]
                + options(certificates, "cluster.{}=")
                + overrides
            ).returncode
            left = children(one.pid) | children(two.pid)
    if left:
        print(f"processes were left on the hosts: {sorted(left)}", file=sys.stderr)
    return 3 if left else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
