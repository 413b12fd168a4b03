"""The specs of a recipe's executors: the arguments with which each is constructed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamarl.cluster import Executor
from llamarl.core.config import (
    Config,
    LoraConfig,
)
from llamarl.core.config.generator import generator_of
from llamarl.core.config.rank_assignment import Device, far_sites, num_storage_units
from llamarl.core.faces import Environment, GeneratorReplica
from llamarl.generator.specs import CollectorSpec, GeneratorSpec
from llamarl.publish.layout import kinds_of
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.prompt_inputs import context_of
from llamarl.scoring.environment import EnvironmentLink, Environments, EnvironmentSpec
from llamarl.scoring.external import ExternalSpec
from llamarl.scoring.loader import SOCKETS
from llamarl.scoring.sandbox.containers import limits_of
from llamarl.scoring.stage_worker import StageSpec
from llamarl.scoring.stages import EXECUTORS, SCORE, TRAIN, FrozenModel, Stage
from llamarl.storage.client import Store
from llamarl.storage.worker import StorageSpec
from llamarl.trainer.specs import ReferenceSpec, TrainerSpec

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


def storage_specs(config: Config, run_dir: str) -> list[StorageSpec]:
    """Return the specs of all storage units."""
    return [
        StorageSpec(
            unit=unit,
            archive_folder=f"{run_dir}/archive",
            socket=f"{run_dir}/.rendezvous-storage/{unit}" if has_sockets(config) else None,
            spill_folder=f"{run_dir}/spill",
            max_bytes=config.experience.max_bytes // config.experience.units_per_host,
        )
        for unit in range(num_storage_units(config))
    ]


def has_sockets(config: Config) -> bool:
    """Return whether executors of one host meet at sockets; otherwise all run in one process."""
    return config.cluster.backend == "monarch"


@dataclass(frozen=True)
class Specs:
    """Makes the specs of all executors except storage units. These are reached through `storage`,
    and through `far_storage` by replicas at other sites. `names` are the executors that run."""

    config: Config
    inputs: Inputs
    run_dir: str
    names: Collection[str]
    storage: Store
    far_storage: Store

    def trainer(self) -> TrainerSpec:
        """Return the spec of the trainer."""
        config, inputs = self.config, self.inputs
        return TrainerSpec(
            checkpoint=inputs.checkpoint,
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            rendezvous=f"{self.run_dir}/.rendezvous-trainer-{_new_id()}",
            config=config.trainer,
            algorithm=config.algorithm,
            sampling=config.sampling,
            weights=config.weights,
            placement=config.placement,
            storage=self.storage,
            run_dir=self.run_dir,
            num_steps=config.most_steps,
            seed=config.seed,
            adapter=inputs.adapter,
            kinds=kinds_of(config.generator, inputs.architecture),
        )

    def generator(
        self, replica: int, places: Sequence[Device], environments: Environments | None
    ) -> GeneratorSpec:
        """Return the spec of one replica, whose ranks are at `places`."""
        config, run_id = self.config, _new_id()
        is_far = places[0].host in far_sites(config)
        storage = self.far_storage if is_far else self.storage
        return GeneratorSpec(
            replica=replica,
            checkpoint=self.inputs.checkpoint,
            load_weights=EXECUTORS[TRAIN] not in self.names,
            tokenizer=self.inputs.tokenizer_folder,
            lora=config.trainer.lora,
            base_dtype=config.trainer.compute_dtype,
            adapter=self.inputs.adapter,
            config=generator_of(config.generator, replica),
            weights=config.weights,
            placement=config.placement,
            storage=storage.signed(f"generator-{replica}/{run_id}"),
            run_dir=self.run_dir,
            run_id=run_id,
            environments=environments,
        )

    def environment(self, index: int) -> EnvironmentSpec:
        """Return the spec of an executor that runs environments, which take turns with rollouts."""
        config, inputs = self.config, self.inputs
        return EnvironmentSpec(
            config=config.environment,
            kinds=inputs.kinds,
            limits=limits_of(config.reward),
            task_source=inputs.task_source,
            data=config.data,
            tokenizer=inputs.tokenizer_folder,
            socket=self._environment_socket(index),
            rewards=config.reward.episode_rewards,
        )

    def environments(
        self, executors: Mapping[int, Executor], hosts: Mapping[int, int], replica: int, host: int
    ) -> Environments | None:
        """Return the environment executors, which are on these `hosts`, as a replica on `host`
        reaches them; None without any."""
        links = tuple(
            EnvironmentLink(
                executor.name,
                executor.one(Environment),
                self._environment_socket(index) if hosts[index] == host else None,
            )
            for index, executor in sorted(executors.items())
        )
        near = [place for place, index in enumerate(sorted(executors)) if hosts[index] == host]
        if not links:
            return None
        own = near[0] if near else replica % len(links)
        return Environments(links, own, context_of(self.config))

    def _environment_socket(self, index: int) -> str | None:
        folder = f"{self.run_dir}/.rendezvous-environment"
        return f"{folder}/{index}" if has_sockets(self.config) else None

    def stage(self, stage: Stage) -> Spec:
        """Return the spec of the executor that runs a stage between generate and settle."""
        config, inputs = self.config, self.inputs
        storage = self.storage.signed(f"{stage.name}/{_new_id()}")
        if isinstance(stage.run, FrozenModel):
            return ReferenceSpec(
                checkpoint=os.path.abspath(Path(config.recipe_dir, stage.run.checkpoint)),
                column=stage.writes[0].name,
                rendezvous=f"{self.run_dir}/.rendezvous-{stage.name}-{_new_id()}",
                config=replace(config.trainer, lora=LoraConfig()),
                sampling=config.sampling,
                storage=storage,
            )
        if stage.is_external:
            units = storage_specs(config, self.run_dir)
            return ExternalSpec(
                stage=stage,
                socket=f"{self.run_dir}/{SOCKETS}/{stage.name}",
                units=tuple((f"storage-{unit.unit}", str(unit.socket)) for unit in units),
                tokenizer=inputs.tokenizer_folder,
                storage=storage,
            )
        return StageSpec(
            stage=stage,
            numbers=inputs.graph.numbers & {*stage.reads},
            tokenizer=inputs.tokenizer_folder,
            task_source=inputs.task_source,
            storage=storage,
            reward=config.reward if stage.name == SCORE else None,
            has_openings=any(kind.is_kept for kind in inputs.kinds.values()),
        )


def collector_spec(
    config: Config, generators: Mapping[int, Executor], number: int
) -> CollectorSpec:
    """Return the spec of a collector, which asks an equal share of the replicas."""
    num = config.generator.num_collectors
    return CollectorSpec(
        generators={
            i: executor.one(GeneratorReplica)
            for i, executor in generators.items()
            if i % num == number
        }
    )


def _new_id() -> str:
    """Return an id for files that no earlier processes of the run used."""
    return uuid.uuid4().hex[:8]
