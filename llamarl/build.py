"""From a config to the objects of a run: the only wiring.

Owns: which object gets which. Does not own: what a run does with them (`jobs.py`). Invariant:
nothing here computes; it only says who gets what.
"""

import asyncio
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarl.algorithms.group_filters import filter_group
from llamarl.cluster import Cluster, ExecutorGroup, make_rdma
from llamarl.config import Config
from llamarl.config.rank_assignment import assign, companions
from llamarl.data.packing import make_batch
from llamarl.environments.prompts import PromptStream
from llamarl.environments.requests import make_requests
from llamarl.environments.rewards.pool import try_loading
from llamarl.executors.specs import (
    CollectorSpec,
    GeneratorSpec,
    ReferenceSpec,
    ScorerSpec,
    Spec,
    StorageSpec,
    TrainerSpec,
)
from llamarl.experience.store import Store
from llamarl.loop.collaborators import Roles, Rules, RunObserver
from llamarl.loop.colocation import Colocated, Colocation, Disaggregated
from llamarl.loop.controller import Controller
from llamarl.loop.dispatch import Dispatch
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.ledger import Ledger, loop_stages
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.saver import Saver
from llamarl.metrics.span import Spans
from llamarl.metrics.startup import ReportState
from llamarl.recipe.inputs import Inputs, evaluation_sampling, make_prompts, train_sampling
from llamarl.weights.sync.publisher import Publisher
from llamarl.weights.transports.table import TRANSPORTS

if TYPE_CHECKING:  # mypy compares the methods of each class with those that are asked of it
    from llamarl import protocols
    from llamarl.executors import collector, offload, reference, rollouts, scorer, storage, trainer

    Generator: type[protocols.Generator] = rollouts.RolloutPart
    Collector: type[protocols.Collector] = collector.CollectorExecutor
    Trainer: type[protocols.Trainer] = trainer.TrainerExecutor
    Scorer: type[protocols.Scorer] = scorer.ScorerExecutor
    Reference: type[protocols.Reference] = reference.ReferenceExecutor
    Storage: type[protocols.Storage] = storage.StorageExecutor
    Offloadable: type[protocols.Offloadable] = offload.OffloadPart


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The executors of a run, started; without one of the `vital` ones it cannot go on."""

    vital: list[ExecutorGroup]
    storage: Store
    generators: dict[int, ExecutorGroup]
    scorer: ExecutorGroup
    trainer: ExecutorGroup | None
    reference: ExecutorGroup | None
    collectors: list[ExecutorGroup] = field(default_factory=list)


async def spawn_executors(
    config: Config,
    inputs: Inputs,
    cluster: Cluster,
    run_dir: str,
    *,
    trains: bool,
    report: ReportState,
) -> Executors:
    """Start every executor that the recipe needs, all at once; a reference only for a KL term.

    A task.py that does not load ends this before any of them starts.
    """
    if "task" in config.reward.functions:
        await try_loading(config.reward, inputs.task_source)
    places = assign(config) | companions(config)

    async def spawn(name: str, spec: Spec) -> ExecutorGroup:
        return await cluster.spawn(name, spec.executor, spec, len(places[name]), places[name])

    async def start(name: str, spec: Spec) -> ExecutorGroup:
        """Spawn the executor and let it load what it needs."""
        report(name, "starting")
        group = await spawn(name, spec)
        report(name, "loading")
        await group.call_all.start()
        report(name, "ready")
        return group

    units = await asyncio.gather(
        *(start(f"storage-{spec.unit}", spec) for spec in _storage_specs(config, run_dir))
    )
    storage = Store([unit.call_one for unit in units])
    specs = _specs(config, inputs, storage, run_dir, trains=trains)
    started = await asyncio.gather(*(start(name, spec) for name, spec in specs.items()))
    groups = dict(zip(specs, started, strict=True))
    generators = {
        spec.replica: groups.pop(name)
        for name, spec in specs.items()
        if isinstance(spec, GeneratorSpec)
    }
    shares = collector_specs(config, generators) if trains else []
    collectors = await asyncio.gather(
        *(spawn(f"collector-{i}", spec) for i, spec in enumerate(shares))
    )
    return Executors(
        vital=[*units, *groups.values(), *collectors],
        storage=storage,
        generators=generators,
        collectors=collectors,
        scorer=groups["scorer"],
        trainer=groups.get("trainer"),
        reference=groups.get("reference"),
    )


def build_controller(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    *,
    run_dir: str,
    state: dict[str, Any],
    run_logger: RunObserver,
    spans: Spans,
) -> tuple[Controller, Publisher, Dispatch]:
    """Assemble the loop around the started executors. `state` is a checkpoint's, or empty."""
    dispatch = make_dispatch(executors)
    roles = _roles(executors, dispatch)
    ledger = Ledger(loop_stages(has_reference=roles.reference is not None))
    gate = _gate(config, make_prompts(config, inputs, state), spans, state)
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
    )
    publisher = _publisher(config, executors, run_dir, dispatch, logprob_check, spans)
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
        rules=_rules(config, inputs),
        gate=gate,
        ledger=ledger,
        publisher=publisher,
        logprob_check=logprob_check,
        colocation=colocation,
        evaluator=evaluator,
        saver=saver,
        run_logger=run_logger,
    )
    return controller, publisher, dispatch


def make_dispatch(executors: Executors) -> Dispatch:
    """One Generator of all replicas."""
    groups = executors.generators.items()
    return Dispatch(
        {index: group.call_one for index, group in groups},
        executors.storage,
        collectors=[group.call_one for group in executors.collectors],
        watches={index: group.watch for index, group in groups},
        stops={index: group.stop for index, group in groups},
    )


def _roles(executors: Executors, dispatch: Dispatch) -> Roles:
    assert executors.trainer is not None
    return Roles(
        generator=dispatch,
        scorer=executors.scorer.call_one,
        reference=executors.reference.call_one if executors.reference else None,
        trainer=executors.trainer.call_one,
        storage=executors.storage,
    )


def _rules(config: Config, inputs: Inputs) -> Rules:
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
        ),
    )


def _publisher(
    config: Config,
    executors: Executors,
    run_dir: str,
    dispatch: Dispatch,
    logprob_check: LogprobCheck,
    spans: Spans,
) -> Publisher:
    assert executors.trainer is not None
    weights = config.weights
    if config.placement.colocated:  # no write may outlast the sync phase
        weights = replace(weights, straggler_timeout_s=weights.timeout_s)

    def committed(replica: int, version: int) -> None:
        dispatch.committed(replica, version)
        logprob_check.committed(replica, version)

    def lost(replica: int, why: Exception) -> asyncio.Future[None]:
        dispatch.lost(replica, why)
        # A replica that was only silent must not wake up and write into its siblings' memory.
        return asyncio.ensure_future(executors.generators[replica].stop())

    return Publisher(
        executors.trainer.call_all,
        {index: group.call_all for index, group in executors.generators.items()},
        spans,
        weights,
        rendezvous_folder=f"{run_dir}/.rendezvous-routes",
        generator_device=config.generator.device,
        on_commit=committed,
        on_lost=lost,
        on_hold=dispatch.hold,
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
        rows_per_replica=config.generator.max_num_seqs,
    )


def _colocation(config: Config, executors: Executors, spans: Spans) -> Colocation:
    if not config.placement.colocated:
        return Disaggregated()
    assert executors.trainer is not None
    generators = {index: group.call_one for index, group in executors.generators.items()}
    return Colocated(executors.trainer.call_one, generators, spans)


def _storage_specs(config: Config, run_dir: str) -> list[StorageSpec]:
    return [
        StorageSpec(
            unit=unit,
            archive_folder=f"{run_dir}/archive",
            archive_tokens=config.experience.archive_tokens,
        )
        for unit in range(config.experience.num_storage_units)
    ]


def _specs(
    config: Config, inputs: Inputs, storage: Store, run_dir: str, *, trains: bool
) -> dict[str, Spec]:
    """By name, of the executors that use the store."""
    session = uuid.uuid4().hex[:8]  # names files that no earlier session of the run used
    rdma = make_rdma() if TRANSPORTS[config.weights.transport].uses_rdma else None
    specs: dict[str, Spec] = {
        "scorer": ScorerSpec(
            config=config.reward,
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            storage=storage,
        )
    }
    for replica in range(config.generator.num_replicas):
        specs[f"generator-{replica}"] = GeneratorSpec(
            replica=replica,
            checkpoint=inputs.checkpoint,
            load_weights=not trains,
            tokenizer=inputs.tokenizer_folder,
            config=config.generator,
            weights=config.weights,
            placement=config.placement,
            storage=storage,
            run_dir=run_dir,
            run_id=session,
            rdma=rdma,
        )
    if trains:
        specs["trainer"] = TrainerSpec(
            checkpoint=inputs.checkpoint,
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            rendezvous=f"{run_dir}/.rendezvous-trainer-{session}",
            config=config.trainer,
            algorithm=config.algorithm,
            sampling=config.sampling,
            weights=config.weights,
            placement=config.placement,
            storage=storage,
            run_dir=run_dir,
            num_steps=config.num_steps,
            seed=config.seed,
            rdma=rdma,
        )
    if trains and config.algorithm.has_reference:
        specs["reference"] = ReferenceSpec(
            checkpoint=inputs.checkpoint,
            rendezvous=f"{run_dir}/.rendezvous-reference-{session}",
            config=config.trainer,
            sampling=config.sampling,
            storage=storage,
        )
    return specs


def collector_specs(config: Config, generators: dict[int, ExecutorGroup]) -> list[CollectorSpec]:
    """Each asks an equal share of the replicas."""
    num = config.generator.num_collectors
    return [
        CollectorSpec(
            generators={i: group.call_one for i, group in generators.items() if i % num == number}
        )
        for number in range(num)
    ]


def _gate(config: Config, prompts: PromptStream, spans: Spans, state: dict[str, Any]) -> Gate:
    return Gate(
        max_staleness=config.staleness.max_staleness,
        groups_per_step=config.trainer.groups_per_step,
        rollouts_per_group=config.sampling.rollouts_per_prompt,
        late=config.staleness.late,
        max_drops_in_row=config.algorithm.max_drops_in_row,
        prompts=prompts,
        spans=spans,
        version=state.get("version", 0),
        next_group_id=state.get("next_group_id", 0),
        next_row_id=state.get("next_row_id", 0),
    )
