"""Builds the objects of a run from its config; no other module wires them."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from llamarl.controller.balance import Balance, Neighbours, Skew, Speeds
from llamarl.controller.batches import PartSize
from llamarl.controller.colocation import Alternating, Colocated, Colocation
from llamarl.controller.controller import Controller
from llamarl.controller.dispatch import Capacity, Dispatch
from llamarl.controller.elasticity import Elasticity
from llamarl.controller.engines import Engines, Rules
from llamarl.controller.evaluation import Evaluator
from llamarl.controller.gate import Gate
from llamarl.controller.lengths import Limits
from llamarl.controller.logprob_check import LogprobCheck
from llamarl.controller.rollouts import Rollouts
from llamarl.controller.saver import Saver
from llamarl.controller.sft import DemonstrationEngines, HeldOutLoss
from llamarl.controller.starter import Executors
from llamarl.controller.supervisor import Supervisor, unless_lost
from llamarl.core import checkpoint
from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import far_sites, num_storage_units, units_near
from llamarl.core.faces import (
    AllRanks,
    Collector,
    Offloadable,
    Processor,
    RunObserver,
    Trainer,
)
from llamarl.core.groups import conversation, turns_of
from llamarl.core.records import RESPONSE_IDS, TOKEN_VERSIONS, Columns
from llamarl.generator.vllm.limits import kv_tokens
from llamarl.metrics.console import Progress
from llamarl.metrics.held_out import BestVersion, best_version
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.shares import DecodeSteps, RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog
from llamarl.model.architecture import Architecture
from llamarl.model.inventory import attention_cost
from llamarl.prompts.stream import make_requests
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import weight_kind
from llamarl.recipe.inputs import Inputs, make_prompts
from llamarl.recipe.prompt_inputs import mini_batches
from llamarl.recipe.rules import train_sampling
from llamarl.scoring.samplers import make_sampler
from llamarl.storage.archive import make_record
from llamarl.trainer.advantages import GDPO, filter_group, over_deviation
from llamarl.trainer.packing import make_batch


@dataclass(frozen=True)
class Wiring:
    """Builds the objects of one session around its started `executors`. `state` is a checkpoint's,
    or empty."""

    config: Config
    inputs: Inputs
    executors: Executors
    run_dir: str
    spans: Spans
    state: dict[str, Any] = field(default_factory=dict)

    def build_controller(
        self,
        supervisor: Supervisor,
        run_logger: RunObserver,
        skew: Skew | None = None,
        *,
        deadline_s: float = math.inf,
    ) -> Controller:
        """Assemble the loop around the supervised executors. `skew` replaces the config's; the run
        ends with the step of the `deadline_s`."""
        config, skew = self.config, skew or self.make_skew()
        fields = self.engine_fields(run_logger, supervisor, skew)
        is_sft = config.algorithm.is_sft
        engines = DemonstrationEngines(**fields) if is_sft else Engines(**fields)
        gate, dispatch = engines.gate, engines.dispatch
        colocation = self.make_colocation()
        evaluator = self.make_evaluator(engines)
        logprob_check = self.make_logprob_check(engines)
        engines.publisher = publisher = self.make_publisher(
            dispatch, on_commit=logprob_check.committed, may_come=supervisor.restarts_replicas
        )
        saver = Saver(
            config=config.checkpoint,
            run_dir=self.run_dir,
            engines=engines,
            colocation=colocation,
            evaluator=evaluator,
            spans=self.spans,
            last=config.most_steps,
            deadline_s=deadline_s,
            limit=f"max_hours={config.max_hours:g}",
        )
        limits = config.generator.elastic
        elasticity = Elasticity(limits=limits, gate=gate, dispatch=dispatch) if limits else None
        supervisor.connect(dispatch, publisher, elasticity, lambda: saver.has_last)
        return Controller(
            engines=engines,
            gate=gate,
            part_size=PartSize(config=config.trainer),
            logprob_check=logprob_check,
            evaluator=evaluator,
            colocation=colocation,
            saver=saver,
        )

    def engine_fields(
        self,
        observer: RunObserver,
        supervisor: Supervisor | None = None,
        skew: Skew | None = None,
    ) -> dict[str, Any]:
        """Return the fields of `Engines` over the executors, without a publisher yet. With a
        supervisor those that are lost are replaced."""
        executors = self.executors
        if supervisor is None:
            by_stage = {
                stage: executors.by_name[name] for name, stage in executors.stage_of.items()
            }
            stages = {stage: executor.one(Processor) for stage, executor in by_stage.items()}
            dispatch = make_dispatch(self.config, executors, skew)
        else:
            stages = supervisor.processors()
            dispatch = make_dispatch(self.config, executors, skew, supervisor.collectors())
        gate = self.make_gate(dispatch)
        rollouts = Rollouts(
            dispatch,
            stages,
            self.inputs.graph,
            executors.storage,
            self.config.environment.max_restarts,
        )
        return {
            "rules": self.make_rules(),
            "gate": gate,
            "dispatch": dispatch,
            "rollouts": rollouts,
            "trainer": None if executors.trainer is None else executors.trainer.one(Trainer),
            "publisher": None,
            "observer": observer,
            "version": gate.version,
        }

    def make_gate(self, dispatch: Dispatch) -> Gate:
        """Return the gate over the recipe's prompts, from `state` on."""
        config, state = self.config, self.state
        return Gate(
            max_staleness=config.staleness.max_staleness,
            steps=replace(mini_batches(config), first_version=state.get("version", 0)),
            rollouts_per_group=config.sampling.rollouts_per_prompt,
            late=config.staleness.late,
            max_drops_in_row=config.algorithm.max_drops_in_row,
            sampler=make_sampler(config.experience.sampler, self.inputs.task),
            prompts=make_prompts(config, self.inputs, state),
            spans=self.spans,
            next_group_id=state.get("next_group_id", 0),
            next_row_id=state.get("next_row_id", 0),
            num_units=num_storage_units(config),
            plan_units=dispatch.balance.plan_units,
            has_room=Capacity(self.executors.storage),
            ended=self.make_best().why_over,
        )

    def make_rules(self) -> Rules:
        """Return the recipe's rules for groups."""
        config, inputs = self.config, self.inputs
        return Rules(
            make_requests=partial(
                make_requests,
                sampling=train_sampling(config, inputs),
                seed=config.seed,
                segment_tokens=config.sampling.segment_tokens,
                replay_lengths=inputs.replay_lengths,
                has_turns=inputs.graph.has_episodes,
            ),
            filter_group=partial(
                filter_group,
                max_tokens=config.sampling.max_tokens,
                config=config.algorithm,
                functions=[*zip(config.reward.functions, config.reward.weights, strict=True)],
                task=inputs.task,
            ),
            make_batch=partial(
                make_batch,
                num_ranks=config.trainer.num_data_ranks,
                tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
                attention_cost=attention_cost(inputs.architecture),
                scale=over_deviation if config.algorithm.advantage == GDPO else list,
            ),
            make_record=partial(
                make_record,
                prompts=config.data.sources,
                held_out=config.held_out_sets,
                functions=config.reward.functions,
                prompt_field=config.data.prompt_field,
            ),
        )

    def make_skew(self) -> Skew:
        """Return the length expectations that the recipe chooses; decode steps are measured from
        the run's spans."""
        generator, architecture, kv_size = self.config.generator, self.inputs.architecture, 0
        if isinstance(generator, VllmConfig) and isinstance(architecture, Architecture):
            kv_size = kv_tokens(generator, architecture)
        limits = Limits(max_num_seqs=generator.max_num_seqs, kv_tokens=kv_size)
        is_streamed = self.config.trainer.parts != "batch"
        steps = DecodeSteps(f"{self.run_dir}/spans")
        return Skew(self.config.dispatch, limits, steps.read, is_streamed=is_streamed)

    def make_logprob_check(self, engines: Engines) -> LogprobCheck:
        """Return the check that generators write with the trainer's policy."""
        sampling = train_sampling(self.config, self.inputs)
        return LogprobCheck(
            engines=engines, config=self.config, prompts=self.inputs.prompts, sampling=sampling
        )

    def make_publisher(
        self,
        dispatch: Dispatch,
        *,
        source: AllRanks | None = None,
        on_commit: Callable[[int, int], None] = lambda replica, version: None,
        may_come: bool = False,
    ) -> Publisher:
        """Return the publisher that brings versions to all replicas: the trainer's, or those of
        another `source`, which may change its tensors as soon as a publish has returned. `may_come`
        says that replicas may join while the run goes on."""
        config, executors, weights = self.config, self.executors, self.config.weights
        if config.placement.colocated or source is not None:  # no write may outlast its publish
            weights = replace(weights, straggler_timeout_s=weights.timeout_s)

        def committed(replica: int, version: int) -> None:
            dispatch.committed(replica, version)
            on_commit(replica, version)

        def lost(replica: int, why: Exception) -> asyncio.Future[None]:
            executor = executors.generators[replica]
            dispatch.lost(replica, why)
            # A replica that was only silent must not wake up and write into its siblings' memory.
            return asyncio.ensure_future(executor.stop())

        if source is None:
            assert executors.trainer is not None
            source = executors.trainer
        sites = far_sites(config)
        return Publisher(
            source,
            executors.generators,
            self.spans,
            weights,
            rendezvous_folder=f"{self.run_dir}/.rendezvous-routes-{uuid.uuid4().hex[:8]}",
            kind_of=cache(partial(weight_kind, config.generator)),
            far_sites={config.cluster.name_host(host): site for host, site in sites.items()},
            on_commit=committed,
            on_lost=lost,
            on_hold=dispatch.hold,
            may_come=may_come,
        )

    def make_evaluator(self, engines: Engines) -> Evaluator:
        """Return the evaluation of the held-out prompts or demonstrations, of which there may be
        none."""
        kind = HeldOutLoss if self.config.algorithm.is_sft else Evaluator
        return kind(
            engines=engines,
            config=self.config,
            inputs=self.inputs,
            version=self.state.get("evaluated", -1),
            best=self.make_best(),
        )

    def make_best(self) -> BestVersion:
        """Return the record of the best version, which goes on from `state` if its checkpoint is in
        this folder."""
        saved = self.state.get("best", {})
        is_there = checkpoint.find(self.run_dir, saved.get("version", -1)) is not None
        config = self.config
        key, patience = config.checkpoint.best, config.evaluation.patience
        return best_version(key, patience, saved if is_there else {})

    def make_colocation(self) -> Colocation:
        """Return the object that grants the device. In a run without generators, held-out losses
        are measured between two steps."""
        if self.config.algorithm.is_sft:
            return Alternating()
        if not self.config.placement.colocated:
            return Colocation()
        assert self.executors.trainer is not None
        replicas = self.executors.generators.items()
        generators = {index: executor.one(Offloadable) for index, executor in replicas}
        return Colocated(self.executors.trainer.one(Offloadable), generators, self.spans)

    def make_run_logger(
        self, log: MetricsLog, progress: Progress, recent_spans: RecentSpans
    ) -> RunLogger:
        """Return the observer of a run: it writes metrics and the display."""
        return RunLogger(
            log=log,
            progress=progress,
            spans=self.spans,
            recent_spans=recent_spans,
            read_completions=self._read_completions,
            num_samples=self.config.metrics.sample_rollouts,
            answer_field=self.config.reward.answer_field,
            prompt_field=self.config.data.prompt_field,
            is_sft=self.config.algorithm.is_sft,
            sources=self.config.data.source_names,
        )

    async def _read_completions(self, row_ids: list[int]) -> dict[int, str]:
        """Return the text of a few rows that are still in storage, by row id."""
        if not row_ids:
            return {}
        # Without its storage unit a step's numbers are written down nevertheless.
        reading = self.executors.storage.read(row_ids, [RESPONSE_IDS, TOKEN_VERSIONS])
        columns: Columns | None = await unless_lost(reading)
        if columns is None:
            return {}
        turns = partial(turns_of, decode=self.inputs.tokenizer.decode)
        found = map(turns, columns[RESPONSE_IDS], columns[TOKEN_VERSIONS])
        return dict(zip(row_ids, map(conversation, found), strict=True))


def make_dispatch(
    config: Config,
    executors: Executors,
    skew: Skew | None = None,
    collectors: Sequence[Collector] | None = None,
) -> Dispatch:
    """Return the dispatch over all replicas; without `skew` no lengths are expected. `collectors`
    take the place of the executors'."""
    if collectors is None:
        collectors = [executor.one(Collector) for executor in executors.collectors]
    neighbours = Neighbours(units_near(config), num_storage_units(config))
    balance = Balance(neighbours, skew, Speeds(pools_of(config.generator)))
    return Dispatch(executors.generators, executors.storage, balance, collectors)
