"""Which attention the devices are asked for: never one that torch has no fused kernel for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from llamarl.core.device.names import CPU, GPU
from llamarl.model.attention import attend_causally
from llamarl.trainer.activations import in_pieces_of as computing_as


class Asked(TorchFunctionMode):
    """Records the heads of queries and keys, and the options, of each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, _ = args
            options = kwargs["attn_mask"] is not None, kwargs["enable_gqa"]
            self.calls.append((q.shape[1], k.shape[1], *options))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "is_masked", "has_groups"),
    [
        (GPU, torch.bfloat16, False, True),  # flash alone lets heads share keys,
        (GPU, torch.bfloat16, True, False),  # and takes no mask,
        (GPU, torch.float32, False, False),  # nor float32
        (GPU, torch.float32, True, False),
        (CPU, torch.float32, False, True),
        (CPU, torch.bfloat16, True, True),
    ],
)
def test_key_heads_are_repeated_where_no_fused_kernel_lets_queries_share_them(
    device: str, dtype: torch.dtype, is_masked: bool, has_groups: bool
) -> None:
    q, k = (torch.empty(2, heads, 5, 16, dtype=dtype, device="meta") for heads in (8, 2))
    mask = torch.ones(5, 5, dtype=torch.bool, device="meta").tril() if is_masked else None
    with computing_as(device), Asked() as asked:
        assert attend_causally(q, k, k, mask).shape == q.shape
    assert asked.calls == [(8, 2 if has_groups else 8, is_masked, has_groups)]


@pytest.mark.parametrize("is_masked", [False, True])
def test_repeated_key_heads_change_no_number(is_masked: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 16, generator=drawn) for heads in (8, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3) if is_masked else None
    repeated = (each.repeat_interleave(4, dim=1) for each in (k, v))
    torch.testing.assert_close(
        attend_causally(q, k, v, mask), attend_causally(q, *repeated, mask), rtol=1e-6, atol=1e-6
    )
