"""Offloading a GPU's memory; the CPU's is in tests/publish/test_offload.py."""

import pytest
import torch

from llamarl.publish.offload import CHUNK_BYTES, MemoryMover

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_device_memory_leaves_for_others_and_comes_back_bit_for_bit(kind, tmp_path):
    offload = MemoryMover(kind, str(tmp_path), "trainer-0")
    large = torch.randn(CHUNK_BYTES // 4 + 12345, device="cuda")  # more than one bounce
    small = torch.arange(10, device="cuda", dtype=torch.bfloat16)
    on_cpu = torch.randn(1000)
    tensors = [large, large[7:].view(-1)[::2], small]  # one storage twice
    if kind == "file":
        tensors.append(on_cpu)
    expected = [tensor.cpu().clone() for tensor in tensors]
    own_bytes = sum(t.untyped_storage().nbytes() for t in (large, small))
    for _ in range(2):
        torch.cuda.synchronize()
        before_bytes = torch.cuda.mem_get_info()[0]
        moved_bytes = offload.offload("state", tensors)
        assert moved_bytes == own_bytes + (4000 if kind == "file" else 0)
        freed_bytes = torch.cuda.mem_get_info()[0] - before_bytes
        assert freed_bytes >= 0.8 * own_bytes
        other = torch.full((CHUNK_BYTES // 4,), 7.0, device="cuda")  # the other side works there
        offload.prefetch("state")
        del other
        torch.cuda.empty_cache()
        assert offload.onload("state") == moved_bytes
        for tensor, want in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), want)
        tensors[0].add_(1)
        expected = [tensor.cpu().clone() for tensor in tensors]
    offload.close()


@pytest.mark.parametrize("kind", ["pinned", "file"])
def test_what_need_not_come_back_comes_back_as_zeros(kind, tmp_path):
    offload = MemoryMover(kind, str(tmp_path), "generator-0")
    cache = torch.randn(1 << 20, device="cuda")
    assert offload.offload("kv", [cache], keep=False) == 4 << 20
    assert cache.untyped_storage().nbytes() == 0
    offload.onload("kv")
    assert not cache.any()
    offload.close()
