"""Worker daemons on this machine as several hosts, over mutual TLS."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.cluster import daemon as worker_command
from llamarl.cluster.actors import ExecutorActors
from llamarl.cluster.certificates import make_certificates
from llamarl.cluster.credentials import (
    Address,
    Credentials,
    check_distinct,
    configure_monarch,
    connect,
    controller_name,
)
from llamarl.cluster.hosts import check_reports, versions
from llamarl.cluster.meshes import ranks_by_host
from llamarl.cluster.os_process import is_alive
from llamarl.core.config import ClusterConfig
from llamarl.core.config.rank_assignment import Device
from tests.cluster.test_processes import is_loopback, listening_addresses
from tests.scoring.test_reward_pool import wait_until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_two_hosts import children, worker

from tests.places import ROOT

pytestmark = pytest.mark.full

LIMIT_S = 60.0


@dataclass(frozen=True)
class Hosts:
    """Three daemons; the third has other sources than this process."""

    certificates: Path
    addresses: list[str]
    pids: list[int]


def credentials(ca: Path, certificate: Path) -> Credentials:
    return Credentials(
        str(ca / "ca.pem"),
        str(certificate / "certificate.pem"),
        str(certificate / "private_key.pem"),
    )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder, other = tmp_path_factory.mktemp("certificates"), tmp_path_factory.mktemp("other")
    make_certificates(str(folder), ["127.0.0.1"])
    shutil.copytree(ROOT / "llamarl", other / "llamarl")
    with (other / "llamarl" / "types.py").open("a") as file:
        file.write("# a later line\n")
    paths = [str(ROOT), str(ROOT), str(other)]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        daemons = [worker(folder, PYTHONPATH=path) for path in paths]
        found = list(pool.map(stack.enter_context, daemons))
        addresses = [address for address, _ in found]
        yield Hosts(folder, addresses, [daemon.pid for _, daemon in found])


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority."""
    folder = tmp_path_factory.mktemp("foreign")
    make_certificates(str(folder), ["127.0.0.1"])
    return folder


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda ours, foreign: credentials(foreign, foreign),
            r"cluster\.ca must have signed .*/ca\.pem and tls://.*: \w",
        ),
        (
            lambda ours, foreign: credentials(ours, foreign),
            r"certificate must be one that every host .* refused by tls",
        ),
        (
            lambda ours, foreign: replace(credentials(ours, ours), private_key=""),
            r"private_key must be a PEM .* got '' \(No such file",
        ),
        (
            lambda ours, foreign: replace(credentials(ours, ours), private_key=str(ours)),
            r"private_key must be a PEM .* got '/.+' \(Is a directory",
        ),
    ],
    ids=["authority", "certificate", "no key", "key is a folder"],
)
def test_a_wrong_certificate_is_refused_with_the_reason(
    wrong: Callable[[Path, Path], Credentials], words: str, hosts: Hosts, foreign: Path
) -> None:
    address = Address.parse(hosts.addresses[0], "cluster.hosts")
    ours = hosts.certificates
    assert connect(address, credentials(ours, ours)) == "127.0.0.1"
    with pytest.raises(ValueError, match=words):
        connect(address, wrong(ours, foreign))


@pytest.mark.slow
def test_a_daemon_closes_connections_that_send_nothing(hosts: Hosts) -> None:
    """And none that has shown its certificate, however quiet it is then."""
    address, pid = Address.parse(hosts.addresses[0], "cluster.hosts"), hosts.pids[0]
    place = (address.host, address.port)
    ours = credentials(hosts.certificates, hosts.certificates)
    context = ours.context("cluster.")
    with ExitStack() as stack:
        plain = socket.create_connection(place)
        shown = stack.enter_context(context.wrap_socket(plain, server_hostname=address.host))
        num_before = len(os.listdir(f"/proc/{pid}/fd"))
        idle = [stack.enter_context(socket.create_connection(place)) for _ in range(60)]
        for connection in idle:
            connection.settimeout(LIMIT_S)
            assert connection.recv(1) == b""
        assert wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= num_before)
        shown.settimeout(0.5)
        with pytest.raises(TimeoutError):
            shown.recv(1)
        assert connect(address, ours) == "127.0.0.1"


def test_a_daemon_says_at_once_what_is_wrong_with_its_certificate_or_port(
    hosts: Hosts, foreign: Path
) -> None:
    mixed = replace(credentials(hosts.certificates, foreign), ca=f"{hosts.certificates}/ca.pem")
    for pem, address, reason in [
        (mixed, "tls://127.0.0.1:0", r"must be signed by --ca .* unable to get local issuer"),
        (
            credentials(foreign, foreign),
            "tls://127.0.0.3:0",
            r"must be signed by --ca for the host .*not valid for '127\.0\.0\.3'",
        ),
        (mixed, hosts.addresses[0], r"--address must be one to listen on, got .* already in use"),
    ]:
        arguments = ["--address", address, "--ca", pem.ca, "--certificate", pem.certificate]
        with pytest.raises(ValueError, match=reason):
            worker_command.main([*arguments, "--private-key", pem.private_key])


def test_one_daemon_is_not_taken_for_two_hosts() -> None:
    names = [Address("tls", name, 7) for name in ("127.0.0.1", "127.0.0.2", "localhost")]
    check_distinct(names[:2])
    with pytest.raises(ValueError, match=r"got tls://127\.0\.0\.1:7 and tls://localhost:7, which"):
        check_distinct(names)


def test_a_host_that_does_not_answer_is_named_with_the_seconds(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:

        def say_hello() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                connection.recv(65536)

        pool.submit(say_hello)
        with pytest.raises(ValueError, match=r"got something at tls.* that does not speak TLS"):
            connect(
                Address("tls", "127.0.0.1", other.getsockname()[1]),
                credentials(hosts.certificates, hosts.certificates),
            )
    with pytest.raises(
        ValueError,
        match=rf"no answer from tls://127\.0\.0\.1:{port} \(Connection refused; .* 5 s\)",
    ):
        connect(
            Address("tls", "127.0.0.1", port), credentials(hosts.certificates, hosts.certificates)
        )


def test_a_name_that_our_certificate_is_not_for_is_not_used(hosts: Hosts) -> None:
    ours = credentials(hosts.certificates, hosts.certificates)
    assert ours.refusal("127.0.0.1") == ""
    assert "not valid for 'localhost'" in ours.refusal("localhost")
    address = Address.parse(hosts.addresses[0], "cluster.hosts")
    assert controller_name("127.0.0.1", address, ours) == "127.0.0.1"
    with pytest.raises(
        ValueError, match=r"must be for this machine as .* reaches it, 127\.0\.0\.2"
    ):
        controller_name("127.0.0.2", address, ours)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--address", "tcp://127.0.0.1:0"], r"must be tls://, or tcp:// with --trusted-network"),
        ([], r"--ca must be a PEM file for tls:// addresses, got ''"),
        (["--address", "127.0.0.1"], r"--address must be like tls://10.0.0.7:24440"),
        (["--address", "tls://0.0.0.0:0"], r"at which controllers reach this host, got tls://0"),
        (["--address", "tls://192.0.2.1:0"], r"one to listen on, got .*: Cannot assign"),
    ],
)
def test_a_daemon_listens_only_where_clients_are_checked(arguments: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        worker_command.main(arguments)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"hosts": ["tcp://127.0.0.1:1"]},
            r"must all be tls://, or tcp:// with cluster.trusts_net",
        ),
        ({"hosts": ["tls://127.0.0.1:1"] * 2}, r"cluster.hosts must all differ"),
        ({"hosts": ["10.0.0.7:24440"]}, r"cluster.hosts must be like tls://"),
        ({"hosts": ["tls://10.0.0.7:1"]}, r"cluster.data_interface must name"),
        ({"hosts": ["tls://127.0.0.1:1", "tls://10.0.0.7:1"]}, r"reach each other .*got .*127"),
        ({"hosts": ["tls://127.0.0.1:1"]}, r"cluster.ca must be a PEM file"),
        ({"num_hosts": 4}, r"cluster.hosts must name the 4 hosts .*`llamarl launch` fills"),
    ],
)
def test_hosts_that_do_not_fit_the_other_fields_are_refused(fields, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        configure_monarch(ClusterConfig(**fields))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"torch": "2.0.0"}, r"same version of torch, got .* and 2\.0\.0 on tls://b:1"),
        ({"probe": ""}, r"run_dir must be .* got /runs/x, in which tls://b:1 cannot read"),
        ({"interfaces": "lo"}, r"data_interface must be .* 'eth0', but tls://b:1 has lo"),
    ],
)
def test_hosts_must_see_the_run_folder_and_have_our_versions_and_the_interface(
    wrong: dict[str, str], words: str
) -> None:
    good = {**versions(), "probe": "text", "interfaces": "lo eth0"}
    check_reports({"tls://a:1": good, "tls://b:1": good}, ("/runs/x/probe", "text"), "eth0")
    reports = {"tls://a:1": good, "tls://b:1": good | wrong}
    with pytest.raises(ValueError, match=words):
        check_reports(reports, ("/runs/x/probe", "text"), "eth0")


CONTROLLER = """
import asyncio, json, sys
from llamarl.cluster import make_cluster, exiting_process
from llamarl.core.config import ClusterConfig
from llamarl.core.config.rank_assignment import Device
from tests.cluster.executors import Probe
folder, logs, one, two, odd = sys.argv[1:]
pem = {name: f"{folder}/{name}.pem" for name in ("ca", "certificate", "private_key")}
def say(value):
    print(json.dumps(value), flush=True)
def cluster_of(*hosts):
    config = ClusterConfig(hosts=list(hosts), **pem)
    return make_cluster(config, spans_folder=None, logs_folder=logs)
async def main():
    cluster = cluster_of(one, odd)
    try:
        await cluster.spawn("trainer", Probe, {})
    except ValueError as error:
        say(str(error))
    finally:
        await cluster.stop()
    cluster = cluster_of(one, two)
    devices = [Device(host=0, gpu=0), Device(host=0, gpu=1), Device(host=1, gpu=0)]
    try:
        storage = await cluster.spawn("storage", Probe, {}, 1, [Device(host=1, gpu=None)])
        trainer = await cluster.spawn("trainer", Probe, {"peer": storage.one(Probe)}, 3, devices)
        say(await trainer.all(Probe.place))
        variables = await trainer.all(Probe.environment)
        say([[each["LLAMARL_HOST"], each["LOCAL_RANK"], each["LLAMARL_GPU"]] for each in variables])
        say(await trainer.all(Probe.ask_peer, "echo", 7))
        try:
            await trainer.all(Probe.fail, 2)
        except KeyError as error:
            say(str(error))
        say(await trainer.all(Probe.start_child))
        await asyncio.to_thread(sys.stdin.readline)
    finally:
        await cluster.stop()
with exiting_process():
    asyncio.run(main())
"""


@pytest.mark.long
def test_ranks_of_one_group_sit_on_several_hosts(hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(hosts.certificates), str(tmp_path / "logs")]
    with subprocess.Popen(
        [*command, *hosts.addresses],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as controller:
        assert controller.stdout is not None

        def receive():
            return json.loads(controller.stdout.readline())

        one, two, odd = hosts.addresses
        refusal = receive()
        assert refusal.startswith("every host must have the same version of llamarl, got 0.1.0 (")
        assert refusal.endswith(f" on {odd}")
        places = receive()
        assert [place[:3] for place in places] == [[i, 3, f"trainer-{i}"] for i in range(3)]
        assert receive() == [
            [one, "0", "auto"],
            [one, "1", "auto"],
            [two, "0", "auto"],
        ]
        assert receive() == [7] * 3
        assert receive() == "'row 7 has no column reward on rank 2'"
        pids = {place[3] for place in places}
        pids |= set(receive())  # children in sessions of their own
        running = [*hosts.pids, *(pid for daemon in hosts.pids for pid in children(daemon))]
        assert pids <= set(running)
        listening = list(listening_addresses([controller.pid, *running]))
        assert {pid for pid, _, _ in listening} >= {controller.pid, *hosts.pids}
        assert [entry for entry in listening if not is_loopback(entry[1])] == []
        controller.communicate("stop\n", LIMIT_S)
        assert controller.returncode == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert not set().union(*map(children, hosts.pids))


class FakeMesh(list):
    """The ranks of one host."""

    def slice(self, *, ranks: slice) -> FakeMesh:
        return FakeMesh(self[ranks])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_the_actors_of_any_range_of_ranks_are_found(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    meshes = [
        (FakeMesh(range(first, first + size)), first)
        for first, size in zip(firsts, sizes, strict=True)
    ]
    start = data.draw(st.integers(0, total - 1))
    ranks = range(start, data.draw(st.integers(start, total)), data.draw(st.integers(1, 6)))
    found = ExecutorActors(tuple(meshes), total).select(ranks)
    assert all(found)
    assert [rank for mesh in found for rank in mesh] == list(ranks)


def test_ranks_are_numbered_host_after_host() -> None:
    places = [Device(host=host, gpu=None) for host in (1, 1, 0)]
    assert [(host, first) for host, first, _ in ranks_by_host(["a", "b"], places)] == [
        ("b", 0),
        ("a", 2),
    ]
    for bad in ([0, 1, 0], [2]):
        with pytest.raises(
            ValueError, match="devices must be on the run's 2 hosts, host after host"
        ):
            list(ranks_by_host(["a", "b"], [Device(host=host, gpu=None) for host in bad]))
