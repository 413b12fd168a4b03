"""The target of a publish: a generator rank's weights, the active ones that the engine reads,
and the staging memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from llamarl.core.config import WeightsConfig
from llamarl.core.device.devices import platform_of
from llamarl.publish import buckets
from llamarl.publish.buckets import Bucket, Memory
from llamarl.publish.comparison import MODULUS, Fingerprints
from llamarl.publish.fingerprint import fingerprint, line_dim
from llamarl.publish.layout import RankLayout, Route, StagingHandle
from llamarl.publish.transports.mapped import MappedBlock, require_memory, this_host
from llamarl.publish.transports.messages import TransportReceiver
from llamarl.publish.transports.routes import End, make_receiver


class EarlySums:
    """`take(name)` gives the fingerprint of a parameter; it runs on a thread of its own for each
    name that `add` gets, from whichever thread."""

    def __init__(self, take: Callable[[str], int]) -> None:
        self._take = take
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._found: dict[str, int] = {}
        self._error: Exception | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="sum-weights", daemon=True)
        self._thread.start()

    def add(self, name: str) -> None:
        """All of this parameter has arrived."""
        self._names.put(name)

    def finish(self, names: Iterable[str]) -> Fingerprints:
        """Those of `names`, all of which have arrived; what `take` raised. RuntimeError after
        `stop`."""
        self._names.put(None)
        self._thread.join()
        if self._is_stopped:
            raise RuntimeError("the version was given up while its sums were taken")
        if self._error is not None:
            raise self._error
        return Fingerprints(
            (name, self._found[name] if name in self._found else self._take(name)) for name in names
        )

    def stop(self) -> None:
        """Forget them."""
        self._is_stopped = True
        self._names.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (name := self._names.get()) is not None and not self._is_stopped:
                self._found[name] = self._take(name)
        except Exception as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error


class WeightBuffer:
    """The `memory` of one rank of a replica, and its staging.

    Its boxes are in buffer BUFFER. What they leave out (padding) is never written by a source; all
    memory starts as zeros. Before the first commit the owner fills `active` itself, and sets
    `version`.

    With `is_offloaded` its owner moves it off the device between publishes (`movable`).

    `before_overwrite(version)` is called before memory that holds `version` is prepared or copied
    over: an owner that passes the weights on sets it to its Writer's `tensors.invalidate`.

    ValueError if a box does not fit or there is too little memory; nothing is created then.
    RuntimeError if calls come in another order than prepare, [verify,] commit or abort, bucket by
    bucket. `commit` belongs on the executor's compute thread; the other methods may run beside
    decoding on other threads, one at a time.
    """

    def __init__(
        self,
        memory: Memory,
        config: WeightsConfig,
        *,
        replica: int,
        rank: int,
        run_id: str,
        device: torch.device | str = "cpu",
        host: str | None = None,
        is_offloaded: bool = False,
    ) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        if memory.is_staged and config.staging == "bucket":
            raise ValueError(
                "weights.staging must be double_buffer or host for an engine with weights of its "
                "own (packed ones, or captured graphs), got 'bucket'"
            )
        buckets.check(memory)
        self.version = -1  # of `active`; -1: nothing published yet
        self.before_overwrite: Callable[[int], None] = lambda version: None
        self._is_staged = memory.is_staged
        self._replica, self._rank, self._host = replica, rank, host or this_host()
        self._end = End(rank=rank, host=self._host, device=self._device, timeout_s=config.timeout_s)
        self._is_offloaded = is_offloaded
        self._is_swapped = config.staging == "double_buffer" and self._device.type == "cpu"
        self._itemsize = memory.dtype.itemsize
        num_bytes = memory.num_elements * self._itemsize
        self._buckets = [Bucket(tuple(memory.parameters), 0, num_bytes, is_dense=True)]
        self._is_cut = config.staging == "bucket"
        if self._is_cut:
            self._buckets = buckets.cut_buckets(memory.parameters, config.bucket_bytes)
        by_name = {
            name: buckets.moved(memory.parameters[name], bucket.begin)
            for bucket in self._buckets
            for name in bucket.names
        }
        self._places = {name: by_name[name] for name in memory.parameters}  # in staging memory
        self._staging_version = -1
        self._prepared: tuple[int, int] | None = None  # version, bucket
        self._committing = -1  # a version of which `_num_committed` buckets, not all, are active
        self._num_committed = 0
        self._death: str | None = None
        self._receiver: TransportReceiver | None = None
        self._sums: EarlySums | None = None  # of the open bucket
        self._stream = platform_of(self._device).side_stream(self._device)
        self._blocks: list[MappedBlock] = []
        label = f"llamarl-{run_id}-generator-{replica}-{rank}"
        self._allocate(label, memory.num_elements, memory.dtype, config.staging == "host")

    def _allocate(
        self, label: str, num_elements: int, dtype: torch.dtype, has_host_staging: bool
    ) -> None:
        """Active and staging memory; one for both if staged."""
        bucket = num_elements
        if self._is_cut:
            bucket = buckets.room_bytes(self._buckets) // self._itemsize
        wanted = [("a", num_elements, False), ("b", bucket, has_host_staging)]
        if self._is_staged:
            wanted = [("a", num_elements, has_host_staging)]
        in_host = [size for _, size, is_host in wanted if is_host or self._device.type == "cpu"]
        require_memory(
            f"{'one copy' if len(in_host) == 1 else 'two copies'} of the weights of generator "
            f"{self._replica} rank {self._rank}",
            sum(in_host) * dtype.itemsize,
        )
        try:
            for side, size, is_host in wanted:
                self._blocks.append(
                    MappedBlock(f"{label}-{side}", size, dtype, self._device, is_host)
                )
        except ValueError:
            self.close()
            raise
        self._active, self._staging = self._blocks[0], self._blocks[-1]

    @property
    def active(self) -> Tensor:
        """The flat memory [num_elements] that the engine reads."""
        return self._active.flat

    @property
    def staging(self) -> Tensor:
        """The flat memory that a publish writes: [num_elements], or the bucket."""
        return self._staging.flat

    def layout(self) -> RankLayout:
        """Where this rank wants its boxes: offsets within the staging memory of their bucket."""
        names = tuple(bucket.names for bucket in self._buckets)
        return RankLayout(rank=self._rank, host=self._host, parameters=self._places, buckets=names)

    def connect(self, route: Route) -> None:
        """Receive over `route` from now on. Waits for the other ranks of a collective route.

        RuntimeError if they do not come, or while a version is open.
        """
        self._require_alive()
        if self._prepared is not None:
            raise RuntimeError(f"a route came while version {self._prepared[0]} is still open")
        self._disconnect()
        if route.copies:
            self._receiver = make_receiver(route, self._end)

    def prepare(self, version: int, bucket: int) -> StagingHandle:
        """Open the staging memory for one bucket of `version`, which must be newer than the active
        one."""
        self._require_alive()
        if self._prepared is not None:
            raise RuntimeError(
                f"version {version} must not be prepared while version {self._prepared[0]} is open"
            )
        if version <= self.version:
            raise RuntimeError(
                f"version {version} must be newer than {self.version}, the active one"
            )
        following = self._committing if self._num_committed else version, self._num_committed
        if (version, bucket) != following:
            raise RuntimeError(
                f"bucket {following[1]} of version {following[0]} must be prepared next, "
                f"got bucket {bucket} of version {version}"
            )
        if bucket == 0:
            self.before_overwrite(self.version if self._is_staged else self._staging_version)
        cut = self._buckets[bucket]
        if not cut.is_dense:
            self._of(self.staging, cut, is_staging=True).copy_(self._of(self.active, cut))
        self._synchronize()  # also with what an engine still derives from the version before
        address: object = self._staging.address
        if self._receiver is not None:
            if self._sums is not None:
                self._sums.stop()
            self._sums = EarlySums(self._fingerprint)
            address = self._receiver.open(version, bucket, self.staging, self._sums.add)
        self._prepared, self._staging_version = (version, bucket), -1
        return StagingHandle(
            version=version,
            bucket=bucket,
            replica=self._replica,
            rank=self._rank,
            host=self._host,
            address=address,
            num_bytes=self._staging.num_bytes,
            is_last=bucket == len(self._buckets) - 1,
            may_be_freed=self._is_offloaded and self._staging.is_freed_by_offload,
        )

    def verify(self, version: int, bucket: int) -> Fingerprints:
        """Fingerprints of the bucket's parameters in the staging memory: all that this rank holds.

        Waits until the bucket has arrived; RuntimeError if it no longer can.
        """
        cut = self._require_prepared(version, bucket)
        sums = self._sums  # an abort beside this call forgets them
        if self._receiver is None or sums is None:
            return Fingerprints((name, self._fingerprint(name)) for name in cut.names)
        self._receiver.arrive(version, bucket)
        return sums.finish(cut.names)

    def commit(self, version: int, bucket: int) -> Tensor | None:
        """Make a bucket active; with the last one, returns the memory that now holds `version`.

        None while buckets are missing.
        """
        cut = self._require_prepared(version, bucket)
        if not self._is_staged and not self._is_swapped:
            if bucket == 0:
                self.before_overwrite(self.version)
            self._of(self.active, cut).copy_(self._of(self.staging, cut, is_staging=True))
            self._synchronize()
        self._prepared, self._committing = None, version
        self._num_committed += 1
        if self._num_committed < len(self._buckets):
            return None
        if self._is_swapped and not self._is_staged:
            self._active, self._staging = self._staging, self._active
            self._staging_version = self.version
        self._num_committed, self.version = 0, version
        return self.active

    def abort(self, version: int) -> None:
        """Forget what was written for `version`; the active memory and its version stay.

        RuntimeError if a bucket of it was committed already: then every later call raises too.
        """
        self._require_alive()
        is_mixed = self._num_committed > 0 and version == self._committing
        if not is_mixed:
            self._require_prepared(version, self._num_committed)
        self._stop_receiving()
        self._prepared = None
        if is_mixed:
            self._death = (
                f"the weights of generator {self._replica} rank {self._rank} are of two versions: "
                f"{self._num_committed} of {len(self._buckets)} buckets of version {version} were "
                "committed"
            )
            self._require_alive()

    def reset(self) -> None:
        """Forget the version and the route: what is committed next is the first."""
        self._disconnect()
        self._prepared, self._death = None, None
        self.version = self._staging_version = self._committing = -1
        self._num_committed = 0

    def movable(self) -> list[Tensor]:
        """Memory that may leave the device while nothing decodes and nothing is published.

        To be asked before each move: handles made afterwards do not assume that the memory stayed.
        """
        for block in self._blocks:
            block.renew()
        return [block.flat for block in self._blocks if block.flat.device == self._device]

    def close(self) -> None:
        """Release all memory; tensors handed out stay valid. May be called twice."""
        self._disconnect()
        for block in self._blocks:
            block.close()

    def _of(self, flat: Tensor, cut: Bucket, *, is_staging: bool = False) -> Tensor:
        """A bucket's elements in active memory, or in staging memory, where it comes first."""
        begin, end = cut.begin // self._itemsize, cut.end // self._itemsize
        return flat[: end - begin] if is_staging else flat[begin:end]

    def _fingerprint(self, name: str) -> int:
        """Of the staging memory, taken beside whatever the engine has launched."""
        layout, total = self._places[name], 0
        flat = self.staging.view(getattr(torch, layout.dtype))
        with self._stream.running():
            for box in layout.boxes:
                view = flat.as_strided(box.shape, box.strides, box.offset)
                # A GPU's staging in host memory is summed on the GPU: a core is many times slower.
                dim = line_dim(layout.shape, box.strides)
                total += fingerprint(name, view.to(self._device), box.start, layout.shape, dim)
        return total % MODULUS

    def _stop_receiving(self) -> None:
        """Let nothing more come into the staging memory, and nothing more be summed there."""
        if self._receiver is not None:
            self._receiver.abort()
        if self._sums is not None:
            self._sums.stop()
            self._sums = None

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._stop_receiving()
            self._receiver = None

    def _synchronize(self) -> None:
        """Return once other processes see what was begun here."""
        platform_of(self._device).synchronize(self._device)

    def _require_alive(self) -> None:
        if self._death is not None:
            raise RuntimeError(self._death)

    def _require_prepared(self, version: int, bucket: int) -> Bucket:
        self._require_alive()
        if self._prepared != (version, bucket):
            state = "none is"
            if self._prepared is not None:
                state = "bucket {1} of version {0} is".format(*self._prepared)
            raise RuntimeError(f"bucket {bucket} of version {version} must be prepared, {state}")
        return self._buckets[bucket]
