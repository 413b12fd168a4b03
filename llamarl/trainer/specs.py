"""The specs of trainer and reference: frozen records, made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llamarl.core.config import (
    AlgorithmConfig,
    PlacementConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.extensions import TaskSource
from llamarl.core.faces import ColumnStore
from llamarl.publish.layout import Kind


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The spec of the trainer. `tokenizer` is the folder from which an export takes its tokenizer
    (None: the checkpoint); `rendezvous` is a file path that no earlier run used; `num_steps` ends
    the learning rate's schedule. Offloaded memory goes to `run_dir` unless `placement` names
    another folder."""

    executor: ClassVar[str] = "llamarl.trainer.worker:TrainerWorker"

    checkpoint: str
    tokenizer: str | None = None
    task_source: TaskSource | None = None
    rendezvous: str
    config: TrainerConfig
    algorithm: AlgorithmConfig
    sampling: SamplingConfig
    weights: WeightsConfig
    placement: PlacementConfig
    storage: ColumnStore
    run_dir: str
    num_steps: int
    seed: int
    replays_routing: bool = False
    """Whether tokens go to the experts that the generator recorded."""
    adapter: str | None = None
    """The folder of the adapter to start from, with lora; None: one that changes nothing."""
    kinds: tuple[Kind, ...] = ()
    """The forms of the generators' weights; with adapters, of the weights that no publish moves."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSpec:
    """The spec of a frozen model. `column` takes the log-probs of the model in `checkpoint`.
    `config` is the trainer's; `rendezvous` is a file path that no other group of ranks uses. With
    `replays_routing` a model with as many experts in as many layers as the policy's sends tokens to
    those that the generator recorded."""

    executor: ClassVar[str] = "llamarl.trainer.reference:ReferenceWorker"

    checkpoint: str
    column: str
    rendezvous: str
    config: TrainerConfig
    sampling: SamplingConfig
    storage: ColumnStore
    replays_routing: bool = False
