"""What a format makes of whole matrices, by its formula alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.core.config import EmbeddedConfig, VllmConfig
from llamarl.publish.layout import FP8, LARGEST, VLLM_SMALLEST, Format, format_of
from tests.tiny_checkpoints import LLAMA

WHOLE = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def make_formats() -> dict[str, Format]:
    """All that there are; those that need a GPU are written out."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        int8 = format_of(EmbeddedConfig(quantization="int8", dtype=dtype), LLAMA)
        assert int8 is not None
        found[f"int8 {dtype}"] = int8
        fields = {"key": f"rows-fp8-{dtype}", "dtype": FP8, "largest": LARGEST[FP8]}
        found[f"fp8 {dtype}"] = Format(
            base_dtype=dtype, scale_dtype=dtype, smallest_scale=1e-30, has_head=True, **fields
        )
    config = VllmConfig(quantization="fp8_per_channel", dtype="bfloat16")
    channel = format_of(config, LLAMA)
    assert channel is not None
    assert channel.smallest_scale == VLLM_SMALLEST
    found["vllm channel"] = channel
    found["vllm tensor"] = Format(
        key="fp8-bfloat16",
        dtype=FP8,
        largest=448.0,
        base_dtype="bfloat16",
        scale_dtype="float32",
        smallest_scale=0.0,
        is_per_tensor=True,
        is_inverted=True,
    )
    return found


def quantise_whole(weights: Mapping[str, Tensor], name: str, form: Format) -> tuple[Tensor, Tensor]:
    """(values [out, in], scales [out] or [1]) of one matrix of a model, in float64 where that
    changes nothing and in the format's own steps where it rounds."""
    parts = {name: weights[name]}
    if form.is_per_tensor:
        prefix, _, module = name.removesuffix(".weight").rpartition(".")
        whole = WHOLE.get(module, module)
        parts = {
            each: tensor
            for each, tensor in weights.items()
            if each.startswith(prefix + ".")
            and WHOLE.get(each.split(".")[-2], each.split(".")[-2]) == whole
            and each.endswith(".weight")
        }
    base = getattr(torch, form.base_dtype)
    matrices = {each: tensor.to(base).to(torch.float32) for each, tensor in parts.items()}
    rows = {each: matrix.abs().max(dim=1).values for each, matrix in matrices.items()}
    maxima = rows[name]
    if form.is_per_tensor:
        maxima = torch.stack([each.max() for each in rows.values()]).max()
    scales = torch.div(maxima.reshape(-1), torch.full((1,), form.largest))
    scales = scales.clamp(min=form.smallest_scale).to(getattr(torch, form.scale_dtype))
    by = scales.to(torch.float32)[:, None]
    values = matrices[name] * (1 / by) if form.is_inverted else matrices[name] / by
    values = values.clamp(-form.largest, form.largest)
    if form.dtype == "int8":
        values = values.round()
    return values.to(getattr(torch, form.dtype)), scales
