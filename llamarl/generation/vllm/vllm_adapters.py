"""Adapters in vLLM: one that every rollout uses, in the memory that vLLM's own layers read.

Owns: where a publish puts adapters, and the copy into vLLM's memory at a commit. Does not own: the
weights beside them (`recorder.py`, `staging.py`). Invariant: vLLM computes W x + scale * B A x with
the A and B that were published, cast to its dtype; only scale * B is rounded once more.

vLLM has one slot per adapter in stacked tensors of each layer, [slots, 1, ...]; the policy's
adapter takes the only slot, so captured graphs read the same memory whatever the version.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llamarl.config import LoraConfig
from llamarl.generation.parameters import Place, one_box
from llamarl.models.adapter_inventory import adapted_modules, adapter_shapes
from llamarl.models.families import LORA_A, LORA_B
from llamarl.models.other_architecture import AnyArchitecture
from llamarl.weights.layout.boxes import ParameterLayout
from llamarl.weights.layout.buckets import ALIGN_BYTES, Memory

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for: the next one is taken
ADAPTER_ID = 1


@dataclass(frozen=True, slots=True)
class _Half:
    """Half an adapter on this rank: where it lies in the flat memory, and in vLLM's."""

    place: Place
    target: Tensor


def adapter_arguments(architecture: AnyArchitecture, lora: LoraConfig) -> dict[str, Any]:
    """vLLM's engine arguments for one slot; none if all weights are trained. ValueError if it has
    no slot as large."""
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
    """The rank of vLLM's slot. ValueError if it has none as large."""
    lora.require(lora.rank <= RANKS[-1], "rank", f"be at most {RANKS[-1]} with generator=vllm")
    return next(rank for rank in RANKS if rank >= lora.rank)


def adapter_request() -> Any:
    """What a rollout's request says of the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="published")


class VllmAdapters:
    """The adapter slot of vLLM's model, and the `memory` that a publish fills for this rank.

    `runner` is vLLM's, `shapes` those of the adapters' parameters. ValueError if vLLM does not
    adapt just the same matrices.
    """

    def __init__(
        self,
        runner: Any,
        lora: LoraConfig,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self._lora, self._shapes, self._dtype = lora, shapes, dtype
        self._model: nn.Module = runner.get_model()
        worker = runner.lora_manager
        manager = worker._adapter_manager
        with worker.dummy_lora_cache():
            worker.add_dummy_lora(adapter_request(), rank=slot_rank(lora))
        manager.activate_adapter(ADAPTER_ID)
        (slot,) = (i for i, held in enumerate(manager.lora_index_to_id) if held == ADAPTER_ID)
        self._layers: dict[str, Any] = manager.modules
        self._halves: dict[str, _Half] = {}
        self._parameters: dict[str, ParameterLayout] = {}
        self._num_elements = 0
        for name, layer in self._layers.items():
            layer.reset_lora(slot)
            for index, module in enumerate(manager.packed_modules.get(name, [name])):
                if f"{module}.{LORA_A}.weight" in shapes:
                    self._add(module, layer, index, slot)
        missing = sorted(shapes.keys() - self._halves.keys())
        must = "name matrices that vLLM can adapt"
        lora.require(not missing, "targets", f"{must} (not {missing[0] if missing else ''})")

    @property
    def memory(self) -> Memory:
        """What a publish fills; a commit copies from there."""
        return Memory(
            parameters=self._parameters,
            num_elements=self._num_elements,
            dtype=self._dtype,
            is_staged=True,
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The halves in the flat memory, by name."""
        return {name: half.place.view(flat) for name, half in self._halves.items()}

    @torch.no_grad()
    def commit(self, views: Mapping[str, Tensor]) -> None:
        """Copy an adapter to where vLLM reads it."""
        for name, half in self._halves.items():
            half.target.copy_(views[name])
            if name.endswith(f".{LORA_B}.weight"):
                half.target.mul_(self._lora.scale)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Inside the block the model is as vLLM builds it without adapters, so that its loader
        finds the names it knows."""
        for name, layer in self._layers.items():
            _replace(self._model, name, layer.base_layer)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                _replace(self._model, name, layer)

    def _add(self, module: str, layer: Any, index: int, slot: int) -> None:
        """Lay out both halves of a matrix's adapter; `index` is its place among those that vLLM
        multiplies with at once."""
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
        align = ALIGN_BYTES // self._dtype.itemsize
        begin = -(-self._num_elements // align) * align
        shape = tuple(target.shape)
        self._num_elements = begin + math.prod(shape)
        self._halves[name] = _Half(Place(begin, shape, self._dtype), target)
        dtype = str(self._dtype).removeprefix("torch.")
        self._parameters[name] = one_box(
            self._shapes[name], dtype, start, shape, begin, (shape[1], 1)
        )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
