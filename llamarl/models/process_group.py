"""The process group of one executor's ranks.

Owns: joining and leaving it. Does not own: what is sent. Invariant: the ranks meet in a file and
talk over the loopback interface, so no socket of theirs can be reached from another machine.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def compute_device(kind: str, rank: int) -> torch.device:
    """This rank's device of `kind`, cpu or cuda; ValueError if the machine has none."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"trainer.device must be cpu on a machine without a GPU, got {kind!r}")
    return torch.device("cuda", rank % torch.cuda.device_count())


def join(rendezvous: str, rank: int, num_ranks: int, device: torch.device) -> DeviceMesh:
    """Form the default process group (gloo, NCCL on CUDA); returns its one-dimensional mesh.

    `rendezvous` is a path on this host that no earlier group has used. Call it from the thread
    that will run the collectives. RuntimeError if this process already is in a group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already in a process group: one trainer per process")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(rendezvous, num_ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))


def leave() -> None:
    """Leave the group that `join` formed."""
    dist.destroy_process_group()
