"""The source of a publish: the versions that a rank's tensors hold, and the writer that sends
them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llamarl.core.compute import Background
from llamarl.core.config import WeightsConfig
from llamarl.core.device.devices import platform_of
from llamarl.core.errors import StaleVersion
from llamarl.metrics.span import Spans
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.fingerprint import line_dim, transfer
from llamarl.publish.layout import (
    KEPT_BYTES,
    Copy,
    Format,
    ParameterLayout,
    RankLayout,
    Route,
    StagingHandle,
)
from llamarl.publish.replica import WeightSource
from llamarl.publish.shards import ShardScales, quantize
from llamarl.publish.transports.mapped import this_host
from llamarl.publish.transports.messages import MessageStore, TransportSender, cut
from llamarl.publish.transports.routes import End, make_sender


@dataclass(slots=True)
class _Set:
    """Tensors by buffer name; if `version` is None they are not to be read. A snapshot stays for
    the `pending` replicas, some of which have `begun` to read. `await_values` lets the next work
    that a thread launches come after the tensors' values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    await_values: Callable[[], None] = lambda: None
    version: int | None = None
    num_reading: int = 0
    pending: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)


class VersionedTensors:
    """Tensors with the version that they hold, for readers on several threads. `tensors` are the
    present ones, which have no version until `label` names it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._changed = threading.Condition()
        self._present = _Set(_detached(tensors))
        self._older = _Set()
        self._readers: set[int] = set()
        self._slow: set[int] = set()
        self._pending: set[int] = set()
        self._is_announced = False

    @property
    def version(self) -> int | None:
        """The label of the present tensors; None before the first and while they change."""
        return self._present.version

    def label(self, version: int, tensors: dict[str, Tensor] | None = None) -> None:
        """Label the present tensors; `tensors` take their place if given (same names, views).

        Memory that they replace can still be read under its own version, until `invalidate` or the
        next such call."""
        with self._changed:
            if tensors is not None:
                self._replace(_detached(tensors))
            self._present.version, self._present.begun = version, set()
            self._present.await_values = _mark(self._present.tensors)
            self._is_announced = False
            self._pending = set(self._readers)

    def announce(self) -> None:
        """Note that the present version will be published: every reader will ask for it."""
        with self._changed:
            self._is_announced = True

    def add_reader(self, replica: int, *, is_slow: bool = False) -> None:
        """Add a connected replica; the present version is pending for it."""
        with self._changed:
            self._readers.add(replica)
            (self._slow.add if is_slow else self._slow.discard)(replica)
            self._pending.add(replica)

    def remove_reader(self, replica: int) -> None:
        """Remove a disconnected replica."""
        with self._changed:
            self._readers.discard(replica)
            self._pending.discard(replica)
            self._drop_snapshot(replica)

    def acknowledge(self, replica: int, version: int) -> None:
        """Note that a write of `version` to `replica` is complete."""
        with self._changed:
            if version == self._present.version:
                self._is_announced = True
                self._pending.discard(replica)
            if self._older.version is not None and version >= self._older.version:
                self._drop_snapshot(replica)

    def begin_step(self) -> None:
        """Return once the caller may change the present tensors; they have no version then.

        Takes a snapshot if a reader is pending and the present version was announced or some write
        of it has begun. The snapshot replaces the one before, in the same memory, unless a slow
        reader is amid that one; it is freed when no reader needs it any more."""
        with self._changed:
            version = self._present.version
            is_needed = version is not None and self._is_announced and bool(self._pending)
            older = self._older
            is_kept = older.version is not None and bool(self._slow & older.pending & older.begun)
            is_needed = is_needed and not is_kept
            # A reader that leaves meanwhile may drop the older set, not this memory.
            snapshot = self._older
            if is_needed:
                self._close(snapshot)
        if is_needed:  # writes go on reading the present tensors meanwhile
            for name, tensor in self._present.tensors.items():
                if name not in snapshot.tensors:
                    snapshot.tensors[name] = tensor.clone()
                else:
                    snapshot.tensors[name].copy_(tensor)
        with self._changed:
            if is_needed:
                snapshot.version, snapshot.pending = version, set(self._pending)
                snapshot.begun = set(self._present.begun)
                snapshot.await_values = _mark(snapshot.tensors)
                # Empty if all have acknowledged meanwhile.
                self._older = snapshot if snapshot.pending else _Set()
            self._close(self._present)

    def release(self) -> None:
        """Free the memory of the older set; writes that need it get StaleVersion."""
        with self._changed:
            self._close(self._older)
            self._older = _Set()

    def invalidate(self, version: int) -> None:
        """Return once no copy reads `version` and none will; no effect if it is not held."""
        with self._changed:
            for each in (self._present, self._older):
                if each.version == version:
                    self._close(each)

    @contextmanager
    def reading(self, version: int, replica: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors that hold `version`, which do not change while the block runs.
        `replica` is the reader, if it is one. Raises StaleVersion if no tensors hold it."""
        with self._changed:
            held = next((s for s in (self._present, self._older) if s.version == version), None)
            if held is None:
                raise StaleVersion(
                    f"version {version} is not there to be read, the present one is "
                    f"{self._present.version}"
                )
            held.num_reading += 1
            if replica is not None:
                held.begun.add(replica)
            if held is self._present:
                self._is_announced = True
        try:
            held.await_values()
            yield held.tensors
        finally:
            with self._changed:
                held.num_reading -= 1
                self._changed.notify_all()

    def _replace(self, tensors: dict[str, Tensor]) -> None:
        """Make `tensors` the present ones; if their memory is another, the replaced ones become the
        older set. Called with the lock held."""
        before = self._present
        if tensors.keys() != before.tensors.keys():
            raise ValueError(f"buffers must be {sorted(before.tensors)}, got {sorted(tensors)}")
        is_other = any(
            tensors[name].data_ptr() != old.data_ptr() for name, old in before.tensors.items()
        )
        if before.version is not None and is_other:
            self._close(self._older)
            self._older = before
        else:
            self._close(before)
        self._present = _Set(tensors)

    def _drop_snapshot(self, replica: int) -> None:
        """Note that this replica no longer needs the snapshot; the last one frees it. Called with
        the lock held."""
        if replica in self._older.pending:
            self._older.pending.discard(replica)
            if not self._older.pending:
                self._older = _Set()  # a copy that still reads it keeps its memory

    def _close(self, held: _Set) -> None:
        """Let no new copy read the set, and wait for those that do. Called with the lock held."""
        held.version = None
        self._changed.wait_for(lambda: held.num_reading == 0)


def _mark(tensors: dict[str, Tensor]) -> Callable[[], None]:
    """Return a call that waits for the present point of their device's queue."""
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return platform_of(device).mark(device)


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


class Writer:
    """Writes the tensors of source rank `rank` into generators' staging memory.

    `tensors` are flat memory or shards by buffer name; `parameters` says which boxes of which
    parameter they hold; `scales` adds the quantised matrices made from these. They are kept as
    `Writer.tensors` (VersionedTensors): the owner labels them with a version, and begins a step or
    invalidates a version before it changes them; the writer adds a replica as a reader when it is
    connected and acknowledges each write to it.

    Writes to different replicas may run at once, each on a thread of its own, beside the owner's
    calls. `timeout_s` limits each wait for the other end. Up to `packed_bytes` of messages that
    several replicas get are kept in `messages` until all have them."""

    def __init__(
        self,
        rank: int,
        host: str,
        tensors: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
        *,
        scales: ShardScales | None = None,
        timeout_s: float = 60.0,
        packed_bytes: int = 0,
    ) -> None:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        made = ShardScales(parameters, (), device) if scales is None else scales
        self.tensors = VersionedTensors(tensors | made.tensors)
        self._parameters, self._made = parameters | made.parameters, made.made
        self._layout = RankLayout(rank=rank, host=host, parameters=parameters)
        self.messages = MessageStore(packed_bytes)
        self._end = End(
            rank=rank, host=host, device=device, timeout_s=timeout_s,
            messages=self.messages,
        )  # fmt: skip
        self._stream = platform_of(device).side_stream(device)
        self._senders: dict[int, TransportSender | None] = {}

    def layout(self) -> RankLayout:
        """Return where this rank keeps its boxes."""
        return self._layout

    def connect(self, replica: int, route: Route | None) -> None:
        """Keep `route`, whose copies start at this rank; None forgets the replica.

        Unmaps what was mapped for `replica` before, so that a dead replica's memory is freed. Over
        the collective transport this waits for the other ranks of the route, and raises TargetLost
        if they do not come. Raises ValueError if a copy does not read from where the layout has its
        elements."""
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
        """Write this rank's slices of `version` into the staging memory of one replica.

        `handles`: one per rank of the replica. Returns the fingerprint by parameter of all values
        written, for all target ranks together. Raises StaleVersion if it has to read `version` and
        this rank does not hold it any more, which messages packed for another replica do not need;
        TargetLost if the replica cannot be reached; RuntimeError if it is not connected or has
        prepared another version."""
        replica = handles[0].replica
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
                written = sender.write(by_rank, copy_cast)
        self.tensors.acknowledge(replica, version)
        return written

    def _transfer(self, copy: Copy, tensors: Mapping[str, Tensor], target: Tensor) -> int:
        """Copy one box, cast or quantised, into `target`. Returns its fingerprint."""
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
        is_one = made.format.is_per_tensor
        first = () if is_one else self._parameters[made.scales].boxes[0].start
        for piece in cut(copy, platform_of(source.device).num_tiled):
            place = tuple(
                slice(a - b, a - b + size)
                for a, b, size in zip(piece.start, copy.start, piece.shape, strict=True)
            )
            rows = tuple(
                slice(a - b, a - b + size)
                for a, b, size in zip(piece.start, first, piece.shape, strict=False)
            )
            own = scales if is_one else scales[rows]
            values = quantize(source[place], own, made.format)
            total += transfer(copy.name, values, target[place], piece.start, layout.shape, dim)
        return total

    def _require_own(self, copy: Copy) -> None:
        """Raise ValueError unless the copy reads where this rank's layout has those elements.

        A fingerprint does not find this: wrong values read here would arrive as they were read."""
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


class SourcePart(WeightSource):
    """The source of one rank; writes run on threads beside the compute thread.

    `buffers` and `parameters` are the Writer's. The owner labels them with the version that they
    hold. A trainer also sends its matrices in these `formats`, for which `cut` and `num_ranks` are
    those of ShardScales. `frozen` are the sums of weights that no publish moves. `check` raises if
    the executor cannot answer calls."""

    def __init__(
        self,
        rank: int,
        buffers: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
        *,
        config: WeightsConfig,
        spans: Spans,
        check: Callable[[], None] = lambda: None,
        formats: Sequence[Format] = (),
        cut: Collection[str] = (),
        num_ranks: int = 1,
        frozen: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._frozen = frozen or {}
        device = next(iter(buffers.values())).device
        self._scales = ShardScales(parameters, formats, device, cut=cut, num_ranks=num_ranks)
        self._writer = Writer(
            rank,
            this_host(),
            buffers,
            parameters,
            scales=self._scales,
            timeout_s=config.timeout_s,
            packed_bytes=KEPT_BYTES,
        )
        self._buffers = buffers
        self.tensors = self._writer.tensors
        self._spans = spans
        self._check = check
        self._withdrawn: int | None = None
        self.background = Background()

    async def source_layout(self) -> RankLayout:
        self._check()
        return replace(self._writer.layout(), frozen=self._frozen)

    async def connect_target(self, replica: int, route: Route | None) -> None:
        self._check()
        await self.background.run(self._writer.connect, replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        self._check()
        with self._spans.span("write", "publish", version=version):
            return await self.background.run(self._writer.write, version, handles)

    @torch.no_grad()
    def label(self, version: int, buffers: dict[str, Tensor] | None = None) -> None:
        """Label the present tensors with `version`; `buffers` take their place if given, as in
        `VersionedTensors.label`. With formats all ranks call it, where their collectives run."""
        self._scales.derive(buffers or self._buffers)
        if buffers is not None:
            buffers = buffers | self._scales.tensors
        self.tensors.label(version, buffers)

    def withdraw(self) -> None:
        """Return once no write reads the tensors, and let none begin until `restore`."""
        if (version := self.tensors.version) is not None:
            self.tensors.invalidate(version)
            self._withdrawn = version
        self.tensors.release()
        self._writer.messages.clear()

    def restore(self) -> None:
        """Label the tensors as before they were withdrawn; they hold the same values again."""
        if self._withdrawn is not None:
            self.tensors.label(self._withdrawn)
            self._withdrawn = None

    def reset(self) -> None:
        """Drop all routes; the tensors hold no version before the next `label`."""
        self.withdraw()
        self._withdrawn = None
        self._writer.close()

    def close(self) -> None:
        """Drop all routes."""
        self._writer.close()
