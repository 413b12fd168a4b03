"""Builds the real controller, gate, ledger, dispatcher and publisher around fake executors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.algorithms.group_filters import filter_group
from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
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
from llamarl.data.batch import make_batch
from llamarl.environments.requests import make_requests
from llamarl.executors.collector import CollectorExecutor
from llamarl.executors.specs import CollectorSpec
from llamarl.loop.collaborators import Roles, Rules
from llamarl.loop.colocation import Colocation, Disaggregated
from llamarl.loop.controller import Controller
from llamarl.loop.dispatch import Dispatch
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.ledger import Ledger, loop_stages
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.saver import Saver
from llamarl.metrics.span import Spans
from llamarl.protocols import Generator
from llamarl.types import Group, Prompt, Request, RolloutInfo, Sampling
from llamarl.weights.sync.publisher import Publisher
from tests.loop.fakes import FakeJournal, FakeReplica, FakeScorer, FakeStorage, FakeTrainer


class FakePrompts(Iterator[Prompt]):
    """Endless numbered prompts."""

    num_prompts = 10**6

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __next__(self) -> Prompt:
        number = next(self._numbers)
        return Prompt(prompt_id=number, text="", token_ids=(1, number % 50))

    def state(self) -> dict[str, object]:
        return {}


def heavy_tail(request: Request) -> int:
    """1 to 4 tokens, and 3 % of the rollouts 40 times as long."""
    rng = random.Random(request.seed)
    return rng.randint(1, 4) * (40 if rng.random() < 0.03 else 1)


def make_dispatch(
    replicas: dict[int, FakeReplica], storage: FakeStorage, num_collectors: int
) -> Dispatch:
    """Over these replicas, heard through so many collectors."""
    shares: list[dict[int, Generator]] = [{} for _ in range(num_collectors)]
    for index, replica in replicas.items() if shares else ():
        shares[index % num_collectors][index] = replica
    collectors = [
        CollectorExecutor(
            CollectorSpec(
                generators=share,
            ),
            rank=0,
            num_ranks=1,
            spans=Spans("collector", None),
        )
        for share in shares
    ]
    watches = {index: replica.watch for index, replica in replicas.items()}
    stops = {index: replica.stop for index, replica in replicas.items()}
    for replica in replicas.values():
        replica.storage = storage
    return Dispatch(dict(replicas), storage, collectors, watches, stops)


@dataclass(kw_only=True)
class Loop:
    """One run; change what a test is about, then `await loop.run()`."""

    max_staleness: int = 1
    late: str = "wait"
    num_steps: int = 50
    groups_per_step: int = 4
    groups_per_part: int = 0
    rollouts_per_prompt: int = 2
    segment_tokens: int = 0
    max_drops_in_row: int = 2000
    evaluate_every: int = 0
    save_every: int = 0
    exports: bool = False
    save_s: float = 600.0
    state: dict[str, Any] = field(default_factory=dict)  # of the checkpoint that it resumes from
    prompts: Iterator[Prompt] = field(default_factory=FakePrompts)
    num_held_out: int = 0
    num_collectors: int = 0
    length: Callable[[Request], int] = heavy_tail
    replicas: dict[int, FakeReplica] = field(default_factory=dict)
    scorer: FakeScorer = field(default_factory=FakeScorer)
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    storage: FakeStorage = field(default_factory=FakeStorage)
    run_logger: FakeJournal = field(default_factory=FakeJournal)
    colocation: Colocation = field(default_factory=Disaggregated)

    def config(self) -> Config:
        return Config(
            num_steps=self.num_steps,
            model=ModelConfig(checkpoint="none"),
            data=DataConfig(prompts="none.jsonl"),
            reward=RewardConfig(),
            algorithm=AIPOConfig(),
            generator=GeneratorConfig(),
            trainer=TrainerConfig(
                groups_per_step=self.groups_per_step, groups_per_part=self.groups_per_part
            ),
            weights=WeightsConfig(),
            placement=PlacementConfig(),
            cluster=ClusterConfig(),
            sampling=SamplingConfig(rollouts_per_prompt=self.rollouts_per_prompt),
            staleness=StalenessConfig(max_staleness=self.max_staleness, late=self.late),
            evaluation=EvaluationConfig(every_steps=self.evaluate_every),
            checkpoint=CheckpointConfig(
                every_steps=self.save_every, save_s=self.save_s, export=self.exports
            ),
        )

    async def run(self, run_dir: Path) -> None:
        config, sampling = self.config(), Sampling(max_tokens=256)
        state = self.state
        replicas = self.replicas or {0: FakeReplica(0, length=self.length)}
        self.written: dict[int, RolloutInfo] = {}
        for executor in (self.scorer, self.trainer, *replicas.values()):
            executor.storage = self.storage
        for replica in replicas.values():
            replica.written = self.written
        spans = Spans("controller", None)
        dispatch = make_dispatch(replicas, self.storage, self.num_collectors)
        ledger = Ledger(loop_stages(has_reference=False))
        self.gate = Gate(
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
            rollouts_per_group=self.rollouts_per_prompt,
            late=self.late,
            max_drops_in_row=self.max_drops_in_row,
            prompts=self.prompts,
            spans=spans,
            **{name: state.get(name, 0) for name in ("version", "next_group_id", "next_row_id")},
        )
        self.logprob_check = LogprobCheck(
            dispatch=dispatch,
            ledger=ledger,
            storage=self.storage,
            trainer=self.trainer,
            allocate_rows=self.gate.allocate_rows,
            prompts=[Prompt(prompt_id=0, text="", token_ids=(1, 2))],
            sampling=sampling,
            seed=0,
            mode=config.weights.logprob_check,
        )

        def committed(replica: int, version: int) -> None:
            dispatch.committed(replica, version)
            self.logprob_check.committed(replica, version)

        publisher = Publisher(
            self.trainer,
            dict(replicas),
            spans,
            config.weights,
            generator_device="cpu",
            rendezvous_folder=str(run_dir),
            on_commit=committed,
            on_lost=dispatch.lost,
            on_hold=dispatch.hold,
        )
        held_out = [
            Prompt(prompt_id=i, text="", token_ids=(2, i)) for i in range(self.num_held_out)
        ]
        evaluator = Evaluator(
            prompts=held_out,
            sampling=sampling,
            seed=0,
            generator=dispatch,
            ledger=ledger,
            storage=self.storage,
            every_steps=self.evaluate_every,
            version=state.get("evaluated", -1),
        )
        self.saver = Saver(
            config=config.checkpoint,
            run_dir=str(run_dir),
            trainer=self.trainer,
            gate=self.gate,
            colocation=self.colocation,
            evaluator=evaluator,
            spans=spans,
            version=self.gate.version,
            last=config.num_steps,
        )
        self.prompt_of: dict[int, tuple[int, int]] = {}  # by row
        requests_of = partial(
            make_requests, sampling=sampling, seed=0, segment_tokens=self.segment_tokens
        )

        def make_and_note(group: Group) -> list[Request]:
            prompt = group.prompt
            self.prompt_of |= dict.fromkeys(group.row_ids, (prompt.epoch, prompt.prompt_id))
            return requests_of(group)

        controller = Controller(
            config=config,
            roles=Roles(
                generator=dispatch,
                scorer=self.scorer,
                reference=None,
                trainer=self.trainer,
                storage=self.storage,
            ),
            rules=Rules(
                make_requests=make_and_note,
                filter_group=partial(filter_group, max_tokens=256, config=config.algorithm),
                make_batch=partial(make_batch, num_ranks=2, tokens_per_micro_batch=64),
            ),
            gate=self.gate,
            ledger=ledger,
            publisher=publisher,
            logprob_check=self.logprob_check,
            colocation=self.colocation,
            evaluator=evaluator,
            saver=self.saver,
            run_logger=self.run_logger,
        )
        await publisher.connect()
        try:
            await controller.run()
        except BaseException:
            await self.saver.rescue()
            raise
        finally:
            await dispatch.close()
            await publisher.close()

    def staleness(self) -> list[int]:
        """Staleness of every trained token, from what the replicas wrote."""
        return [age for age, is_trained in self._ages() if is_trained]

    def masked(self) -> list[int]:
        """Staleness of every token with zero weight."""
        return [age for age, is_trained in self._ages() if not is_trained]

    def _ages(self) -> Iterator[tuple[int, bool]]:
        for batch in self.trainer.batches:
            for row in batch.rows:
                for span in self.written[row.row_id].spans:
                    is_trained = span.version >= row.oldest_version
                    yield from [(batch.version - span.version, is_trained)] * span.num_tokens
