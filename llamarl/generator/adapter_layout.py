"""The layout of adapters in the flat memory that a publish fills.

Matrices that the engine multiplies with at once have their adapters side by side: for q, k and v
all A as one [in, 3 * rank], and B on the diagonal of one [3 * rank, out], whose other elements are
zeros that no publish writes. Tensor-parallel ranks divide the side of an adapter that its matrix
divides, and hold all of the other.

The tensors that `adapt` makes are views, so a change of version only binds another tensor."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from llamarl.core.config import LoraConfig
from llamarl.generator.engine.weights import (
    DTYPES,
    LAYER,
    AdaptedMatrix,
    Place,
    Weights,
    local_shape,
    one_box,
    start_of,
)
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.architecture import FUSED, LORA_A, LORA_B, Architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import ParameterLayout
from llamarl.publish.target import ALIGN_BYTES, Memory


class AdapterLayout:
    """The adapters of tensor-parallel rank `rank`, in one flat tensor of `dtype` ("float32").

    `parameters` has their layouts by their names in a publish, and `memory` the whole tensor."""

    def __init__(
        self,
        architecture: Architecture,
        lora: LoraConfig,
        dtype: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.parameters: dict[str, ParameterLayout] = {}
        self._lora, self._dtype = lora, dtype
        self._rank, self._num_ranks = rank, num_ranks
        self._shapes = adapter_shapes(architecture, lora)
        self._matrices = parameter_shapes(architecture)
        self._places: dict[tuple[int, str], tuple[Place, Place]] = {}
        self._num_elements = 0
        for layer in range(architecture.num_layers):
            for field, module in LAYER.items():
                parts = FUSED.get(module, (module,))
                self._append(layer, field, [f"model.layers.{layer}.{part}" for part in parts])
        missing = self._shapes.keys() - self.parameters.keys()
        assert not missing, f"adapters without a place: {missing}"

    @property
    def memory(self) -> Memory:
        """The whole tensor, from which the engine decodes as it is."""
        return Memory(
            parameters=self.parameters, num_elements=self._num_elements, dtype=DTYPES[self._dtype]
        )

    def adapt(self, weights: Weights, flat: Tensor) -> Weights:
        """Return the `weights` with the adapters in `flat`, as views of both."""
        layers = [*weights.layers]
        for (layer, field), (down, up) in self._places.items():
            base = getattr(layers[layer], field)
            adapted = AdaptedMatrix(base, down.view(flat), up.view(flat), self._lora.scale)
            changed: dict[str, Any] = {field: adapted}
            layers[layer] = replace(layers[layer], **changed)
        return replace(weights, layers=layers)

    def _append(self, layer: int, field: str, modules: list[str]) -> None:
        """Reserve memory for the adapters of matrices that are multiplied with at once."""
        adapted = [module for module in modules if f"{module}.{LORA_A}.weight" in self._shapes]
        if not adapted:
            return
        widths = [self._local_shape(f"{module}.weight")[0] for module in modules]
        rank, num_outputs = self._lora.rank, sum(widths)
        num_rows, num_inputs = rank * len(adapted), self._local_shape(f"{modules[0]}.weight")[1]
        down, up = self._reserve((num_inputs, num_rows)), self._reserve((num_rows, num_outputs))
        self._places[layer, field] = down, up
        column = 0
        for module, width in zip(modules, widths, strict=True):
            if module in adapted:
                row = rank * adapted.index(module)
                self._put(f"{module}.{LORA_A}.weight", down.offset + row, (1, num_rows))
                offset = up.offset + row * num_outputs + column
                self._put(f"{module}.{LORA_B}.weight", offset, (1, num_outputs))
            column += width

    def _reserve(self, shape: tuple[int, int]) -> Place:
        number = DTYPES[self._dtype]
        align = ALIGN_BYTES // number.itemsize
        begin = -(-self._num_elements // align) * align
        self._num_elements = begin + math.prod(shape)
        return Place(begin, shape, number)

    def _put(self, name: str, offset: int, strides: tuple[int, int]) -> None:
        size = self._local_shape(name)
        start = start_of(name, size, self._rank)
        self.parameters[name] = one_box(
            self._shapes[name], self._dtype, start, size, offset, strides
        )

    def _local_shape(self, name: str) -> tuple[int, ...]:
        return local_shape(name, self._shapes.get(name) or self._matrices[name], self._num_ranks)
