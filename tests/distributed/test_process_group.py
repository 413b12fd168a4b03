"""Where ranks of several hosts meet, and which GPU a process takes."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
import torch

from llamarl.models.process_group import (
    INTERFACE,
    check_gpu,
    interface_address,
    join,
    leave,
    meet,
)
from tests.distributed.test_processes import is_loopback, listening_addresses

GB = 10**9


async def meet_and_sum(rank, num_ranks, rendezvous):
    """Over the data interface: the sum of all ranks, and where this process listens meanwhile."""
    os.environ[INTERFACE] = "lo"
    try:
        join(rendezvous, rank, num_ranks, torch.device("cpu"))
        total = torch.tensor(float(rank))
        torch.distributed.all_reduce(total)
        found = [address for _, address, _ in listening_addresses([os.getpid()])]
        torch.distributed.barrier()
        leave()
    finally:
        del os.environ[INTERFACE]
    return total.item(), found


def test_ranks_of_several_hosts_meet_at_an_address_of_the_data_interface(ranks, tmp_path) -> None:
    rendezvous = tmp_path / "meeting"
    (first, listening), (second, _) = ranks(2).run(meet_and_sum, str(rendezvous))
    assert first == second == 1.0
    assert re.fullmatch(r"127\.0\.0\.1 \d+", rendezvous.read_text())
    assert listening
    assert all(map(is_loopback, listening))


def test_a_first_rank_that_does_not_come_is_missed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    with pytest.raises(RuntimeError, match=r"rank 0 did not come to .*/nowhere within 0\.2 s"):
        meet(str(tmp_path / "nowhere"), 1, 2, timedelta(seconds=0.2))


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"data_interface must have an IPv4 .*'ib9'.*: .*\blo\b"):
        interface_address("ib9")


@pytest.mark.parametrize(
    ("wanted", "name", "num_bytes", "is_right"),
    [
        ("H100-80GB", "NVIDIA H100 80GB HBM3", 85.0 * GB, True),
        ("H100-80GB", "NVIDIA H100 PCIe", 85.2 * GB, True),
        ("H100-80GB", "NVIDIA A100-SXM4-80GB", 85.0 * GB, False),
        ("H100-80GB", "NVIDIA H100 NVL", 99.9 * GB, False),
        ("H200-141GB", "NVIDIA H200", 150.1 * GB, True),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", 42.4 * GB, True),
        ("", "anything", 1 * GB, True),
    ],
)
def test_a_gpu_of_another_kind_than_planned_is_refused(wanted, name, num_bytes, is_right) -> None:
    if is_right:
        check_gpu(wanted, name, int(num_bytes))
        return
    with pytest.raises(ValueError, match=rf"cluster.gpu must .*, got {wanted}, but .* has {name}"):
        check_gpu(wanted, name, int(num_bytes))
