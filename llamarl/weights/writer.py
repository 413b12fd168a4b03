"""The writer: a trainer rank's end of a publish over shared memory.

Owns: the mappings of offered segments and the strided copies. Does not own: which copies
(`plan.py`) or when (`publish.py`). Invariant: it works in tiles, so it never allocates memory in
proportion to a parameter; what it fingerprints are its own values after casting, never what it
reads back.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from llamarl.weights.fingerprint import MODULUS, finish, tile_sum, tiles
from llamarl.weights.layout import Copy, Offer, ParameterLayout, RankLayout
from llamarl.weights.plan import box_offset
from llamarl.weights.shared_memory import Segment


class Writer:
    """Writes the local shards of trainer rank `rank` into generators' shadow arenas.

    `tensors` are the local shards by buffer name; they are read at every `write`, so they must
    stay where they are. `parameters` says which boxes of which parameter they hold. The trainer
    must not change them while `write` runs.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        tensors: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
    ) -> None:
        self._layout = RankLayout(rank=rank, host=host, parameters=parameters)
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._copies: dict[int, list[Copy]] = {}
        self._segments: dict[int, dict[str, Segment]] = {}

    def layout(self) -> RankLayout:
        """Where this rank keeps its boxes."""
        return self._layout

    def connect(self, replica: int, copies: list[Copy]) -> None:
        """Keep the copies to `replica` that start at this rank; none of them means forget it.

        Also drops what was mapped for `replica` before, so a dead replica's memory is freed.
        """
        mine = [copy for copy in copies if copy.source_rank == self._layout.rank]
        for copy in mine:
            self._require_own(copy)
        self.forget(replica)
        if copies:
            self._copies[replica] = mine

    def forget(self, replica: int) -> None:
        """Drop the copies and mappings of `replica`."""
        self._copies.pop(replica, None)
        for segment in self._segments.pop(replica, {}).values():
            segment.close()

    def close(self) -> None:
        """Drop all mappings."""
        for replica in list(self._copies):
            self.forget(replica)

    def write(self, version: int, offers: list[Offer]) -> dict[str, int]:
        """Write this rank's slices of `version` into one replica's `offers`, one per rank of it.

        Returns the fingerprint by parameter of all values written, for all target ranks together.
        RuntimeError if an offer is for another version or host, or the replica is not connected.
        """
        replica = offers[0].replica
        for offer in offers:
            self._check(offer, version, replica)
        by_rank = {offer.rank: offer for offer in offers}
        flat: dict[tuple[int, str], Tensor] = {}
        totals: dict[str, int] = {}
        with torch.no_grad():
            for copy in self._copies[replica]:
                place = (copy.target_rank, copy.target_dtype)
                if place not in flat:
                    flat[place] = self._map(by_rank, copy)
                total = self._copy(copy, flat[place])
                totals[copy.name] = (totals.get(copy.name, 0) + total) % MODULUS
        return totals

    def _require_own(self, copy: Copy) -> None:
        """ValueError unless the copy reads where this rank's layout has those elements.

        The fingerprint cannot tell: wrong values read here would arrive as they were read.
        """
        parameter = self._layout.parameters.get(copy.name)
        for box in parameter.boxes if parameter else ():
            stop = tuple(map(operator.add, copy.start, copy.shape))
            is_inside = all(map(operator.le, box.start, copy.start)) and all(
                map(operator.le, stop, box.stop)
            )
            place = (box.buffer, box_offset(box, copy.start), box.strides)
            if is_inside and place == (
                copy.source_buffer, copy.source_offset, copy.source_strides,
            ):  # fmt: skip
                return
        raise ValueError(
            f"copy of {copy.name} must read from where the layout has it, got element "
            f"{copy.source_offset} of {copy.source_buffer!r} for index {copy.start}"
        )

    def _check(self, offer: Offer, version: int, replica: int) -> None:
        if offer.version != version:
            raise RuntimeError(f"asked to write version {version}, offered {offer.version}")
        if offer.host != self._layout.host:
            raise RuntimeError(
                f"weights=shared_memory must stay on one host: trainer rank "
                f"{self._layout.rank} is on {self._layout.host}, generator {replica} rank "
                f"{offer.rank} on {offer.host}"
            )
        if offer.replica != replica:
            raise RuntimeError(f"offers must be of one generator, got {replica}, {offer.replica}")
        if replica not in self._copies:
            raise RuntimeError(f"generator {replica} is not connected")

    def _map(self, offers: dict[int, Offer], copy: Copy) -> Tensor:
        """The offered memory of the copy's target rank; a segment is mapped once."""
        if copy.target_rank not in offers:
            raise RuntimeError(f"no offer for rank {copy.target_rank} of the generator")
        offer = offers[copy.target_rank]
        cached = self._segments.setdefault(offer.replica, {})
        if offer.segment not in cached:
            cached[offer.segment] = Segment.open(offer.segment, offer.num_bytes)
        return cached[offer.segment].tensor(getattr(torch, copy.target_dtype))

    def _copy(self, copy: Copy, flat: Tensor) -> int:
        """Cast, fingerprint and copy tile by tile; returns the fingerprint of the values."""
        tensor = self._tensors[copy.source_buffer]
        offset = tensor.storage_offset() + copy.source_offset
        source = tensor.as_strided(copy.shape, copy.source_strides, offset)
        target = flat.as_strided(copy.shape, copy.target_strides, copy.target_offset)
        shape = self._layout.parameters[copy.name].shape
        total = 0
        for index, row, column in tiles(copy.start, copy.shape, shape):
            values = source[index].to(device=flat.device, dtype=flat.dtype)
            total += tile_sum(values, row, column)
            target[index].copy_(values)
        return finish(copy.name, total)
