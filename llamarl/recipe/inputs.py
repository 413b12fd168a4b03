"""What a run reads: checkpoint, tokenizer, prompts and task.py, checked.

Owns: reading and checking them, and the sampling of training and held-out rollouts. Does not own:
objects of the run (`run/wiring.py`). Invariant: `read_inputs` finds every mistake that can be found
before a process starts.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.checkpoints import manifest
from llamarl.config import Config, TransformersConfig, VllmConfig
from llamarl.config.check import require
from llamarl.config.pools import alone, named, pools_of
from llamarl.data.kept_rollouts import is_kept
from llamarl.data.tokenizer import (
    TextDecoder,
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    split_stops,
)
from llamarl.dataflow.graph import Graph
from llamarl.device.driver import ALLOCATOR_VARIABLES, has_driver
from llamarl.device.names import GPU
from llamarl.environments.contained import lacking, missing
from llamarl.environments.definition import Kinds
from llamarl.environments.prompt_cache import ShowPieces, show_nothing
from llamarl.environments.prompt_stream import PromptStream
from llamarl.environments.prompt_table import PromptTable
from llamarl.environments.prompts import is_chat
from llamarl.environments.requests import read_lengths
from llamarl.environments.rewards.functions import check_pattern
from llamarl.environments.turn_format import TurnFormats
from llamarl.generation.vllm.limits import check_installed, check_limits, check_temperature
from llamarl.metrics.trackers import check_trackers
from llamarl.models.adapter_inventory import check_adapter
from llamarl.models.architecture import Architecture, read_architecture
from llamarl.models.inventory import check_checkpoint, check_parallel
from llamarl.models.other_architecture import AnyArchitecture
from llamarl.recipe.demonstration_inputs import read_demonstrations
from llamarl.recipe.frozen_models import check_models
from llamarl.recipe.hub_names import PREFIX, REPOSITORY
from llamarl.recipe.prompt_inputs import check_length, read_prompts, resolve
from llamarl.recipe.task_source import load_task, read_graph, read_task
from llamarl.task_neighbours import TaskSource
from llamarl.types import Prompt
from llamarl.weights.transports.registry import TRANSPORTS

LOGGER = logging.getLogger(__name__)
EOS = "eos_token_ids"  # of an architecture: they change no tensor, and may differ
SHAPES = "shapes"  # of an architecture: a checkpoint's tensors show them
PROMPTS = "data.prompts"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads, checked and ready. `checkpoint`, `tokenizer_folder` and `adapter`, if
    there is one, are absolute.

    `task` holds the functions of task.py that the controller calls, by name; `graph` the stages;
    `kinds` what rollouts take turns with.
    """

    checkpoint: str
    adapter: str | None
    tokenizer_folder: str
    architecture: AnyArchitecture
    tokenizer: TextDecoder
    prompts: Sequence[Prompt]
    held_out: list[Prompt]
    task_source: TaskSource | None
    task: Mapping[str, Callable[..., Any]]
    graph: Graph
    kinds: Kinds
    replay_lengths: list[int]


def read_inputs(
    config: Config, *, needs_prompts: bool = True, show: ShowPieces = show_nothing
) -> Inputs:
    """Read and check checkpoint, tokenizer, prompts and task.py; ValueError says what to change.
    `show` hears how far large files of prompts are."""
    _check_devices(config)
    if any(isinstance(pool.generator, VllmConfig) for pool in pools_of(config.generator)):
        check_installed()
    _check_allocator(config)
    checkpoint = resolve(config, config.model.checkpoint)
    tokenizer_folder = resolve(config, config.model.tokenizer or config.model.checkpoint)
    _check_folder(config, checkpoint)
    architecture = _check_checkpoint(config, checkpoint)
    _check_planned(config, architecture)
    _check_architecture(config, architecture)
    adapter = resolve(config, config.model.adapter) if config.model.adapter else None
    check_adapter(adapter, architecture, config.trainer.lora)
    tokenizer = load_tokenizer(tokenizer_folder, config.data.chat_template_kwargs, config.data.date)
    check_tokenizer(tokenizer, architecture.vocab_size)
    split_stops(tokenizer, config.sampling.stop_strings)  # raises what is wrong with them
    check_pattern(config.reward, tokenizer.special_ids)
    task_source = read_task(config)
    graph, kinds = read_graph(config, task_source)
    task = load_task(config, task_source)
    check_trackers(config.metrics.trackers)  # task.py may have added one
    check_models(config, graph, architecture, tokenizer)
    check_contained(config)
    TurnFormats(tokenizer, kinds, config.environment)  # raises what is wrong with them
    if config.algorithm.imitates and needs_prompts:
        most = architecture.max_positions
        prompts, held_out = read_demonstrations(config, tokenizer, most, show=show)
    else:
        read = partial(read_prompts, config, tokenizer, kinds, task_source, show=show)
        prompts, held_out = _read_all(config, read, needs_prompts=needs_prompts)
    if not config.algorithm.imitates and any(is_chat(each, config.data) for each in prompts[:1]):
        _warn_of_endless_turns(config, tokenizer, architecture)
    replay_lengths = []
    if config.sampling.replay_lengths is not None:
        path = resolve(config, config.sampling.replay_lengths)
        replay_lengths = read_lengths(path, config.sampling.max_tokens)
    for folder in {checkpoint, tokenizer_folder, adapter or checkpoint}:  # as it reads every byte
        manifest.verify_if_listed(Path(folder))
    return Inputs(
        checkpoint=checkpoint,
        adapter=adapter,
        tokenizer_folder=tokenizer_folder,
        architecture=architecture,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        task_source=task_source,
        task=task,
        graph=graph,
        kinds=kinds,
        replay_lengths=replay_lengths,
    )


def _warn_of_endless_turns(
    config: Config, tokenizer: Tokenizer, architecture: AnyArchitecture
) -> None:
    """Say so if rollouts do not stop where the chat template ends an answer."""
    end = tokenizer.end_of_answer()
    ids = {*tokenizer.eos_token_ids, *architecture.eos_token_ids}
    is_known = end is None or tokenizer.special_ids[end] in ids
    if not is_known and end not in config.sampling.stop_strings:
        words = "the chat template of %s ends an answer with %s, at which rollouts do not stop: "
        advice = "add it to sampling.stop_strings, or to eos_token_id in generation_config.json"
        log.warning(words + advice, tokenizer.folder, end)


def _read_all(
    config: Config, read: Callable[..., PromptTable], *, needs_prompts: bool
) -> tuple[PromptTable, list[Prompt]]:
    """The prompts to train on, if those are needed, and all that are held out."""
    prompts, held_out = PromptTable([]), list[Prompt]()
    if needs_prompts:
        prompts = read()
        check_length(config, "sampling", prompts.longest)
    for name in config.held_out_sets:
        found = read(held_out=name)
        some = found[: config.evaluation.max_prompts or len(found)]
        held_out += [replace(prompt, held_out=name) for prompt in some]
    share, seed = config.experience.keep_rollouts, config.seed
    held_out = [replace(each, is_kept=is_kept(each, share, seed)) for each in held_out]
    longest = max((len(prompt.token_ids) for prompt in held_out), default=0)
    check_length(config, "evaluation", longest)
    return prompts, held_out


def check_contained(config: Config) -> None:
    """ValueError if the recipe runs programs that a model wrote, and they cannot be contained. The
    log says in one line what cannot be kept from them on this machine."""
    runs_programs = "code" in config.reward.functions or "python" in config.environment.tools
    if not (runs_programs and config.reward.contained):
        return
    if what := missing():
        must = "reward.contained must be false, on purpose, where programs cannot be contained"
        raise ValueError(f"{must}, got true: {what}")
    if what := lacking():
        LOGGER.warning(what)


def identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was saved, by config key; JSON.

    If one of these differed, the run would go on without an error and be wrong: the prompts and
    their order (to which the saved position and open prompts refer), the optimizer, and what the
    model's tensors do not show.
    """
    architecture = asdict(inputs.architecture)
    sizes = {name: value for name, value in architecture.items() if name not in (EOS, SHAPES)}
    return {
        "seed": config.seed,
        "data.shuffle": config.data.shuffle,
        "data.weights": config.data.weights,
        "trainer.optimizer": config.trainer.optimizer,
        PROMPTS: getattr(inputs.prompts, "digest", ""),
        **{f"{name} of model.checkpoint": value for name, value in sizes.items()},
    }


def check_identity(saved: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """ValueError, naming the first difference, unless a run of identity `found` may resume from a
    checkpoint of identity `saved`."""
    for key, value in found.items():
        if key not in saved:
            raise ValueError(f"the checkpoint must say what {key} was, got one that does not")
        if saved[key] == value:
            continue
        if key == PROMPTS:
            raise ValueError(
                "data.prompts, data.chat, data.date, the tokenizer, its chat template and what "
                "data.overlong does must give the same prompts as when the checkpoint was saved, "
                "got others: resume with those, or start a new run from the export"
            )
        was = json.dumps(saved[key])
        raise ValueError(f"{key} must be {was}, as in the checkpoint, got {json.dumps(value)}")


def read_planned_architecture(config: Config) -> Architecture:
    """The architecture for a forecast: the checkpoint's or, without a checkpoint, that of
    `model.architecture`. ValueError as for a run."""
    folder = resolve(config, config.model.checkpoint)
    if config.model.architecture is not None and not os.path.isdir(folder):
        architecture = read_architecture(resolve(config, config.model.architecture))
    else:
        _check_folder(config, folder)
        architecture = read_architecture(folder)
        _check_planned(config, architecture)
    _check_architecture(config, architecture)
    return architecture


def _check_devices(config: Config) -> None:
    """ValueError for a GPU on a machine without a driver; `cluster.hosts` check their own."""
    is_able = has_driver() or bool(config.cluster.hosts)
    must = "be cpu on a machine without a GPU"
    for pool in pools_of(config.generator):
        with named(pool):
            pool.generator.require(is_able or pool.generator.device == "cpu", "device", must)
    config.trainer.require(is_able or config.trainer.device == "cpu", "device", must)


def _check_allocator(config: Config) -> None:
    """ValueError if torch's allocator makes GPU memory that other processes cannot map by its
    handle without a system call that containers forbid (pidfd_getfd). Such a run has one host, so
    all processes have this environment."""
    transport = TRANSPORTS[config.weights.transport]
    needs_handles = transport.is_mapped and transport.device == GPU
    must = f"not have expandable_segments:True with weights.transport={config.weights.transport}"
    for name in ALLOCATOR_VARIABLES if needs_handles else ():
        settings = os.environ.get(name, "")
        is_able = "expandable_segments:true" not in settings.lower().replace(" ", "")
        require(is_able, name, must, settings)


def _check_folder(config: Config, folder: str) -> None:
    """ValueError for a checkpoint that is not there; with its name for what may be meant as a model
    of the Hub."""
    if os.path.isdir(folder):
        return
    name, hint = config.model.checkpoint, ""
    if REPOSITORY.fullmatch(name):
        hint = f" (if {name} is a model of the Hub: model.checkpoint={PREFIX}{name})"
    raise ValueError(f"model.checkpoint must be an existing folder, got {folder!r}{hint}")


def _check_checkpoint(config: Config, checkpoint: str) -> AnyArchitecture:
    """The architecture; of any family if no part of the run has model code of our own."""
    is_ours = not isinstance(config.trainer, TransformersConfig)
    pools = pools_of(config.generator)
    is_ours = is_ours or not all(isinstance(pool.generator, VllmConfig) for pool in pools)
    return check_checkpoint(checkpoint, is_any=not is_ours)


def _check_planned(config: Config, architecture: AnyArchitecture) -> None:
    """ValueError, naming the first difference, unless the checkpoint has the planned
    architecture. Ids that end a completion may differ: they change no tensor."""
    if config.model.architecture is None:
        return
    folder = resolve(config, config.model.architecture)
    planned, checkpoint = read_architecture(folder), resolve(config, config.model.checkpoint)
    for name in (field.name for field in fields(Architecture) if field.name != EOS):
        expected, found = getattr(planned, name), getattr(architecture, name, None)
        must = f"be {expected} as in {folder}, which the recipe was planned with"
        require(found == expected, f"{name} of the checkpoint {checkpoint}", must, found)


def _check_architecture(config: Config, architecture: AnyArchitecture) -> None:
    """ValueError if config and architecture do not go together."""
    must = f"be at most the checkpoint's {architecture.max_positions} positions"
    for pool in pools_of(config.generator):
        with named(pool):
            generator = alone(config, pool).generator
            check_parallel(architecture, config.trainer, generator)
            if isinstance(generator, VllmConfig):
                check_limits(generator, architecture)
                check_temperature("sampling.temperature", config.sampling.temperature)
                check_temperature("evaluation.temperature", config.evaluation.temperature)
            fits = generator.max_model_len <= architecture.max_positions
            generator.require(fits, "max_model_len", must)


def make_prompts(config: Config, inputs: Inputs, state: dict[str, Any]) -> PromptStream:
    """The prompts still to be generated for, from `state` on."""
    return PromptStream(
        inputs.prompts,
        seed=config.seed,
        shuffle=config.data.shuffle,
        keep=config.experience.keep_rollouts,
        weights=config.data.weights,
        num_epochs=config.num_epochs,
        repeat_share=config.data.repeat_share,
        position=state.get("position", 0),
        walks=state.get("walks", ()),
        silent=state.get("silent", ""),
        first=[tuple(pair) for pair in (*state.get("pending", []), *state.get("backlog", []))],
        identity=identity(config, inputs),
    )
