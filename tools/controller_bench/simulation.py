"""The real controller, wired as in a run, around simulated executors of a large cluster."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from controller_bench.charged import Charged, Idle, IdleReplica, IdleScorer, IdleTrainer, Load
from controller_bench.clock import CostClock
from controller_bench.messages import MessageCosts
from llamarl.controller.starter import Executors
from llamarl.core.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GeneratorConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.metrics.console import Progress
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog, open_trackers
from llamarl.model.architecture import read_architecture
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import Setting
from llamarl.planner.simulation.simulated_cluster import (
    SimulatedCluster,
    SimulatedProcess,
    make_executors,
)
from llamarl.planner.simulation.simulated_run import drive, make_inputs
from llamarl.planner.simulation.workload import USUAL_PROMPT_TOKENS, make_workload
from llamarl.scoring.stages import make_graph
from llamarl.storage.client import Store
from llamarl.trainer.losses.aipo import AIPOConfig

NUM_STORAGE_UNITS = 4
EQUAL_SHARE = 0.0
# Of a step, so that it lasts about `step_s` and neither side waits long for the other.
DECODE_SHARE, TRAIN_SHARE = 0.0065 / 20, 0.88
MEDIAN_TOKENS = 400  # for which that holds
ARCHITECTURE = Path(__file__).parents[2] / "recipes" / "llama31_405b_math" / "architecture"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the run is. The seconds of its executors follow: a step takes about `step_s`."""

    num_replicas: int = 256
    ranks_per_replica: int = 8
    num_trainer_ranks: int = 2048
    num_groups: int = 1024
    rollouts_per_group: int = 16
    max_staleness: int = 1
    num_collectors: int = 1
    num_steps: int = 5
    step_s: float = 20.0
    median_tokens: int = MEDIAN_TOKENS
    num_turns: int = 0
    """Of each episode, or conversation; 0: of a rollout that has no others there are none."""
    num_conversations: int = 1
    """Of each rollout, which are an episode's if there are several; they share its tokens."""

    @property
    def num_ranks(self) -> int:
        """Of trainer and generators together."""
        return self.num_replicas * self.ranks_per_replica + self.num_trainer_ranks

    @property
    def num_rollouts(self) -> int:
        """Trained in a step."""
        return self.num_groups * self.rollouts_per_group

    @property
    def has_episodes(self) -> bool:
        """Whether rollouts take turns."""
        return self.num_turns > 0 or self.num_conversations > 1

    @property
    def tokens_per_conversation(self) -> int:
        """In the median."""
        return self.median_tokens // self.num_conversations


def make_config(shape: Shape) -> Config:
    """The recipe of such a run."""
    max_tokens = 5 * shape.tokens_per_conversation
    return Config(
        num_steps=shape.num_steps,
        model=ModelConfig(checkpoint="none"),
        data=DataConfig(prompts="none.jsonl", chat=True),
        environment=EnvironmentConfig(tools=["task"] if shape.has_episodes else []),
        reward=RewardConfig(num_workers=256),
        algorithm=AIPOConfig(),
        generator=GeneratorConfig(
            device="cuda",
            num_replicas=shape.num_replicas,
            num_ranks=shape.ranks_per_replica,
            num_collectors=shape.num_collectors,
            max_num_seqs=64,
            max_model_len=2 * max_tokens,
        ),
        trainer=TrainerConfig(
            device="cuda",
            num_ranks=shape.num_trainer_ranks,
            tensor_parallel=8 if shape.num_trainer_ranks % 8 == 0 else 1,
            groups_per_step=shape.num_groups,
            tokens_per_micro_batch=16384,
        ),
        weights=WeightsConfig(transport="collective", straggler_timeout_s=5.0),
        placement=PlacementConfig(),
        cluster=ClusterConfig(num_hosts=1024),
        sampling=SamplingConfig(
            rollouts_per_prompt=shape.rollouts_per_group, max_tokens=max_tokens
        ),
        staleness=StalenessConfig(max_staleness=shape.max_staleness),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(every_steps=0, export=False),
        plan=PlanConfig(
            prompt_tokens=USUAL_PROMPT_TOKENS,
            median_tokens=shape.tokens_per_conversation,
            num_turns=max(1, shape.num_turns),
            observation_tokens=20,
            tool_s=0.1,
        ),
    )


def make_costs(config: Config, shape: Shape) -> Costs:
    """Executors whose steps take `step_s`, the trainer's share of it nearly all."""
    mean_tokens = config.plan.prompt_tokens + 1.38 * config.plan.median_tokens
    num_rows = shape.num_rollouts * shape.num_conversations
    tokens_per_rank = num_rows * mean_tokens / config.trainer.num_data_ranks
    return Costs(
        decode_step_s=DECODE_SHARE * shape.step_s * MEDIAN_TOKENS / shape.median_tokens,
        prefill_token_s=1e-5,
        commit_s=0.1,
        token_s=TRAIN_SHARE * shape.step_s / tokens_per_rank,
        optimizer_s=0.03 * shape.step_s,
        write_s=3.0,
        check_s=0.5,
        score_call_s=0.01,
        score_row_s=0.01,
        store_row_s=1e-5,
        message_s=1e-3,
    )


async def run(shape: Shape, costs: MessageCosts) -> Load:
    """Simulate; the load of the steps after the pipeline is full."""
    config = make_config(shape)
    workload = make_workload(config, equal_share=EQUAL_SHARE)
    workload = replace(workload, num_conversations=shape.num_conversations)
    setting, load = Setting(config=config, workload=workload), Load()
    graph = make_graph(config)
    cluster = SimulatedCluster(config, make_costs(config, shape))
    simulated = make_executors(setting, cluster, graph)
    executors = _charged(config, simulated, costs, load)
    with tempfile.TemporaryDirectory() as folder, Path("/dev/null").open("w") as null:
        spans = Spans("controller", folder)
        run_logger = Measured(
            log=MetricsLog(folder, open_trackers(["tensorboard"], Path(folder), {}, 0)),
            progress=Progress(shape.num_steps, live=False, console=Console(file=null)),
            spans=spans,
        )
        run_logger.watch(load, shape.max_staleness + 1)
        inputs = make_inputs(workload.prompts(), graph, read_architecture(ARCHITECTURE))
        await drive(config, inputs, executors, shape.num_steps - 1, run_logger, spans)
    load.calls, load.num_bytes, load.waits = run_logger.counted
    load.busy_shares, load.wait_shares = setting.timeline.shares(
        load.end_s - load.elapsed_s, load.end_s
    )
    return load


class Measured(RunLogger):
    """The real run logger, which starts and ends the count when versions are made."""

    def watch(self, load: Load, num_skipped: int) -> None:
        """Count from the end of step `num_skipped` on."""
        self._load, self._num_skipped = load, num_skipped
        self._start: tuple[float, float, float] | None = None

    async def log_step(self, stats: Any, *details: Any) -> None:
        clock = cast(CostClock, asyncio.get_running_loop())
        load, now = self._load, (clock.time(), clock.cpu_s, clock.charged_s)
        if stats.version == self._num_skipped:
            self._start = now
            for counted in (load.calls, load.num_bytes, load.waits):
                counted.clear()
        elif self._start is not None:
            load.num_steps += 1
            load.end_s = clock.time()
            load.elapsed_s, load.cpu_s, load.message_s = (
                b - a for a, b in zip(self._start, now, strict=True)
            )
            self.counted = (Counter(load.calls), Counter(load.num_bytes), list(load.waits))
        await super().log_step(stats, *details)  # its time is the next step's


def _charged(config: Config, simulated: Executors, costs: MessageCosts, load: Load) -> Executors:
    """The same executors behind messages."""
    scored_s: dict[int, float] = {}
    on_ranks, trainer = replace(costs, call_s=costs.ranks_s), IdleTrainer(load, scored_s)
    max_num_seqs = config.generator.max_num_seqs

    def charged(name: str, group: Any, idle: Idle, costs: MessageCosts) -> SimulatedProcess:
        kind = name.partition("-")[0]
        return SimulatedProcess(name, Charged(kind, group.executor, costs, load, idle))

    kinds: dict[str, tuple[Idle, MessageCosts]] = {
        f"generator-{index}": (
            IdleReplica(load, group.executor, max_num_seqs, trainer),
            on_ranks,
        )
        for index, group in simulated.generators.items()
    }
    kinds |= {each.name: (Idle(load), costs) for each in simulated.collectors}
    kinds |= {name: (IdleScorer(load, scored_s), costs) for name in simulated.stage_of}
    kinds["trainer"] = trainer, on_ranks
    unit = cast(Any, simulated.storage)._units[0]
    units = [Charged("storage", unit, costs, load, Idle(load)) for _ in range(NUM_STORAGE_UNITS)]
    return replace(
        simulated,
        storage=Store(cast(Any, units)),
        by_name=simulated.by_name
        | {
            name: charged(name, simulated.by_name[name], idle, its_costs)
            for name, (idle, its_costs) in kinds.items()
        },
    )
