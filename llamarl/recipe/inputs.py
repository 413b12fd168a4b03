"""The inputs of a run: checkpoint, frozen models, tokenizer with its chat template, prompts and
task.py, read and checked."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.core import files
from llamarl.core.config import Config, TransformersConfig, VllmConfig
from llamarl.core.config.generator import alone, named, pools_of
from llamarl.core.config.inputs import AGENT
from llamarl.core.device.names import ALLOCATOR_VARIABLES, GPU, has_driver
from llamarl.core.extensions import TaskSource
from llamarl.core.fields import require
from llamarl.core.records import Prompt
from llamarl.generator.vllm.limits import check_installed, check_limits, check_temperature
from llamarl.metrics.trackers import check_trackers
from llamarl.model.adapter_inventory import check_adapter
from llamarl.model.architecture import AnyArchitecture, Architecture, read_architecture
from llamarl.model.inventory import check_checkpoint, check_parallel
from llamarl.model.prompt_rules import is_chat
from llamarl.model.tokenizer import (
    END_FILE,
    TODAY,
    TextDecoder,
    Tokenizer,
    check_teacher,
    check_tokenizer,
    load_tokenizer,
    split_stops,
    tokenizer_files,
)
from llamarl.prompts.cache import ShowPieces, show_nothing
from llamarl.prompts.rows import PromptTable
from llamarl.prompts.stream import PromptStream, read_lengths
from llamarl.publish.transports.routes import TRANSPORTS
from llamarl.recipe.hub import PREFIX, REPOSITORY
from llamarl.recipe.prompt_inputs import (
    check_length,
    load_task,
    read_demonstrations,
    read_graph,
    read_prompts,
    read_task,
    resolve,
)
from llamarl.scoring.agent.command import check_command, image_of
from llamarl.scoring.agent.tasks import task_of
from llamarl.scoring.definition import Kinds
from llamarl.scoring.rewards import check_pattern
from llamarl.scoring.sandbox.containers import lacking, missing
from llamarl.scoring.sandbox.docker import missing_engine, missing_image
from llamarl.scoring.stages import INFER, FrozenModel, Graph
from llamarl.scoring.turn_format import TurnFormats
from llamarl.storage.archive import is_kept


def read_frozen(config: Config, graph: Graph) -> dict[str, Architecture]:
    """Return the architectures of the frozen models that run stages, by stage; without the policy's
    own reference, and those that are not on this machine or of a family that forecasts do not
    know."""
    found = {}
    for name, folder in _frozen_folders(config, graph).items():
        with suppress(ValueError):
            found[name] = read_architecture(folder)
    return found


def _frozen_folders(config: Config, graph: Graph) -> dict[str, str]:
    """Return the folders of the frozen models of stages, but for a model that is the checkpoint
    which the policy begins as."""
    return {
        stage.name: resolve(config, stage.run.checkpoint)
        for stage in graph.between
        if isinstance(stage.run, FrozenModel)
        and not (stage.name == INFER and not config.algorithm.reference)
    }


def check_models(
    config: Config, graph: Graph, architecture: AnyArchitecture, tokenizer: Tokenizer
) -> None:
    """Raise a ValueError unless the frozen models of stages can read the policy's tokens."""
    for name, folder in _frozen_folders(config, graph).items():
        is_any = isinstance(config.trainer, TransformersConfig)  # its code computes them too
        found = check_checkpoint(folder, is_any=is_any)
        key, own = f"the vocabulary of {folder} (stage {name})", architecture.vocab_size
        if name == INFER:
            check_teacher(tokenizer, load_tokenizer(folder), found.vocab_size)
            must = f"be at least the policy's {own}, of which generators draw"
            require(found.vocab_size >= own, key, must, found.vocab_size)
        else:
            require(found.vocab_size == own, key, f"be the policy's {own}", found.vocab_size)
        longest = max(pool.generator.max_model_len for pool in pools_of(config.generator))
        must = f"be at least generator.max_model_len {longest}"
        key = f"the positions of {folder} (stage {name})"
        require(found.max_positions >= longest, key, must, found.max_positions)
        check_parallel(found, config.trainer, config.generator)


DATE = "data.date"
TEMPLATE_FILE = "chat_template.jinja"


def with_own_template(config: Config) -> Config:
    """Set a tokenizer whose template is that of `data.chat_template`: a folder of links in the
    cache. ValueError, in one line, for a file that cannot be read."""
    if config.data.chat_template is None:
        return config
    path = Path(resolve(config, config.data.chat_template))
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        must = "data.chat_template must name a file of UTF-8 text"
        raise ValueError(f"{must}, got {error}") from error
    source = Path(tokenizer_folder(config))
    files = [each for each in (*tokenizer_files(source), source / END_FILE) if each.is_file()]
    others = [each for each in files if each.name != TEMPLATE_FILE and each.parent == source]
    key = hashlib.sha256("\n".join([str(source), *map(str, others)]).encode() + text)
    from huggingface_hub import cached_assets_path

    try:
        folder = cached_assets_path("llamarl", "tokenizers", key.hexdigest()[:12])
        for each in others:
            with suppress(FileExistsError):
                os.symlink(each, folder / each.name)
        unfinished = folder / f"{TEMPLATE_FILE}.{os.getpid()}"
        unfinished.write_bytes(text)
        unfinished.rename(folder / TEMPLATE_FILE)
    except OSError as error:
        must = "be used where links can be made (HF_ASSETS_CACHE)"
        raise ValueError(f"data.chat_template must {must}, got {error}") from error
    return replace(config, model=replace(config.model, tokenizer=str(folder)))


def with_date(config: Config, saved: Callable[[], Mapping[str, Any]]) -> Config:
    """Set the day that the chat template gets, if it asks for one: the recipe's, that of the run
    whose config `saved` gives, or today."""
    folder = Path(tokenizer_folder(config))
    if config.data.date is not None or not any(map(_is_dated, tokenizer_files(folder))):
        return config
    data = saved().get("data")
    kept = data.get("date") if isinstance(data, dict) else None
    date = str(kept or datetime.date.today().isoformat())
    return replace(config, data=replace(config.data, date=date))


def tokenizer_folder(config: Config) -> str:
    """Return the folder of the tokenizer."""
    return resolve(config, config.model.tokenizer or config.model.checkpoint)


def _is_dated(path: Path) -> bool:
    is_text = path.suffix == ".jinja" or path.name == "tokenizer_config.json"
    return is_text and TODAY.encode() in path.read_bytes()


EOS = "eos_token_ids"  # of an architecture: they change no tensor, and may differ
SHAPES = "shapes"  # of an architecture: a checkpoint's tensors show them
OF_EXPERTS = "experts", "norms_all_heads"  # of an architecture: left out where a model has none
PROMPTS = "data.prompts"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a run are checked and ready. `checkpoint`, `tokenizer_folder` and `adapter`, if
    there is one, are absolute; `task` holds the functions of task.py that the controller calls, by
    name, `graph` the stages, and `kinds` what rollouts take turns with."""

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
    folder = tokenizer_folder(config)
    _check_folder(config, checkpoint)
    # Of any family if no part of the run has model code of our own.
    is_any = isinstance(config.trainer, TransformersConfig) and all(
        isinstance(pool.generator, VllmConfig) for pool in pools_of(config.generator)
    )
    architecture = check_checkpoint(checkpoint, is_any=is_any)
    _check_planned(config, architecture)
    _check_architecture(config, architecture)
    adapter = resolve(config, config.model.adapter) if config.model.adapter else None
    check_adapter(adapter, architecture, config.trainer.lora)
    tokenizer = load_tokenizer(folder, config.data.chat_template_kwargs, config.data.date)
    check_tokenizer(tokenizer, architecture.vocab_size)
    split_stops(tokenizer, config.sampling.stop_strings)  # raises what is wrong with them
    check_pattern(config.reward, tokenizer.special_ids)
    task_source = read_task(config)
    graph, kinds = read_graph(config, task_source)
    task = load_task(config, task_source)
    check_trackers(config.metrics.trackers)  # task.py may have added one
    check_models(config, graph, architecture, tokenizer)
    check_sandbox(config)
    TurnFormats(tokenizer, kinds, config.environment)  # raises what is wrong with them
    if config.algorithm.is_sft and needs_prompts:
        most = architecture.max_positions
        prompts, held_out = read_demonstrations(config, tokenizer, most, show=show)
    else:
        read = partial(read_prompts, config, tokenizer, kinds, task_source, show=show)
        prompts, held_out = _read_all(config, read, needs_prompts=needs_prompts)
    check_episodes(config, prompts, held_out)
    if not config.algorithm.is_sft and any(is_chat(each, config.data) for each in prompts[:1]):
        _warn_of_endless_turns(config, tokenizer, architecture)
    replay_lengths = []
    if config.sampling.replay_lengths is not None:
        path = resolve(config, config.sampling.replay_lengths)
        replay_lengths = read_lengths(path, config.sampling.max_tokens)
    for each in {checkpoint, folder, adapter or checkpoint}:  # as it reads every byte
        files.verify_if_listed(Path(each))
    return Inputs(
        checkpoint=checkpoint,
        adapter=adapter,
        tokenizer_folder=folder,
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


def check_episodes(config: Config, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Raise a ValueError unless the recipe's agent can play the first prompts, and all that are
    tasks. The log says in one line if tasks may want an internet that they do not have."""
    environment, images, wanting = config.environment, dict[str, str](), list[str]()
    names = (*config.data.sources, *config.held_out_sets.values())
    differ = "{" in environment.image or any(os.path.isdir(resolve(config, n)) for n in names)
    for some in (prompts, held_out):
        for prompt in some if environment.command and differ else some[:1]:
            task = task_of(prompt.fields)
            check_command(environment, prompt)
            if environment.image:
                how = ""
                if task is not None and task.build:
                    how = f" (docker build --tag {task.image} {task.build})"
                images.setdefault(image_of(environment.image, prompt.fields), how)
            if task is not None and task.has_internet and not environment.internet:
                wanting.append(task.name)
    if image := missing_image(environment.engine, [*images]):
        must = f"name images that are on this machine{images[image]}"
        raise ValueError(f"environment.image must {must}, got none that is called {image}")
    if wanting:
        words = "%d tasks may use the internet, such as %s, which their sandboxes do not reach: %s"
        advice = "say allow_internet = false in task.toml, or set environment.internet"
        log.warning(words, len(wanting), wanting[0], advice)


def _warn_of_endless_turns(
    config: Config, tokenizer: Tokenizer, architecture: AnyArchitecture
) -> None:
    """Warn if rollouts do not stop where the chat template ends an answer."""
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
    """Return the prompts to train on, if those are needed, and all that are held out."""
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


def check_sandbox(config: Config) -> None:
    """Raise a ValueError if the recipe runs programs that a model wrote, and they cannot be
    contained. The log says in one line what cannot be kept from them on this machine."""
    in_container = config.environment.sandbox == "docker"
    if in_container and (what := missing_engine(config.environment.engine)):
        must = "be local where the engine of containers cannot be reached"
        raise ValueError(f"environment.sandbox must {must}, got docker: {what}")
    runs_programs = "code" in config.reward.functions
    own = {"python"} if in_container else {"python", AGENT}
    runs_programs |= bool(own & {*config.environment.tools})
    if not (runs_programs and config.reward.sandbox):
        return
    if what := missing():
        must = "reward.sandbox must be false, on purpose, where programs cannot be sandboxed"
        raise ValueError(f"{must}, got true: {what}")
    if what := lacking():
        log.warning(what)


def identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """Return what a resumed run must have in common with the one that was saved, by config key, as
    JSON.

    If one of these differed, the run would go on without an error and be wrong: the prompts and
    their order (to which the saved position and open prompts refer), the optimizer, and what the
    model's tensors do not show.
    """
    architecture = json.loads(json.dumps(asdict(inputs.architecture)))
    left_out = {EOS, SHAPES, *(name for name in OF_EXPERTS if not architecture.get(name))}
    sizes = {name: value for name, value in architecture.items() if name not in left_out}
    return {
        "seed": config.seed,
        "data.shuffle": config.data.shuffle,
        "data.weights": config.data.weights,
        "trainer.optimizer": config.trainer.optimizer,
        PROMPTS: getattr(inputs.prompts, "digest", ""),
        **{f"{name} of model.checkpoint": value for name, value in sizes.items()},
    }


def check_identity(saved: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise a ValueError, naming the first difference, unless a run of identity `found` may resume
    from a checkpoint of identity `saved`."""
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
    """Return the architecture for a forecast: the checkpoint's or, without a checkpoint, that of
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
    """Raise a ValueError for a GPU on a machine without a driver; `cluster.hosts` check their
    own."""
    is_able = has_driver() or bool(config.cluster.hosts)
    must = "be cpu on a machine without a GPU"
    for pool in pools_of(config.generator):
        with named(pool):
            pool.generator.require(is_able or pool.generator.device == "cpu", "device", must)
    config.trainer.require(is_able or config.trainer.device == "cpu", "device", must)


def _check_allocator(config: Config) -> None:
    """Raise a ValueError if torch's allocator makes GPU memory that other processes cannot map by
    its handle without a system call that containers forbid (pidfd_getfd). Such a run has one host,
    so all processes have this environment."""
    transport = TRANSPORTS[config.weights.transport]
    needs_handles = transport.is_mapped and transport.device == GPU
    must = f"not have expandable_segments:True with weights.transport={config.weights.transport}"
    for name in ALLOCATOR_VARIABLES if needs_handles else ():
        settings = os.environ.get(name, "")
        is_able = "expandable_segments:true" not in settings.lower().replace(" ", "")
        require(is_able, name, must, settings)


def _check_folder(config: Config, folder: str) -> None:
    """Raise a ValueError for a checkpoint that is not there; with its name for what may be meant as
    a model of the Hub."""
    if os.path.isdir(folder):
        return
    name, hint = config.model.checkpoint, ""
    if REPOSITORY.fullmatch(name):
        hint = f" (if {name} is a model of the Hub: model.checkpoint={PREFIX}{name})"
    raise ValueError(f"model.checkpoint must be an existing folder, got {folder!r}{hint}")


def _check_planned(config: Config, architecture: AnyArchitecture) -> None:
    """Raise a ValueError, naming the first difference, unless the checkpoint has the planned
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
    """Raise a ValueError if config and architecture do not go together."""
    must = f"be at most the checkpoint's {architecture.max_positions} positions"
    for pool in pools_of(config.generator):
        with named(pool):
            generator = alone(config, pool).generator
            check_parallel(architecture, config.trainer, generator)
            if isinstance(generator, VllmConfig):
                check_limits(generator, architecture, config.trainer.lora)
                check_temperature("sampling.temperature", config.sampling.temperature)
                check_temperature("evaluation.temperature", config.evaluation.temperature)
            fits = generator.max_model_len <= architecture.max_positions
            generator.require(fits, "max_model_len", must)


def make_prompts(config: Config, inputs: Inputs, state: dict[str, Any]) -> PromptStream:
    """Return the prompts still to be generated for, from `state` on."""
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
