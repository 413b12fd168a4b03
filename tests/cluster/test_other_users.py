"""Other users of a machine cannot speak to the processes of a run, or of a worker daemon."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llamarl.cluster import make_cluster
from llamarl.cluster.certificates import make_certificates
from llamarl.cluster.sockets import LocalServer
from llamarl.core.config import ClusterConfig
from tests.cluster.executors import Probe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_two_hosts import children, worker

STRANGER = 65534
LISTENING = "00010000"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and Linux"),
]

KNOCK = """
import json, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
found = {}
for name in sys.argv[3:]:
    with socket.socket(socket.AF_UNIX, int(sys.argv[2])) as client:
        client.settimeout(1.0)
        try:
            client.connect(name.replace("@", "\\0", 1))
            found[name] = "closed" if client.recv(1) == b"" else "served"
        except TimeoutError:
            found[name] = "served"
        except (PermissionError, ConnectionError) as error:
            found[name] = type(error).__name__
print(json.dumps(found))
"""


def listening_sockets(pids: list[int]) -> Iterator[str]:
    """Names of the unix stream sockets on which one of these processes listens."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENING and words[6] in inodes and len(words) > 7 and words[4] == "0001":
            yield words[7]


def knock(uid: int, names: list[str], kind: int = socket.SOCK_STREAM) -> dict[str, str]:
    """What happens to a client of this user at each socket."""
    command = [sys.executable, "-c", KNOCK, str(uid), str(int(kind)), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def assert_private(pids: list[int]) -> None:
    names = [*listening_sockets(pids)]
    assert any(name.startswith("@") for name in names), names
    served = {name for name, end in knock(0, names).items() if end == "served"}
    assert served == {*names}, "the test's own client must be served, or it shows nothing"
    refused = knock(STRANGER, names)
    assert {*refused.values()} <= {"closed", "PermissionError", "ConnectionResetError"}, refused
    folders = {Path(name).parent for name in names if name.startswith("/")}
    assert {folder.stat().st_mode & 0o077 for folder in folders} <= {0}


def test_another_user_is_refused_at_every_socket_of_a_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        try:
            group = await cluster.spawn("storage", Probe, {}, 2)
            pids = [os.getpid(), *(place[3] for place in await group.all(Probe.place))]
            await asyncio.to_thread(assert_private, pids)
            assert await group.all(Probe.echo, 7) == [7, 7]  # it goes on
        finally:
            await cluster.stop()

    asyncio.run(scenario())


@pytest.mark.long
def test_another_user_is_refused_at_the_unix_sockets_of_a_daemon(tmp_path: Path) -> None:
    make_certificates(str(tmp_path), ["127.0.0.1"])
    with worker(tmp_path) as (_, daemon):
        assert_private([daemon.pid, *children(daemon.pid)])


@pytest.mark.parametrize(("mode", "end"), [(0o700, "PermissionError"), (0o777, "closed")])
def test_another_user_is_refused_also_where_files_have_no_permissions(mode: int, end: str) -> None:
    async def scenario(folder: Path) -> None:
        server = LocalServer(folder / "inner" / "s", lambda packet: ({}, (), ()))
        try:
            for path in (folder, folder / "inner", folder / "inner" / "s"):
                path.chmod(mode)
            names = [str(folder / "inner" / "s")]
            for uid, wanted in ((os.geteuid(), "served"), (STRANGER, end)):
                found = await asyncio.to_thread(knock, uid, names, socket.SOCK_SEQPACKET)
                assert found == {names[0]: wanted}
        finally:
            server.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


def test_a_cluster_in_one_process_listens_nowhere(tmp_path: Path) -> None:
    code = (
        "import asyncio, os\n"
        "from llamarl.cluster import make_cluster\n"
        "from llamarl.core.config import ClusterConfig\n"
        "from tests.cluster.executors import Probe\n"
        "from tests.cluster.test_other_users import listening_sockets\n"
        "async def main():\n"
        "    config = ClusterConfig(backend='inline')\n"
        "    cluster = make_cluster(config, spans_folder=None, logs_folder='.')\n"
        "    await cluster.spawn('storage', Probe, {})\n"
        "    assert not [*listening_sockets([os.getpid()])]\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
