"""Weights of the caller's own, published to generators like a trainer's.

Owns: the caller's tensors as the source of a publish, and their versions. Does not own: the publish
(`weights/sync/`). Invariant: tensors are read only while `publish` runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamarl.cluster.inline import InlineExecutor
from llamarl.loop.engines import Engines
from llamarl.run.wiring import Wiring
from llamarl.weights.layout.formats import formats_of
from llamarl.weights.sync.replicas import PublishStats
from llamarl.weights.transports.registry import TRANSPORTS, named

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from llamarl.executors.weight_source import SourcePart


@dataclass
class OwnWeights:
    """The source in the caller's process. `connect` makes the publisher of `engines` from it."""

    engines: Engines
    connect: Callable[[Any], Awaitable[None]]
    wiring: Wiring
    _source: "SourcePart | None" = None

    async def publish(
        self, source: "Module | Mapping[str, Tensor]", version: int | None
    ) -> PublishStats:
        """Bring these tensors to the generators as `version` (None: the next one). ValueError for a
        wrong name or shape, or where generators expect adapters."""
        from llamarl.models.hf import as_parameters  # here, for it imports torch

        engines = self.engines
        version = engines.version + 1 if version is None else version
        if engines.trainer is not None:
            raise RuntimeError("source must come without the trainer among executors, got both")
        if version <= engines.version:
            raise RuntimeError(f"version must be above {engines.version}, got {version}")
        lora = self.wiring.config.trainer.lora
        lora.require(not lora.is_used, "rank", "be 0 where weights of the caller's are published")
        tensors = as_parameters(source, self.wiring.inputs.architecture)
        if self._source is None:
            self._source = await self._open(tensors)
        assert engines.publisher is not None
        await asyncio.to_thread(self._source.label, version, tensors)
        try:
            stats = await engines.publisher.publish(version)
        finally:
            await asyncio.to_thread(self._source.withdraw)
        engines.version = version
        return stats

    def close(self) -> None:
        """Let go of the tensors."""
        if self._source is not None:
            self._source.close()

    async def _open(self, tensors: "Mapping[str, Tensor]") -> "SourcePart":
        from llamarl.executors.weight_source import SourcePart
        from llamarl.weights.layout.shards import shard_boxes

        config, must = self.wiring.config, f"be {named('is_mapped')} with a source"
        is_mapped = TRANSPORTS[config.weights.transport].is_mapped
        config.require(is_mapped, "weights.transport", must)
        found = SourcePart(
            0,
            *shard_boxes(tensors),
            config=config.weights,
            rdma=None,
            spans=self.wiring.spans,
            formats=formats_of(config.generator, self.wiring.inputs.architecture),
        )
        await self.connect(InlineExecutor("trainer", [found], [self.wiring.spans]).call_all)
        return found
