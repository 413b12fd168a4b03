"""The real controller, wired as in a run, around simulated executors and a real storage unit."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from llamarl.controller.balance import Skew
from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import Wiring
from llamarl.core.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EmbeddedConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExperienceConfig,
    PlacementConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.groups import Batch, Dropped, Evaluation, Group, StepStats, Verdict
from llamarl.core.records import (
    NO_VERSION,
    EpisodeState,
    Prompt,
    Request,
    StageResult,
    StageStatus,
    TurnResult,
    episode_of,
)
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import SimulatedRunLogger
from llamarl.planner.simulation.setting import Setting, SimulatedTimeline
from llamarl.planner.simulation.simulated_cluster import make_executors
from llamarl.planner.simulation.simulated_run import make_inputs
from llamarl.planner.simulation.workload import Workload, spread
from llamarl.scoring.samplers import Sampler, admission
from llamarl.scoring.stages import Stage, make_graph
from llamarl.trainer.losses.aipo import AIPOConfig
from tests.fakes import WatchedStorage
from tests.planner.planner_recipes import LLAMA, make_recipe
from tests.simulation.faults import Faults, FaultyCluster, FaultyProcess, StoredRollouts

MANY = 1000
COSTS = Costs(
    decode_step_s=0.01,
    part_s=0.1,
    write_s=0.01,
    score_call_s=0.001,
    moves_s=dict.fromkeys(
        ("trainer weights", "trainer state", "generator weights", "generator kv"), 0.01
    ),
)


def heavy_tail(request: Request) -> int:
    """1 to 4 tokens, and 3 % of the rollouts 40 times as long."""
    rng = random.Random(request.seed)
    return rng.randint(1, 4) * (40 if rng.random() < 0.03 else 1)


@dataclass(frozen=True, kw_only=True)
class LoopWorkload(Workload):
    """Rollouts as long as `length_of` says; reward code raises for `failed_share` of them, as do
    stages of the recipe's own, which drop `stage_drop_share` besides."""

    length_of: Callable[[Request], int]
    failed_share: float = 0.0
    stage_drop_share: float = 0.0
    turns_of: Callable[[int], int] = lambda row_id: 1
    count_of: Callable[[int], int] = lambda row_id: 1
    """The conversations of an episode."""
    tool_failed_share: float = 0.0

    def conversations_of(self, row_id: int) -> int:
        return self.count_of(row_id)

    def answer(self, row_id: int, turn: int) -> tuple[float, TurnResult]:
        rng = random.Random(f"{row_id} {turn}")
        seconds = rng.choice(self.tool_seconds)
        is_done = turn >= self.turns_of(row_id)
        status, error = StageStatus.OK, ""
        if rng.random() < self.tool_failed_share:
            status, error = rng.choice([StageStatus.RAISED, StageStatus.HUNG]), "simulated"
        state = EpisodeState.DONE if is_done else EpisodeState.GOES_ON
        numbers = {"turns": float(turn)}
        result = TurnResult(
            row_id=row_id, attempt=0, state=state, status=status, error=error, numbers=numbers
        )
        return seconds, result

    def length(self, request: Request) -> int:
        return self.length_of(request)

    def pass_stage(self, stage: Stage, row_id: int) -> StageResult:
        chance = random.Random(f"{stage.name} {row_id}").random()
        if chance < self.stage_drop_share:
            return StageResult(row_id=row_id, reason=f"{stage.name}_said_no")
        if chance > 1 - self.failed_share:
            return StageResult(row_id=row_id, status=StageStatus.HUNG, error="simulated")
        return super().pass_stage(stage, row_id)

    def score(self, row_id: int, prompt: Prompt) -> StageResult:
        if spread(row_id * 0.618033988749895) < self.failed_share:
            return StageResult(row_id=row_id, status=StageStatus.RAISED, error="simulated")
        return super().score(row_id, prompt)


class WatchedRunLogger(SimulatedRunLogger):
    """Keeps what it is given."""

    def __init__(self, timeline: SimulatedTimeline) -> None:
        super().__init__(timeline)
        self.drops: list[str] = []
        self.evaluations: list[Evaluation] = []
        self.versions: list[int] = []

    def log_group(self, group: Group, verdict: Verdict) -> None:
        if isinstance(verdict, Dropped):
            self.drops.append(verdict.reason)

    def log_evaluation(self, evaluated: Evaluation | None) -> None:
        if evaluated is not None:
            self.evaluations.append(evaluated)

    async def log_step(self, stats: StepStats, *details: object) -> None:
        self.versions.append(stats.version)
        await super().log_step(stats, *details)


def slower(**seconds: float) -> Faults:
    """A process that takes longer than the others."""
    return Faults(costs=replace(COSTS, **seconds))


def first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(kw_only=True)
class Loop:
    """One run: `await Loop(...).run(folder)`. `faults` are by executor name, "generator-0".

    `state` is that of the checkpoint that it resumes from.
    """

    max_staleness: int = 1
    late: str = "wait"
    num_steps: int = 50
    groups_per_step: int = 4
    num_mini_batches: int = 1
    num_passes: int = 1
    proximal: str = "none"
    parts: str = "dynamic"
    tokens_per_micro_batch: int = 4096
    rollouts_per_prompt: int = 2
    segment_tokens: int = 0
    max_drops_in_row: int = 2000
    sampler: str = "admission"
    sample: Sampler = admission
    """With `sampler="task"`."""
    evaluate_every: int = 0
    patience: int = 0
    save_every: int = 0
    keep: int = 2
    best: str = ""
    exports: bool = False
    num_held_out: int = 0
    keep_rollouts: float = 0.0
    num_hosts: int = 1
    num_replicas: int = 1
    pools: Sequence[str] = ()
    """As `generator.pools`; their number of replicas counts then."""
    elastic: Sequence[int] = ()
    num_collectors: int = 0
    max_restarts: int = 0
    max_stage_restarts: int = 0
    max_num_seqs: int = 64
    is_colocated: bool = False
    length: Callable[[Request], int] = heavy_tail
    drop_share: float = 0.0
    failed_share: float = 0.0
    stage_drop_share: float = 0.0
    costs: Costs = COSTS
    workload: Workload | None = None
    prompts: list[Prompt] | None = None
    num_epochs: float = 0.0
    repeat_share: float = 1.0
    deadline_s: float = math.inf
    """Of the virtual clock."""
    state: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Faults] = field(default_factory=dict)
    storage: WatchedStorage = field(default_factory=WatchedStorage)
    most_turns: int = 0
    """Turns of an episode, 1 to this many by row; 0: there are no episodes."""
    most_conversations: int = 1
    """Conversations of an episode, 1 to this many by row, each with turns of its own."""
    are_parallel: bool = False
    tool_seconds: tuple[float, ...] = (0.0,)
    tool_failed_share: float = 0.0
    observation_tokens: int = 3
    stages: Sequence[Stage] = ()
    reward_columns: Sequence[str] = ("reward",)
    skew: Skew | None = None

    def __post_init__(self) -> None:
        workload = self.workload or LoopWorkload(
            lengths=(),
            prompt_tokens=2,
            equal_share=self.drop_share,
            failed_share=self.failed_share,
            stage_drop_share=self.stage_drop_share,
            length_of=self.length,
            row_step=self.num_hosts,
            num_turns=max(1, self.most_turns),
            turns_of=self.turns_of,
            num_conversations=self.most_conversations,
            count_of=self.conversations_of,
            are_parallel=self.are_parallel,
            tool_seconds=self.tool_seconds,
            tool_failed_share=self.tool_failed_share,
            observation_tokens=self.observation_tokens,
        )
        self.workload = workload
        self.config = self._config()
        rollouts = StoredRollouts(self.faults)
        setting = Setting(config=self.config, workload=workload, rollouts=rollouts)
        self.timeline = setting.timeline
        self.run_logger = WatchedRunLogger(self.timeline)
        graph = make_graph(self.config, self.stages)
        self.cluster = FaultyCluster(self.config, self.costs, self.faults)
        self.executors = make_executors(
            setting, self.cluster, graph, lambda costs, cores: self.storage
        )
        rollouts.storage = self.executors.storage
        assert self.executors.trainer is not None
        self.trainer = self.executors.trainer.executor
        self.trainer.version = self.state.get("version", 0)
        held_out = [
            Prompt(prompt_id=i, text="", token_ids=(2, i), held_out="held_out")
            for i in range(self.num_held_out)
        ]
        self.inputs = make_inputs(self.prompts or workload.prompts(), graph, LLAMA, held_out)
        self.inputs = replace(self.inputs, task={**self.inputs.task, "sample": self.sample})
        self.batches: list[Batch] = []
        self.ahead: dict[int, int] = {}  # version at which a row's proximal log-probs were stored
        self.part_starts: dict[int, list[float]] = defaultdict(list)
        self.prompt_of: dict[int, tuple[int, int]] = {}  # by row
        self.group_of: dict[int, int] = {}  # by row
        self.replica_of: dict[int, int] = {}  # by trained row

    def turns_of(self, row_id: int) -> int:
        """The turns of an episode, or of a conversation."""
        return random.Random(row_id).randint(1, max(1, self.most_turns))

    def conversations_of(self, row_id: int) -> int:
        """The conversations of an episode."""
        return random.Random(f"{row_id}").randint(1, self.most_conversations)

    def _config(self) -> Config:
        return make_recipe(
            data=DataConfig(
                prompts="x",
                held_out="y" if self.num_held_out else None,
                chat=True,
                repeat_share=self.repeat_share,
            ),
            num_epochs=self.num_epochs,
            environment=EnvironmentConfig(
                tools=["task"] if self.most_turns else [], max_restarts=MANY
            ),
            num_steps=self.num_steps,
            algorithm=AIPOConfig(
                proximal=self.proximal,
                max_drops_in_row=self.max_drops_in_row,
                reward_columns=[*self.reward_columns],
                reward_column_weights=[1.0] * len(self.reward_columns),
            ),
            generator=EmbeddedConfig(
                num_replicas=1 if self.pools else self.num_replicas,
                pools=[*self.pools],
                elastic=[*self.elastic],
                num_collectors=self.num_collectors,
                max_restarts=self.max_restarts,
                max_num_seqs=self.max_num_seqs,
                max_model_len=1024,
            ),
            trainer=TrainerConfig(
                num_ranks=2,
                groups_per_step=self.groups_per_step,
                num_mini_batches=self.num_mini_batches,
                num_passes=self.num_passes,
                parts=self.parts,
                tokens_per_micro_batch=self.tokens_per_micro_batch,
                warmup_steps=0,
            ),
            placement=PlacementConfig(colocated=self.is_colocated),
            cluster=ClusterConfig(num_hosts=self.num_hosts, max_restarts=self.max_stage_restarts),
            weights=WeightsConfig(
                transport="shared_memory" if self.num_hosts == 1 else "collective"
            ),
            sampling=SamplingConfig(
                rollouts_per_prompt=self.rollouts_per_prompt,
                max_tokens=512,
                segment_tokens=self.segment_tokens,
            ),
            staleness=StalenessConfig(
                max_staleness=self.max_staleness,
                late=self.late,
            ),
            experience=ExperienceConfig(sampler=self.sampler, keep_rollouts=self.keep_rollouts),
            evaluation=EvaluationConfig(every_steps=self.evaluate_every, patience=self.patience),
            checkpoint=CheckpointConfig(
                every_steps=self.save_every,
                export=self.exports,
                keep=self.keep,
                best=self.best,
            ),
        )

    def process(self, name: str) -> FaultyProcess:
        """The process of this name: "generator-1", "trainer", "scorer"."""
        return cast(FaultyProcess, self.executors.by_name[name])

    async def run(self, run_dir: Path) -> None:
        self.supervisor = Supervisor(self.config, self.executors)
        common = self.config, self.inputs, self.executors, str(run_dir)
        wiring = Wiring(*common, Spans("controller", None), self.state)
        controller = wiring.build_controller(
            self.supervisor, self.run_logger, self.skew, deadline_s=self.deadline_s
        )
        self.gate, self.saver = controller.gate, controller.saver
        engines = controller.engines
        make_requests, make_batch = engines.rules.make_requests, engines.rules.make_batch
        look_ahead = engines.look_ahead

        def note_requests(group: Group) -> list[Request]:
            prompt = group.prompt
            self.prompt_of |= dict.fromkeys(group.row_ids, (prompt.epoch, prompt.prompt_id))
            self.group_of |= dict.fromkeys(group.row_ids, group.group_id)
            return make_requests(group)

        def note_batch(groups: Sequence[Group], version: int, oldest: int) -> Batch:
            batch = make_batch(groups, version, oldest)
            self.batches.append(batch)
            rollouts = {row: each for group in groups for row, each in group.rollouts.items()}
            for row in batch.rows:
                self.replica_of[row.row_id] = rollouts[episode_of(row.row_id)[0]].replica
            self.part_starts[version].append(asyncio.get_running_loop().time())
            return batch

        async def note_look_ahead(groups: Sequence[Group]) -> None:
            try:
                await look_ahead(groups)
            finally:
                batch = self.batches.pop()
                self.ahead |= {row.row_id: batch.version for row in batch.rows}

        engines.look_ahead = note_look_ahead  # type: ignore[method-assign]
        engines.rules = replace(engines.rules, make_requests=note_requests, make_batch=note_batch)
        await engines.connect()
        try:
            await self.supervisor.guard(controller.run())
        except BaseException:
            await controller.saver.rescue()
            raise
        finally:
            await self.supervisor.close()
            await engines.close()

    def trained_rows(self) -> list[int]:
        """Row ids in the order of training."""
        return [row.row_id for batch in self.batches for row in batch.rows]

    def staleness(self) -> list[int]:
        """Staleness of every trained token, from what was in storage."""
        return [age for age, is_trained in self._ages() if is_trained]

    def masked(self) -> list[int]:
        """Staleness of every token with zero weight."""
        return [age for age, is_trained in self._ages() if not is_trained]

    def _ages(self) -> Iterator[tuple[int, bool]]:
        for batch in self.batches:
            for row in batch.rows:
                for version in self.storage.versions[row.row_id]:
                    if version != NO_VERSION:
                        yield batch.version - version, version >= row.oldest_version
