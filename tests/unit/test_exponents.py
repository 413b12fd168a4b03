"""Weights in the form in which they cross a slow link."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.publish.transports.messages import expand, longest, squeeze


def arrived(memory: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, int]:
    """What the other end has, and the bytes that were sent."""
    sent = squeeze(memory, itemsize)
    assert len(sent) <= longest(len(memory))
    there = torch.randint(256, (longest(len(memory)),), dtype=torch.uint8)
    there[: len(sent)] = sent  # into memory that was used before
    found = torch.zeros_like(memory)
    expand(there, found, itemsize)
    return found, len(sent)


@given(st.binary(min_size=1, max_size=64), st.sampled_from([1, 2, 4]), st.integers(1, 300))
def test_any_bytes_arrive_as_they_were(data: bytes, itemsize: int, times: int) -> None:
    memory = torch.frombuffer(bytearray(data * itemsize * times), dtype=torch.uint8)
    found, _ = arrived(memory, itemsize)
    assert torch.equal(found, memory)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.86), (torch.bfloat16, 0.72)])
def test_weights_become_shorter_and_noise_hardly_longer(dtype: torch.dtype, share: float) -> None:
    weights = (torch.randn(100_000, generator=torch.manual_seed(0)) / 20).to(dtype)
    for memory, most in (
        (weights.view(torch.uint8), share),
        (torch.randint(256, (400_000,), dtype=torch.uint8), 1.002),
    ):
        found, num_sent = arrived(memory, dtype.itemsize)
        assert torch.equal(found, memory)
        assert num_sent <= most * len(memory)
