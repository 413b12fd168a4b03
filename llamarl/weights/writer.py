"""The writer: a source rank's end of a publish, over any transport.

Owns: which copies start here, and reading them as one version. Does not own: which copies there are
(`plan.py`), when (`publish.py`), how bytes travel (`mapped.py`, `collective.py`, `rdma.py`) or
versions (`holdings.py`). Invariant: it works in tiles and messages, so it never allocates memory in
proportion to a parameter; what it fingerprints are its own values after casting, never what it
reads back.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor

from llamarl.weights.collective import CollectiveOutlet
from llamarl.weights.comparison import MODULUS, Fingerprints
from llamarl.weights.fingerprint import transfer
from llamarl.weights.holdings import Holdings
from llamarl.weights.layout import Copy, Offer, ParameterLayout, RankLayout, Route
from llamarl.weights.mapped import MappedOutlet
from llamarl.weights.plan import box_offset
from llamarl.weights.rdma import RdmaOutlet
from llamarl.weights.transport import Outlet, Rdma


class Writer(Holdings):
    """Writes the tensors of source rank `rank` into generators' shadow memory.

    `tensors` are flat memory or shards by buffer name, read at every `write`; `parameters` says
    which boxes of which parameter they hold. The owner labels them with `present(version)` and
    calls `begin_step()`, or `retire(version)`, before it changes them; see Holdings. Writes to
    different replicas may run at once, each on its own thread, beside those calls.

    `timeout_s` limits what waits for the other end; `rdma` is needed by routes over rdma.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        tensors: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
        *,
        timeout_s: float = 60.0,
        rdma: Rdma | None = None,
    ) -> None:
        super().__init__(tensors)
        self._layout = RankLayout(
            rank=rank, host=host, parameters=parameters, parts=(tuple(parameters),)
        )
        self._device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._timeout_s, self._rdma = timeout_s, rdma
        self._routes: dict[int, tuple[list[Copy], Outlet | None]] = {}
        self._written: dict[int, tuple[int, set[str]]] = {}  # version, parameters

    def layout(self) -> RankLayout:
        """Where this rank keeps its boxes."""
        return self._layout

    def connect(self, replica: int, route: Route | None) -> None:
        """Keep the copies of `route` that start at this rank; None forgets the replica.

        What was mapped for `replica` before is dropped, so a dead replica's memory is freed. Over
        the collective transport this waits for the other ranks of the route: TargetLost if they
        do not come. ValueError if a copy does not read from where the layout has its elements.
        """
        copies = [] if route is None else list(route.copies)
        mine = [copy for copy in copies if copy.source_rank == self._layout.rank]
        for copy in mine:
            self._require_own(copy)
        _, before = self._routes.pop(replica, ([], None))
        self._written.pop(replica, None)
        if before is not None:
            before.close()
        if route is None:
            return self.forget(replica)
        self._routes[replica] = mine, self._outlet(route) if mine else None
        self.owe(replica)

    def close(self) -> None:
        """Drop all routes."""
        for replica in list(self._routes):
            self.connect(replica, None)

    def write(self, version: int, offers: list[Offer]) -> Fingerprints:
        """Write this rank's slices of one part of `version` into one replica's `offers`.

        An offer per rank of it. Returns the fingerprint by parameter of all values written, for
        all target ranks together. StaleVersion if `version` is not, or no longer, to be had;
        TargetLost if the replica cannot be reached; RuntimeError if an offer is for another
        version, or the replica is not connected.
        """
        replica, names = offers[0].replica, set(offers[0].names)
        for offer in offers:
            self._check(offer, version, offers[0])
        mine, outlet = self._routes[replica]
        copies = [copy for copy in mine if not names or copy.name in names]
        totals: dict[str, int] = defaultdict(int)

        def carry(copy: Copy, target: Tensor) -> None:
            with self.reading(version) as tensors:
                tensor = tensors[copy.source_buffer]
                offset = tensor.storage_offset() + copy.source_offset
                source = tensor.as_strided(copy.shape, copy.source_strides, offset)
                shape = self._layout.parameters[copy.name].shape
                totals[copy.name] += transfer(copy.name, source, target, copy.start, shape)

        if outlet is not None and copies:
            with torch.no_grad():
                outlet.write(version, copies, {offer.rank: offer for offer in offers}, carry)
        self._note(replica, version, {copy.name for copy in copies})
        return Fingerprints((name, total % MODULUS) for name, total in totals.items())

    def _note(self, replica: int, version: int, names: set[str]) -> None:
        """A part was written; with the last one the replica has its due."""
        before, written = self._written.get(replica, (version, set()))
        written = names | written if before == version else names
        self._written[replica] = version, written
        mine, _ = self._routes.get(replica, ([], None))
        if written >= {copy.name for copy in mine}:
            self.settle(replica, version)

    def _outlet(self, route: Route) -> Outlet:
        if route.transport == "collective":
            return CollectiveOutlet(route, self._layout.rank, self._device, self._timeout_s)
        if route.transport == "rdma":
            if self._rdma is None:
                raise ValueError("weights.transport must not be rdma without Monarch")
            return RdmaOutlet(route, self._layout.rank, self._rdma, self._timeout_s)
        return MappedOutlet(self._layout.host)

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

    def _check(self, offer: Offer, version: int, first: Offer) -> None:
        if offer.version != version:
            raise RuntimeError(f"asked to write version {version}, offered {offer.version}")
        if (offer.replica, offer.part) != (first.replica, first.part):
            raise RuntimeError(
                f"offers must be of one generator and part, got {first.replica}, {first.part} and "
                f"{offer.replica}, {offer.part}"
            )
        if offer.replica not in self._routes:
            raise RuntimeError(f"generator {offer.replica} is not connected")
