"""The hosts of a run: this machine, or others that worker daemons serve.

Owns: attaching to daemons, noticing their death, and what is done to a host's processes from
outside. Does not own: executors (`meshes.py`), what hosts must have in common (`inspection.py`).
Invariant: an attached host answered in time and passed all checks, and nothing of a run is on it
before.

Every host is a Monarch host mesh of its own, so that the death of one never holds up another.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import uuid
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol

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

from llamarl.cluster.bootstrap import PARENT
from llamarl.cluster.credentials import (
    Address,
    Credentials,
    check_distinct,
    hold,
    own_name,
    reach,
)
from llamarl.cluster.inspection import Report, check_reports, inspect
from llamarl.cluster.process import end_marked, first_ended, import_path, quiet_stderr
from llamarl.config import ClusterConfig

log = logging.getLogger(__name__)

DIMENSION = "ranks"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FIRST_CALL_LIMIT_S = 60.0  # to start a process on a host and hear from it
START_PATIENCE_S = 900.0  # for daemons that a scheduler starts: it may fetch images before
END_LIMIT_S = 8.0  # for a host to kill what is left there
DETACH_LIMIT_S = 3.0


own_names: set[str] = set()  # by which hosts reach this process, once it attached to any


class Host(Protocol):
    """Where processes are started."""

    surroundings: dict[str, str]  # what every process there has in its environment
    is_lost: bool  # nothing there can be reached any more

    def spawn(self, name: str, environments: list[dict[str, str]]) -> Any:
        """Start one process per environment, which adds to the host's; a Monarch process mesh."""

    async def end(self, mark: str) -> list[int]:
        """Kill every process there that carries `mark`; the pids that are left, normally none."""

    async def first_ended(self, pids: list[int]) -> int:
        """Wait until one of these processes there has ended; its index."""

    async def until_lost(self) -> str:
        """Wait until the host is lost; why."""

    async def detach(self) -> None:
        """Let the host go; never raises."""


class LocalHost:
    """This machine, over abstract unix sockets; no port is opened."""

    def __init__(self) -> None:
        # The import path is the controller's, so that whatever it could import can be spawned.
        self.surroundings = {
            "PYTHONPATH": import_path(),
            PARENT: str(os.getpid()),
            **network(LOOPBACK),
        }
        self.is_lost = False
        self._mesh = _this_host()

    def spawn(self, name: str, environments: list[dict[str, str]]) -> Any:
        return spawn_processes(self._mesh, name, environments, None)

    async def end(self, mark: str) -> list[int]:
        return await end_marked(mark)

    async def first_ended(self, pids: list[int]) -> int:
        return await first_ended(pids)

    async def until_lost(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def detach(self) -> None:
        """Nothing to let go."""


class HostAgent(Actor):
    """What the controller asks of a host itself."""

    @concurrent_endpoint
    async def inspect(self, probe: str, interface: str) -> Report:
        return await asyncio.to_thread(inspect, probe, interface)

    @concurrent_endpoint
    async def end(self, mark: str) -> list[int]:
        return await end_marked(mark)

    @concurrent_endpoint
    async def first_ended(self, pids: list[int]) -> int:
        return await first_ended(pids)


class RemoteHost:
    """A host that a worker daemon serves."""

    def __init__(self, address: Address, config: ClusterConfig, credentials: Credentials) -> None:
        self.address = address
        self.is_lost = False
        self._credentials = credentials
        self._end: asyncio.Task[str] | None = None
        interface = data_interface(config)
        self.surroundings = {
            "LLAMARL_HOST": str(address),
            "LLAMARL_DATA_INTERFACE": interface,
            **network(interface),
        }
        self._mesh = attach_to_workers(ca="trust_all_connections", workers=[str(address)])
        self._agents = self._mesh.spawn_procs(name=f"host-{uuid.uuid4().hex[:8]}")
        self._agent: Any = self._agents.spawn("host", HostAgent)
        self._executable: str | None = None

    async def inspect(self, probe: str, interface: str) -> Report:
        """The host's report. ValueError if it does not come in time."""
        answer = self._agent.inspect.call_one(probe, interface).as_asyncio()
        try:
            report: Report = await asyncio.wait_for(answer, FIRST_CALL_LIMIT_S)
        except (TimeoutError, SupervisionError, ActorError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else str(error).splitlines()[-1]
            raise ValueError(
                f"cluster.hosts must start processes, got none from {self.address} within "
                f"{FIRST_CALL_LIMIT_S:g} s: {reason}; is its version of Monarch ours?"
            ) from error
        self._executable = report["executable"]
        return report

    def spawn(self, name: str, environments: list[dict[str, str]]) -> Any:
        return spawn_processes(self._mesh, name, environments, self._executable)

    async def end(self, mark: str) -> list[int]:
        answer = self._agent.end.call_one(mark).as_asyncio()
        try:
            left: list[int] = await asyncio.wait_for(answer, END_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - a dead daemon's processes die with it
            log.debug("ending processes of %s: %s", self.address, error)
            return []
        return left

    async def first_ended(self, pids: list[int]) -> int:
        index: int = await self._agent.first_ended.call_one(pids)
        return index

    async def until_lost(self) -> str:
        if self._end is None:
            self._end = asyncio.create_task(hold(self.address, self._credentials))
        reason = await asyncio.shield(self._end)
        self.is_lost = True
        return f"host {self.address} is lost: {reason}"

    async def detach(self) -> None:
        if self._end is not None:
            self._end.cancel()
        if self.is_lost:
            return
        try:
            await asyncio.wait_for(self._mesh.stop().as_asyncio(), DETACH_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - tear-down goes on
            log.debug("detaching from %s: %s", self.address, error)


async def attach(config: ClusterConfig, folder: str) -> list[Host]:
    """The hosts of a run, checked: this machine, or all of cluster.hosts.

    `folder` is one that all must see. ValueError, in one line, for whatever is wrong with one.
    """
    if not config.hosts:
        return [LocalHost()]
    credentials = Credentials(config.ca, config.certificate, config.private_key)
    addresses = [Address.parse(text, "cluster.hosts") for text in config.hosts]
    patience_s = 0.0 if config.scheduler == "none" else START_PATIENCE_S
    own = await asyncio.gather(
        *(asyncio.to_thread(reach, address, credentials, patience_s) for address in addresses)
    )
    check_distinct(addresses)
    # A host may know itself, if the controller is on it, at an address that is only its own.
    index = next((i for i, ip in enumerate(own) if not ip_address(ip).is_loopback), 0)
    name = await asyncio.to_thread(own_name, own[index], addresses[index], credentials)
    _start_client(addresses[0].scheme, name)
    hosts = [RemoteHost(address, config, credentials) for address in addresses]
    probe, text = Path(folder, f".hosts-{uuid.uuid4().hex}"), uuid.uuid4().hex
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.write_text(text)
    interface = data_interface(config)
    try:
        reports = await asyncio.gather(*(host.inspect(str(probe), interface) for host in hosts))
        found = dict(zip(config.hosts, reports, strict=True))
        check_reports(found, (str(probe), text), interface)
    except BaseException:
        await asyncio.gather(*(host.detach() for host in hosts))
        raise
    finally:
        probe.unlink()
    return list(hosts)


def data_interface(config: ClusterConfig) -> str:
    """The interface that ranks of several hosts talk over."""
    return config.data_interface or LOOPBACK


def network(interface: str) -> dict[str, str]:
    """Gloo and NCCL else take the interface that the host name resolves to."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def spawn_processes(
    mesh: HostMesh, name: str, environments: list[dict[str, str]], executable: str | None
) -> Any:
    """One process per environment on the one host of `mesh`; `executable` None is this Python."""
    command = default_bootstrap_cmd()
    command.args = ["-m", "llamarl.cluster.bootstrap"]
    if executable is not None:
        command.program = executable
    return mesh.spawn_procs(
        {DIMENSION: len(environments)},
        name=name,
        bootstrap_command=lambda point: command.with_env(environments[point[DIMENSION]]),
    )


@functools.cache
def _this_host() -> HostMesh:
    """This machine; the first use starts Monarch's client, which announces itself on stderr."""
    monarch.actor.unhandled_fault_hook = _log_fault
    with quiet_stderr():
        return this_host()


def _start_client(scheme: str, own_name: str) -> None:
    """Start Monarch's client, which the hosts reach at `own_name`."""
    monarch.actor.unhandled_fault_hook = _log_fault
    host = f"[{own_name}]" if ":" in own_name else own_name
    try:
        enable_transport(f"{scheme}://{host}:0")
    except RuntimeError as error:
        raise ValueError(
            "cluster.hosts must be those of the first run of this process: it talks to others"
        ) from error
    own_names.add(own_name)
    with quiet_stderr():
        monarch.actor.context()


def _log_fault(failure: Any) -> None:
    """Keep the controller alive (Monarch's own hook exits): the watchers report losses."""
    log.debug("monarch: %s", failure)
