"""What stages and environments are constructed with: frozen records, made without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from llamarl.core.config import (
    DataConfig,
    EnvironmentConfig,
    RewardConfig,
)
from llamarl.core.extensions import TaskSource
from llamarl.core.faces import ColumnStore
from llamarl.scoring.definition import Kinds
from llamarl.scoring.sandbox.contained import ProgramLimits
from llamarl.scoring.stages import Stage


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Of a stage that runs functions: `stage.run` is the name of one of `task_source`, the recipe's
    task.py if it has one, or `reward` says which the stage `score` runs. `numbers`
    names the columns it reads that are one number per rollout; `tokenizer` is a folder with
    tokenizer files."""

    executor: ClassVar[str] = "llamarl.scoring.stage_worker:StageExecutor"

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

    executor: ClassVar[str] = "llamarl.scoring.external:ExternalExecutor"

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

    executor: ClassVar[str] = "llamarl.scoring.environment:EnvironmentExecutor"

    config: EnvironmentConfig
    kinds: Kinds
    limits: ProgramLimits
    task_source: TaskSource | None
    data: DataConfig
    tokenizer: str
    socket: str | None = None
    rewards: list[str] = field(default_factory=list)
