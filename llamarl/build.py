"""From a config to the objects of a run: the only wiring.

Owns: which object gets which. Does not own: what a run does with them (`jobs.py`). Invariant:
nothing here computes; it only says who gets what.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from llamarl.algorithms.group_filters import filter_group
from llamarl.config import Config, VllmConfig
from llamarl.config.pools import pool_at, pools_of
from llamarl.config.rank_assignment import far_sites, num_storage_units, units_near
from llamarl.data.packing import make_batch
from llamarl.environments.requests import make_requests
from llamarl.executor_groups import Executors
from llamarl.experience.samplers import make_sampler
from llamarl.generation.vllm.limits import kv_tokens
from llamarl.lengths.split import Limits
from llamarl.loop.collaborators import Roles, Rules, RunObserver
from llamarl.loop.colocation import Colocated, Colocation, Disaggregated
from llamarl.loop.controller import Controller
from llamarl.loop.dispatch import Dispatch
from llamarl.loop.elasticity import Elasticity
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.healing_stage import HealingStage
from llamarl.loop.ledger import Ledger
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.placement import Neighbours
from llamarl.loop.replica_set import ReplicaSet
from llamarl.loop.room import Room
from llamarl.loop.saver import Saver
from llamarl.loop.skew import Skew
from llamarl.loop.speeds import Speeds
from llamarl.metrics.decode_steps import DecodeSteps
from llamarl.metrics.span import Spans
from llamarl.models.architecture import Architecture
from llamarl.models.inventory import attention_cost
from llamarl.protocols import WeightSource
from llamarl.recipe.inputs import Inputs, make_prompts
from llamarl.recipe.sampling_rules import evaluation_sampling, train_sampling
from llamarl.weights.layout.kinds import weight_kind
from llamarl.weights.sync.publisher import Publisher

if TYPE_CHECKING:  # mypy compares the methods of each class with those that are asked of it
    from llamarl import protocols
    from llamarl.executors import (
        collector,
        generator,
        offload,
        reference,
        rollouts,
        scorer,
        storage,
        trainer,
    )

    Generator: type[protocols.Generator] = rollouts.RolloutPart
    Collector: type[protocols.Collector] = collector.CollectorExecutor
    Trainer: type[protocols.Trainer] = trainer.TrainerExecutor
    Scorer: type[protocols.Processor] = scorer.ScorerExecutor
    Reference: type[protocols.Processor] = reference.ReferenceExecutor
    Storage: type[protocols.Storage] = storage.StorageExecutor
    Resettable: type[protocols.Resettable] = generator.GeneratorExecutor
    Offloadable: type[protocols.Offloadable] = offload.OffloadPart


def build_controller(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    *,
    run_dir: str,
    state: dict[str, Any],
    run_logger: RunObserver,
    spans: Spans,
    skew: Skew | None = None,
    may_restart: Callable[[], bool] | None = None,
) -> tuple[Controller, Publisher, Dispatch]:
    """Assemble the loop around the started executors. `state` is a checkpoint's, or empty, `skew`
    what replaces the config's. `may_restart`: may a lost stage be started again? None: never."""
    dispatch = make_dispatch(config, executors, skew or make_skew(config, inputs, run_dir))
    roles, ledger = _roles(executors, dispatch, may_restart), Ledger(inputs.graph)
    gate = make_gate(config, inputs, executors, dispatch, spans, state)
    colocation = _colocation(config, executors, spans)
    evaluator = build_evaluator(config, inputs, executors, dispatch, ledger, state)
    logprob_check = LogprobCheck(
        dispatch=dispatch,
        ledger=ledger,
        storage=roles.storage,
        trainer=roles.trainer,
        allocate_rows=gate.allocate_rows,
        prompts=inputs.prompts,
        sampling=train_sampling(config, inputs),
        seed=config.seed,
        mode=config.weights.logprob_check,
        pool_of=cache(lambda replica: pool_at(config.generator, replica).key),
    )
    on_commit = logprob_check.committed
    replica_set, publisher = _replica_set(config, executors, dispatch, spans, run_dir, on_commit)
    saver = Saver(
        config=config.checkpoint,
        run_dir=run_dir,
        trainer=roles.trainer,
        gate=gate,
        colocation=colocation,
        evaluator=evaluator,
        spans=spans,
        version=gate.version,
        last=config.num_steps,
    )
    controller = Controller(
        config=config,
        roles=roles,
        rules=make_rules(config, inputs),
        gate=gate,
        ledger=ledger,
        publisher=publisher,
        replica_set=replica_set,
        elasticity=_elasticity(config, gate, dispatch, replica_set),
        logprob_check=logprob_check,
        colocation=colocation,
        evaluator=evaluator,
        saver=saver,
        run_logger=run_logger,
    )
    return controller, publisher, dispatch


def _replica_set(
    config: Config,
    executors: Executors,
    dispatch: Dispatch,
    spans: Spans,
    run_dir: str,
    on_commit: Callable[[int, int], None],
) -> tuple[ReplicaSet, Publisher]:
    # Colocated, a replica could start only in a phase of its own.
    max_restarts = 0 if config.placement.colocated else config.generator.max_restarts
    options: dict[str, Any] = {"on_commit": on_commit, "may_come": max_restarts > 0}
    publisher = make_publisher(config, executors, dispatch, spans, run_dir, **options)
    groups, start = executors.generators, executors.start_generator
    return ReplicaSet(groups, start, publisher, dispatch, max_restarts=max_restarts), publisher


def _elasticity(
    config: Config, gate: Gate, dispatch: Dispatch, replica_set: ReplicaSet
) -> Elasticity | None:
    if not (limits := config.generator.elastic):
        return None
    return Elasticity(limits=limits, gate=gate, dispatch=dispatch, replica_set=replica_set)


def make_skew(config: Config, inputs: Inputs, run_dir: str) -> Skew:
    """What the recipe expects of lengths; decode steps are measured from the run's spans."""
    generator, kv_size = config.generator, 0
    if isinstance(generator, VllmConfig) and isinstance(inputs.architecture, Architecture):
        kv_size = kv_tokens(generator, inputs.architecture)
    limits = Limits(max_num_seqs=generator.max_num_seqs, kv_tokens=kv_size)
    is_streamed = config.trainer.parts != "batch"
    steps = DecodeSteps(f"{run_dir}/spans")
    return Skew(config.dispatch, limits, steps.read, is_streamed=is_streamed)


def make_dispatch(config: Config, executors: Executors, skew: Skew | None = None) -> Dispatch:
    """One Generator of all replicas; without `skew` nothing is expected of lengths."""
    return Dispatch(
        executors.generators,
        executors.storage,
        collectors=[group.call_one for group in executors.collectors],
        neighbours=Neighbours(units_near(config), num_storage_units(config)),
        skew=skew,
        speeds=Speeds(pools_of(config.generator)),
    )


def _roles(
    executors: Executors, dispatch: Dispatch, may_restart: Callable[[], bool] | None
) -> Roles:
    assert executors.trainer is not None
    groups, start, storage = executors.stages, executors.start_stage, executors.storage
    healing = {
        stage: HealingStage(stage, groups, start, storage, may_restart)
        for stage in groups
        if start is not None and may_restart is not None and executors.heals(stage)
    }
    return Roles(
        generator=dispatch,
        stages={stage: group.call_one for stage, group in groups.items()} | healing,
        trainer=executors.trainer.call_one,
        storage=storage,
        healing=[*healing.values()],
    )


def make_rules(config: Config, inputs: Inputs) -> Rules:
    """What the recipe decides about groups."""
    return Rules(
        make_requests=partial(
            make_requests,
            sampling=train_sampling(config, inputs),
            seed=config.seed,
            segment_tokens=config.sampling.segment_tokens,
            replay_lengths=inputs.replay_lengths,
        ),
        filter_group=partial(
            filter_group,
            max_tokens=config.sampling.max_tokens,
            config=config.algorithm,
            task=inputs.task,
        ),
        make_batch=partial(
            make_batch,
            num_ranks=config.trainer.num_data_ranks,
            tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
            attention_cost=attention_cost(inputs.architecture),
        ),
    )


def make_publisher(
    config: Config,
    executors: Executors,
    dispatch: Dispatch,
    spans: Spans,
    run_dir: str,
    *,
    source: WeightSource | None = None,
    on_commit: Callable[[int, int], None] = lambda replica, version: None,
    may_come: bool = False,
) -> Publisher:
    """Brings versions to all replicas: the trainer's, or those of another `source`, which may
    change its tensors as soon as a publish has returned. Replicas `may_come` while the run goes
    on."""
    weights = config.weights
    if config.placement.colocated or source is not None:  # no write may outlast its publish
        weights = replace(weights, straggler_timeout_s=weights.timeout_s)

    def committed(replica: int, version: int) -> None:
        dispatch.committed(replica, version)
        on_commit(replica, version)

    def lost(replica: int, why: Exception) -> asyncio.Future[None]:
        group = executors.generators[replica]
        dispatch.lost(replica, why)
        # A replica that was only silent must not wake up and write into its siblings' memory.
        return asyncio.ensure_future(group.stop())

    if source is None:
        assert executors.trainer is not None
        source = executors.trainer.call_all
    return Publisher(
        source,
        {index: group.call_all for index, group in executors.generators.items()},
        spans,
        weights,
        rendezvous_folder=f"{run_dir}/.rendezvous-routes-{uuid.uuid4().hex[:8]}",
        kind_of=cache(partial(weight_kind, config.generator)),
        far_sites={
            config.cluster.name_host(host): site for host, site in far_sites(config).items()
        },
        on_commit=committed,
        on_lost=lost,
        on_hold=dispatch.hold,
        may_come=may_come,
    )


def build_evaluator(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    dispatch: Dispatch,
    ledger: Ledger,
    state: dict[str, Any],
) -> Evaluator:
    """The evaluation of the held-out prompts, of which there may be none."""
    return Evaluator(
        prompts=inputs.held_out,
        sampling=evaluation_sampling(config, inputs),
        seed=config.seed,
        generator=dispatch,
        ledger=ledger,
        storage=executors.storage,
        every_steps=config.evaluation.every_steps,
        version=state.get("evaluated", -1),
        rows_per_replica=min(p.generator.max_num_seqs for p in pools_of(config.generator)),
    )


def _colocation(config: Config, executors: Executors, spans: Spans) -> Colocation:
    if not config.placement.colocated:
        return Disaggregated()
    assert executors.trainer is not None
    generators = {index: group.call_one for index, group in executors.generators.items()}
    return Colocated(executors.trainer.call_one, generators, spans)


def make_gate(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    dispatch: Dispatch,
    spans: Spans,
    state: dict[str, Any],
) -> Gate:
    """The gate over the recipe's prompts, from `state` on."""
    return Gate(
        max_staleness=config.staleness.max_staleness,
        groups_per_step=config.trainer.groups_per_step,
        rollouts_per_group=config.sampling.rollouts_per_prompt,
        late=config.staleness.late,
        carry_over_groups=config.staleness.carry_over_groups,
        max_drops_in_row=config.algorithm.max_drops_in_row,
        sampler=make_sampler(config.experience.sampler, inputs.task),
        prompts=make_prompts(config, inputs, state),
        spans=spans,
        version=state.get("version", 0),
        next_group_id=state.get("next_group_id", 0),
        next_row_id=state.get("next_row_id", 0),
        num_units=num_storage_units(config),
        plan_units=dispatch.balance.plan_units,
        has_room=Room(executors.storage),
    )
