"""Fingerprints of weights that no publish moves: those beside adapters.

Owns: which rank counts which elements, and what a source's shards would be for each kind of
replica. Does not own: the comparison (`integrity/comparison.py`). Invariant: the sums of all ranks
of either end, added up, count each element once, so they are equal exactly if both ends hold the
same numbers in the same places.

A source adds them up once for each kind of replica, by KIND: a dtype ("bfloat16"), or a format,
whose values and scales are then made as for a publish.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.integrity.fingerprint import fingerprint
from llamarl.weights.layout.boxes import Box, ParameterLayout
from llamarl.weights.layout.formats import Format, Kind
from llamarl.weights.layout.shards import cut_rows, shard_boxes
from llamarl.weights.quantization.rounding import quantize
from llamarl.weights.quantization.shard_scales import ShardScales


def key_of(kind: Kind) -> str:
    """The name of a kind in a rank's layout."""
    return kind if isinstance(kind, str) else kind.key


@torch.no_grad()
def frozen_sums(
    parameters: Mapping[str, ParameterLayout],
    view: Callable[[str, Box], Tensor],
    owns: Callable[[str], bool],
) -> Fingerprints:
    """Of what this rank holds of those `parameters` that it `owns`: each element has one owner."""
    found = Fingerprints()
    for name, layout in parameters.items():
        for box in layout.boxes if owns(name) else ():
            found.add(name, fingerprint(name, view(name, box), box.start, layout.shape, -1))
    return found


@torch.no_grad()
def shard_sums(
    frozen: Mapping[str, Tensor],
    kinds: Sequence[Kind],
    rank: int,
    num_ranks: int,
    num_copies: int = 1,
) -> dict[str, Fingerprints]:
    """By kind, those of this rank's shards of the `frozen` parameters, of which the ranks hold so
    many copies. With several ranks all call it, on the thread of their collectives."""
    tensors, parameters = shard_boxes(frozen)
    is_counted = rank < num_ranks // num_copies  # copies are the mesh's slowest dimension
    own = {name for name, each in frozen.items() if is_counted and _is_first(each)}
    formats = [kind for kind in kinds if isinstance(kind, Format)]
    device = next(iter(tensors.values())).device
    cut = cut_rows(frozen)
    scales = ShardScales(parameters, formats, device, cut=cut, num_ranks=num_ranks)
    scales.derive(tensors)
    sums: dict[str, Fingerprints] = {}
    for kind in kinds:
        dtype = getattr(torch, kind if isinstance(kind, str) else kind.base_dtype)

        def plain(name: str, box: Box, dtype: torch.dtype = dtype) -> Tensor:
            return tensors[name].to(dtype)

        found = frozen_sums(parameters, plain, own.__contains__)
        for each in scales.made.values():
            if each.format == kind and (boxes := parameters[each.base].boxes):
                values = quantize(tensors[each.base], scales.tensors[each.scales], each.format)
                if each.base in own:
                    _add(found, scales.parameters, each.values, values)
                holds_first = boxes[0].start[1] == 0 and each.base in own
                counts = rank == 0 if each.format.is_per_tensor else holds_first
                if counts and each.scales not in found:
                    _add(found, scales.parameters, each.scales, scales.tensors[each.scales])
        sums[key_of(kind)] = found
    return sums


def _add(
    found: Fingerprints, layouts: Mapping[str, ParameterLayout], name: str, values: Tensor
) -> None:
    layout = layouts[name]
    (box,) = layout.boxes
    found.add(name, fingerprint(name, values, box.start, layout.shape, -1))


def _is_first(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    pairs = zip(parameter.placements, coordinates, strict=True)
    return all(coordinate == 0 for placement, coordinate in pairs if placement.is_replicate())
