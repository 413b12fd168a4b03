"""Which parameters look alike from layer to layer, so that what holds for one is known of all.

Owns: finding them. Does not own: what is planned for them (`reshard.py`) or a layer's number in a
name (`boxes.py`). Invariant: every parameter is in exactly one set of alike ones, and the boxes of
each follow from those of the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llamarl.weights.layout.boxes import ParameterLayout, in_layer, layer_of

Held = dict[int, ParameterLayout]  # one parameter on one side: rank -> layout
Steps = dict[int, tuple[int, ...]]  # rank -> how far its boxes move from layer to layer, elements


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Parameters `names` of layers whose numbers grow by `layer_step`. Of the first of them the
    ranks hold `sources` and `targets`; from each to the next, box i of a rank moves by
    `source_steps[rank][i]` or `target_steps[rank][i]` elements, and nothing else changes."""

    names: tuple[str, ...]
    layer_step: int
    sources: Held
    targets: Held
    source_steps: Steps
    target_steps: Steps


def find_alike(sources: dict[str, Held], targets: dict[str, Held]) -> Iterator[AlikeLayers]:
    """All parameters, those that look alike on all ranks together. Both sides have equal names."""
    families: dict[str, list[tuple[int, str]]] = {}
    for name in targets:
        family, layer = layer_of(name) or (name, 0)
        families.setdefault(family, []).append((layer, name))
    for members in families.values():
        members.sort()
        while members:
            found = _first_alike(members, sources, targets)
            yield found
            del members[: len(found.names)]


def _first_alike(
    members: list[tuple[int, str]], sources: dict[str, Held], targets: dict[str, Held]
) -> AlikeLayers:
    """The first of one family (layer, name) with those after it that follow from it."""
    (layer, first), *others = members
    names, layer_step = [first], 0
    steps: list[Steps] = [
        {rank: (0,) * len(layout.boxes) for rank, layout in side[first].items()}
        for side in (sources, targets)
    ]
    for number, name in others:
        moved = [_moved(side[first], side[name], number - layer) for side in (sources, targets)]
        if moved[0] is None or moved[1] is None:
            break
        if len(names) == 1:
            layer_step, steps = number - layer, [moved[0], moved[1]]
        is_next = number - layer == len(names) * layer_step
        if not is_next or moved != [_times(each, len(names)) for each in steps]:
            break
        names.append(name)
    return AlikeLayers(tuple(names), layer_step, sources[first], targets[first], *steps)


def _moved(first: Held, other: Held, by: int) -> Steps | None:
    """How far the boxes of `other`, `by` layers after `first`, lie from those of `first`; None if
    it looks different."""
    if first.keys() != other.keys():
        return None
    moved: Steps = {}
    for rank, here in first.items():
        there = other[rank]
        if (here.shape, here.dtype, len(here.boxes)) != (
            there.shape, there.dtype, len(there.boxes),
        ):  # fmt: skip
            return None
        for a, b in zip(here.boxes, there.boxes, strict=True):
            if a.start != b.start or a.stop != b.stop or a.strides != b.strides:
                return None
            if b.buffer != in_layer(a.buffer, by):
                return None
        pairs = zip(here.boxes, there.boxes, strict=True)
        moved[rank] = tuple(b.offset - a.offset for a, b in pairs)
    return moved


def _times(steps: Steps, count: int) -> Steps:
    return {rank: tuple(count * step for step in moved) for rank, moved in steps.items()}
