"""Where ranks of several hosts meet, and which GPU a process takes."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llamarl.cluster.os_process import environment
from llamarl.core.device.cuda import (
    CLEAN_UP_ONLY,
    CONNECTING_S,
    ERROR_HANDLING,
    formed_to_fail_alone,
    why_no_gpu,
)
from llamarl.core.device.devices import check_gpu
from llamarl.core.process_group import (
    INTERFACE,
    form_group,
    interface_address,
    join,
    leave,
    meet,
)
from tests.cluster.test_processes import is_loopback, listening_addresses

pytestmark = pytest.mark.full

GB = 10**9


async def meet_and_sum(rank, num_ranks, rendezvous, interface):
    """The sum of all ranks, and where this process listens meanwhile."""
    if interface:
        os.environ[INTERFACE] = interface
    try:
        join(rendezvous, rank, num_ranks, torch.device("cpu"))
        total = torch.tensor(float(rank))
        torch.distributed.all_reduce(total)
        found = [address for _, address, _ in listening_addresses([os.getpid()])]
        torch.distributed.barrier()
        leave()
    finally:
        os.environ.pop(INTERFACE, None)
    return total.item(), found


@pytest.mark.parametrize("interface", ["lo", ""], ids=["several hosts", "one host"])
def test_ranks_meet_at_an_address_of_the_data_interface_or_of_loopback(
    ranks, tmp_path, interface
) -> None:
    rendezvous = tmp_path / "meeting"
    (first, listening), (second, _) = ranks(2).run(meet_and_sum, str(rendezvous), interface)
    assert first == second == 1.0
    if interface:
        assert re.fullmatch(r"127\.0\.0\.1 \d+", rendezvous.read_text())
    assert listening
    assert all(map(is_loopback, listening))


def test_a_first_rank_that_does_not_come_is_missed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    with pytest.raises(RuntimeError, match=r"rank 0 must write .*/nowhere within 0\.2 s"):
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
        ("16GB", "Quadro RTX 5000", 17.2 * GB, True),
        ("16GB", "NVIDIA L40S", 48.3 * GB, True),
        ("24GB", "Quadro RTX 5000", 17.2 * GB, False),
    ],
)
def test_a_gpu_of_another_kind_than_planned_is_refused(wanted, name, num_bytes, is_right) -> None:
    if is_right:
        check_gpu(wanted, name, int(num_bytes))
        return
    with pytest.raises(ValueError, match=rf"cluster.gpu must .*, got {wanted}, but .* has {name}"):
        check_gpu(wanted, name, int(num_bytes))


OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@x)"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Mar  7 12:44 2024\nGCC: 12"


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        ("13.0", "", "on a machine without a GPU"),
        (None, OPEN_DRIVER.format("580.65.06"), "with torch 2.13.0, which is built without CUDA"),
        (
            "13.0",
            CLOSED_DRIVER.format("550.54.15"),
            "with NVIDIA driver 550.54.15 (torch's CUDA 13.0 needs 580 or newer)",
        ),
        ("12.8", OPEN_DRIVER.format("515.1.2"), "CUDA 12.8 needs 525 or newer"),
        (
            "13.0",
            OPEN_DRIVER.format("580.65"),
            "its CUDA is 13.0, NVIDIA driver 580.65, CUDA_VISIBLE_DEVICES empty",
        ),
    ],
)
def test_a_missing_gpu_and_a_driver_or_torch_that_cannot_use_it_give_different_errors(
    cuda, driver, words, monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reason = why_no_gpu("2.13.0", cuda, driver)
    assert words in reason
    assert "\n" not in reason


@pytest.mark.parametrize("before", [None, "1"])
def test_only_groups_that_lead_to_a_replica_outlive_an_error_of_nccl(before, monkeypatch) -> None:
    """This machine has no NCCL: what is tested is the environment that it would be formed in."""
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(ERROR_HANDLING, before)
    with formed_to_fail_alone():
        assert os.environ[ERROR_HANDLING] == CLEAN_UP_ONLY
    assert os.environ.get(ERROR_HANDLING) == before


def test_a_group_of_nccl_that_fails_alone_is_connected_at_once_and_waits_as_long_as_it_was_told(
    monkeypatch,
) -> None:
    formed, connected, waited = [], [], []

    class Recorded:
        """Stands in for the NCCL group of torch, and records what it would read."""

        class Options:
            def __init__(self) -> None:
                self._timeout, self.config = timedelta(), SimpleNamespace(blocking=1)

        def __init__(self, store, rank, size, options) -> None:
            formed.append((os.environ.get(ERROR_HANDLING), options))

        def eager_connect_single_device(self, device) -> None:
            assert ERROR_HANDLING not in os.environ  # other groups may form while this one waits
            connected.append(device)

        def _comm_ptr(self) -> int:
            waited.append(os.environ[CONNECTING_S])
            return 1

    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.delenv(CONNECTING_S, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Recorded, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    device, limit = torch.device("cuda", 3), timedelta(seconds=14)
    form_group(device, torch.distributed.HashStore(), 0, 2, limit, fails_alone=True)
    ((handling, options),) = formed
    assert handling == CLEAN_UP_ONLY
    assert options._timeout == limit
    assert options.config.blocking == 0  # else a peer that died would be waited for for ever
    assert connected == [device]
    assert waited == ["14"]
    assert ERROR_HANDLING not in os.environ


def test_nccl_settings_are_spelt_as_in_the_header_of_torch() -> None:
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    header = (folder / "ProcessGroupNCCL.hpp").read_text()
    assert f"CleanUpOnly = {CLEAN_UP_ONLY}," in header
    (monitor,) = [name for name in environment("mark", 1) if "NCCL" in name]
    assert environment("mark", 1)[monitor] == "0"
    for name in (ERROR_HANDLING, monitor):
        assert f'"{name}"' in header
    # Once connected, such a group sends and receives over the communicator of all its ranks.
    assert "void eagerConnectSingleDevice(at::Device device) override;" in header
    assert "bool eagerInit_{false};" in header
    assert hasattr(torch._C._distributed_c10d.Backend, "eager_connect_single_device")
