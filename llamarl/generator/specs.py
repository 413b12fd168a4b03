"""The specs of a generator and a collector, frozen records that are made without torch, and the
calls of a run that continues to a generator that is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from llamarl.core.config import (
    GeneratorConfig,
    LoraConfig,
    PlacementConfig,
    WeightsConfig,
)
from llamarl.core.faces import ColumnStore, GeneratorReplica
from llamarl.scoring.environment import Environments

HEARTBEAT_S = 30.0
"""The longest time until a replica reports which rollouts have stopped, if any; when all rollouts
of a prompt have stopped it reports them at once."""


class Resettable(Protocol):
    """A generator that outlives a session of its run."""

    async def reset(self) -> None:
        """Forget every rollout, version and route: nothing starts before the next commit. Returns
        once no call to storage or trainer is under way; raises if that takes too long."""

    async def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        """Write to `storage`, and take turns with these `environments` (None: there are none), from
        now on, in the next session."""


@dataclass(frozen=True, kw_only=True)
class GeneratorSpec:
    """The spec of one replica, equal on all its ranks.

    `checkpoint` is the folder whose config.json gives the architecture. With `load_weights` its
    weights are version 0; without, no rollout starts before the first commit. `tokenizer` is loaded
    when the first request with stop strings comes. With `lora` a publish moves adapters, the
    weights beside them are the checkpoint's in the trainer's `base_dtype`, and version 0 is that of
    the folder `adapter` (None: the checkpoint itself). `run_dir` holds the files at which the ranks
    meet, named by `run_id`, and offloaded memory unless `placement` names another folder."""

    executor: ClassVar[str] = "llamarl.generator.worker:GeneratorWorker"

    replica: int
    checkpoint: str
    load_weights: bool
    tokenizer: str
    lora: LoraConfig = field(default_factory=LoraConfig)
    base_dtype: str = "float32"
    records_experts: bool = False
    """Whether the experts of each token are stored with its rollout."""
    num_kept_ids: int = 0
    """How many tokens are stored with each one among which it was drawn; 0: it was among all."""
    adapter: str | None = None
    config: GeneratorConfig
    weights: WeightsConfig
    placement: PlacementConfig
    storage: ColumnStore
    run_dir: str
    run_id: str
    environments: Environments | None = None
    """The environments that rollouts take turns with."""
    heartbeat_s: float = HEARTBEAT_S


@dataclass(frozen=True, kw_only=True)
class CollectorSpec:
    """The spec of a collector: the replicas that it asks, by index."""

    executor: ClassVar[str] = "llamarl.generator.collector:CollectorWorker"

    generators: dict[int, GeneratorReplica]
