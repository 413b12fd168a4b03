"""The tools and environments that a task.py defines for episodes.

    tools = [calculator]          # functions with types and a docstring
    environment = Wordle          # a class, or {name: class}; a row's field `environment` selects

    def episode_reward(prompt, messages, environment):   # beside either: its number is added
        return 0.1 * environment.num_solved

    episode_rewards = [solved, brief]   # such functions, each a reward: environment.solved, ...

A class is written as for TRL's GRPOTrainer: `reset(**row)` begins an episode and may return a text
that is added to the last message; public methods are tools; `get_reward()`, if there is one, gives
the episode's reward. Instead of tools it may have `step(messages)`, which gets the conversation so
far and returns the next message, several of them, or None at the end; in a tuple the reward may
stand beside them. The `reset` of such a class may return an Opening.

Each mistake is reported in one line, with its place in the text."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from llamarl.core.extensions import FILE, FORMS, checked, find, place_of, where
from llamarl.core.records import read_json
from llamarl.scoring.agent import AgentEnvironment

TOOLS, ENVIRONMENT = "tools", "environment"
RESET, REWARD, STEP = "reset", "get_reward", "step"
EPISODE, EPISODES = "episode_reward", "episode_rewards"
Schema = dict[str, Any]
"""A tool's name, description and parameters, as chat templates take them."""
Tool = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of environment, as data.

    `schemas` are those of the tools that a model may call. `has_instance`: each episode has an
    instance of a class; `has_step`: the class has a `step`; `has_reward`: the environment gives a
    reward; `is_agent`: a program of its own plays it (`agent.py`); `has_episode_reward`:
    `episode_reward` reads the episode at its end."""

    schemas: tuple[Schema, ...]
    has_instance: bool = False
    has_step: bool = False
    has_reward: bool = False
    is_agent: bool = False
    has_episode_reward: bool = False
    rewards: tuple[str, ...] = ()
    """The names of the `episode_rewards`, which read the episode at its end too."""

    @property
    def is_read(self) -> bool:
        """Whether functions of task.py read the episode at its end."""
        return self.has_episode_reward or bool(self.rewards)

    @property
    def is_kept(self) -> bool:
        """Whether a process keeps state of an episode, from `begin` to `finish`."""
        return self.has_instance or self.is_read


AGENT_KIND = Kind((), has_instance=True, has_step=True, has_reward=True, is_agent=True)
"""The kind of environments that a program plays, which brings the tools of each episode."""
Kinds = Mapping[str, Kind]
"""Kinds by name; the name of a sole, unnamed one is ""."""


@dataclass(frozen=True, slots=True)
class Defined:
    """The definitions of a task.py: plain tools by name, the makers of environments by kind,
    `episode_reward` if there is one, and `episode_rewards` by name."""

    tools: Mapping[str, Tool]
    makers: Mapping[str, Callable[[], Any]]
    episode_reward: Callable[..., Any] | None = None
    episode_rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def kind_of(row: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Return the name of the environment that a prompt's row selects. Raises ValueError if there is
    none of that name."""
    if "" in kinds:
        return ""
    name = row.get(ENVIRONMENT)
    if name not in kinds:
        known = ", ".join(kinds)
        raise ValueError(f"the row's field {ENVIRONMENT!r} must be one of {known}, got {name!r}")
    return str(name)


def schemas_of(row: Mapping[str, Any], kinds: Kinds) -> tuple[Schema, ...]:
    """Return the schemas of the tools that the model may call in an episode of this row. Raises
    ValueError as `kind_of` does, and for a field whose name the environment's methods cannot
    take."""
    kind = kinds[kind_of(row, kinds)]
    taken = ["self"] * kind.has_instance + ["url"] * kind.is_agent
    if found := [name for name in taken if name in row]:
        whose = "play gets the server's address" if found == ["url"] else "methods get the instance"
        must = f"the row's field {found[0]!r} must have another name, for an environment's"
        raise ValueError(f"{must} {whose} by it, got {row[found[0]]!r:.80}")
    return kind.schemas


def find_defined(module: ModuleType | None, ready: Sequence[Tool] = ()) -> Defined:
    """Return the tools and environments of a loaded task.py, if there is one, and the `ready`
    tools. Raises ValueError if there are none, or they have another form."""
    tools, found = _functions(module, TOOLS, ready), getattr(module, ENVIRONMENT, None)
    makers: dict[str, Any] = found if isinstance(found, dict) else {"": found}
    several = {
        name: checked(function, name, FORMS[EPISODE])
        for name, function in _functions(module, EPISODES).items()
    }
    read = None
    if module is not None and getattr(module, EPISODE, None) is not None:
        read = find(module, EPISODE)
    has_reward = read is not None or bool(several)
    if found is None:
        makers = {}
        has_own = len(tools) > len(ready)
        if module is not None and not (has_own or (ready and has_reward)):
            must = f"must define {TOOLS} or {ENVIRONMENT} for environment.tools=[task]"
            raise ValueError(f"{FILE} {must}, got neither")
    is_named = all(isinstance(name, str) and callable(maker) for name, maker in makers.items())
    if not is_named or (isinstance(found, dict) and (not found or "" in found)):
        must = f"{ENVIRONMENT} must be a class, or a dictionary of names and classes"
        raise ValueError(f"{FILE}: {must}, got {found!r:.100}")
    return Defined(tools, makers, read, several)


def _functions(module: ModuleType | None, key: str, ready: Sequence[Tool] = ()) -> dict[str, Tool]:
    """Return the `ready` functions and those in the list `key` of task.py by name. Raises
    ValueError unless it is a list of functions, all with distinct names."""
    found = getattr(module, key, ())
    if not isinstance(found, list | tuple) or not all(map(callable, found)):
        raise ValueError(f"{FILE}: {key} must be a list of functions, got {found!r:.100}")
    by_name: dict[str, Tool] = {}
    for function in (*ready, *found):
        name = getattr(function, "__name__", "")
        is_name = name.isidentifier() if key == EPISODES else bool(name)
        if not is_name or name in by_name:
            must = "must have a name of its own"
            raise ValueError(f"{place_of(function)}: each of {key} {must}, got {name!r}")
        by_name[name] = function
    return by_name


def methods_of(environment: Any) -> dict[str, Tool]:
    """Return the tools of an environment by name: its public methods."""
    if is_stepped(environment):
        return {}
    # The class is inspected, as looking at a property of the instance would run it.
    methods = inspect.getmembers(type(environment), inspect.isroutine)
    names = [name for name, _ in methods if name[0] != "_" and name not in (RESET, REWARD)]
    found: dict[str, Tool] = {name: getattr(environment, name) for name in names}
    return {name: tool for name, tool in found.items() if inspect.ismethod(tool)}


def is_stepped(environment: Any) -> bool:
    """Return whether an environment has the form `step(messages)`; any other `step` is a tool."""
    step = getattr(environment, STEP, None)
    return step is not None and [*inspect.signature(step).parameters] == ["messages"]


def describe(module: ModuleType | None, ready: Sequence[Tool] = ()) -> dict[str, Kind]:
    """Return the kinds of a loaded task.py and `ready` tools, for which an instance of each class
    is made. Raises ValueError for tools that a model could not call."""
    defined = find_defined(module, ready)
    shared = tuple(map(_schema, defined.tools.values()))
    is_read = defined.episode_reward is not None
    own: dict[str, Any] = {"has_episode_reward": is_read, "rewards": (*defined.episode_rewards,)}
    kinds = {name: _describe(maker, shared) for name, maker in defined.makers.items()}
    return {
        name: replace(kind, has_reward=kind.has_reward or is_read, **own)
        for name, kind in (kinds or {"": Kind(shared)}).items()
    }


def as_kinds(data: Mapping[str, dict[str, Any]]) -> Kinds:
    """Return the kinds that this JSON describes."""
    return {name: read_json(Kind, kind) for name, kind in data.items()}


def _describe(maker: Callable[[], Any], shared: Sequence[Schema]) -> Kind:
    name = getattr(maker, "__name__", ENVIRONMENT)
    place = f"{place_of(maker)}: {ENVIRONMENT} {name}"
    environment, why = None, ""
    try:
        environment = maker()
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        why = where(error)
    if why:
        raise ValueError(f"{place} must be made without arguments, got {why}")
    if isinstance(environment, AgentEnvironment):
        if shared:
            must = f"bring the tools of its program itself, without {TOOLS} beside it"
            raise ValueError(f"{place} must {must}, got {shared[0]['function']['name']}")
        return AGENT_KIND
    if not callable(getattr(environment, RESET, None)):
        raise ValueError(f"{place} must have a method {RESET}(**row), got none")
    methods = methods_of(environment)
    schemas = (*shared, *map(_schema, methods.values()))
    names = [schema["function"]["name"] for schema in schemas]
    if twice := {each for each in names if names.count(each) > 1}:
        raise ValueError(f"{place} must have tools of different names, got {min(twice)} twice")
    if bool(schemas) == is_stepped(environment):
        must = f"have tools ({TOOLS}, or public methods) or else {STEP}(messages)"
        raise ValueError(f"{place} must {must}, got {'both' if schemas else 'neither'}")
    return Kind(
        schemas,
        has_instance=True,
        has_step=is_stepped(environment),
        has_reward=is_stepped(environment) or callable(getattr(environment, REWARD, None)),
    )


def _schema(tool: Tool) -> Schema:
    # The import takes half a second, and seconds if it loads torch to recognise tensors.
    from transformers.utils import chat_template_utils as templates

    vars(templates)["is_torch_available"] = lambda: False
    place = f"{place_of(tool)}: tool {getattr(tool, '__name__', repr(tool))}"
    _check_callable(tool, place)
    try:
        return dict(templates.get_json_schema(tool))
    except Exception as error:  # noqa: BLE001 - it raises kinds of its own
        got = " ".join(str(error).split())
    must = "must have a type for each argument, and a docstring that describes each under Args:"
    raise ValueError(f"{place} {must}, got: {got:.300}")


def _check_callable(tool: Tool, place: str) -> None:
    """Raise ValueError for a tool that cannot be called with its arguments by name."""
    function = inspect.unwrap(tool)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{place} must return what the model is told, got one that yields it")
    try:
        parameters = inspect.signature(tool).parameters.values()
    except (ValueError, TypeError):
        return  # of a function that Python does not know is seen why it has no schema
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            got = "*" * (parameter.kind == parameter.VAR_POSITIONAL) + parameter.name
            raise ValueError(f"{place} must take its arguments by their names, got {got}")
