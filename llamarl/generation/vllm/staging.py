"""From the weights as loaded to the weights that vLLM's layers compute with.

Owns: putting a model into the form that its loader expects, and quantising from the flat memory.
Does not own: the layout of that memory (`recorder.py`). Invariant: a parameter that a layer
computes with keeps its address, so captured graphs stay valid.

The work is done by vLLM's own reload code, which keeps each layer's parameters as they were created
("loading form", without storage) beside those that it made of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llamarl.device.devices import platform_of
from llamarl.weights.layout.buckets import ALIGN_BYTES
from llamarl.weights.layout.formats import Format
from llamarl.weights.quantization.rounding import quantize, row_maxima, scales_of

VLLM_SCALE = "_scale"  # behind the name of a quantised parameter of vLLM, the name of its scales


@contextmanager
def loading_form(model: nn.Module) -> Iterator[None]:
    """Inside the block `model` has the parameters that a loader fills, on the meta device."""
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
    """Recompute the model's parameters from `tensors`, its parameters in loading form by name.

    No reference to `tensors` is kept. They may be in host memory: what is quantised is copied to
    the device of its layer, which has the kernels for it, while the layer before is processed; what
    a layer computes with as loaded is only copied into place.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    filled = []
    for prefix, layer in model.named_modules():
        _unwrap_loaders(layer)
        names = [name for name in layer._parameters if f"{prefix}.{name}" in tensors]
        if names:
            filled.append((layer, {name: tensors[f"{prefix}.{name}"] for name in names}))
        elif not layerwise.is_deferred_attention_layer(layer):
            _put_back(layer)
    kernels = [layerwise.get_layerwise_info(layer).kernel_tensors[0] for layer, _ in filled]
    device = next(tensor.device for kernel in kernels for tensor in kernel.values())
    changed = [
        {name: tensor for name, tensor in own.items() if not is_as_loaded(kernel[name], tensor)}
        for (_, own), kernel in zip(filled, kernels, strict=True)
    ]
    moved = on_device([group for group in changed if group], device)
    for (layer, own), kernel, group in zip(filled, kernels, changed, strict=True):
        info = layerwise.get_layerwise_info(layer)
        for name, tensor in {**own, **(next(moved) if group else {})}.items():
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


@torch.no_grad()
def check_quantiser(
    model: nn.Module, model_config: Any, shapes: Mapping[str, tuple[int, ...]], format_: Format
) -> None:
    """ValueError unless vLLM makes of random matrices, for its parameters of these `shapes` [out,
    in], the bits that `format_` says. It overwrites these parameters.

    All ranks take the same numbers, so a maximum over the ranks changes nothing.
    """
    live = dict(model.named_parameters())
    source = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        device = live[name].device
        matrix = torch.randn(shape, generator=source).to(getattr(torch, format_.base_dtype))
        matrix = matrix.to(device)
        process(model, model_config, {name: matrix})
        maxima = row_maxima(matrix)
        scales = scales_of(maxima.amax().view(1) if format_.is_per_tensor else maxima, format_)
        values = quantize(matrix, scales, format_)
        held = dict(model.named_parameters())
        theirs = held[name].data.t().view(torch.uint8), held[name + VLLM_SCALE].data.flatten()
        num_wrong = int((theirs[0] != values.view(torch.uint8)).sum())
        if num_wrong or not torch.equal(theirs[1], scales):
            num_scales = int((theirs[1] != scales).sum())
            raise ValueError(
                f"vLLM's {name} must be quantised as {format_.key}, bit for bit, got other bits in "
                f"{num_wrong} of {values.numel()} values, {num_scales} of {scales.numel()} scales"
            )


def is_as_loaded(computing: Tensor, loaded: Tensor) -> bool:
    """True if a layer computes with a parameter in its loaded form."""
    return computing.shape == loaded.shape and computing.dtype == loaded.dtype


def on_device(
    groups: Sequence[Mapping[str, Tensor]], device: torch.device
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the groups on `device`; on a GPU the next one is copied meanwhile.

    Tensors that are there already are yielded as they are. The others are copied into two slots in
    turn, each as large as the largest group, so a group is valid until the next one is yielded.
    """
    num_bytes = [sum(map(_slot_bytes, _elsewhere(group, device).values())) for group in groups]
    if not any(num_bytes):
        yield from groups
        return
    slots = [torch.empty(max(num_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
    stream = platform_of(device).side_stream(device)

    def begin(index: int) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
        """Start to copy a group; returns its tensors, and what waits for their arrival."""
        slot, end, found = slots[index % 2], 0, dict(groups[index])
        with stream.after_computing(slot):  # which reads this slot's last group
            for name, tensor in _elsewhere(groups[index], device).items():
                place = slot[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                found[name] = place.copy_(tensor, non_blocking=True)
                end += _slot_bytes(tensor)
        return found, stream.mark()

    pending = begin(0)
    for index in range(len(groups)):
        group, await_arrival = pending
        if index + 1 < len(groups):
            pending = begin(index + 1)
        await_arrival()
        yield group


def _elsewhere(group: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in group.items() if tensor.device != device}


def _slot_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


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
