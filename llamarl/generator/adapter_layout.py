"""The layout of adapters in the flat memory that a publish fills.

Matrices that the engine multiplies with at once have their adapters side by side: for q, k and v
all A as one [in, 3 * rank], and B on the diagonal of one [3 * rank, out], whose other elements are
zeros that no publish writes. Tensor-parallel ranks divide the side of an adapter that its matrix
divides, and hold all of the other.

The tensors that `adapt` makes are views, so a change of version only binds another tensor."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from llamarl.core.config import LoraConfig
from llamarl.generator.engine.weights import LAYER, AdaptedMatrix, Weights, rank_box
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.architecture import FUSED, LORA_A, LORA_B, Architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.shards import Shape
from llamarl.publish.target import MemoryPlan, Place


class AdapterLayout:
    """The adapters of tensor-parallel rank `rank`, in one flat tensor of `dtype` ("float32").

    `parameters` has their layouts by their names in a publish, and `memory` the whole tensor, from
    which the engine decodes as it is."""

    def __init__(
        self,
        architecture: Architecture,
        lora: LoraConfig,
        dtype: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._plan = MemoryPlan()
        self.parameters = self._plan.parameters
        self._lora, self._dtype = lora, dtype
        self._shapes = adapter_shapes(architecture, lora)
        self._boxes = {
            name: rank_box(architecture, name, shape, rank, num_ranks)
            for name, shape in (parameter_shapes(architecture) | self._shapes).items()
        }
        self._places: dict[tuple[int, str], tuple[Place, Place]] = {}
        for layer in range(architecture.num_layers):
            for field, module in LAYER.items():
                parts = FUSED.get(module, (module,))
                self._append(layer, field, [f"model.layers.{layer}.{part}" for part in parts])
        missing = self._shapes.keys() - self.parameters.keys()
        assert not missing, f"adapters without a place: {missing}"
        self.memory = self._plan.memory()

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
        """Append the adapters of matrices that are multiplied with at once."""
        adapted = [module for module in modules if f"{module}.{LORA_A}.weight" in self._shapes]
        if not adapted:
            return
        sizes = [self._boxes[f"{module}.weight"][0] for module in modules]
        rank, num_outputs = self._lora.rank, sum(size[0] for size in sizes)
        num_rows, num_inputs = rank * len(adapted), sizes[0][1]
        prefix = f"model.layers.{layer}.{field}"
        down = self._plan.reserve(f"{prefix}.down", (num_inputs, num_rows), self._dtype)
        up = self._plan.reserve(f"{prefix}.up", (num_rows, num_outputs), self._dtype)
        self._places[layer, field] = down, up
        row = column = 0
        for module, size in zip(modules, sizes, strict=True):
            if module in adapted:
                self._put(f"{module}.{LORA_A}.weight", down.offset + row, (1, num_rows))
                offset = up.offset + row * num_outputs + column
                self._put(f"{module}.{LORA_B}.weight", offset, (1, num_outputs))
                row += rank
            column += size[0]

    def _put(self, name: str, offset: int, strides: Shape) -> None:
        self._plan.put(name, self._shapes[name], self._boxes[name], self._dtype, offset, strides)
