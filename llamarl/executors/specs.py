"""What an executor is constructed with: one frozen record per role, made by `run/`.

Owns: the fields and which class reads them. Does not own: their values (the config holds most), or
rank, number of ranks and spans, which the cluster adds. Invariant: nothing here imports torch, for
the controller's process makes these records and never loads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from llamarl.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    GeneratorConfig,
    LoraConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.dataflow.graph import Stage
from llamarl.environments.contained import ProgramLimits
from llamarl.environments.definition import Kinds
from llamarl.executors.environment_link import Environments
from llamarl.protocols import ColumnStore, GeneratorReplica
from llamarl.task_neighbours import TaskSource
from llamarl.weights.layout.formats import Kind

if TYPE_CHECKING:
    from llamarl.weights.transports.ends import Rdma


@dataclass(frozen=True, kw_only=True)
class GeneratorSpec:
    """Of one replica, equal on all its ranks.

    `checkpoint` is the folder whose config.json gives the architecture. With `load_weights` its
    weights are version 0; without, no rollout starts before the first commit. `tokenizer` is loaded
    when the first request with stop strings comes. With `lora` a publish moves adapters, the
    weights beside them are the checkpoint's in the trainer's `base_dtype`, and version 0 is that of
    the folder `adapter` (None: the checkpoint itself). `run_dir` holds the files at which the ranks
    meet, named by `run_id`, and what is offloaded unless `placement` names another folder.
    """

    executor: ClassVar[str] = "llamarl.executors.generator:GeneratorExecutor"

    replica: int
    checkpoint: str
    load_weights: bool
    tokenizer: str
    lora: LoraConfig = field(default_factory=LoraConfig)
    base_dtype: str = "float32"
    adapter: str | None = None
    config: GeneratorConfig
    weights: WeightsConfig
    placement: PlacementConfig
    storage: ColumnStore
    run_dir: str
    run_id: str
    environments: Environments | None = None
    """What rollouts take turns with."""
    rdma: Rdma | None = None
    """What weights.transport=rdma works with."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """`tokenizer` is the folder from which an export takes its tokenizer (None: the checkpoint);
    `rendezvous` is a file path that no earlier run used; `num_steps` ends the learning rate's
    schedule. `run_dir` takes what is offloaded unless `placement` names another folder.
    """

    executor: ClassVar[str] = "llamarl.executors.trainer:TrainerExecutor"

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
    adapter: str | None = None
    """Folder of the adapter to start from, with lora; None: one that changes nothing."""
    kinds: tuple[Kind, ...] = ()
    """What the generators' weights are in; beside adapters, those that no publish moves."""
    rdma: Rdma | None = None
    """What weights.transport=rdma works with."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSpec:
    """`column` takes the log-probs of the model in `checkpoint`. `config` is the trainer's;
    `rendezvous` is a file path that no other group of ranks uses."""

    executor: ClassVar[str] = "llamarl.executors.reference:ReferenceExecutor"

    checkpoint: str
    column: str
    rendezvous: str
    config: TrainerConfig
    sampling: SamplingConfig
    storage: ColumnStore


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Of a stage that runs functions: `stage.run` is the name of one of `task_source`, the recipe's
    task.py if it has one, or `reward` says which the stage `score` runs. `numbers`
    names the columns it reads that are one number per rollout; `tokenizer` is a folder with
    tokenizer files."""

    executor: ClassVar[str] = "llamarl.executors.stage:StageExecutor"

    stage: Stage
    numbers: frozenset[str]
    tokenizer: str
    task_source: TaskSource | None
    storage: ColumnStore
    reward: RewardConfig | None = None
    has_openings: bool = False
    """An environment may show the model another prompt than that of its row."""


@dataclass(frozen=True, kw_only=True)
class ExternalSpec:
    """Of a stage that runs External, at `socket`. `units` are names and socket paths of the storage
    units, which consumers read from; `tokenizer` is a folder with tokenizer files."""

    executor: ClassVar[str] = "llamarl.executors.external:ExternalExecutor"

    stage: Stage
    socket: str
    units: tuple[tuple[str, str], ...]
    tokenizer: str
    storage: ColumnStore


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """Of the executor that plays what `config` names, in `task_source` or ready, of these `kinds`.
    `data` says how prompts are rendered; `limits` are those of programs that the model writes.
    Generators on its host find it at `socket` (None: it answers calls only). `rewards` are the
    functions of task.py's `episode_rewards` that are wanted."""

    executor: ClassVar[str] = "llamarl.executors.environment:EnvironmentExecutor"

    config: EnvironmentConfig
    kinds: Kinds
    limits: ProgramLimits
    task_source: TaskSource | None
    data: DataConfig
    tokenizer: str
    socket: str | None = None
    rewards: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Retired rows of storage unit `unit` go to `archive_folder` (None: nowhere), see
    `executors/archive.py`. Clients on the unit's host find it at `socket` (None: it answers calls
    only). Above `max_bytes` in memory (0: no limit) rows go
    to files in `spill_folder` (None: they stay)."""

    executor: ClassVar[str] = "llamarl.executors.storage:StorageExecutor"

    unit: int
    archive_folder: str | None
    socket: str | None = None
    spill_folder: str | None = None
    max_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CollectorSpec:
    """The replicas that a collector asks, by index."""

    executor: ClassVar[str] = "llamarl.executors.collector:CollectorExecutor"

    generators: dict[int, GeneratorReplica]


Spec = (
    GeneratorSpec
    | TrainerSpec
    | ReferenceSpec
    | StageSpec
    | ExternalSpec
    | EnvironmentSpec
    | StorageSpec
    | CollectorSpec
)
