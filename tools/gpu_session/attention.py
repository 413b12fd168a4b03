"""Attention: the kernels of decoding against float64, and the forms that training may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import pairwise

import torch
from gpu_bench.setting import Setting
from sections import Facts
from torch import Tensor
from torch.nn import functional

from gpu_session.timing import graphed_s, median_s, peak_bytes
from llamarl.core.device.devices import send, use_device
from llamarl.model.attention import attend_causally, make_packing, packed_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 64  # of Llama 3.2 1B
GROUP = NUM_HEADS // NUM_KV_HEADS
DECODED = (  # rows, their mean length, positions of the cache
    (1, 256, 1024),
    (16, 256, 1024),
    (64, 256, 1024),
    (256, 256, 384),
    (256, 256, 1024),
    (256, 900, 1024),
    (16, 8000, 8192),
)
SPREAD = (  # tokens of packed rollouts, three blocks of attention
    *(600, 633, 512, 400, 350, 420, 380, 590, 610, 290, 311, 200, 180, 160, 250, 300, 310, 222),
    *(199, 240, 260, 280, 170, 158, 148, 100, 80),
)


def attend(setting: Setting) -> Iterator[Facts]:
    """The error of decode attention's kernels in bfloat16, and how fast they read the cache."""
    from llamarl.generator.engine.decode_attention import attend as decoded

    for num_rows, mean, most in DECODED:
        keys, values = (_normal(setting, num_rows, NUM_KV_HEADS, most, HEAD_DIM) for _ in range(2))
        queries = _normal(setting, num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)[:, :NUM_HEADS]
        lengths = torch.randint(mean // 2, mean * 3 // 2, (num_rows,), device=setting.device)
        lengths = lengths.clamp_(max=most)
        last, length = num_rows - 1, int(lengths[-1])
        got = decoded(queries, keys, values, lengths)[last].double().flatten()
        want = functional.scaled_dot_product_attention(
            queries[last].double().unflatten(0, (NUM_KV_HEADS, GROUP)),
            keys[last, :, :length].double(),
            values[last, :, :length].double(),
        ).flatten()
        took_s = graphed_s(setting, lambda: decoded(queries, keys, values, lengths))  # noqa: B023
        num_bytes = int(lengths.sum()) * NUM_KV_HEADS * HEAD_DIM * 4
        yield Facts(
            {
                "relative_error": float((got - want).norm() / want.norm()),
                "attend_us": took_s * 1e6,
                "read_gb_per_s": num_bytes / took_s / 1e9,
            },
            f"{num_rows} rows, {mean} of {most}",
        )


def sdpa(setting: Setting) -> Iterator[Facts]:
    """Time and memory of the forms of torch's attention: of turns over a cache, of float32, and of
    packed rollouts."""
    use_device(torch.device(setting.device, 0) if setting.is_cuda else torch.device("cpu"))
    yield from _continued(setting)
    yield from _float32(setting)
    yield from _packed(setting)


def _continued(setting: Setting) -> Iterator[Facts]:
    """A masked turn: query heads that share key heads, against such heads as query positions."""
    num_rows, width, most = (8, 256, 4096) if setting.is_cuda else (2, 3, 16)
    queries = _normal(setting, num_rows, NUM_HEADS, width, HEAD_DIM)
    keys, values = (_normal(setting, num_rows, NUM_KV_HEADS, most, HEAD_DIM) for _ in range(2))
    mask = torch.ones(width, most, dtype=torch.bool, device=setting.device).tril(most - width)
    positions = queries.view(num_rows, NUM_KV_HEADS, GROUP * width, HEAD_DIM)

    def as_heads() -> Tensor:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=True
        )

    def as_positions() -> Tensor:
        return functional.scaled_dot_product_attention(
            positions, keys, values, attn_mask=mask.repeat(GROUP, 1)
        ).view_as(queries)

    yield from _compared(
        setting, {"masked, shared heads": as_heads, "masked, heads as positions": as_positions}
    )


def _float32(setting: Setting) -> Iterator[Facts]:
    """Causal, with query heads that share key heads: torch's own way, and the trainer's."""
    width = 1024 if setting.is_cuda else 5
    q, k, v = (
        torch.randn(8, num_heads, width, HEAD_DIM, device=setting.device)
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )

    def shared() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    forms = {"float32, shared heads": shared, "float32, trainer": lambda: attend_causally(q, k, v)}
    yield from _compared(setting, forms)


def _packed(setting: Setting) -> Iterator[Facts]:
    """Rollouts of different lengths, forward and backward: padded blocks, against torch's own
    kernels for such lengths."""
    lengths = SPREAD if setting.is_cuda else (5, 9, 30)
    packing = send(make_packing(lengths), torch.device(setting.device))
    q, k, v = (
        _normal(setting, sum(lengths), num_heads, HEAD_DIM).requires_grad_()
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    grad = _normal(setting, sum(lengths), NUM_HEADS, HEAD_DIM)

    def gradients(out: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(out, (q, k, v), grad)])

    forms: dict[str, Callable[[], Tensor]] = {
        "packed, blocks": lambda: gradients(packed_attention(q, k, v, packing))
    }
    if setting.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.tensor([0, *lengths]).cumsum(0).to(setting.device, torch.int32)

        longest, options = max(lengths), {"window_size": (-1, 0)}  # causal
        if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 always does
            options["enable_gqa"] = True
        forms["packed, varlen"] = lambda: gradients(
            varlen_attn(q, k, v, ends, ends, longest, longest, **options)
        )
    yield from _compared(setting, forms)


def _compared(setting: Setting, forms: dict[str, Callable[[], Tensor]]) -> Iterator[Facts]:
    """Time and memory of each form, and how far the next one is from it."""
    for name, form in forms.items():
        took_s, num_bytes = median_s(setting, form), peak_bytes(setting, form)
        yield Facts({"form_us": took_s * 1e6, "peak_bytes": num_bytes}, name)
    for one, other in pairwise(forms):
        difference = float((forms[one]() - forms[other]()).abs().max())
        yield Facts({"largest_difference": difference}, f"{one}, and {other}")


def _normal(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
