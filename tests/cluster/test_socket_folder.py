"""What killed runs leave in the folder for temporary files is removed by the next run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.cluster.peer_check import PREFIX, private_sockets, remove_left

pytestmark = pytest.mark.full

RUN = """
import asyncio, sys
from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig
from tests.cluster.executors import Probe

async def main():
    cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=sys.argv[1])
    await (await cluster.spawn("storage", Probe, {}, 2)).stop()
    await cluster.spawn("storage", Probe, {})
    print("at work", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder in which the path of a socket fits, which it may not in one of pytest."""
    with tempfile.TemporaryDirectory(prefix=".sockets-") as folder:
        yield Path(folder)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A process with executors at work, whose temporary files go into `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder / "logs")],
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"at work\n"
    return process


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(".")}


@pytest.mark.long
def test_the_sockets_of_a_killed_run_are_removed_by_the_next_one(short: Path) -> None:
    first = start(short)
    try:
        (left,) = folders(short)
        assert left.startswith(PREFIX)
        assert any(path.is_socket() for path in (short / left).glob("*/*"))
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    second = start(short)
    try:
        (own,) = folders(short)
        assert own != left
        third = start(short)
        third.kill()
        third.wait()
        assert own in folders(short), "its process lives"
    finally:
        second.kill()
        second.wait()


def test_a_folder_with_another_file_or_of_another_mode_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, mode in (("notes", 0o700), ("open", 0o755), ("dead", 0o700)):
        inner = tmp_path / f"{PREFIX}{name}" / "inner"
        inner.mkdir(parents=True)
        inner.parent.chmod(mode)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(inner / "s"))
    (tmp_path / f"{PREFIX}notes" / "inner" / "a").write_text("mine")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / f"{PREFIX}notes")
    remove_left()
    assert folders(tmp_path) == {f"{PREFIX}{name}" for name in ("notes", "open", "link")}
    assert (tmp_path / f"{PREFIX}notes" / "inner" / "a").exists()
    assert (tmp_path / f"{PREFIX}open" / "inner" / "s").is_socket()


def test_the_folder_for_temporary_files_is_the_old_one_afterwards(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for before in (str(short), None):
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        monkeypatch.delenv("TMPDIR", raising=False)
        if before is not None:
            monkeypatch.setenv("TMPDIR", before)
        with private_sockets():
            assert Path(os.environ["TMPDIR"]).parent == short
        assert os.environ.get("TMPDIR") == before
    long = short / ("a" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_sockets():
        assert "TMPDIR" not in os.environ, "a socket's path would be too long"
