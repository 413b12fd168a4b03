"""The target of a publish: a generator rank's active weights, which the engine reads, and its
staging memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.core.config import WeightsConfig
from llamarl.core.device.devices import platform_of
from llamarl.publish.comparison import MODULUS, Fingerprints
from llamarl.publish.fingerprint import fingerprint, line_dim
from llamarl.publish.layout import (
    BUFFER,
    Box,
    ParameterLayout,
    RankLayout,
    Route,
    StagingHandle,
)
from llamarl.publish.shards import Shape, one_box
from llamarl.publish.transports.mapped import MappedBlock, require_memory, this_host
from llamarl.publish.transports.messages import TransportReceiver
from llamarl.publish.transports.routes import End, make_receiver

ALIGN_BYTES = 64  # a cache line, and the widest vector load


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The flat memory that a publish fills for this rank: `num_elements` of `dtype`, and the boxes
    of every parameter (Hugging Face names) that the rank holds.

    Where parameters differ in dtype, as quantised matrices and their scales do, the memory is bytes
    (uint8, a multiple of ALIGN_BYTES), and a parameter is found in a view of its own dtype.

    `is_staged`: the engine makes its own weights from this memory at a commit (packed, or copied to
    where captured graphs read them); else it decodes straight from it."""

    parameters: dict[str, ParameterLayout]
    num_elements: int
    dtype: torch.dtype
    is_staged: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of the memory."""
        return self.num_elements * self.dtype.itemsize

    def check(self) -> None:
        """Raise ValueError unless all boxes lie in a weight buffer of this size and dtype: sources
        write where they say, also those that were recorded from another engine."""
        is_mixed = self.dtype == torch.uint8
        if is_mixed and self.num_bytes % ALIGN_BYTES:
            raise ValueError(f"bytes must be a multiple of {ALIGN_BYTES}, got {self.num_bytes}")
        for name, layout in self.parameters.items():
            if not is_mixed and layout.dtype != str(self.dtype).removeprefix("torch."):
                raise ValueError(
                    f"dtype of {name} must be the weight buffer's {self.dtype}, got {layout.dtype}"
                )
            for box in layout.boxes:
                if box.buffer != BUFFER:
                    raise ValueError(f"buffer of {name} must be {BUFFER!r}, got {box.buffer!r}")
                if 0 in box.shape:
                    continue
                begin, item = box.offset, getattr(torch, layout.dtype).itemsize
                end = box.offset_of(tuple(stop - 1 for stop in box.stop)) + 1
                is_negative = begin < 0 or min(box.strides, default=0) < 0
                if is_negative or end * item > self.num_bytes:
                    raise ValueError(
                        f"{name} must lie within the weight buffer's {self.num_bytes // item} "
                        f"elements, got elements {begin} to {end - 1}"
                    )


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the flat memory: elements of `dtype` from `offset`, row after row."""

    offset: int
    shape: Shape
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor as a view of `flat`."""
        flat = flat.view(self.dtype)
        return flat[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


class MemoryPlan:
    """The plan of a rank's flat memory: `places` has its tensors by name, one after the other, and
    `parameters` the layouts of the parameters that lie in them."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.parameters: dict[str, ParameterLayout] = {}
        self.num_bytes = 0

    def reserve(self, name: str, shape: Shape, dtype: str) -> Place:
        """Append the tensor `name`. Returns its place."""
        number = getattr(torch, dtype)
        begin = -(-self.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.num_bytes = begin + math.prod(shape) * number.itemsize
        self.places[name] = Place(begin // number.itemsize, shape, number)
        return self.places[name]

    def put(
        self,
        name: str,
        shape: Shape,
        box: tuple[Shape, Shape],
        dtype: str,
        offset: int,
        strides: Shape | None = None,
    ) -> None:
        """Record where this rank's `box` (its shape and first index) of a parameter lies; see
        `shards.one_box`."""
        self.parameters[name] = one_box(shape, *box, dtype, BUFFER, offset, strides)

    def memory(self, *, is_staged: bool = False) -> Memory:
        """Return the whole memory: bytes if its tensors differ in dtype."""
        dtypes = {place.dtype for place in self.places.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        num_bytes = self.num_bytes
        if dtype == torch.uint8:
            num_bytes = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return Memory(
            parameters=self.parameters,
            num_elements=num_bytes // dtype.itemsize,
            dtype=dtype,
            is_staged=is_staged,
        )


def view_box(flat: Tensor, layout: ParameterLayout, box: Box) -> Tensor:
    """Return a box of a parameter as a view of the flat memory."""
    flat = flat.view(getattr(torch, layout.dtype))
    return flat.as_strided(box.shape, box.strides, box.offset)


class EarlySums:
    """Takes fingerprints while other parameters still arrive: `take(name)` returns that of a
    parameter, and runs on a thread of its own for each name that `add` gets, from any thread."""

    def __init__(self, take: Callable[[str], int]) -> None:
        self._take, self._thread = take, ThreadPoolExecutor(1, "sum-weights")
        self._found: dict[str, Future[int]] = {}
        self._is_stopped = False

    def add(self, name: str) -> None:
        """Note that all of this parameter has arrived."""
        with suppress(RuntimeError):  # stopped
            self._found[name] = self._thread.submit(self._take, name)

    def finish(self, names: Iterable[str]) -> Fingerprints:
        """Return the fingerprints of `names`, all of which have arrived. Raises what `take` raised,
        or RuntimeError after `stop`."""
        self._thread.shutdown()
        if self._is_stopped:
            raise RuntimeError("the version was given up while its sums were taken")
        found = {name: sums.result() for name, sums in self._found.items()}
        return Fingerprints(
            (name, found[name] if name in found else self._take(name)) for name in names
        )

    def stop(self) -> None:
        """Stop, and forget the fingerprints."""
        self._is_stopped = True
        self._thread.shutdown(cancel_futures=True)


class WeightBuffer:
    """The `memory` of one rank of a replica, and its staging.

    Its boxes are in buffer BUFFER. Padding between them is never written by a source; all memory
    starts as zeros. Before the first commit the owner fills `active` itself, and sets `version`.

    With `is_offloaded` its owner moves it off the device between publishes (`movable`).

    `before_overwrite(version)` is called before memory that holds `version` is prepared or copied
    over: an owner that passes the weights on sets it to its Writer's `tensors.invalidate`.

    Raises ValueError if a box lies outside or there is too little memory, and creates nothing then;
    RuntimeError if calls come in another order than prepare, [verify,] commit or abort. `commit`
    belongs on the executor's compute thread; the other methods may run beside decoding on other
    threads, one at a time."""

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
        memory.check()
        self._device = torch.empty(0, device=device).device  # with its index
        self.version = -1  # of `active`; -1: nothing published yet
        self.before_overwrite: Callable[[int], None] = lambda version: None
        self._is_staged = memory.is_staged
        self._replica, self._rank, self._host = replica, rank, host or this_host()
        self._end = End(rank=rank, host=self._host, device=self._device, timeout_s=config.timeout_s)
        self._is_offloaded = is_offloaded
        is_on_cpu = self._device.type == "cpu"
        self._is_swapped = is_on_cpu and config.staging == "double_buffer" and not memory.is_staged
        self._parameters = memory.parameters
        self._staging_version = -1
        self._prepared: int | None = None  # a version
        self._receiver: TransportReceiver | None = None
        self._sums: EarlySums | None = None  # of that version
        self._stream = platform_of(self._device).side_stream(self._device)
        self._blocks: list[MappedBlock] = []
        has_host_staging = config.staging == "host"
        wanted = [("a", False), ("b", has_host_staging)]
        if self._is_staged:  # active and staging memory are one
            wanted = [("a", has_host_staging)]
        num_in_host = sum(is_host or is_on_cpu for _, is_host in wanted)
        require_memory(
            f"{'one copy' if num_in_host == 1 else 'two copies'} of the weights of generator "
            f"{replica} rank {rank}",
            num_in_host * memory.num_bytes,
        )
        size = memory.num_elements, memory.dtype
        try:
            for side, is_host in wanted:
                label = f"llamarl-{run_id}-generator-{replica}-{rank}-{side}"
                self._blocks.append(MappedBlock(label, *size, self._device, is_host))
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
        """The flat memory [num_elements] that a publish writes."""
        return self._staging.flat

    def layout(self) -> RankLayout:
        """Return where this rank wants its boxes."""
        return RankLayout(rank=self._rank, host=self._host, parameters=self._parameters)

    def connect(self, route: Route) -> None:
        """Receive over `route` from now on, after waiting for the other ranks of a collective
        route.

        Raises RuntimeError if they do not come, or while a version is open."""
        if self._prepared is not None:
            raise RuntimeError(f"a route came while version {self._prepared} is still open")
        self._disconnect()
        if route.copies:
            self._receiver = make_receiver(route, self._end)

    def prepare(self, version: int) -> StagingHandle:
        """Open the staging memory for `version`, which must be newer than the active one."""
        if self._prepared is not None:
            raise RuntimeError(
                f"version {version} must not be prepared while version {self._prepared} is open"
            )
        if version <= self.version:
            raise RuntimeError(
                f"version {version} must be newer than {self.version}, the active one"
            )
        self.before_overwrite(self.version if self._is_staged else self._staging_version)
        # Other processes see all that was begun, and an engine derives nothing more from before.
        platform_of(self._device).synchronize(self._device)
        address: object = self._staging.address
        if self._receiver is not None:
            if self._sums is not None:
                self._sums.stop()
            self._sums = EarlySums(self._fingerprint)
            address = self._receiver.open(version, self.staging, self._sums.add)
        self._prepared, self._staging_version = version, -1
        return StagingHandle(
            version=version,
            replica=self._replica,
            rank=self._rank,
            host=self._host,
            address=address,
            num_bytes=self._staging.num_bytes,
            may_be_freed=self._is_offloaded and self._staging.is_freed_by_offload,
        )

    def verify(self, version: int) -> Fingerprints:
        """Return the fingerprints of all parameters that this rank holds in the staging memory.

        It waits until the version has arrived. Raises RuntimeError if it no longer can."""
        self._require_prepared(version)
        sums = self._sums  # an abort beside this call forgets them
        if self._receiver is None or sums is None:
            return Fingerprints((name, self._fingerprint(name)) for name in self._parameters)
        self._receiver.arrive(version)
        return sums.finish(self._parameters)

    def commit(self, version: int) -> Tensor:
        """Make the version active. Returns the memory that now holds it."""
        self._require_prepared(version)
        if self._is_swapped:
            self._active, self._staging = self._staging, self._active
            self._staging_version = self.version
        elif not self._is_staged:
            self.before_overwrite(self.version)
            self.active.copy_(self.staging)
            platform_of(self._device).synchronize(self._device)
        self._prepared, self.version = None, version
        return self.active

    def abort(self, version: int) -> None:
        """Forget what was written for `version`; the active memory and its version stay."""
        self._require_prepared(version)
        self._stop_receiving()
        self._prepared = None

    def reset(self) -> None:
        """Forget the version and the route; the next commit is the first."""
        self._disconnect()
        self._prepared = None
        self.version = self._staging_version = -1

    def movable(self) -> list[Tensor]:
        """Return the memory that may leave the device while nothing decodes and nothing is
        published.

        It has to be called before each move: handles made afterwards do not assume that the memory
        stayed."""
        for block in self._blocks:
            block.renew()
        return [block.flat for block in self._blocks if block.flat.device == self._device]

    def close(self) -> None:
        """Release all memory; tensors handed out stay valid. It may be called twice."""
        self._disconnect()
        for block in self._blocks:
            block.close()

    def _fingerprint(self, name: str) -> int:
        """Return the fingerprint of a parameter in the staging memory, taken beside the engine's
        work."""
        layout, total = self._parameters[name], 0
        with self._stream.running():
            for box in layout.boxes:
                view = view_box(self.staging, layout, box)
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

    def _require_prepared(self, version: int) -> None:
        if self._prepared != version:
            state = "none is" if self._prepared is None else f"version {self._prepared} is"
            raise RuntimeError(f"version {version} must be prepared, {state}")
