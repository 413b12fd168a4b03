"""What a run reads: checkpoint, tokenizer, prompts and task.py, checked.

Owns: reading and checking them, and the sampling of training and held-out rollouts. Does not own:
objects of the run (`run/wiring.py`). Invariant: `read_inputs` finds every mistake that can be found
before a process starts.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
from llamarl.dataflow.graph import INFER, FrozenModel, Graph
from llamarl.device.driver import ALLOCATOR_VARIABLES, has_driver
from llamarl.device.names import GPU
from llamarl.environments.contained import missing
from llamarl.environments.definition import Kinds, schemas_of
from llamarl.environments.prompts import (
    NumberedRow,
    PromptStream,
    no_tools,
    read_rows,
    tokenize_rows,
)
from llamarl.environments.requests import read_lengths
from llamarl.environments.rewards.functions import check_answers
from llamarl.environments.task_prompts import make_rows
from llamarl.environments.turn_format import TurnFormats
from llamarl.generation.vllm.limits import check_installed, check_limits, check_temperature
from llamarl.metrics.trackers import check_trackers
from llamarl.models.adapter_inventory import check_adapter
from llamarl.models.architecture import Architecture, read_architecture
from llamarl.models.inventory import check_checkpoint, check_parallel
from llamarl.models.other_architecture import AnyArchitecture
from llamarl.recipe.hub_names import PREFIX, REPOSITORY
from llamarl.recipe.task_source import load_task, read_graph, read_task
from llamarl.task_file import FILE
from llamarl.types import Prompt
from llamarl.weights.transports.registry import TRANSPORTS

EOS = "eos_token_ids"  # of an architecture: they change no tensor, and may differ
SHAPES = "shapes"  # of an architecture: a checkpoint's tensors show them
PROMPTS = "data.prompts"
TASK = "task"  # in place of a file of prompts
NUM_MEASURED = 256  # prompts; a plan needs only their mean length


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
    prompts: list[Prompt]
    held_out: list[Prompt]
    task_source: str | None
    task: Mapping[str, Callable[..., Any]]
    graph: Graph
    kinds: Kinds
    replay_lengths: list[int]


def read_inputs(config: Config, *, needs_prompts: bool = True) -> Inputs:
    """Read and check checkpoint, tokenizer, prompts and task.py; ValueError says what to change."""
    _check_devices(config)
    if any(isinstance(pool.generator, VllmConfig) for pool in pools_of(config.generator)):
        check_installed()
    _check_allocator(config)
    checkpoint = _resolve(config, config.model.checkpoint)
    tokenizer_folder = _resolve(config, config.model.tokenizer or config.model.checkpoint)
    _check_folder(config, checkpoint)
    architecture = _check_checkpoint(config, checkpoint)
    _check_planned(config, architecture)
    _check_architecture(config, architecture)
    adapter = _resolve(config, config.model.adapter) if config.model.adapter else None
    check_adapter(adapter, architecture, config.trainer.lora)
    tokenizer = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer, architecture.vocab_size)
    split_stops(tokenizer, config.sampling.stop_strings)  # raises what is wrong with them
    task_source = read_task(config)
    graph, kinds = read_graph(config, task_source)
    task = load_task(config, task_source)
    check_trackers(config.metrics.trackers)  # task.py may have added one
    _check_models(config, graph, architecture)
    check_contained(config)
    TurnFormats(tokenizer, kinds, config.environment.calls)  # raises what is wrong with them
    prompts, held_out = [], []
    if needs_prompts:
        prompts = _read_prompts(config, tokenizer, kinds, task_source)
    for name in config.held_out_sets:
        found = _read_prompts(config, tokenizer, kinds, task_source, held_out=name)
        found = found[: config.evaluation.max_prompts or len(found)]
        held_out += [replace(prompt, held_out=name) for prompt in found]
    share, seed = config.experience.keep_rollouts, config.seed
    held_out = [replace(each, is_kept=is_kept(each, share, seed)) for each in held_out]
    check_lengths(config, prompts, held_out)
    replay_lengths = []
    if config.sampling.replay_lengths is not None:
        path = _resolve(config, config.sampling.replay_lengths)
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


def check_contained(config: Config) -> None:
    """ValueError if the recipe runs programs that a model wrote, and they cannot be contained."""
    runs_programs = "code" in config.reward.functions or "python" in config.environment.tools
    if runs_programs and config.reward.contained and (what := missing()):
        must = "reward.contained must be false, on purpose, where programs cannot be contained"
        raise ValueError(f"{must}, got true without {what}")


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
        "trainer.optimizer": config.trainer.optimizer,
        PROMPTS: _digest(inputs.prompts),
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
                "data.prompts, data.chat, the tokenizer and what data.too_long leaves out must "
                "give the same prompts as when the checkpoint was saved, got others: resume with "
                "those, or start a new run from the export"
            )
        was = json.dumps(saved[key])
        raise ValueError(f"{key} must be {was}, as in the checkpoint, got {json.dumps(value)}")


def _digest(prompts: Sequence[Prompt]) -> str:
    """Digest of all prompts: their numbers and token ids, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        ids = np.array([prompt.prompt_id, len(prompt.token_ids), *prompt.token_ids], dtype="<i8")
        digest.update(ids.tobytes())
    return digest.hexdigest()


def read_planned_architecture(config: Config) -> Architecture:
    """The architecture for a forecast: the checkpoint's or, without a checkpoint, that of
    `model.architecture`. ValueError as for a run."""
    folder = _resolve(config, config.model.checkpoint)
    if config.model.architecture is not None and not os.path.isdir(folder):
        architecture = read_architecture(_resolve(config, config.model.architecture))
    else:
        _check_folder(config, folder)
        architecture = read_architecture(folder)
        _check_planned(config, architecture)
    _check_architecture(config, architecture)
    return architecture


def with_measured_prompts(config: Config) -> Config:
    """The recipe with the mean length of its prompts in `plan`, if the plan leaves it open and both
    the prompts and the tokenizer are there. ValueError as for a run."""
    folder = _resolve(config, config.model.tokenizer or config.model.checkpoint)
    path = _place(config, config.data.prompts)
    is_there = os.path.exists(path) and os.path.isfile(Path(folder, "tokenizer.json"))
    if config.plan.prompt_tokens or not is_there:
        return config
    tokenizer = load_tokenizer(folder)
    task_source = read_task(config)
    _, kinds = read_graph(config, task_source)
    prompts = _read_prompts(config, tokenizer, kinds, task_source, most=NUM_MEASURED)
    check_lengths(config, prompts, [])
    mean = round(sum(len(prompt.token_ids) for prompt in prompts) / len(prompts))
    return replace(config, plan=replace(config.plan, prompt_tokens=max(1, mean)))


def read_frozen(config: Config, graph: Graph) -> dict[str, Architecture]:
    """The architectures of the frozen models that run the recipe's own stages, by stage; without
    those that are not on this machine or of a family that forecasts do not know."""
    found = {}
    for stage in graph.between:
        if isinstance(stage.run, FrozenModel) and stage.name != INFER:
            with suppress(ValueError):
                found[stage.name] = read_architecture(_resolve(config, stage.run.checkpoint))
    return found


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
    """ValueError, with its name, for what may be meant as a model of the Hub."""
    name = config.model.checkpoint
    if REPOSITORY.fullmatch(name) and not os.path.isdir(folder):
        raise ValueError(
            f"the checkpoint must be an existing folder, got {folder!r} (if {name} is a model of "
            f"the Hub: model.checkpoint={PREFIX}{name})"
        )


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
    folder = _resolve(config, config.model.architecture)
    planned, checkpoint = read_architecture(folder), _resolve(config, config.model.checkpoint)
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


def _check_models(config: Config, graph: Graph, architecture: AnyArchitecture) -> None:
    """ValueError unless the frozen models of the recipe's own stages can read the policy's
    tokens."""
    for stage in graph.between:
        if isinstance(stage.run, FrozenModel) and stage.name != INFER:
            folder = _resolve(config, stage.run.checkpoint)
            is_any = isinstance(config.trainer, TransformersConfig)  # its code computes them too
            found = check_checkpoint(folder, is_any=is_any)
            must = f"be the policy's {architecture.vocab_size}"
            key = f"the vocabulary of {folder} (stage {stage.name})"
            require(found.vocab_size == architecture.vocab_size, key, must, found.vocab_size)
            check_parallel(found, config.trainer, config.generator)


def _resolve(config: Config, path: str) -> str:
    return os.path.abspath(Path(config.recipe_dir, path))


def _read_prompts(
    config: Config,
    tokenizer: Tokenizer,
    kinds: Kinds,
    task_source: str | None,
    *,
    held_out: str = "",
    most: int | None = None,
) -> list[Prompt]:
    """The prompts to train on or those of the set `held_out`, or the first `most`, checked for what
    rewards need. With data.too_long=drop only those that leave room for a completion."""
    data, options = config.data, {}
    section = "evaluation" if held_out else "sampling"
    source = config.held_out_sets[held_out] if held_out else data.prompts
    place = _place(config, source)
    tools = partial(schemas_of, kinds=kinds) if kinds else no_tools
    context, max_tokens = context_of(config), _max_tokens(config)[section]
    room = max(1, context - max_tokens)
    if data.too_long == "drop" and room < data.max_prompt_tokens:
        data = replace(data, max_prompt_tokens=room)
        limit = f"generator.max_model_len={context} less {section}.max_tokens={max_tokens}"
        options = {"limit": limit}
    if source == TASK:
        assert task_source is not None, "data.prompts=task comes with a task.py"
        made = make_rows(task_source, data.options, held_out=bool(held_out))
        rows: Iterable[NumberedRow] = enumerate(made, start=1)
        place = f"{place}: prompts"
    else:
        rows = read_rows(Path(place))
    prompts = tokenize_rows(rows, place, data, tokenizer, most=most, tools=tools, **options)
    check_answers(config.reward, prompts, place)
    return prompts


def _place(config: Config, source: str) -> str:
    """The file of data.prompts or data.held_out."""
    return _resolve(config, FILE if source == TASK else source)


def context_of(config: Config) -> int:
    """Tokens of prompt and completion that every replica can hold."""
    return min(pool.generator.max_model_len for pool in pools_of(config.generator))


def _max_tokens(config: Config) -> dict[str, int]:
    """The longest completion of training and of held-out prompts, by the section that says it."""
    training = config.sampling.max_tokens
    return {"sampling": training, "evaluation": config.evaluation.max_tokens or training}


def check_lengths(config: Config, prompts: list[Prompt], held_out: list[Prompt]) -> None:
    """ValueError unless each prompt and its completion fit into the context."""
    context, max_tokens = context_of(config), _max_tokens(config)
    for name, some in (("sampling", prompts), ("evaluation", held_out)):
        longest, added = max((len(p.token_ids) for p in some), default=0), max_tokens[name]
        must = f"leave room for the longest prompt ({longest} tokens) in generator.max_model_len"
        require(longest + added <= context, f"{name}.max_tokens", f"{must} ({context})", added)


def make_prompts(config: Config, inputs: Inputs, state: dict[str, Any]) -> PromptStream:
    """The prompts still to be generated for, from `state` on."""
    return PromptStream(
        inputs.prompts,
        seed=config.seed,
        shuffle=config.data.shuffle,
        keep=config.experience.keep_rollouts,
        position=state.get("position", 0),
        first=[tuple(pair) for pair in (*state.get("pending", []), *state.get("backlog", []))],
        identity=identity(config, inputs),
    )
