"""Rendezvous, network interface and device of the ranks of a process group.

Owns: the rendezvous, how groups are formed, the default one of an executor's ranks included, the
choice of interface and device, and what NCCL does after an error. Does not own: what is sent.
Invariant: sockets listen only on the address of the data interface; on a single host that is
loopback, and the rendezvous is a file.

Settings of a host come in environment variables, which `cluster/` sets for each process; without
them the run has a single host, as with `cluster=inline`.
"""

import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llamarl.models.gpu_kind import is_kind

INTERFACE = "LLAMARL_DATA_INTERFACE"  # set where a run has several hosts
GPU = "LLAMARL_GPU"  # the kind of GPU that the recipe is for, such as H100-80GB
GPU_INDEX = "LOCAL_RANK"  # index of this process's GPU on its host; vLLM reads it too
JOIN = timedelta(minutes=10)  # between the first rank and the last one
POLL_S = 0.05
GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
BACKLOG = 4096  # thousands of ranks connect at once
DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {"12": "525", "13": "580"}  # by CUDA's major version
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is formed
CLEAN_UP_ONLY = "2"

_forming = threading.Lock()  # all threads share the environment


def compute_device(kind: str, field: str) -> torch.device:
    """This process's device of `kind`, cpu or cuda; `field` is the config's name for the choice.

    ValueError if the host has no such GPU, no driver that can run it, or another GPU than the
    recipe was planned for.
    """
    if kind == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        driver = DRIVER_FILE.read_text() if DRIVER_FILE.exists() else ""
        reason = why_no_gpu(torch.__version__, torch.version.cuda, driver)
        raise ValueError(f"{field} must be cpu {reason}, got {kind!r}")
    index = int(os.environ.get(GPU_INDEX, "0"))
    if index >= num_gpus:
        raise ValueError(
            f"cluster.num_gpus_per_host must be at most the {num_gpus} GPUs of "
            f"{socket.gethostname()}, got a rank for number {index}"
        )
    properties = torch.cuda.get_device_properties(index)
    check_gpu(os.environ.get(GPU, ""), properties.name, properties.total_memory)
    return torch.device("cuda", index)


def why_no_gpu(torch_version: str, cuda: str | None, driver_text: str) -> str:
    """Why torch, built for this version of `cuda`, finds no GPU: the words after "must be cpu".

    `driver_text` is the content of DRIVER_FILE, "" without a driver.
    """
    found = re.search(r"\d+\.\d+(\.\d+)?", driver_text)
    if found is None:
        return "on a machine without a GPU"
    if cuda is None:
        return f"with torch {torch_version}, which is built without CUDA"
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0], "")
    if oldest and int(found[0].partition(".")[0]) < int(oldest):
        return f"with NVIDIA driver {found[0]} (torch's CUDA {cuda} needs {oldest} or newer)"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return (
        f"where torch finds no GPU (its CUDA is {cuda}, NVIDIA driver {found[0]}, "
        f"CUDA_VISIBLE_DEVICES {shown or 'empty'})"
    )


def use_device(device: torch.device) -> None:
    """Make `device` this thread's device, and keep attention in this process from using cuDNN's
    kernels: they build a plan for each new shape, which takes about half a second, and packed
    rollouts have a new shape in every micro-batch."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for libraries that ignore the device of tensors


@contextmanager
def formed_to_fail_alone() -> Iterator[None]:
    """NCCL groups formed in this block only clean up after an error, such as a rank that died.

    By default torch ends the process. That is right for the ranks of one model, whose numbers would
    be garbage, and wrong for a trainer that sends weights to a replica that is gone.
    """
    with _forming:
        before = os.environ.get(ERROR_HANDLING)
        os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[ERROR_HANDLING]
            else:
                os.environ[ERROR_HANDLING] = before


def check_gpu(wanted: str, name: str, memory_bytes: int) -> None:
    """ValueError unless a GPU called `name` is of the `wanted` kind, such as H100-80GB."""
    if not is_kind(wanted, name, memory_bytes):
        raise ValueError(
            f"cluster.gpu must be auto, or the kind of GPU of every host, got {wanted}, but "
            f"{socket.gethostname()} has {name} with {memory_bytes / 1e9:.1f} GB"
        )


def data_interface() -> str:
    """The network interface of tensor traffic, for gloo and NCCL: loopback on a single host."""
    return os.environ.get(INTERFACE) or ("lo0" if sys.platform == "darwin" else "lo")


def meet(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """The store of a group that is about to form. `rendezvous` is a path no earlier group has used.

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
    device: torch.device, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta
) -> Any:
    """A process group beside the default one, over the data interface: NCCL on GPUs, gloo on CPUs.

    `timeout` limits each collective or message.
    """
    if device.type == "cuda":
        os.environ["NCCL_SOCKET_IFNAME"] = data_interface()
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, num_ranks, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(interface=data_interface())]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, num_ranks, gloo)


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface of this host; ValueError if there is none."""
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
    """The address that rank 0 writes into the file; waits for it."""
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
    """Form the default process group (gloo, NCCL on CUDA).

    `rendezvous` is as in `meet`. Call it from the thread that will run the collectives.
    RuntimeError if this process already is in a group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already in a process group: one trainer per process")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = data_interface()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = meet(rendezvous, rank, num_ranks, JOIN)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def leave() -> None:
    """Leave the group that `join` formed."""
    dist.destroy_process_group()
