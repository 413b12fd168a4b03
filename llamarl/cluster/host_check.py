"""What a host reports of itself, and whether the hosts of a run fit together.

Owns: versions, the shared folder and the data interface of a host. Does not own: the connection
(`hosts.py`); GPUs, which each rank checks (`models/process_group.py`). Invariant: a report is a
plain dict, so that hosts of different versions can read each other's.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from pathlib import Path

import llamarl

PACKAGES = ("torch", "torchmonarch")
PROBE_LIMIT_S = 20.0  # a network file system may show a new file late
POLL_S = 0.1

Report = dict[str, str]


def inspect(probe: str) -> Report:
    """This host's report, with the text of `probe`, a file the controller wrote; "" if it cannot be
    seen."""
    names = [name for _, name in socket.if_nameindex()]
    return {
        **versions(),
        "executable": sys.executable,
        "probe": _read(Path(probe)),
        "interfaces": " ".join(names),
    }


@functools.cache
def versions() -> Report:
    """What must be equal on all hosts; for llamarl with its sources' digest, as checkouts of one
    version differ."""
    found = {"Python": platform.python_version(), "llamarl": f"{_public('llamarl')} ({digest()})"}
    return found | {name: _public(name) for name in PACKAGES}


def digest() -> str:
    """Eight characters that change with any source file of this package."""
    total = hashlib.blake2b(digest_size=4)
    folder = Path(llamarl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def check_reports(reports: dict[str, Report], probe: tuple[str, str], interface: str) -> None:
    """ValueError unless all hosts fit this one. `reports` are by address, `probe` path and text."""
    path, text = probe
    for address, report in reports.items():
        for name, version in versions().items():
            if report.get(name) != version:
                raise ValueError(
                    f"every host must have the same version of {name}, got {version} on "
                    f"{socket.gethostname()} (controller) and {report.get(name)} on {address}"
                )
        if report["probe"] != text:
            raise ValueError(
                f"run_dir must be on a file system that every host sees, got "
                f"{os.path.dirname(path)}, in which {address} cannot read a new file"
            )
        if interface not in report["interfaces"].split():
            raise ValueError(
                f"cluster.data_interface must be there on every host, got {interface!r}, but "
                f"{address} has {report['interfaces']}"
            )


def _read(path: Path) -> str:
    deadline_s = time.monotonic() + PROBE_LIMIT_S
    while time.monotonic() < deadline_s and path.parent.is_dir():
        os.scandir(path.parent).close()  # makes NFS look again for files that it did not find
        if path.is_file():
            return path.read_text()
        time.sleep(POLL_S)
    return ""


def _public(name: str) -> str:
    """A package's version without its build, such as +cpu."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"
