"""The writer: a source rank's end of a publish, over any transport.

Owns: reading what is copied from this rank as one version, cast or quantised. Does not own: which
copies there are (`reshard.py`), when they are written (`publisher.py`), how bytes travel
(`transports/`) or which tensors hold which version (`versioned_tensors.py`). Invariant: it never
allocates memory in proportion to a parameter, and fingerprints its own values after casting, never
what it reads back.
"""

import operator
from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.device.devices import platform_of
from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.integrity.fingerprint import line_dim, transfer
from llamarl.weights.integrity.versioned_tensors import VersionedTensors
from llamarl.weights.layout.boxes import Copy, ParameterLayout, RankLayout, Route, StagingHandle
from llamarl.weights.quantization.rounding import quantize
from llamarl.weights.quantization.shard_scales import ShardScales
from llamarl.weights.transports.ends import Rdma, TransportSender
from llamarl.weights.transports.message_store import MessageStore
from llamarl.weights.transports.packed import cut
from llamarl.weights.transports.registry import End, make_sender


class Writer:
    """Writes the tensors of source rank `rank` into generators' staging memory.

    `tensors` are flat memory or shards by buffer name; `parameters` says which boxes of which
    parameter they hold; `scales` adds what is quantised from these. They are kept as
    `Writer.tensors` (VersionedTensors): the owner labels them with a version, and begins a step or
    invalidates a version before it changes them; the writer adds a replica as a reader when it is
    connected and acknowledges what was written to it.

    Writes to different replicas may run at once, each on a thread of its own, beside the owner's
    calls. `timeout_s` limits what waits for the other end; routes over rdma need `rdma`. Of the
    messages that several replicas get, `packed_bytes` are kept in `messages` until all have them.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        tensors: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
        *,
        scales: ShardScales | None = None,
        timeout_s: float = 60.0,
        rdma: Rdma | None = None,
        packed_bytes: int = 0,
    ) -> None:
        self._made = {} if scales is None else scales.made
        made = (scales.tensors, scales.parameters) if scales is not None else ({}, {})
        self.tensors = VersionedTensors(tensors | made[0])
        self._parameters = parameters | made[1]
        self._layout = RankLayout(
            rank=rank, host=host, parameters=parameters, buckets=(tuple(parameters),)
        )
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self.messages = MessageStore(packed_bytes)
        self._end = End(
            rank=rank, host=host, device=device, timeout_s=timeout_s, rdma=rdma,
            messages=self.messages,
        )  # fmt: skip
        self._stream = platform_of(device).side_stream(device)
        self._senders: dict[int, TransportSender | None] = {}

    def layout(self) -> RankLayout:
        """Where this rank keeps its boxes."""
        return self._layout

    def connect(self, replica: int, route: Route | None) -> None:
        """Keep `route`, whose copies start at this rank; None forgets the replica.

        Unmaps what was mapped for `replica` before, so that a dead replica's memory is freed. Over
        the collective transport this waits for the other ranks of the route: TargetLost if they
        do not come. ValueError if a copy does not read from where the layout has its elements.
        """
        for copy in () if route is None else route.copies:
            for single in copy.each():
                self._require_own(single)
        before = self._senders.pop(replica, None)
        if before is not None:
            before.close()
        if route is None:
            return self.tensors.remove_reader(replica)
        self._senders[replica] = make_sender(route, self._end) if route.copies else None
        self.tensors.add_reader(replica, is_slow=route.is_slow)

    def close(self) -> None:
        """Drop all routes."""
        for replica in list(self._senders):
            self.connect(replica, None)

    def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        """Write this rank's slices of a bucket of `version` into the staging memory of one replica.

        `handles`: one per rank of the replica. Returns the fingerprint by parameter of all values
        written, for all target ranks together. StaleVersion if it would have to read `version` and
        this rank does not hold it, or no longer: what was packed for another replica is not read
        again. TargetLost if the replica cannot be reached; RuntimeError if it is not connected or
        has prepared another version.
        """
        replica, bucket = handles[0].replica, handles[0].bucket
        for handle in handles:
            if handle.version != version:
                raise RuntimeError(f"version {version} must be prepared, got {handle.version}")
        if replica not in self._senders:
            raise RuntimeError(f"generator {replica} is not connected")
        sender = self._senders[replica]

        def copy_cast(copy: Copy, target: Tensor) -> int:
            with self.tensors.reading(version, replica) as tensors:
                return self._transfer(copy, tensors, target)

        written = Fingerprints()
        if sender is not None:
            by_rank = {handle.rank: handle for handle in handles}
            with torch.no_grad(), self._stream.running():
                written = sender.write(bucket, by_rank, copy_cast)
        if handles[0].is_last:
            self.tensors.acknowledge(replica, version)
        return written

    def _transfer(self, copy: Copy, tensors: Mapping[str, Tensor], target: Tensor) -> int:
        """Copy one box, cast or quantised, into `target`; returns its fingerprint."""
        layout, made = self._parameters[copy.name], self._made.get(copy.name)
        tensor = tensors[copy.source_buffer]
        if tensor.dtype == torch.uint8:  # memory of several dtypes
            tensor = tensor.view(getattr(torch, layout.dtype))
        offset = tensor.storage_offset() + copy.source_offset
        source = tensor.as_strided(copy.shape, copy.source_strides, offset)
        dim = line_dim(layout.shape, copy.target_strides)
        if made is None:
            return transfer(copy.name, source, target, copy.start, layout.shape, dim)
        total, scales = 0, tensors[made.scales]
        first = 0 if made.format.is_per_tensor else self._parameters[made.scales].boxes[0].start[0]
        for piece in cut(copy, platform_of(source.device).num_tiled):
            place = tuple(
                slice(a - b, a - b + size)
                for a, b, size in zip(piece.start, copy.start, piece.shape, strict=True)
            )
            rows = slice(piece.start[0] - first, piece.start[0] - first + piece.shape[0])
            own = scales if made.format.is_per_tensor else scales[rows]
            values = quantize(source[place], own, made.format)
            total += transfer(copy.name, values, target[place], piece.start, layout.shape, dim)
        return total

    def _require_own(self, copy: Copy) -> None:
        """ValueError unless the copy reads where this rank's layout has those elements.

        A fingerprint does not find this: wrong values read here would arrive as they were read.
        """
        parameter = self._parameters.get(copy.name)
        place = copy.source_buffer, copy.source_offset, copy.source_strides
        stop = tuple(map(operator.add, copy.start, copy.shape))
        for box in parameter.boxes if parameter else ():
            is_begun = all(map(operator.le, box.start, copy.start))
            is_inside = is_begun and all(map(operator.le, stop, box.stop))
            if is_inside and place == (box.buffer, box.offset_of(copy.start), box.strides):
                return
        raise ValueError(
            f"copy of {copy.name} must read from where the layout has it, got element "
            f"{copy.source_offset} of {copy.source_buffer!r} for index {copy.start}"
        )
