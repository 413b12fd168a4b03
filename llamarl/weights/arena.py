"""The arena: a generator rank's weights, live (in use), and the shadow that a publish writes.

Owns: these memories, which version lies in which, and the order of calls. Does not own: the model
over them or the protocol (`publish.py`). Invariant: the live memory changes only in `flip`, and
only to what was completely offered.

What the shadow is, by `weights.shadow`:

    full    a second memory like the live one. On the CPU a flip swaps the two; on a GPU it copies,
            because CUDA graphs have captured the addresses of the live one.
    host    the same in host memory (pinned for a GPU); a flip copies.
    bucket  a small buffer. Parts of at most `bucket_bytes` are offered and flipped one by one; once
            one was flipped, the way back is gone: a discard then ends the arena.

A staged engine makes its own weights from the arena at a flip and never reads it otherwise, so
there is one memory only, which is shadow and live in turn; it keeps its content until the next
offer. The CPU's memories are shared segments, so that siblings of this host can map them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.weights import parts
from llamarl.weights.collective import CollectiveInlet
from llamarl.weights.comparison import MODULUS, Fingerprints
from llamarl.weights.fingerprint import fingerprint
from llamarl.weights.layout import Offer, ParameterLayout, RankLayout, Route
from llamarl.weights.mapped import Block
from llamarl.weights.packed import target_ranks
from llamarl.weights.parts import Part
from llamarl.weights.rdma import RdmaInlet
from llamarl.weights.shared_memory import require_memory, this_host
from llamarl.weights.transport import Inlet, Rdma


class Arena:
    """Memory for `num_elements` elements of `dtype`, and its shadow.

    `parameters` says where each parameter lies: boxes with buffer "arena" and this dtype. What
    the boxes leave out (padding) is never written by a source; all memory starts as zeros. Before
    the first flip the owner fills `live` itself, and labels it with `version`.

    With `is_offloaded` its owner moves it off the device between publishes (`movable`).

    `before_overwrite(version)` is called before memory that holds `version` is offered or copied
    over: an owner who passes the weights on sets it to its Writer's `retire`.

    ValueError if a box does not fit or there is too little memory; nothing is created then.
    RuntimeError if calls come in another order than offer, [fingerprint,] flip or discard, part by
    part. `flip` belongs on the executor's compute thread; the other methods may run beside
    decoding on other threads, one at a time.
    """

    def __init__(
        self,
        *,
        parameters: dict[str, ParameterLayout],
        num_elements: int,
        dtype: torch.dtype,
        is_staged: bool = False,
        replica: int,
        rank: int,
        run_id: str,
        shadow: str = "full",
        bucket_bytes: int = 1 << 25,
        device: torch.device | str = "cpu",
        host: str | None = None,
        rdma: Rdma | None = None,
        timeout_s: float = 60.0,
        is_offloaded: bool = False,
    ) -> None:
        device = torch.empty(0, device=device).device  # with its index
        if num_elements < 1:
            raise ValueError(f"num_elements must be at least 1, got {num_elements}")
        if is_staged and shadow == "bucket":
            raise ValueError(
                "weights.shadow must be full or host for an engine with weights of its own "
                "(quantised or packed ones, or captured graphs), got 'bucket'"
            )
        for name, layout in parameters.items():
            parts.check(name, layout, num_elements, dtype)
        self.version = -1  # of `live`; -1: nothing published yet
        self.before_overwrite: Callable[[int], None] = lambda version: None
        self._parameters, self._num_elements = parameters, num_elements
        self._replica, self._rank, self._host = replica, rank, host or this_host()
        self._rdma, self._timeout_s, self._device = rdma, timeout_s, device
        self._is_offloaded = is_offloaded
        self._is_staged, self._is_swapped = is_staged, shadow == "full" and device.type == "cpu"
        self._parts = [parts.whole(parameters, num_elements)]
        if shadow == "bucket":
            self._parts = parts.cut_parts(parameters, max(1, bucket_bytes // dtype.itemsize))
        self._shadow_version = -1
        self._offered: tuple[int, int] | None = None  # version, part
        self._num_flipped = 0  # parts of the version that is being taken over
        self._taking = -1  # that version
        self._death: str | None = None
        self._inlet: Inlet | None = None
        self._blocks: list[Block] = []
        self._allocate(f"llamarl-{run_id}-generator-{replica}-{rank}", dtype, shadow)

    def _allocate(self, label: str, dtype: torch.dtype, shadow: str) -> None:
        """Live and shadow; one for both if staged."""
        bucket = max((part.end - part.begin for part in self._parts), default=1)
        wanted = [("a", self._num_elements, False), ("b", bucket, shadow == "host")]
        if self._is_staged:
            wanted = [("a", self._num_elements, shadow == "host")]
        in_host = [size for _, size, is_host in wanted if is_host or self._device.type == "cpu"]
        require_memory(
            f"{'one copy' if len(in_host) == 1 else 'two copies'} of the weights of generator "
            f"{self._replica} rank {self._rank}",
            sum(in_host) * dtype.itemsize,
        )
        try:
            for side, size, is_host in wanted:
                self._blocks.append(Block(f"{label}-{side}", size, dtype, self._device, is_host))
        except ValueError:
            self.close()
            raise
        self._live, self._shadow = self._blocks[0], self._blocks[-1]

    @property
    def live(self) -> Tensor:
        """The flat memory [num_elements] that the engine reads."""
        return self._live.flat

    @property
    def shadow(self) -> Tensor:
        """The flat memory that a publish writes: [num_elements], or the bucket."""
        return self._shadow.flat

    def layout(self) -> RankLayout:
        """Where this rank wants its boxes: offsets within what is offered."""
        by_name = {
            name: parts.moved(self._parameters[name], part.begin)
            for part in self._parts
            for name in part.names
        }
        parameters = {name: by_name[name] for name in self._parameters}
        names = tuple(part.names for part in self._parts)
        return RankLayout(rank=self._rank, host=self._host, parameters=parameters, parts=names)

    def connect(self, route: Route) -> None:
        """Receive over `route` from now on. Waits for the other ranks of a collective route.

        RuntimeError if they do not come, or while a version is open.
        """
        self._require_alive()
        if self._offered is not None:
            raise RuntimeError(f"a route came while version {self._offered[0]} is still open")
        self._disconnect()
        if self._rank not in target_ranks(route):
            return
        names = [part.names for part in self._parts]
        if route.transport == "collective":
            self._inlet = CollectiveInlet(route, self._rank, names, self._device, self._timeout_s)
        elif route.transport == "rdma":
            if self._rdma is None:
                raise ValueError("weights.transport must not be rdma without Monarch")
            self._inlet = RdmaInlet(route, self._rank, names, self._rdma)

    def offer(self, version: int, part: int) -> Offer:
        """Open the shadow for one part of `version`, which must be newer than the live one."""
        self._require_alive()
        if self._offered is not None:
            raise RuntimeError(
                f"version {version} offered while version {self._offered[0]} is still open"
            )
        if version <= self.version:
            raise RuntimeError(f"version {version} offered, but {self.version} is already live")
        if self._num_flipped and version != self._taking:
            raise RuntimeError(
                f"version {version} offered after part {self._num_flipped - 1} of version "
                f"{self._taking} was flipped"
            )
        if part != self._num_flipped or part >= len(self._parts):
            raise RuntimeError(
                f"part {part} offered, the next one of {len(self._parts)} is {self._num_flipped}"
            )
        if part == 0:
            self.before_overwrite(self.version if self._is_staged else self._shadow_version)
        cut = self._parts[part]
        if not cut.is_dense:
            self.shadow[: cut.end - cut.begin].copy_(self.live[cut.begin : cut.end])
        self._synchronize()  # also with what an engine still derives from the version before
        address = (
            self._inlet.open(version, part, self.shadow) if self._inlet else self._shadow.address
        )
        self._offered, self._shadow_version = (version, part), -1
        return Offer(
            version=version,
            part=part,
            replica=self._replica,
            rank=self._rank,
            host=self._host,
            address=address,
            num_bytes=self._shadow.num_bytes,
            names=cut.names if len(self._parts) > 1 else (),
            may_be_freed=self._is_offloaded and self._shadow.is_freed_by_offload,
        )

    def fingerprint(self, version: int, part: int) -> Fingerprints:
        """Fingerprint of each of the part's parameters in the shadow: all that this rank holds.

        Waits until the part has arrived; RuntimeError if it cannot any more.
        """
        cut = self._require_offered(version, part)
        if self._inlet is not None:
            self._inlet.arrive(version, part)
        return Fingerprints(
            (name, self._fingerprint(name, parts.moved(self._parameters[name], cut.begin)))
            for name in cut.names
        )

    def flip(self, version: int, part: int) -> Tensor | None:
        """Take over a part; with the last one, returns the memory that now holds `version`.

        None while parts are missing.
        """
        cut = self._require_offered(version, part)
        if not self._is_staged and not self._is_swapped:
            if part == 0:
                self.before_overwrite(self.version)
            self.live[cut.begin : cut.end].copy_(self.shadow[: cut.end - cut.begin])
            self._synchronize()
        self._offered, self._taking = None, version
        self._num_flipped += 1
        if self._num_flipped < len(self._parts):
            return None
        if self._is_swapped and not self._is_staged:
            self._live, self._shadow = self._shadow, self._live
            self._shadow_version = self.version
        self._num_flipped, self.version = 0, version
        return self.live

    def discard(self, version: int) -> None:
        """Forget what was written for `version`; the live memory and its version stay.

        RuntimeError if a part of it was flipped already: then every later call raises too.
        """
        self._require_alive()
        if self._num_flipped and version == self._taking:
            self._death = (
                f"the weights of generator {self._replica} rank {self._rank} are of two versions: "
                f"{self._num_flipped} of {len(self._parts)} parts of version {version} were flipped"
            )
            self._stop_receiving()
            self._require_alive()
        self._require_offered(version, self._offered[1] if self._offered else 0)
        self._stop_receiving()
        self._offered = None

    def movable(self) -> list[Tensor]:
        """Memory that may leave the device while nothing decodes and nothing is published.

        Ask anew each time: offers made after it do not assume that the memory stayed.
        """
        for block in self._blocks:
            block.renew()
        return [block.flat for block in self._blocks if block.flat.device == self._device]

    def close(self) -> None:
        """Release all memory; tensors handed out stay valid. May be called twice."""
        self._disconnect()
        for block in self._blocks:
            block.close()

    def _fingerprint(self, name: str, layout: ParameterLayout) -> int:
        total = 0
        for box in layout.boxes:
            view = self.shadow.as_strided(parts.extents(box), box.strides, box.offset)
            # A GPU's shadow in host memory is summed on the GPU: a core is many times slower.
            total += fingerprint(name, view.to(self._device), box.start, layout.shape)
        return total % MODULUS

    def _disconnect(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None

    def _stop_receiving(self) -> None:
        if self._inlet is not None:
            self._inlet.discard()

    def _synchronize(self) -> None:
        """Let other processes find what was begun here done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _require_alive(self) -> None:
        if self._death is not None:
            raise RuntimeError(self._death)

    def _require_offered(self, version: int, part: int) -> Part:
        self._require_alive()
        if self._offered != (version, part):
            state = "none is open"
            if self._offered is not None:
                state = "version {} is open".format(*self._offered)
                state += f", part {self._offered[1]}" if self._offered[0] == version else ""
            raise RuntimeError(f"version {version} was not offered: {state}")
        return self._parts[part]
