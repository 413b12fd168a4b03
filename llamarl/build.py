"""From a config to the objects of a run: the only wiring.

Owns: which object gets which, and every check that needs two of them. Does not own: what a run does
with them (`jobs.py`). Invariant: `read_inputs` finds whatever can be known to be wrong before any
process starts.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.algorithms.verdict import judge
from llamarl.cluster import Cluster, ExecutorGroup
from llamarl.config import Config
from llamarl.config.check import require
from llamarl.controller import Controller
from llamarl.data.backlog import Backlog
from llamarl.data.batch import make_batch
from llamarl.data.prompts import PromptStream, read_prompts
from llamarl.data.requests import make_requests, read_lengths
from llamarl.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from llamarl.dispatch import Dispatch
from llamarl.evaluate import Evaluator
from llamarl.experience.ledger import Ledger, loop_stages
from llamarl.experience.store import Store
from llamarl.metrics.journal import Journal
from llamarl.metrics.span import Spans
from llamarl.models.architecture import Architecture
from llamarl.models.inventory import check_checkpoint
from llamarl.rewards.functions import check_answers, check_rewards
from llamarl.staleness import Gate
from llamarl.types import Prompt, Sampling
from llamarl.weights.publish import Publisher

# By name: this process never loads torch, which would cost every start two seconds.
EXECUTORS = {
    "generator": "llamarl.executors.generator:GeneratorExecutor",
    "trainer": "llamarl.executors.trainer:TrainerExecutor",
    "reference": "llamarl.executors.reference:ReferenceExecutor",
    "scorer": "llamarl.executors.scorer:ScorerExecutor",
    "storage": "llamarl.executors.storage:StorageExecutor",
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads, checked and ready. `checkpoint` and `tokenizer_folder` are absolute."""

    checkpoint: str
    tokenizer_folder: str
    architecture: Architecture
    tokenizer: Tokenizer
    prompts: list[Prompt]
    held_out: list[Prompt]
    task_source: str | None
    replay_lengths: list[int]


def read_inputs(config: Config, *, needs_prompts: bool = True) -> Inputs:
    """Read and check checkpoint, tokenizer, prompts and task.py; ValueError says what to change."""
    checkpoint = _resolve(config, config.model.checkpoint)
    tokenizer_folder = _resolve(config, config.model.tokenizer or config.model.checkpoint)
    architecture = check_checkpoint(checkpoint)
    tokenizer = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer, architecture.vocab_size)
    task_source = _task_source(config)
    check_rewards(config.reward, task_source)
    prompts, held_out = [], []
    if needs_prompts:
        prompts = _read_prompts(config, config.data.prompts, tokenizer)
    if config.data.held_out is not None:
        held_out = _read_prompts(config, config.data.held_out, tokenizer)
        held_out = held_out[: config.evaluation.max_prompts or len(held_out)]
    _check_lengths(config, architecture, prompts, held_out)
    return Inputs(
        checkpoint=checkpoint,
        tokenizer_folder=tokenizer_folder,
        architecture=architecture,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        task_source=task_source,
        replay_lengths=_replay_lengths(config),
    )


def train_sampling(config: Config, inputs: Inputs) -> Sampling:
    """How training rollouts are drawn."""
    return Sampling(
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=stop_token_ids(inputs),
        stop_strings=tuple(config.sampling.stop_strings),
    )


def evaluation_sampling(config: Config, inputs: Inputs) -> Sampling:
    """How held-out rollouts are drawn."""
    return Sampling(
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        max_tokens=config.evaluation.max_tokens or config.sampling.max_tokens,
        stop_token_ids=stop_token_ids(inputs),
        stop_strings=tuple(config.sampling.stop_strings),
    )


def stop_token_ids(inputs: Inputs) -> tuple[int, ...]:
    """What ends a completion: the tokenizer's ids and those of the model's config."""
    ids = (*inputs.tokenizer.eos_token_ids, *inputs.architecture.eos_token_ids)
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The executors of a run, started; without one of the `vital` ones it cannot go on."""

    vital: list[ExecutorGroup]
    storage: Store
    generators: dict[int, ExecutorGroup]
    scorer: ExecutorGroup
    trainer: ExecutorGroup | None
    reference: ExecutorGroup | None


async def spawn_executors(
    config: Config, inputs: Inputs, cluster: Cluster, run_dir: str, *, trains: bool
) -> Executors:
    """Start every executor that the recipe needs, all at once; a reference only for a KL term."""
    units = await asyncio.gather(
        *(
            cluster.spawn(
                f"storage-{unit}",
                EXECUTORS["storage"],
                {
                    "unit": unit,
                    "archive_folder": f"{run_dir}/archive",
                    "archive_tokens": config.experience.archive_tokens,
                },
            )
            for unit in range(config.experience.num_storage_units)
        )
    )
    storage = Store([unit.first for unit in units])
    replicas = range(config.generator.num_replicas)
    scorer_kwargs = {
        "config": config.reward,
        "tokenizer": inputs.tokenizer_folder,
        "task_source": inputs.task_source,
        "storage": storage,
    }
    spawns = [cluster.spawn("scorer", EXECUTORS["scorer"], scorer_kwargs)]
    spawns += [_spawn_generator(config, inputs, cluster, storage, i, not trains) for i in replicas]
    if trains:
        spawns.append(_spawn_trainer(config, inputs, cluster, storage, run_dir))
    if trains and config.algorithm.kl_coefficient > 0:
        spawns.append(_spawn_reference(config, inputs, cluster, storage))
    scorer, *others = await asyncio.gather(*spawns)
    await asyncio.gather(*(group.every.start() for group in (*units, scorer, *others)))
    generators, rest = others[: len(replicas)], others[len(replicas) :]
    return Executors(
        vital=[*units, scorer, *rest],
        storage=storage,
        generators=dict(zip(replicas, generators, strict=True)),
        scorer=scorer,
        trainer=rest[0] if rest else None,
        reference=rest[1] if len(rest) > 1 else None,
    )


def build_controller(
    config: Config,
    inputs: Inputs,
    executors: Executors,
    *,
    run_dir: str,
    state: dict[str, Any],
    journal: Journal,
    spans: Spans,
) -> tuple[Controller, Publisher, Dispatch]:
    """Assemble the loop around the started executors. `state` is a checkpoint's, or empty."""
    assert executors.trainer is not None
    generators = {index: group.first for index, group in executors.generators.items()}
    dispatch = Dispatch(generators, executors.storage)
    publisher = Publisher(
        executors.trainer.every,
        {index: group.every for index, group in executors.generators.items()},
        spans,
        timeout_s=config.weights.timeout_s,
        on_flip=dispatch.flipped,
        on_lost=dispatch.lost,
    )
    ledger = Ledger(loop_stages(has_reference=executors.reference is not None))
    controller = Controller(
        config=config,
        run_dir=run_dir,
        prompts=make_backlog(config, inputs, state),
        gate=_gate(config, state),
        ledger=ledger,
        make_requests=partial(
            make_requests,
            sampling=train_sampling(config, inputs),
            seed=config.seed,
            segment_tokens=config.sampling.segment_tokens,
            replay_lengths=inputs.replay_lengths,
        ),
        generator=dispatch,
        scorer=executors.scorer.first,
        reference=executors.reference.first if executors.reference else None,
        judge=partial(judge, max_tokens=config.sampling.max_tokens, config=config.algorithm),
        make_batch=partial(
            make_batch,
            num_ranks=config.trainer.num_ranks,
            tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        ),
        trainer=executors.trainer.first,
        storage=executors.storage,
        publisher=publisher,
        evaluator=build_evaluator(config, inputs, executors, dispatch, ledger),
        journal=journal,
        spans=spans,
    )
    return controller, publisher, dispatch


def build_evaluator(
    config: Config, inputs: Inputs, executors: Executors, dispatch: Dispatch, ledger: Ledger
) -> Evaluator | None:
    """The held-out evaluation, or None without held-out prompts."""
    if not inputs.held_out:
        return None
    return Evaluator(
        prompts=inputs.held_out,
        sampling=evaluation_sampling(config, inputs),
        seed=config.seed,
        generator=dispatch,
        ledger=ledger,
        storage=executors.storage,
    )


async def _spawn_generator(
    config: Config, inputs: Inputs, cluster: Cluster, storage: Store, index: int, loads: bool
) -> ExecutorGroup:
    kwargs = {
        "replica": index,
        "checkpoint": inputs.checkpoint,
        "load_weights": loads,
        "config": config.generator,
        "storage": storage,
        "tokenizer": inputs.tokenizer_folder,
        "run_id": str(os.getpid()),
    }
    return await cluster.spawn(f"generator-{index}", EXECUTORS["generator"], kwargs)


async def _spawn_trainer(
    config: Config, inputs: Inputs, cluster: Cluster, storage: Store, run_dir: str
) -> ExecutorGroup:
    rendezvous = Path(run_dir) / f".rendezvous-{os.getpid()}"
    rendezvous.unlink(missing_ok=True)
    kwargs = {
        "checkpoint": inputs.checkpoint,
        "tokenizer": inputs.tokenizer_folder,
        "rendezvous": str(rendezvous),
        "config": config.trainer,
        "algorithm": config.algorithm,
        "sampling": config.sampling,
        "num_steps": config.num_steps,
        "seed": config.seed,
        "storage": storage,
        "needs_reference": config.algorithm.kl_coefficient > 0,
    }
    return await cluster.spawn("trainer", EXECUTORS["trainer"], kwargs, config.trainer.num_ranks)


async def _spawn_reference(
    config: Config, inputs: Inputs, cluster: Cluster, storage: Store
) -> ExecutorGroup:
    kwargs = {
        "checkpoint": inputs.checkpoint,
        "config": config.trainer,
        "sampling": config.sampling,
        "storage": storage,
    }
    return await cluster.spawn("reference", EXECUTORS["reference"], kwargs)


def _gate(config: Config, state: dict[str, Any]) -> Gate:
    return Gate(
        max_staleness=config.staleness.max_staleness,
        groups_per_step=config.trainer.groups_per_step,
        rollouts_per_group=config.sampling.rollouts_per_prompt,
        late=config.staleness.late,
        max_drops_in_row=config.algorithm.max_drops_in_row,
        version=state.get("version", 0),
        next_group_id=state.get("next_group_id", 0),
        next_row_id=state.get("next_row_id", 0),
    )


def make_backlog(config: Config, inputs: Inputs, state: dict[str, Any]) -> Backlog:
    """The prompts to come. ValueError if `state` was saved with others."""
    stream = PromptStream(
        inputs.prompts,
        seed=config.seed,
        shuffle=config.data.shuffle,
        position=state.get("position", 0),
    )
    first = [tuple(pair) for pair in (*state.get("pending", []), *state.get("backlog", []))]
    return Backlog(stream, inputs.prompts, first, digest=state.get("prompts"))


def _resolve(config: Config, path: str) -> str:
    return os.path.abspath(Path(config.recipe_dir, path))


def _read_prompts(config: Config, path: str, tokenizer: Tokenizer) -> list[Prompt]:
    resolved = _resolve(config, path)
    prompts = read_prompts(resolved, config.data, tokenizer)
    check_answers(config.reward, prompts, resolved)
    return prompts


def _replay_lengths(config: Config) -> list[int]:
    if config.sampling.replay_lengths is None:
        return []
    path = _resolve(config, config.sampling.replay_lengths)
    return read_lengths(path, config.sampling.max_tokens)


def _task_source(config: Config) -> str | None:
    if "task" not in config.reward.functions:
        return None
    path = Path(config.recipe_dir) / "task.py"
    require(path.is_file(), "reward.functions", f"not name task without a {path}", "task")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be Python in UTF-8, got {error}") from error


def _check_lengths(
    config: Config, architecture: Architecture, prompts: list[Prompt], held_out: list[Prompt]
) -> None:
    context = config.generator.max_context_tokens
    positions = architecture.max_positions
    require(
        context <= positions,
        "generator.max_context_tokens",
        f"be at most the checkpoint's {positions} positions",
        context,
    )
    for name, some, max_tokens in (
        ("sampling", prompts, config.sampling.max_tokens),
        ("evaluation", held_out, config.evaluation.max_tokens or config.sampling.max_tokens),
    ):
        longest = max((len(prompt.token_ids) for prompt in some), default=0)
        require(
            longest + max_tokens <= context,
            f"{name}.max_tokens",
            f"leave room for the longest prompt ({longest} tokens) in "
            f"generator.max_context_tokens ({context})",
            max_tokens,
        )
