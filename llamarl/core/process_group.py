"""The rendezvous and network interface of the ranks of a process group.

Settings of a host come in environment variables, which `cluster/` sets for each process; without
them the run has a single host, as with `cluster=inline`. Sockets listen only on the address of the
data interface; on a single host that is loopback, and the rendezvous is a file."""

import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llamarl.core.device.devices import platform_of
from llamarl.core.device.names import INTERFACE_VARIABLES

INTERFACE = "LLAMARL_DATA_INTERFACE"  # set where a run has several hosts
JOIN = timedelta(minutes=10)  # between the first rank and the last one
POLL_S = 0.05
GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
BACKLOG = 4096  # thousands of ranks connect at once


def data_interface() -> str:
    """Return the network interface of tensor traffic: loopback on a single host."""
    return os.environ.get(INTERFACE) or ("lo0" if sys.platform == "darwin" else "lo")


def meet(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """Return the store of a group that is about to form. `rendezvous` is a path that no earlier
    group has used.

    On a single host the store is that file. Ranks of several hosts, possibly thousands, would wait
    for each other's locks on a network file system: there rank 0 serves the store from memory, and
    the file holds its address on the data interface. RuntimeError if rank 0 does not write it
    within `timeout`, which is also the limit of every wait in the store.
    """
    if INTERFACE not in os.environ:
        store: dist.Store = dist.FileStore(rendezvous, num_ranks)
        store.set_timeout(timeout)
        return store
    is_master = rank == 0
    descriptor = None
    if is_master:
        server = socket.create_server((interface_address(data_interface()), 0), backlog=BACKLOG)
        host, port = server.getsockname()
        descriptor = server.detach()  # the store closes it
    else:
        host, port = _read_address(rendezvous, timeout.total_seconds())
    store = dist.TCPStore(
        host,
        port,
        num_ranks,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    if is_master:
        unfinished = Path(f"{rendezvous}.tmp")
        unfinished.write_text(f"{host} {port}")
        unfinished.rename(rendezvous)
    return store


def form_group(
    device: torch.device,
    store: dist.Store,
    rank: int,
    num_ranks: int,
    timeout: timedelta,
    fails_alone: bool = False,
) -> Any:
    """Form a process group beside the default one; see `Platform.make_group`."""
    platform, interface = platform_of(device), data_interface()
    return platform.make_group(store, rank, num_ranks, timeout, interface, fails_alone)


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host; ValueError if there is none."""
    import fcntl  # Unix only

    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"cluster.data_interface must have an IPv4 address on {socket.gethostname()}, got "
                f"{interface!r} ({error.strerror}); its interfaces: {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _read_address(rendezvous: str, timeout_s: float) -> tuple[str, int]:
    """Wait for the address that rank 0 writes into the file, and return it."""
    path = Path(rendezvous)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        os.scandir(path.parent).close()  # refreshes what NFS caches about missing files
        if path.exists():
            host, port = path.read_text().split()
            return host, int(port)
        time.sleep(POLL_S)
    raise RuntimeError(f"rank 0 must write {rendezvous} within {timeout_s:g} s, got no file")


def join(rendezvous: str, rank: int, num_ranks: int, device: torch.device) -> None:
    """Form the default process group, whose backend is that of the device's platform.

    `rendezvous` is as in `meet`. Call it from the thread that will run the collectives.
    RuntimeError if this process already is in a group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already in a process group: one trainer per process")
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, data_interface()))
    platform = platform_of(device)
    platform.use(device)
    store = meet(rendezvous, rank, num_ranks, JOIN)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=num_ranks)


def leave() -> None:
    """Leave the group that `join` formed."""
    dist.destroy_process_group()


def largest(count: int) -> int:
    """Return the largest count of all ranks of the default group, or `count` without a group."""
    if not dist.is_initialized():
        return count
    most = torch.tensor(count)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
