"""The hosts of a run: this machine, or others that worker daemons serve, and the check that they
fit together."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    HostMesh,
    attach_to_workers,
    concurrent_endpoint,
    default_bootstrap_cmd,
    enable_transport,
    this_host,
)

import llamarl
from llamarl.cluster.bootstrap import PARENT
from llamarl.cluster.credentials import (
    Address,
    Credentials,
    check_distinct,
    connect,
    controller_name,
    monarch_limits,
    wait_disconnected,
)
from llamarl.cluster.os_process import import_path, kill_marked, quiet_stderr, wait_first_exit
from llamarl.cluster.peer_check import private_sockets, refuse_other_users
from llamarl.core.config import ClusterConfig
from llamarl.core.device.names import INTERFACE_VARIABLES

PACKAGES = ("torch", "torchmonarch")
PROBE_LIMIT_S = 20.0  # a network file system may show a new file late
POLL_S = 0.1

Report = dict[str, str]


def inspect(probe: str) -> Report:
    """Return this host's report, with the text of `probe`, a file the controller wrote; "" if it
    cannot be seen."""
    names = [name for _, name in socket.if_nameindex()]
    return {
        **versions(),
        "executable": sys.executable,
        "probe": _read(Path(probe)),
        "interfaces": " ".join(names),
    }


@cache
def versions() -> Report:
    """Return the versions that must be equal on all hosts; llamarl's with its sources' digest, as
    checkouts of one version differ."""
    found = {"Python": platform.python_version(), "llamarl": f"{_public('llamarl')} ({digest()})"}
    return found | {name: _public(name) for name in PACKAGES}


def digest() -> str:
    """Return eight characters that change with any source file of this package."""
    total = hashlib.blake2b(digest_size=4)
    folder = Path(llamarl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def check_reports(reports: dict[str, Report], probe: tuple[str, str], interface: str) -> None:
    """Raise ValueError unless all hosts fit this one. `reports` are by address, `probe` is path and
    text."""
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
    """Return a package's version without its build, such as +cpu."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


log = logging.getLogger(__name__)

DIMENSION = "ranks"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FIRST_CALL_LIMIT_S = 60.0  # to start a process on a host and get its answer
START_PATIENCE_S = 900.0  # for daemons that a scheduler starts: it may fetch images before
KILL_LIMIT_S = 8.0  # for a host to kill what is left there
DETACH_LIMIT_S = 3.0


class Host:
    """A host on which processes are started; this class is this machine, over unix sockets, without
    a port."""

    def __init__(self) -> None:
        # The import path is the controller's, so that all it can import can be spawned.
        self.environment = {
            "PYTHONPATH": import_path(),
            PARENT: str(os.getpid()),
            **dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK),
        }
        """The environment of every process there."""
        self.is_lost = False
        """Whether the host can be reached no more."""
        self._mesh = _this_host()
        self._executable = sys.executable

    def spawn(self, name: str, environments: list[dict[str, str]]) -> Any:
        """Start one process per environment, which adds to the host's; return a Monarch process
        mesh."""
        command = default_bootstrap_cmd()
        command.args = ["-m", "llamarl.cluster.bootstrap"]
        command.program = self._executable
        return self._mesh.spawn_procs(
            {DIMENSION: len(environments)},
            name=name,
            bootstrap_command=lambda point: command.with_env(environments[point[DIMENSION]]),
        )

    async def kill(self, mark: str) -> list[int]:
        """Kill every process there that has `mark`; return the pids that are left, normally
        none."""
        return await kill_marked(mark)

    async def wait_first_exit(self, pids: list[int]) -> tuple[int, str]:
        """Wait until one of these processes there has ended; return its index, and how it ended."""
        return await wait_first_exit(pids)

    async def wait_lost(self) -> str:
        """Wait until the host is lost; return the reason."""
        await asyncio.Event().wait()
        raise AssertionError

    async def detach(self) -> None:
        """Let the host go; never raises."""


class HostAgent(Actor):
    """Runs the controller's calls about a remote host, on that host."""

    @concurrent_endpoint
    async def inspect(self, probe: str) -> Report:
        return await asyncio.to_thread(inspect, probe)

    @concurrent_endpoint
    async def kill(self, mark: str) -> list[int]:
        return await kill_marked(mark)

    @concurrent_endpoint
    async def wait_first_exit(self, pids: list[int]) -> tuple[int, str]:
        return await wait_first_exit(pids)


class RemoteHost(Host):
    """A host that a worker daemon serves."""

    def __init__(
        self, name: str, address: Address, config: ClusterConfig, credentials: Credentials
    ) -> None:
        self.address = address
        self.is_lost = False
        self._credentials = credentials
        self._disconnected: asyncio.Task[str] | None = None
        interface = data_interface(config)
        self.environment = {
            "LLAMARL_HOST": name,
            "LLAMARL_DATA_INTERFACE": interface,
            **dict.fromkeys(INTERFACE_VARIABLES, interface),
            **(monarch_limits(config) if config.sites else {}),
        }
        self._patience_s = config.liveness_timeout_s if config.sites else 0.0
        self._mesh = attach_to_workers(ca="trust_all_connections", workers=[str(address)])
        self._agents = self._mesh.spawn_procs(name=f"host-{uuid.uuid4().hex[:8]}")
        self._agent: Any = self._agents.spawn("host", HostAgent)

    async def inspect(self, probe: str) -> Report:
        """Return the host's report. ValueError if it does not come in time."""
        answer = self._agent.inspect.call_one(probe).as_asyncio()
        try:
            async with asyncio.timeout(FIRST_CALL_LIMIT_S):
                report: Report = await answer
        except (TimeoutError, SupervisionError, ActorError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else str(error).splitlines()[-1]
            raise ValueError(
                f"cluster.hosts must start processes, got none from {self.address} within "
                f"{FIRST_CALL_LIMIT_S:g} s: {reason}; is its version of Monarch ours?"
            ) from error
        self._executable = report["executable"]
        return report

    async def kill(self, mark: str) -> list[int]:
        answer = self._agent.kill.call_one(mark).as_asyncio()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                left: list[int] = await answer
        except Exception as error:  # noqa: BLE001 - a dead daemon's processes die with it
            log.debug("killing processes of %s: %s", self.address, error)
            return []
        return left

    async def wait_first_exit(self, pids: list[int]) -> tuple[int, str]:
        found: tuple[int, str] = await self._agent.wait_first_exit.call_one(pids)
        return found

    async def wait_lost(self) -> str:
        if self._disconnected is None:
            waiting = wait_disconnected(self.address, self._credentials, self._patience_s)
            self._disconnected = asyncio.create_task(waiting)
        reason = await asyncio.shield(self._disconnected)
        self.is_lost = True
        return f"host {self.address} is lost: {reason}"

    async def detach(self) -> None:
        if self._disconnected is not None:
            self._disconnected.cancel()
        if self.is_lost:
            return
        try:
            async with asyncio.timeout(DETACH_LIMIT_S):
                await self._mesh.stop().as_asyncio()
        except Exception as error:  # noqa: BLE001 - tear-down continues
            log.debug("detaching from %s: %s", self.address, error)


async def attach(config: ClusterConfig, folder: str) -> list[Host]:
    """Return the hosts of a run, checked: this machine, or all of cluster.hosts.

    All hosts must see `folder`. ValueError, in one line, says what is wrong with one of them.
    """
    if not config.hosts:
        return [Host()]
    credentials = Credentials(config.ca, config.certificate, config.private_key)
    addresses = [Address.parse(text, "cluster.hosts") for text in config.hosts]
    patience_s = 0.0 if config.scheduler == "none" else START_PATIENCE_S
    own_ips = await asyncio.gather(
        *(asyncio.to_thread(connect, address, credentials, patience_s) for address in addresses)
    )
    check_distinct(addresses)
    # A host on the controller's machine may reach it at an address that others cannot reach.
    index = next((i for i, ip in enumerate(own_ips) if not ip_address(ip).is_loopback), 0)
    name = await asyncio.to_thread(controller_name, own_ips[index], addresses[index], credentials)
    _start_client(addresses[0].scheme, name)
    hosts = [
        RemoteHost(config.name_host(index), address, config, credentials)
        for index, address in enumerate(addresses)
    ]
    await _check(hosts, config, folder)
    return list(hosts)


async def attach_late(config: ClusterConfig, text: str, folder: str, hosts: list[Host]) -> None:
    """Add the host at the address `text` to those of a run at work, as the last of `hosts`.

    ValueError, in one line, says what is wrong with it.
    """
    if not config.hosts:
        raise ValueError("cluster.hosts must name the hosts of a run that others join, got none")
    credentials = Credentials(config.ca, config.certificate, config.private_key)
    address = Address.parse(text, "host")
    await asyncio.to_thread(connect, address, credentials, 0.0)
    known = [host.address for host in hosts if isinstance(host, RemoteHost)]
    check_distinct([*known, address])
    host = RemoteHost(text, address, config, credentials)
    await _check([host], config, folder)
    hosts.append(host)


async def _check(hosts: list[RemoteHost], config: ClusterConfig, folder: str) -> None:
    """Let all of these hosts go, with a ValueError, unless they fit and see `folder`."""
    probe, text = Path(folder, f".hosts-{uuid.uuid4().hex}"), uuid.uuid4().hex
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.write_text(text)
    try:
        reports = await asyncio.gather(*(host.inspect(str(probe)) for host in hosts))
        found = {str(host.address): each for host, each in zip(hosts, reports, strict=True)}
        check_reports(found, (str(probe), text), data_interface(config))
    except BaseException:
        await asyncio.gather(*(host.detach() for host in hosts))
        raise
    finally:
        probe.unlink()


def data_interface(config: ClusterConfig) -> str:
    """Return the network interface of tensor traffic between ranks."""
    return config.data_interface or LOOPBACK


@cache
def _this_host() -> HostMesh:
    """Return this machine; the first call starts Monarch's client."""
    with _starting_client():
        return this_host()


def _start_client(scheme: str, own_name: str) -> None:
    """Start Monarch's client, which the hosts reach at `own_name`."""
    host = f"[{own_name}]" if ":" in own_name else own_name
    try:
        enable_transport(f"{scheme}://{host}:0")
    except RuntimeError as error:
        raise ValueError(
            "cluster.hosts must be those of the first run of this process, got others"
        ) from error
    with _starting_client():
        monarch.actor.context()


@contextmanager
def _starting_client() -> Iterator[None]:
    """Start Monarch's client inside this block, which discards its output to standard error. Its
    own hook for faults would end the controller; here the watchers report losses."""
    monarch.actor.unhandled_fault_hook = partial(log.debug, "monarch: %s")
    refuse_other_users()
    with quiet_stderr(), private_sockets():
        yield
