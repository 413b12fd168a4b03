"""The output head against plain log-softmax, and which attention a device is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from llamarl.core.device.devices import PLATFORMS
from llamarl.core.device.names import CPU, GPU
from llamarl.core.device.platform import Platform
from llamarl.model import head
from llamarl.model.attention import attend_causally
from llamarl.trainer.activations import in_pieces_of as computing_as
from tests.allocation import LargestAllocation
from tests.tiny_checkpoints import relative_error


def test_the_head_equals_plain_log_softmax_in_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(31, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 31, (23,), generator=generator)
    up = torch.randn(2, 23, generator=generator)
    exact = [x.clone().requires_grad_() for x in (hidden, weight)]
    log_p = (exact[0] @ exact[1].T / 0.6).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (up[0].double() @ logprobs + up[1].double() @ entropy).backward()
    for chunk_elements in (1, 31 * 5, 2**24):
        monkeypatch.setattr(PLATFORMS["cpu"], "num_logits", chunk_elements)
        got = [x.float().requires_grad_() for x in (hidden, weight)]
        stats = head.token_stats(got[0], got[1], targets, 0.6)
        (up[0] @ stats.logprobs + up[1] @ stats.entropy).backward()
        assert relative_error(stats.logprobs, logprobs.float()) <= 1e-6
        assert relative_error(stats.entropy, entropy.float()) <= 1e-6
        for mine, theirs in zip(got, exact, strict=True):
            assert relative_error(mine.grad.double(), theirs.grad) <= 1e-6


@pytest.mark.parametrize("chosen", [[2, 3, 4, 9, 20, 22], [0], []])
def test_chosen_tokens_have_the_stats_and_gradients_that_they_have_among_all(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PLATFORMS["cpu"], "num_logits", 31 * 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 7, generator=generator)
    weight = torch.randn(31, 7, generator=generator)
    targets = torch.randint(0, 31, (23,), generator=generator)
    some = torch.tensor(chosen, dtype=torch.int64)
    up = torch.randn(2, len(some), generator=generator)
    found = []
    for given in (None, some):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        stats = head.token_stats(*leaves, targets, 0.6, chosen=given)
        logprobs, entropy = (x if given is not None else x[some] for x in stats)
        (up[0] @ logprobs + up[1] @ entropy).backward()
        found.append((logprobs, entropy, *(leaf.grad for leaf in leaves)))
    for among_all, alone in zip(*found, strict=True):
        assert among_all.shape == alone.shape
        assert torch.allclose(among_all, alone, atol=1e-5)


def test_the_head_never_holds_all_logits() -> None:
    num_tokens, vocab_size = 600, 50_000
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    weight = torch.randn(vocab_size, 8, requires_grad=True)
    with LargestAllocation() as largest:
        stats = head.token_stats(hidden, weight, torch.zeros(num_tokens, dtype=torch.int64), 1.0)
        stats.logprobs.sum().backward()
    assert largest.num_bytes <= 4 * PLATFORMS["cpu"].num_logits < 4 * num_tokens * vocab_size


@pytest.mark.parametrize(
    ("num_elements", "vocab_size", "sizes"),
    [(2**27, 128_256, [1024, 1024, 252]), (2**24, 128_256, [128] * 17 + [124]), (30, 8, [3] * 766)],
)
def test_chunks_are_whole_tiles_and_hold_every_token(
    num_elements: int, vocab_size: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = Platform()
    platform.num_logits = num_elements
    monkeypatch.setitem(PLATFORMS, "meta", platform)
    hidden, weight = (torch.empty(n, 4, device="meta") for n in (sum(sizes), vocab_size))
    assert [len(hidden[part]) for part in head._chunks(hidden, weight)] == sizes


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


def test_among_kept_tokens_the_head_is_a_log_softmax_of_these_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(31, 7, generator=generator, dtype=torch.float64)
    kept = torch.rand(23, 31, generator=generator).argsort(1)[:, :5]
    targets = kept[:, 2].clone()
    kept[::3, 3:] = -1  # of some there are fewer
    kept[4] = torch.tensor([int(targets[4]), *[-1] * 4])
    up = torch.randn(2, 23, generator=generator)
    exact = [x.clone().requires_grad_() for x in (hidden, weight)]
    is_kept = torch.zeros(23, 32, dtype=torch.bool).scatter_(1, kept % 32, True)[:, :31]
    logits = (exact[0] @ exact[1].T / 0.6).masked_fill(~is_kept, -torch.inf)
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(~is_kept, 0)).sum(-1)
    (up[0].double() @ logprobs + up[1].double() @ entropy).backward()
    assert (logprobs[4], entropy[4]) == (0, 0)
    chosen = torch.arange(23)
    for chunk_elements, some in ((1, None), (31 * 5, chosen), (2**24, None)):
        monkeypatch.setattr(PLATFORMS["cpu"], "num_logits", chunk_elements)
        got = [x.float().requires_grad_() for x in (hidden, weight)]
        stats = head.token_stats(got[0], got[1], targets, 0.6, chosen=some, kept=kept)
        (up[0] @ stats.logprobs + up[1] @ stats.entropy).backward()
        assert relative_error(stats.logprobs, logprobs.float()) <= 1e-6
        assert relative_error(stats.entropy, entropy.float()) <= 1e-6
        for mine, theirs in zip(got, exact, strict=True):
            assert relative_error(mine.grad.double(), theirs.grad) <= 1e-6


def test_the_gradient_among_kept_tokens_is_that_of_the_expected_reward() -> None:
    """By enumeration: the mean, over all tokens that could be drawn, of what each of them gives."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 6, generator=generator)
    weight = torch.randn(9, 6, generator=generator)
    kept = torch.tensor([[7, 2, 4, -1]])
    rewards = torch.randn(9, generator=generator)
    exact = [x.clone().requires_grad_() for x in (hidden, weight)]
    among = (exact[0] @ exact[1].T)[0, kept[0, :3]].softmax(0)
    (among @ rewards[kept[0, :3]]).backward()
    found = [x.clone().requires_grad_() for x in (hidden, weight)]
    for token, probability in zip(kept[0, :3], among.detach(), strict=True):
        logprob = head.token_stats(*found, token[None], 1.0, kept=kept).logprobs[0]
        assert logprob.detach().exp() == pytest.approx(probability.item(), rel=1e-5)
        (probability * rewards[token] * logprob).backward()
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
