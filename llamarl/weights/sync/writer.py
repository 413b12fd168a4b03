"""The writer: a source rank's end of a publish, over any transport.

Owns: which copies start here, and reading them as one version. Does not own: which copies there are
(`reshard.py`), when (`publisher.py`), how bytes travel (`mapped.py`, `collective.py`, `rdma.py`) or
versions (`versioned tensors.py`). Invariant: it works in tiles and messages, so it never allocates
memory in proportion to a parameter; what it fingerprints are its own values after casting, never
what it reads back.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor

from llamarl.weights.integrity.comparison import MODULUS, Fingerprints
from llamarl.weights.integrity.fingerprint import transfer
from llamarl.weights.integrity.versioned_tensors import VersionedTensors
from llamarl.weights.layout.boxes import Copy, ParameterLayout, RankLayout, Route, StagingHandle
from llamarl.weights.layout.reshard import box_offset
from llamarl.weights.transports.protocol import Rdma, TransportSender
from llamarl.weights.transports.table import End, make_sender


class Writer:
    """Writes the tensors of source rank `rank` into generators' staging memory.

    `tensors` are flat memory or shards by buffer name; `parameters` says which boxes of which
    parameter they hold. They are kept as `Writer.tensors` (VersionedTensors): the owner labels them
    with a version, and begins a step or invalidates a version before it changes them; the writer
    adds a replica as a reader when it is connected and acknowledges what was written to it.

    Writes to different replicas may run at once, each on a thread of its own, beside the owner's
    calls. `timeout_s` limits what waits for the other end; routes over rdma need `rdma`.
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
        self.tensors = VersionedTensors(tensors)
        self._layout = RankLayout(
            rank=rank, host=host, parameters=parameters, buckets=(tuple(parameters),)
        )
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._end = End(rank=rank, host=host, device=device, timeout_s=timeout_s, rdma=rdma)
        self._routes: dict[int, tuple[list[Copy], TransportSender | None]] = {}
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
            return self.tensors.remove_reader(replica)
        self._routes[replica] = mine, make_sender(route, self._end) if mine else None
        self.tensors.add_reader(replica)

    def close(self) -> None:
        """Drop all routes."""
        for replica in list(self._routes):
            self.connect(replica, None)

    def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        """Write this rank's slices of one part of `version` into one replica's `staging handles`.

        An offer per rank of it. Returns the fingerprint by parameter of all values written, for
        all target ranks together. StaleVersion if `version` is not, or no longer, to be had;
        TargetLost if the replica cannot be reached; RuntimeError if an offer is for another
        version, or the replica is not connected.
        """
        replica, names = handles[0].replica, set(handles[0].names)
        for handle in handles:
            self._check(handle, version, handles[0])
        mine, sender = self._routes[replica]
        copies = [copy for copy in mine if not names or copy.name in names]
        totals: dict[str, int] = defaultdict(int)

        def copy_cast(copy: Copy, target: Tensor) -> None:
            with self.tensors.reading(version) as tensors:
                tensor = tensors[copy.source_buffer]
                offset = tensor.storage_offset() + copy.source_offset
                source = tensor.as_strided(copy.shape, copy.source_strides, offset)
                shape = self._layout.parameters[copy.name].shape
                totals[copy.name] += transfer(copy.name, source, target, copy.start, shape)

        if sender is not None and copies:
            with torch.no_grad():
                sender.write(
                    version, copies, {handle.rank: handle for handle in handles}, copy_cast
                )
        self._note(replica, version, {copy.name for copy in copies})
        return Fingerprints((name, total % MODULUS) for name, total in totals.items())

    def _note(self, replica: int, version: int, names: set[str]) -> None:
        """A part was written; with the last one the replica has its due."""
        before, written = self._written.get(replica, (version, set()))
        written = names | written if before == version else names
        self._written[replica] = version, written
        mine, _ = self._routes.get(replica, ([], None))
        if written >= {copy.name for copy in mine}:
            self.tensors.acknowledge(replica, version)

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

    def _check(self, handle: StagingHandle, version: int, first: StagingHandle) -> None:
        if handle.version != version:
            raise RuntimeError(f"asked to write version {version}, offered {handle.version}")
        if (handle.replica, handle.bucket) != (first.replica, first.bucket):
            raise RuntimeError(
                f"staging handles must be of one generator and bucket, got {first.replica}, "
                f"{first.bucket} and {handle.replica}, {handle.bucket}"
            )
        if handle.replica not in self._routes:
            raise RuntimeError(f"generator {handle.replica} is not connected")
