"""A weight buffer that cannot be made, or whose memory runs out, leaves nothing behind."""

import os

import pytest
import torch

from llamarl.core import memory
from tests.contract.test_shared_memory import layout, make_weight_buffer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_elements": 2**58}, r"two copies .* must fit into memory: needs \d+ bytes, got \d+"),
        (
            {"num_elements": 31},
            r"w must lie within the weight buffer's 31 elements, got elements 8 to 31",
        ),
        (
            {"dtype": torch.bfloat16},
            "dtype of w must be the weight buffer's torch.bfloat16, got float32",
        ),
        (
            {"parameters": {"w": layout(0, 6, "other")}},
            "buffer of w must be 'weights', got 'other'",
        ),
    ],
)
def test_a_weight_buffer_that_cannot_be_is_refused_and_nothing_is_left_of_it(
    changes, message
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=message):
        make_weight_buffer(**changes)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_runs_out_half_way_is_given_back(monkeypatch) -> None:
    real, calls = os.posix_fallocate, []

    def runs_out(fd, offset, num_bytes):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(fd, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", runs_out)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="must have 160 bytes, got: No space left on device"):
        make_weight_buffer()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_container_limit_counts(tmp_path, monkeypatch) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 5\ninactive_file 20\nactive_file 30\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes() == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1000
