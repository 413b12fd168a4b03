"""vLLM's layers between the weights as loaded and the weights as computed with.

Owns: putting a model into the form that its loader expects, and quantising from the flat memory.
Does not own: what lies where in that memory (`recorder.py`). Invariant: a parameter that computes
keeps its address, so captured graphs stay valid.

vLLM's own reload machinery does the work: it remembers each layer's parameters as they were created
("loading form", without storage) beside those it made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def loading_form(model: nn.Module) -> Iterator[None]:
    """For the length of the block `model` has the parameters that a loader fills, on meta."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            _unwrap_loaders(layer)
        yield
    finally:
        for layer in model.modules():
            _put_back(layer)
        model._do_torchao_reload = model._original_do_torchao_reload


@torch.no_grad()
def process(model: nn.Module, model_config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Compute the model's parameters anew from `tensors`, parameters in loading form by name.

    `tensors` are read, not kept.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    for prefix, layer in model.named_modules():
        _unwrap_loaders(layer)
        names = [name for name in layer._parameters if f"{prefix}.{name}" in tensors]
        if not names:
            if not layerwise.is_deferred_attention_layer(layer):
                _put_back(layer)
            continue
        info = layerwise.get_layerwise_info(layer)
        kernel, _ = info.kernel_tensors
        for name in names:
            tensor = tensors[f"{prefix}.{name}"]
            if layer._parameters[name] is kernel[name]:  # never in loading form: a bias
                kernel[name].copy_(tensor)
            else:
                setattr(layer, name, _like(tensor, layer._parameters[name]))
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()
    layerwise.finalize_layerwise_reload(model, model_config)


def _like(tensor: Tensor, form: Tensor | None) -> Tensor:
    """`tensor` as a parameter of the class and with the attributes of `form`."""
    assert form is not None
    parameter = tensor.detach()
    parameter.__class__ = form.__class__
    parameter.__dict__ = form.__dict__.copy()
    return parameter


def _unwrap_loaders(layer: nn.Module) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    for tensor in layerwise.get_layer_tensors(layer).values():
        loader = layerwise._get_original_loader(tensor)
        if getattr(tensor, "weight_loader", loader) is not loader:
            tensor.weight_loader = loader


def _put_back(layer: nn.Module) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
    info.reset()
