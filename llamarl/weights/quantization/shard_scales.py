"""Scales of a source rank's shards, made again for each version.

Owns: the tensors that hold them, and the maxima over ranks that share a scale. Does not own: the
values, which are made while they are copied (`sync/writer.py`). Invariant: on each rank, a scale is
that of the whole row, or of the whole tensor, whatever part of it lies here.

Rows that every rank holds whole need no other rank. All other maxima are taken over all ranks of
the source in one all-reduce, so all ranks derive at the same moment, on the thread of their
collectives.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.weights.layout.boxes import ParameterLayout
from llamarl.weights.layout.formats import Format
from llamarl.weights.layout.quantized_parameters import (
    QuantizedParameter,
    made_from,
    quantized_parameters,
)
from llamarl.weights.quantization.rounding import row_maxima, scales_of


class ShardScales:
    """`tensors` are the scales by name, `parameters` the layouts of values and scales, and `made`
    says by the name of values what they are made of.

    `parameters` (of the constructor) are the shards, all of one `device`; `cut` names those whose
    rows are divided among ranks. `num_ranks` are those of the default process group that hold the
    model together, 1 if there is none.
    """

    def __init__(
        self,
        parameters: Mapping[str, ParameterLayout],
        formats: Sequence[Format],
        device: torch.device,
        *,
        cut: Collection[str] = (),
        num_ranks: int = 1,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, ParameterLayout] = {}
        self.made: dict[str, QuantizedParameter] = {}
        self._shards, self._cut, self._num_ranks = parameters, cut, num_ranks
        self._device = device
        self._bases: dict[str, list[QuantizedParameter]] = {}
        for format_ in formats:
            for each in quantized_parameters(parameters, format_):
                self._add(each)
        self._places, self._num_shared = self._arrange()

    def derive(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the scales of these shards. With several ranks all call it."""
        if not self._bases:
            return
        shared = torch.zeros(self._num_shared, device=self._device)
        own: dict[str, Tensor] = {}
        for base in self._bases:
            if self._shards[base].boxes:
                own[base] = row_maxima(tensors[base])
                for place in self._of(base):
                    self._put(shared, place, base, own[base])
        if self._num_shared and self._num_ranks > 1:
            dist.all_reduce(shared, dist.ReduceOp.MAX)
        for base, made in self._bases.items():
            for each in made:
                self._fill(each, own.get(base), shared)

    def _add(self, each: QuantizedParameter) -> None:
        base, format_ = self._shards[each.base], each.format
        shape = (1,) if format_.is_per_tensor else base.shape[:1]
        values = ParameterLayout(shape=base.shape, dtype=format_.dtype, boxes=())
        scales = ParameterLayout(shape=shape, dtype=format_.scale_dtype, boxes=())
        layout = made_from(base, each.scales, scales)
        self.parameters[each.values] = made_from(base, each.values, values)
        self.parameters[each.scales] = layout
        num_held = sum(box.shape[0] for box in layout.boxes)
        dtype = getattr(torch, format_.scale_dtype)
        self.tensors[each.scales] = torch.zeros(num_held, dtype=dtype, device=self._device)
        self.made[each.values] = each
        self._bases.setdefault(each.base, []).append(each)

    def _arrange(self) -> tuple[dict[str, slice], int]:
        """Where the maxima that ranks share lie, by base or by scale of a tensor; how many."""
        places: dict[str, slice] = {}
        end = 0
        for base, made in self._bases.items():
            keys = {each.scales: 1 for each in made if each.format.is_per_tensor}
            if base in self._cut and len(keys) < len(made):
                keys[base] = self._shards[base].shape[0]
            for key, size in keys.items():
                if key not in places:
                    places[key] = slice(end, end + size)
                    end += size
        return places, end

    def _of(self, base: str) -> list[str]:
        """The keys of `places` that a matrix has a part in."""
        keys = [each.scales for each in self._bases[base] if each.format.is_per_tensor]
        return [*dict.fromkeys(keys), *([base] if base in self._places else [])]

    def _put(self, shared: Tensor, key: str, base: str, maxima: Tensor) -> None:
        part = shared[self._places[key]]
        if key == base:
            part[self._rows(base)] = maxima
        elif maxima.numel():
            part.copy_(torch.maximum(part, maxima.amax()))

    def _fill(self, each: QuantizedParameter, own: Tensor | None, shared: Tensor) -> None:
        if each.format.is_per_tensor:
            maxima = shared[self._places[each.scales]]
        elif own is None:
            return
        elif each.base in self._places:
            maxima = shared[self._places[each.base]][self._rows(each.base)]
        else:
            maxima = own
        self.tensors[each.scales].copy_(scales_of(maxima, each.format))

    def _rows(self, base: str) -> slice:
        (box,) = self._shards[base].boxes
        return slice(box.start[0], box.stop[0])
