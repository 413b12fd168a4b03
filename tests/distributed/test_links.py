"""Hosts behind links with a rate and a delay: the network itself, and the store across it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.cluster.os_process import is_alive

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import read
from links import Host, Link, network, why_not

from tests.places import ROOT

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"namespaces of Linux: {WHY_NOT}")

NUM_BYTES = 2_000_000
SEND = """
import socket, sys, time
start_s = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as stream:
    print(time.monotonic() - start_s)
    stream.sendall(bytes(int(sys.argv[3])))
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    with server.accept()[0] as stream:
        start_s, num_bytes = time.monotonic(), 0
        while some := stream.recv(2**20):
            num_bytes += len(some)
print(num_bytes, time.monotonic() - start_s)
"""


def send(sender: Host, receiver: Host) -> tuple[float, float]:
    """Send NUM_BYTES; seconds of the connection's start, and of the bytes."""
    command = receiver.command(sys.executable, "-c", RECEIVE, receiver.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        arguments = [receiver.address, process.stdout.readline().strip(), str(NUM_BYTES)]
        sending = sender.command(sys.executable, "-c", SEND, *arguments)
        sent = subprocess.run(sending, stdout=subprocess.PIPE, text=True, timeout=20, check=True)
        num_bytes, took_s = process.stdout.read().split()
        assert int(num_bytes) == NUM_BYTES
        return float(sent.stdout), float(took_s)


def use(links: list[Link], folder: Path, found: list[Host]) -> None:
    """Measure the links, then fail in their midst."""
    with network(links, [folder]) as (this_machine, *hosts):
        found += [this_machine, *hosts]
        for link, host in zip(links, hosts, strict=True):
            before = host.num_bytes()[1]
            for ends in (host, this_machine), (this_machine, host):
                connect_s, took_s = send(*ends)
                assert connect_s >= 2 * link.delay_s
                assert took_s >= 0.9 * NUM_BYTES * 8 / link.rate_bits_per_s
            assert host.num_bytes()[1] - before >= NUM_BYTES
            subprocess.run(host.command("touch", str(folder / "own")), check=True)
        assert send(*hosts)[1] >= 0.9 * NUM_BYTES * 8 / links[1].rate_bits_per_s
        assert not (folder / "own").exists()
        raise ZeroDivisionError


@pytest.mark.long
def test_links_have_their_rate_and_delay_and_leave_nothing_after_an_error(tmp_path: Path) -> None:
    found: list[Host] = []
    with pytest.raises(ZeroDivisionError):
        use([Link(100e6), Link(50e6, delay_s=0.05)], tmp_path, found)
    shown = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert found[0].interface not in shown
    assert not [host for host in found[1:] if is_alive(host.pid)]


@pytest.mark.slow
def test_a_row_that_takes_long_over_a_slow_link_arrives_whole(tmp_path: Path) -> None:
    """14 MB at 20 Mbit/s: 6 s each way. Neither a socket nor shared memory leads past the link."""
    file = tmp_path / "links.json"
    command = [sys.executable, str(ROOT / "tools" / "bench_links.py"), f"--json={file}"]
    command += ["--rate=20e6", "--tokens=1000000", "--rows=1", "--batch-rows=1", "--depth=1"]
    done = subprocess.run(
        [*command, "--rounds=1", "--consumers=1"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = read(file)
    assert found[""]["row_bytes"] > 12e6
    one_unit = found["1 units"]
    assert one_unit["payload_share"] < 0.55  # written first, then read
    assert one_unit["written_share"] >= one_unit["payload_share"]
    assert found[""]["second_unit_behind_links"] > 0
