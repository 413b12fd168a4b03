"""The prompts, demonstrations and task.py that a recipe names, read and checked, and the rules of
SFT.

The stages and rewards of task.py run in processes of their own, never here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from llamarl.core.config import (
    Config,
    EmbeddedConfig,
    EnvironmentConfig,
    EvaluationConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
)
from llamarl.core.config.generator import pools_of
from llamarl.core.config.inputs import AGENT, OF_EPISODE
from llamarl.core.extensions import FILE, STAGES, TaskSource, load, neighbours
from llamarl.core.extensions import read_source as read_text
from llamarl.core.fields import require, require_choice
from llamarl.core.records import Prompt
from llamarl.metrics.trackers import TRACKERS
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.prompts.cache import PromptSource, ShowPieces, read_source, show_nothing
from llamarl.prompts.files import find_files
from llamarl.prompts.rows import PromptRows, PromptTable, make_rows
from llamarl.scoring.agent.command import read_command
from llamarl.scoring.definition import AGENT_KIND, TOOLS, Kinds
from llamarl.scoring.rewards import OWN
from llamarl.scoring.stages import ENVIRONMENT, Graph, check_task, make_graph
from llamarl.scoring.tool_calls import READY
from llamarl.trainer.losses.task_loss import TaskConfig
from llamarl.trainer.packing import MiniBatches

TASK = "task"  # in place of a file of prompts
CONTROLLER_TASKS = {"advantages", "drop", "sample"}  # functions that run in this process
NUM_MEASURED = 256  # prompts; a plan needs only their mean length


def resolve(config: Config, path: str) -> str:
    """Return the absolute path of one that starts at the recipe's folder."""
    return os.path.abspath(Path(config.recipe_dir, path))


def read_task(config: Config) -> TaskSource | None:
    """Return task.py and what it imports from the recipe's folder; None if the recipe names nothing
    of it."""
    names = named_functions(config) | ({STAGES} if config.experience.stages else set())
    names |= {TOOLS} if "task" in config.environment.tools else set()
    path = Path(config.recipe_dir) / FILE
    may_add_tracker = not TRACKERS.keys() >= {*config.metrics.trackers} and path.is_file()
    if not names and not may_add_tracker:
        return None
    named = ", ".join(sorted(names))
    if not path.is_file():
        must = f"the recipe must have a {path}, as it names task for {named}"
        raise ValueError(f"{must}, got no such file")
    text = read_text(path)
    return {FILE: text, **neighbours(text, path.parent)}


def load_task(config: Config, source: TaskSource | None) -> dict[str, Callable[..., Any]]:
    """Return the functions of this task.py that the controller calls, by name; trackers that it
    adds to TRACKERS are there then."""
    return {} if source is None else load(source, named_functions(config) & CONTROLLER_TASKS)


def read_graph(config: Config, source: TaskSource | None) -> tuple[Graph, Kinds]:
    """Return the recipe's graph, with the stages of this task.py that it names, and its
    environments, once a short process has checked it for all that the recipe names. ValueError, in
    one line, for what would not work."""
    names, functions = config.experience.stages, named_functions(config)
    require(len({*names}) == len(names), "experience.stages", "name each stage once", names)
    tools, is_agent = config.environment.tools, config.environment.tools == [AGENT]
    for tool in tools:
        require_choice("environment.tools", tool, ["task", *READY, AGENT])
    if is_agent:
        read_command(config.environment, config.recipe_dir, contained=config.reward.sandbox)
    if not (tools or (source is not None and (names or functions))):
        return make_graph(config), {}
    stages, kinds = check_task(source, functions, names, tools=[] if is_agent else tools)
    kinds = {"": AGENT_KIND} if is_agent else kinds
    gives_reward = all(kind.has_reward for kind in kinds.values())
    gives = "each environment of task.py gives a reward (get_reward or episode_reward)"
    must = f"not name environment unless {gives}"
    is_opened = any(kind.is_agent for kind in kinds.values())
    alone = "be null with an AgentEnvironment, whose program says all that the model sees"
    config.data.require(not is_opened or config.data.system is None, "system", alone)
    for name in config.reward.episode_rewards:
        defined = next(iter(kinds.values())).rewards
        require_choice(f"reward.functions {OF_EPISODE}NAME", name, defined or ["none is defined"])
    is_able = gives_reward or ENVIRONMENT not in config.reward.functions
    require(is_able, "reward.functions", must, config.reward.functions)
    return make_graph(config, stages), kinds


def named_functions(config: Config) -> set[str]:
    """Return the functions of task.py that the recipe names."""
    algorithm = config.algorithm
    is_named = {
        "prompts": TASK in (*config.data.sources, *config.held_out_sets.values()),
        **{own: name in config.reward.functions for name, own in OWN.items()},
        "loss": isinstance(algorithm, TaskConfig),
        "advantages": algorithm.advantage == "task",
        "drop": "task" in algorithm.filters,
        "sample": config.experience.sampler == "task",
    }
    return {name for name, value in is_named.items() if value}


def read_prompts(
    config: Config,
    tokenizer: Tokenizer,
    kinds: Kinds,
    task_source: TaskSource | None,
    *,
    held_out: str = "",
    most: int | None = None,
    show: ShowPieces = show_nothing,
) -> PromptTable:
    """Return the prompts to train on or those of the set `held_out`, or the first `most` of the
    first source, checked for what rewards need. With data.overlong other than error, all leave room
    for a completion."""
    data, limit = config.data, "data.max_prompt_tokens"
    section = "evaluation" if held_out else "sampling"
    context, max_tokens = context_of(config), _max_tokens(config)[section]
    room = max(1, context - max_tokens)
    if data.overlong != "error" and room < data.max_prompt_tokens:
        data = replace(data, max_prompt_tokens=room)
        limit = f"generator.max_model_len={context} less {section}.max_tokens={max_tokens}"
    names = [config.held_out_sets[held_out]] if held_out else data.sources[: 1 if most else None]
    found: list[PromptRows] = []
    for name in names:
        made: list[dict[str, Any]] = []
        if name == TASK:
            assert task_source is not None, "data.prompts=task comes with a task.py"
            made = make_rows(task_source, data.options, held_out=bool(held_out))
        source = PromptSource(
            name=name,
            place=f"{resolve(config, FILE)}: prompts" if name == TASK else resolve(config, name),
            files=() if name == TASK else find_files(Path(resolve(config, name))),
            made=made,
            data=data,
            tokenizer=tokenizer,
            limit=limit,
            kinds=kinds,
            reward=config.reward,
        )
        found.append(read_source(source, most=most, show=show))
    return PromptTable(found)


def with_last_step(config: Config, num_prompts: int) -> Config:
    """Set the recipe's limit of steps as `num_steps`: num_epochs of so many prompts allow no more.
    ValueError if they allow none."""
    num_steps = config.most_steps
    if config.num_epochs:
        steps = mini_batches(config)
        allowed = steps.num_steps(math.ceil(config.num_epochs * num_prompts))
        num_needed = steps.num_needed(0)
        must = f"hold a first step, of {num_needed} prompts, of which there are {num_prompts}"
        config.require(allowed > 0, "num_epochs", must)
        num_steps = min(num_steps, allowed)
    return replace(config, num_steps=num_steps)


def mini_batches(config: Config) -> MiniBatches:
    """Return which steps use which groups."""
    return MiniBatches(
        groups_per_step=config.trainer.groups_per_step,
        number=config.trainer.num_mini_batches,
        num_passes=config.trainer.num_passes,
        looks_ahead=config.algorithm.proximal == "recompute",
    )


def context_of(config: Config) -> int:
    """Return the tokens of prompt and completion that every replica can hold."""
    return min(pool.generator.max_model_len for pool in pools_of(config.generator))


def _max_tokens(config: Config) -> Mapping[str, int]:
    """Return the longest completion of training and of held-out prompts, by the section that says
    it."""
    training = config.sampling.max_tokens
    return {"sampling": training, "evaluation": config.evaluation.max_tokens or training}


def check_length(config: Config, section: str, longest: int) -> None:
    """Raise a ValueError unless a prompt of `longest` tokens and its completion fit into the
    context."""
    context, added = context_of(config), _max_tokens(config)[section]
    must = f"leave room for the longest prompt ({longest} tokens) in generator.max_model_len"
    require(longest + added <= context, f"{section}.max_tokens", f"{must} ({context})", added)


def with_measured_prompts(config: Config) -> Config:
    """Set the mean length of the recipe's prompts in `plan`, if the plan leaves it open and both
    the prompts and the tokenizer are there. ValueError as for a run."""
    folder = resolve(config, config.model.tokenizer or config.model.checkpoint)
    first = config.data.sources[0]
    path = resolve(config, FILE if first == TASK else first)
    is_there = os.path.exists(path) and os.path.isfile(Path(folder, "tokenizer.json"))
    if config.plan.prompt_tokens or not is_there:
        return config
    tokenizer = load_tokenizer(folder, config.data.chat_template_kwargs, config.data.date)
    task_source = read_task(config)
    _, kinds = read_graph(config, task_source)
    prompts = read_prompts(config, tokenizer, kinds, task_source, most=NUM_MEASURED)
    check_length(config, "sampling", prompts.longest)
    mean = round(prompts.num_tokens / len(prompts))
    return replace(config, plan=replace(config.plan, prompt_tokens=max(1, mean)))


COMMAND = "llamarl sft"


def as_sft(config: Config) -> Config:
    """Set defaults for all that only rollouts need. ValueError for what the trainer cannot do with
    demonstrations."""
    must = f"be sft with {COMMAND}"
    require(config.algorithm.is_sft, "algorithm", must, type(config.algorithm).__name__)
    steps = config.trainer.steps_per_batch
    must = f"be 1 with {COMMAND} (num_steps says how long it trains)"
    require(steps == 1, "trainer.num_mini_batches and trainer.num_passes", must, steps)
    must = f"be left out with {COMMAND} (a held-out loss is no metric of rollouts)"
    config.require(not config.checkpoint.best, "checkpoint.best", must)
    must = f"be left out with {COMMAND} (data.held_out names demonstrations)"
    config.require(not config.evaluation.sets, "evaluation.sets", must)
    algorithm = config.algorithm
    must = f"be tokens or rollouts with {COMMAND}, which has no sampling.max_tokens"
    algorithm.require(algorithm.normalization != "constant", "normalization", must)
    return replace(
        config,
        algorithm=type(algorithm)(
            normalization=algorithm.normalization,
            entropy_coefficient=algorithm.entropy_coefficient,
        ),
        reward=RewardConfig(),
        trainer=replace(config.trainer, parts="batch"),
        generator=EmbeddedConfig(max_model_len=2),
        sampling=SamplingConfig(max_tokens=1, rollouts_per_prompt=1),
        placement=PlacementConfig(),
        staleness=StalenessConfig(),
        environment=EnvironmentConfig(),
        evaluation=EvaluationConfig(
            every_steps=config.evaluation.every_steps, max_prompts=config.evaluation.max_prompts
        ),
        experience=replace(config.experience, stages=[], sampler="admission", keep_rollouts=0.0),
        metrics=replace(config.metrics, sample_rollouts=0),
    )


def refuse_sft(config: Config, command: str) -> None:
    """Raise a ValueError for algorithm=sft with a `command` that needs rollouts."""
    must = f"not be sft with {command} ({COMMAND} trains on demonstrations)"
    require(not config.algorithm.is_sft, "algorithm", must, "sft")


def read_demonstrations(
    config: Config,
    tokenizer: Tokenizer,
    most_positions: int,
    *,
    show: ShowPieces = show_nothing,
) -> tuple[PromptTable, list[Prompt]]:
    """Return the demonstrations to train on, and those held out. ValueError, with file and line,
    for one that cannot be used; with another data.overlong than error, those that are too long are
    left out or cut."""
    data, limit = config.data, "data.max_prompt_tokens"
    if most_positions < data.max_prompt_tokens:
        data, limit = replace(data, max_prompt_tokens=most_positions), "the model's positions"
    held_out = [] if data.held_out is None else [data.held_out]
    for key, sources in (("data.prompts", data.sources), ("data.held_out", held_out)):
        must = f"name files of demonstrations with {COMMAND}"
        require(TASK not in sources, key, must, TASK)

    def read(name: str) -> PromptRows:
        source = PromptSource(
            name=name,
            place=resolve(config, name),
            files=find_files(Path(resolve(config, name))),
            data=data,
            tokenizer=tokenizer,
            limit=limit,
            has_answers=True,
        )
        return read_source(source, show=show)

    most_held_out = config.evaluation.max_prompts or None
    found = [PromptTable([*map(read, sources)]) for sources in (data.sources, held_out)]
    return found[0], [*islice(found[1], most_held_out)]
