"""The staging of new weights for vLLM, and adapters in its layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llamarl.core.config import LoraConfig
from llamarl.core.device.devices import platform_of
from llamarl.core.device.names import CPU
from llamarl.model.adapter_inventory import adapted_modules, adapter_shapes
from llamarl.model.architecture import LORA_A, LORA_B, AnyArchitecture
from llamarl.publish.layout import Format
from llamarl.publish.shards import quantize, row_maxima, scales_of
from llamarl.publish.target import ALIGN_BYTES, MemoryPlan

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for: the next one is taken
ADAPTER_ID = 1


def adapter_arguments(architecture: AnyArchitecture, lora: LoraConfig) -> dict[str, Any]:
    """Return vLLM's engine arguments for one adapter slot; none if all weights are trained. Raises
    ValueError if vLLM has no slot as large."""
    if not lora.is_used:
        return {}
    modules = adapted_modules(adapter_shapes(architecture, lora))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": slot_rank(lora),
        "lora_target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


def slot_rank(lora: LoraConfig) -> int:
    """Return the rank of vLLM's slot. Raises ValueError if vLLM has none as large."""
    lora.require(lora.rank <= RANKS[-1], "rank", f"be at most {RANKS[-1]} with generator=vllm")
    return next(rank for rank in RANKS if rank >= lora.rank)


def adapter_request() -> Any:
    """Return the adapter of a rollout's request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="published")


class VllmAdapters:
    """The adapter slot of vLLM's model, and the `memory` that a publish fills for this rank, from
    which a commit copies.

    `runner` is vLLM's, `shapes` are those of the adapters' parameters. Raises ValueError if vLLM
    does not adapt just the same matrices."""

    def __init__(
        self,
        runner: Any,
        lora: LoraConfig,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self._lora, self._shapes = lora, shapes
        self._dtype = str(dtype).removeprefix("torch.")
        self._model: nn.Module = runner.get_model()
        worker = runner.lora_manager
        manager = worker._adapter_manager
        with worker.dummy_lora_cache():
            worker.add_dummy_lora(adapter_request(), rank=slot_rank(lora))
        manager.activate_adapter(ADAPTER_ID)
        (slot,) = (i for i, held in enumerate(manager.lora_index_to_id) if held == ADAPTER_ID)
        self._layers: dict[str, Any] = manager.modules
        self._plan, self._targets = MemoryPlan(), dict[str, Tensor]()
        for name, layer in self._layers.items():
            layer.reset_lora(slot)
            for index, module in enumerate(manager.packed_modules.get(name, [name])):
                if f"{module}.{LORA_A}.weight" in shapes:
                    self._add(module, layer, index, slot)
        missing = sorted(shapes.keys() - self._targets.keys())
        must = "name matrices that vLLM can adapt"
        lora.require(not missing, "targets", f"{must} (not {missing[0] if missing else ''})")

        self.memory = self._plan.memory(is_staged=True)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the halves in the flat memory, by name."""
        return {name: place.view(flat) for name, place in self._plan.places.items()}

    @torch.no_grad()
    def commit(self, views: Mapping[str, Tensor]) -> None:
        """Copy an adapter to where vLLM reads it."""
        for name, target in self._targets.items():
            target.copy_(views[name])
            if name.endswith(f".{LORA_B}.weight"):
                target.mul_(self._lora.scale)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Make the model, inside the block, as vLLM builds it without adapters, so that its loader
        finds the names it knows."""
        for name, layer in self._layers.items():
            _replace(self._model, name, layer.base_layer)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                _replace(self._model, name, layer)

    def _add(self, module: str, layer: Any, index: int, slot: int) -> None:
        """Lay out both halves of a matrix's adapter; `index` is its place among the matrices that
        vLLM multiplies with at once."""
        name = f"{module}.{LORA_A}.weight"
        rank, num_inputs = self._shapes[name]
        held_inputs = layer.lora_a_stacked[index].shape[3]
        first = layer.tp_rank * held_inputs if held_inputs < num_inputs else 0
        target = layer.lora_a_stacked[index][slot, 0, :rank]
        self._put(name, (0, first), target)
        name = f"{module}.{LORA_B}.weight"
        held_outputs = layer.lora_b_stacked[index].shape[2]
        ids = getattr(layer, "output_ids", None) or (layer.tp_rank,) * layer.n_slices
        first = ids[index] * held_outputs if held_outputs < self._shapes[name][0] else 0
        target = layer.lora_b_stacked[index][slot, 0, :, :rank]
        self._put(name, (first, 0), target)

    def _put(self, name: str, start: tuple[int, int], target: Tensor) -> None:
        size, self._targets[name] = tuple(target.shape), target
        offset = self._plan.reserve(name, size, self._dtype).offset
        self._plan.put(name, self._shapes[name], (size, start), self._dtype, offset)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


VLLM_SCALE = "_scale"  # behind the name of a quantised parameter of vLLM, the name of its scales


@contextmanager
def loading_form(model: nn.Module) -> Iterator[None]:
    """Give `model`, inside the block, the parameters that a loader fills, on the meta device."""
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
def process(
    model: nn.Module,
    model_config: Any,
    tensors: Mapping[str, Tensor],
    experts: Collection[str] = (),
) -> None:
    """Recompute the model's parameters from `tensors`, its parameters in loading form by name; of
    those of `experts` also where the form is the same.

    No reference to `tensors` is kept, and none is changed. They may be in host memory: a tensor to
    be quantised or packed is copied to the device of its layer, which has the kernels for it, while
    the layer before is processed; a tensor that a layer computes with as loaded is only copied into
    place."""
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
    of_experts = {tensors[name].data_ptr() for name in experts}
    changed = [
        {
            name: tensor
            for name, tensor in own.items()
            if tensor.data_ptr() in of_experts or not is_as_loaded(kernel[name], tensor)
        }
        for (_, own), kernel in zip(filled, kernels, strict=True)
    ]
    moved = on_device([group for group in changed if group], device)
    for (layer, own), kernel, group in zip(filled, kernels, changed, strict=True):
        info = layerwise.get_layerwise_info(layer)
        for name, tensor in {**own, **(next(moved) if group else {})}.items():
            if layer._parameters[name] is kernel[name]:  # never in loading form: a bias
                kernel[name].copy_(tensor)
            else:  # kernels of experts write over what they get
                own_memory = tensor.clone() if tensor.data_ptr() in of_experts else tensor
                setattr(layer, name, _like(own_memory, layer._parameters[name]))
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        method = getattr(layer, "quant_method", None)
        if method is not None and device.type == CPU and hasattr(method, "moe_kernel"):
            method.moe_kernel = None  # else it would not pack them as at its start
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
    """Raise ValueError unless vLLM quantises random matrices, for its parameters of these `shapes`
    [out, in], to the bits that `format_` says. It overwrites these parameters.

    All ranks take the same numbers, so a maximum over the ranks changes nothing."""
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
    """Return True if a layer computes with a parameter in its loaded form."""
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
        """Start to copy a group. Returns its tensors, and a call that waits for their arrival."""
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
    """Return `tensor` as a parameter of the class and with the attributes of `form`."""
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
