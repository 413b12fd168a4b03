"""A recipe's own task.py: its files, and what of it the recipe uses.

Stages and rewards run in processes of their own, never here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamarl.core.config import Config
from llamarl.core.config.inputs import OF_EPISODE
from llamarl.core.extensions import FILE, STAGES, TaskSource, load, neighbours, read_source
from llamarl.core.fields import require, require_choice
from llamarl.metrics.trackers import TRACKERS
from llamarl.scoring.definition import TOOLS, Kinds
from llamarl.scoring.rewards import OWN
from llamarl.scoring.stages import ENVIRONMENT, Graph, check_task, make_graph
from llamarl.scoring.tool_calls import READY
from llamarl.trainer.losses.task_loss import TaskConfig

CONTROLLER_TASKS = {"advantages", "drop", "sample"}  # functions that run in this process


def read_task(config: Config) -> TaskSource | None:
    """task.py and what it imports from the recipe's folder; None if the recipe names nothing of
    it."""
    names = named_functions(config) | ({STAGES} if config.experience.stages else set())
    names |= {TOOLS} if "task" in config.environment.tools else set()
    path = Path(config.recipe_dir) / FILE
    may_add_tracker = not TRACKERS.keys() >= {*config.metrics.trackers} and path.is_file()
    if not names and not may_add_tracker:
        return None
    named = ", ".join(sorted(names))
    require(path.is_file(), "the recipe", f"not name task for {named} without a {path}", "task")
    text = read_source(path)
    return {FILE: text, **neighbours(text, path.parent)}


def load_task(config: Config, source: TaskSource | None) -> dict[str, Callable[..., Any]]:
    """The functions of this task.py that the controller calls, by name; trackers that it adds to
    TRACKERS are there then."""
    return {} if source is None else load(source, named_functions(config) & CONTROLLER_TASKS)


def read_graph(config: Config, source: TaskSource | None) -> tuple[Graph, Kinds]:
    """The recipe's graph, with the stages of this task.py that it names, and its environments, once
    a short process has checked it for all that the recipe names. ValueError, in one line, for what
    would not work."""
    names, functions = config.experience.stages, named_functions(config)
    require(len({*names}) == len(names), "experience.stages", "name each stage once", names)
    tools = config.environment.tools
    for tool in tools:
        require_choice("environment.tools", tool, ["task", *READY])
    if not (tools or (source is not None and (names or functions))):
        return make_graph(config), {}
    stages, kinds = check_task(source, functions, names, tools=tools)
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
    """The functions of task.py that the recipe names."""
    algorithm = config.algorithm
    is_named = {
        "prompts": "task" in (*config.data.sources, *config.held_out_sets.values()),
        **{own: name in config.reward.functions for name, own in OWN.items()},
        "loss": isinstance(algorithm, TaskConfig),
        "advantages": algorithm.advantage == "task",
        "drop": "task" in algorithm.filters,
        "sample": config.experience.sampler == "task",
    }
    return {name for name, value in is_named.items() if value}
