"""The part of an executor that other executors get weights from: a trainer's rank, or a
generator's, which passes on what it received."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llamarl.config import WeightsConfig
from llamarl.executors.compute import Background
from llamarl.metrics.span import Spans
from llamarl.weights.integrity.comparison import Fingerprints
from llamarl.weights.layout.boxes import ParameterLayout, RankLayout, Route, StagingHandle
from llamarl.weights.layout.formats import Format
from llamarl.weights.quantization.shard_scales import ShardScales
from llamarl.weights.sync.writer import Writer
from llamarl.weights.transports.ends import Rdma
from llamarl.weights.transports.shared_memory import this_host


class SourcePart:
    """protocols.WeightSource for one rank; writes run on threads beside the compute thread.

    `buffers` and `parameters` are the Writer's. The owner labels them with the version that they
    hold. A trainer also sends its matrices in these `formats`: `cut` and `num_ranks` are those of
    ShardScales. `frozen` are the sums of weights that no publish moves. `check` raises if the
    executor is not fit to be asked.
    """

    def __init__(
        self,
        rank: int,
        buffers: dict[str, Tensor],
        parameters: dict[str, ParameterLayout],
        *,
        config: WeightsConfig,
        rdma: Rdma | None,
        spans: Spans,
        check: Callable[[], None] = lambda: None,
        formats: Sequence[Format] = (),
        cut: Collection[str] = (),
        num_ranks: int = 1,
        frozen: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._frozen = frozen or {}
        self._scales = None
        if formats:
            device = next(iter(buffers.values())).device
            shared: dict[str, Any] = {"cut": cut, "num_ranks": num_ranks}
            self._scales = ShardScales(parameters, formats, device, **shared)
        self._writer = Writer(
            rank,
            this_host(),
            buffers,
            parameters,
            scales=self._scales,
            timeout_s=config.timeout_s,
            rdma=rdma,
            packed_bytes=config.packed_bytes,
        )
        self._buffers = buffers
        self.tensors = self._writer.tensors
        self._spans = spans
        self._check = check
        self._withdrawn: int | None = None
        self.background = Background()

    async def source_layout(self) -> RankLayout:
        """Where this rank keeps its boxes of the parameters."""
        self._check()
        return replace(self._writer.layout(), frozen=self._frozen)

    async def connect_target(self, replica: int, route: Route | None) -> None:
        """Keep the route to `replica`, this rank's part of it (None: forget the replica); waits for
        the route's other ranks."""
        self._check()
        await self.background.run(self._writer.connect, replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        """Write a bucket of `version` into a replica's staging memory. StaleVersion, TargetLost."""
        self._check()
        with self._spans.span("write", "publish", version=version):
            return await self.background.run(self._writer.write, version, handles)

    @torch.no_grad()
    def label(self, version: int, buffers: dict[str, Tensor] | None = None) -> None:
        """The present tensors hold `version`; `buffers` take their place if given, as in
        `VersionedTensors.label`. With formats all ranks call it, where their collectives run."""
        if self._scales is not None:
            held = buffers or self._buffers
            self._scales.derive(held)
            buffers = None if buffers is None else buffers | self._scales.tensors
        self.tensors.label(version, buffers)

    def withdraw(self) -> None:
        """Return once no write reads the tensors, and let none begin until `restore`."""
        if (version := self.tensors.version) is not None:
            self.tensors.invalidate(version)
            self._withdrawn = version
        self.tensors.release()
        self._writer.messages.clear()

    def restore(self) -> None:
        """The tensors hold what they held when they were withdrawn."""
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
