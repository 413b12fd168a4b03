"""NCCL groups of routes on a CUDA device: who waits for whom, and for how long."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from llamarl.core.device.devices import platform_of
torch.cuda.set_device(0)
store = dist.FileStore(sys.argv[1], int(sys.argv[2]))
limit = timedelta(seconds=4)
platform = platform_of("cuda")
group = platform.make_group(store, 0, int(sys.argv[2]), limit, "lo", fails_alone=True)
ones = torch.ones(4, device="cuda")
group.allreduce([ones]).wait()
print(ones.sum().item())
group.abort()
"""


def form(store: Path, num_ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FORM, str(store), str(num_ranks)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


def test_a_group_of_one_rank_connects_computes_and_ends(tmp_path: Path) -> None:
    done = form(tmp_path / "store", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4.0"]


def test_a_rank_whose_peer_never_connects_fails_in_time(tmp_path: Path) -> None:
    start_s = time.monotonic()
    done = form(tmp_path / "store", 2)
    assert done.returncode == 1, done.stderr
    assert "Error" in done.stderr.splitlines()[-1]
    assert time.monotonic() - start_s < 45  # the limit of NCCL itself is half an hour
