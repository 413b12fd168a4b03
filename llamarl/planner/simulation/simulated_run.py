"""Runs without a model: the real controller on a virtual clock, with executors that only sleep.

The loop (gate, dispatch, packing, log-prob check, publisher and placement) is that of a run, wired
by `controller/wiring.py`. It is deterministic; equal arguments give equal times."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamarl.controller.balance import Skew
from llamarl.controller.lengths import Limits, Ranker
from llamarl.controller.starter import Executors
from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import Wiring
from llamarl.core.config import CheckpointConfig, Config, DispatchConfig
from llamarl.core.config.generator import number_of, pools_of
from llamarl.core.faces import RunObserver
from llamarl.core.records import Prompt
from llamarl.metrics.span import Spans
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import PoolStep, StepForecast
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.executors import SimulatedRunLogger
from llamarl.planner.simulation.replica import SimulatedReplica
from llamarl.planner.simulation.setting import Setting, SimulatedTimeline
from llamarl.planner.simulation.simulated_cluster import SimulatedCluster, make_executors
from llamarl.planner.simulation.workload import Workload, make_workload
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.rules import without_evaluation, without_own_stages
from llamarl.scoring.samplers import admission
from llamarl.scoring.stages import Graph, make_graph


def simulate(
    config: Config,
    architecture: Architecture,
    costs: Costs,
    *,
    workload: Workload | None = None,
    num_steps: int | None = None,
    num_skipped: int | None = None,
    ranker: Ranker | None = None,
) -> StepForecast:
    """Return the steady state of `num_steps` steps of `config` (default: plan.num_steps, or enough
    for one whole burst; at least a batch's and one more), without the first `num_skipped` (default:
    until the gate's run-ahead has passed through).

    `workload` defaults to the one that config.plan describes. Evaluation, checkpoints and export
    are left out. Without `ranker` no length is expected, for those of most workloads do not depend
    on the prompt.
    """
    workload = workload or make_workload(config)
    steps = num_steps or max(config.plan.num_steps, fewest_steps(config))
    steps = max(steps, config.trainer.steps_per_batch + 1)
    timeline = clock.run(run(config, costs, architecture, workload, steps, ranker))
    return forecast(timeline, num_skipped or settling_steps(config, steps), config)


async def run(
    config: Config,
    costs: Costs,
    architecture: Architecture,
    workload: Workload,
    num_steps: int,
    ranker: Ranker | None = None,
) -> SimulatedTimeline:
    """Run the controller with simulated executors on whatever clock the present loop has."""
    config = without_own_stages(config)
    setting = Setting(config=config, workload=workload)
    timeline = setting.timeline
    graph = make_graph(config)
    executors = make_executors(setting, SimulatedCluster(config, costs), graph)
    run_logger = SimulatedRunLogger(timeline)
    inputs = make_inputs(workload.prompts(), graph, architecture)
    context = workload.prompt_tokens + sum(workload.lengths) // (2 * len(workload.lengths) or 1)
    skew = make_skew(config, costs, ranker, context) if ranker else None
    await drive(config, inputs, executors, num_steps, run_logger, skew=skew)
    for group in executors.generators.values():
        group.one(SimulatedReplica).end_idle()
    timeline.forget_last_step()
    return timeline


async def drive(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    num_steps: int,
    run_logger: RunObserver,
    spans: Spans | None = None,
    skew: Skew | None = None,
) -> None:
    """Run the controller with these executors; without `skew` no lengths are expected, since they
    do not depend on a simulation's prompts.

    It runs one step more than asked for: the last one ends with a checkpoint, which is really
    written.
    """
    config = replace(
        without_evaluation(config),
        num_steps=num_steps + 1,
        checkpoint=CheckpointConfig(every_steps=0, export=False),
        dispatch=DispatchConfig(ranker="none"),
        trainer=replace(config.trainer, warmup_steps=0, warmup_share=0.0, schedule="constant"),
    )
    supervisor = Supervisor(config, executors)
    with tempfile.TemporaryDirectory() as run_dir:
        spans = spans or Spans("controller", None)
        wiring = Wiring(config, inputs, executors, run_dir, spans)
        controller = wiring.build_controller(supervisor, run_logger, skew)
        await controller.engines.connect()
        try:
            await supervisor.guard(controller.run())
        finally:
            await supervisor.close()
            await controller.engines.close()


def make_skew(config: Config, costs: Costs, ranker: Ranker, context: int) -> Skew:
    """Return the length expectations of a simulation, by this ranker. Decode steps take the time
    that `costs` says with `context` tokens of each rollout in the KV cache."""
    most = config.generator.max_num_seqs
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    steps = [(size, costs.decode_s(size, size * context)) for size in sorted(sizes)]
    limits, is_streamed = Limits(max_num_seqs=most), config.trainer.parts != "batch"
    return Skew(config.dispatch, limits, lambda: steps, ranker, is_streamed=is_streamed)


def make_inputs(
    prompts: list[Prompt],
    graph: Graph,
    architecture: Architecture,
    held_out: Sequence[Prompt] = (),
) -> Inputs:
    """Return the inputs of a run that reads no files."""
    return Inputs(
        checkpoint="",
        adapter=None,
        tokenizer_folder="",
        architecture=architecture,
        tokenizer=NoTokenizer(),
        prompts=prompts,
        held_out=list(held_out),
        task_source=None,
        # no code of a recipe runs
        task={"advantages": list, "drop": lambda group: None, "sample": admission},
        graph=graph,
        kinds={},
        replay_lengths=[],
    )


def settling_steps(config: Config, num_steps: int) -> int:
    """Return the number of steps before the steady state: until the gate's whole run-ahead has
    passed through. The number of steps left is a multiple of the run-ahead where that is possible,
    for steps may end in bursts of that many, and whole batches in any case."""
    run_ahead, per_batch = _burst(config), config.trainer.steps_per_batch
    left = num_steps - run_ahead - 1
    whole = left // run_ahead * run_ahead or left // per_batch * per_batch
    return num_steps - max(whole, -(-2 // per_batch) * per_batch)


def fewest_steps(config: Config) -> int:
    """Return the fewest steps for comparisons: after settling, one whole burst is left. Where the
    size of parts is learnt it is one step more."""
    is_learnt = config.trainer.parts == "dynamic"
    return 2 * _burst(config) + 1 + is_learnt


def _burst(config: Config) -> int:
    """Return the steps that the gate lets generators run ahead, in whole batches."""
    per_batch = config.trainer.steps_per_batch
    return -(-(config.staleness.max_staleness + 1) // per_batch) * per_batch


def forecast(
    timeline: SimulatedTimeline, skipped: int, config: Config | None = None
) -> StepForecast:
    """Return the figures per step from the end of step number `skipped` to the last one's end; with
    `config` for each of its pools too."""
    start_s, end_s = timeline.step_ends_s[skipped - 1], timeline.step_ends_s[-1]
    num_steps = len(timeline.step_ends_s) - skipped
    ages: Counter[int] = Counter()
    for step in timeline.ages[skipped:]:
        ages.update(step)
    num_tokens = sum(timeline.num_tokens[skipped:])
    busy, waits = timeline.shares(start_s, end_s)
    publishes_s = timeline.publishes_s[-num_steps:]
    return StepForecast(
        step_s=(end_s - start_s) / num_steps,
        busy_shares=busy,
        wait_shares=waits,
        mean_staleness=sum(age * n for age, n in ages.items()) / max(1, ages.total()),
        max_staleness=max(ages, default=0),
        trained_tokens_per_s=num_tokens / (end_s - start_s),
        publish_s=sum(publishes_s) / max(1, len(publishes_s)),
        pools=_pool_steps(timeline, config, start_s, end_s) if config else {},
    )


def _pool_steps(
    timeline: SimulatedTimeline, config: Config, start_s: float, end_s: float
) -> dict[str, PoolStep]:
    """Return the figures of each pool in this window, by the pool's key."""
    if not config.generator.pools:
        return {}
    pools = pools_of(config.generator)

    def key(executor: str) -> str:
        name, _, replica = executor.partition("-")
        return pools[number_of(pools, int(replica))].key if name == "generator" else name

    busy, _ = timeline.shares(start_s, end_s, key)
    num_tokens: Counter[str] = Counter()
    for when_s, replica, number in timeline.written:
        if start_s < when_s <= end_s:
            num_tokens[key(f"generator-{replica}")] += number
    return {
        pool.key: PoolStep(
            busy_share=busy.get(pool.key, 0.0),
            tokens_per_s=num_tokens[pool.key] / (end_s - start_s),
        )
        for pool in pools
    }


@dataclass(frozen=True)
class NoTokenizer:
    """Stands for a tokenizer where no text is ever decoded and rollouts end at their simulated
    length."""

    eos_token_ids: tuple[int, ...] = ()
    special_ids: Mapping[str, int] = field(default_factory=dict)

    def decode(self, token_ids: object) -> str:
        """Return "", since no text is needed."""
        return ""
