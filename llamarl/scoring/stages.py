"""A run's dataflow as a graph: the stages, the columns that each reads and writes, and the stages
that task.py adds."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from graphlib import CycleError, TopologicalSorter
from types import ModuleType
from typing import Any

from llamarl.core.config import Config
from llamarl.core.extensions import FILE, STAGES, TaskSource, find, load_module, place_of
from llamarl.core.fields import did_you_mean, require, require_choice
from llamarl.core.records import (
    CLIPPED,
    EPISODE_REWARD,
    EPISODE_REWARDS,
    GENERATE,
    GENERATOR_LOGPROBS,
    INFER,
    KEPT_IDS,
    LOSS_WEIGHTS,
    PROMPT_ID,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    SCORE,
    SETTLE,
    TOKEN_VERSIONS,
    TRAIN,
    TRAINER_LOGPROBS,
    TURNS,
    as_json,
)
from llamarl.scoring import definition
from llamarl.scoring.definition import Kinds, as_kinds
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.tool_calls import READY
from llamarl.scoring.user_code.calls import shown
from llamarl.scoring.user_code.pool import Call, UserCode, run_once
from llamarl.storage.columns import (
    COLUMNS,
    DERIVED,
    NUMBER,
    RESPONSE,
    TEXT,
    Column,
    check_name,
    stored_columns,
)

ADVANTAGE = "advantage"  # settle's result: metadata, which storage never holds
ENDS = (GENERATE, SETTLE, TRAIN)
EXECUTORS = {
    GENERATE: "generator",
    SCORE: "scorer",
    INFER: "reference",
    SETTLE: "controller",
    TRAIN: "trainer",
}
"""The executor that runs each of the stages that every run has."""
ENVIRONMENT = "environment"  # the executor that takes turns with rollouts while they are written
TAKEN_NAMES = {*EXECUTORS, *EXECUTORS.values(), ENVIRONMENT, "storage", "collector", "evaluate"}
ROLLOUT, GROUP = "rollout", "group"
REWARD_COLUMNS, LOSS_COLUMNS = "algorithm.reward_columns", "algorithm.loss_columns"


@dataclass(frozen=True, slots=True)
class Drop:
    """The result of a stage's function for a rollout that is not to be trained on.

    The rest of its group is trained on; the rollout is counted under `reason`, of small letters,
    digits and _."""

    reason: str


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """Computes log-probs of each response under a model that stays as it is, in processes like the
    trainer's, at the sampling temperature.

    `checkpoint` is a folder in the Hugging Face layout, relative to the recipe's; its vocabulary is
    the policy's. A stage that it runs writes one float32 column with an entry per response
    token."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class External:
    """Lets processes outside the run take the rollouts, at a socket in the run's folder, and write
    the stage's columns: see `scoring/loader.py`.

    `sampler` is a name in `samplers.SAMPLERS`. If the consumer has data ranks, each gets its share
    of every batch, and the `num_peers` processes of one rank get the same. A batch that is not
    finished within the stage's `timeout_s`, or whose loader is gone, goes to others."""

    sampler: str = "admission"
    num_data_ranks: int = 1
    num_peers: int = 1


@dataclass(frozen=True, slots=True, init=False)
class Stage:
    """A node of the graph: `run` computes the columns `writes` of each rollout from `reads`.

    `run` is a FrozenModel, External, or a function of task.py, which takes its `reads` as arguments
    in that order and returns its `writes` (several as a tuple), or a `Drop`; a function that writes
    nothing only drops. With `per="group"` it gets the rollouts of a whole group at once, a list per
    argument, and returns a list per column. It runs in `workers` processes of its own, and may be a
    coroutine, many of which run at once in each; a call that takes longer than `timeout_s` is
    ended. Its rollout is then dropped, as when the function raises; if more than `max_failure_rate`
    of the last 1000 calls fail, the run ends.

    `reads` are columns, "prompt" (the `records.Prompt`) and "completion" (the response as text).
    `writes` names columns of one number, or has a `Column` for one entry per response token."""

    name: str
    run: Callable[..., Any] | FrozenModel | External | str
    reads: tuple[str, ...]
    writes: tuple[Column, ...]
    per: str
    workers: int
    timeout_s: float
    max_failure_rate: float

    def __init__(
        self,
        name: str,
        run: Callable[..., Any] | FrozenModel | External | str,
        reads: Sequence[str] = (),
        writes: Sequence[str | Column] = (),
        per: str = ROLLOUT,
        workers: int = 1,
        timeout_s: float = 10.0,
        max_failure_rate: float = 0.1,
    ) -> None:
        """Raise ValueError, naming the stage, for a value that no graph could use."""
        check_name("a stage", name)
        if isinstance(run, FrozenModel) and not reads:
            reads = (PROMPT_IDS, RESPONSE_IDS)
        are_workers = _is_in(workers, 1, 1024) and int(workers) == workers
        for key, holds, must, got in (
            ("reads", _is_names(reads), "be a list of names", reads),
            ("writes", _is_names(writes, Column), "be a list of names and Columns", writes),
            ("per", per in (ROLLOUT, GROUP), f'be "{ROLLOUT}" or "{GROUP}"', per),
            ("workers", are_workers, "be 1 to 1024", workers),
            ("timeout_s", _is_in(timeout_s, 1e-3, 86400), "be 0.001 to 86400", timeout_s),
            ("max_failure_rate", _is_in(max_failure_rate, 0, 1), "be 0 to 1", max_failure_rate),
        ):
            require(holds, f"{key} of stage {name}", must, got)
        columns = [COLUMNS.get(c, Column(c)) if isinstance(c, str) else c for c in writes]
        values = (name, run, tuple(reads), tuple(columns), per, workers, timeout_s)
        for key, value in zip(self.__slots__, (*values, max_failure_rate), strict=True):
            object.__setattr__(self, key, value)

    @property
    def is_external(self) -> bool:
        """True if processes outside the run do its work."""
        return isinstance(self.run, External)

    @property
    def is_per_token(self) -> bool:
        """True if it writes a column with an entry per response token, so that each conversation of
        an episode passes it. Its columns of one number are those of the first."""
        return any(column.length == RESPONSE for column in self.writes)

    @property
    def is_model(self) -> bool:
        """True if a frozen model runs it."""
        return isinstance(self.run, FrozenModel)


@dataclass(frozen=True)
class Graph:
    """The checked stages of a run.

    `stages` has them by name, each after those it waits for, which are in `needs`. Example: with
    `reads=["reward"]`, `needs["rank"]` is {"score"}; `needs["settle"]` is every stage between
    generate and it."""

    stages: Mapping[str, Stage]
    needs: Mapping[str, frozenset[str]]
    has_episodes: bool = False
    """Whether rollouts take turns with an environment."""

    @property
    def between(self) -> list[Stage]:
        """The stages between a rollout and its settled group, which executors run."""
        return [stage for name, stage in self.stages.items() if name not in ENDS]

    @property
    def numbers(self) -> frozenset[str]:
        """The columns that are one number per rollout."""
        columns = (column for stage in self.stages.values() for column in stage.writes)
        return frozenset(column.name for column in columns if column.length == NUMBER)

    @property
    def edges(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """The edges as (writer, reader, the columns that the reader takes from it), in order."""
        writers = {
            column.name: stage.name for stage in self.stages.values() for column in stage.writes
        }
        for reader in self.stages.values():
            columns: dict[str, list[str]] = {}
            for name in reader.reads:
                for writer in dict.fromkeys(writers[each] for each in stored_columns([name])):
                    columns.setdefault(writer, []).append(name)
            for writer, names in columns.items():
                yield writer, reader.name, tuple(names)


def make_graph(config: Config, own: Sequence[Stage] = ()) -> Graph:
    """Return the graph of a recipe with these stages of its own. Raises ValueError, in one line,
    for a graph that would not work."""
    stages = {stage.name: stage for stage in _shipped(config)}
    for stage in own:
        is_new = stage.name not in stages and stage.name not in TAKEN_NAMES
        require(is_new, "the name of each stage", "be its own, and no executor's", stage.name)
        stages[stage.name] = stage
    stages = {name: stages[name] for name in sorted(stages, key=(SETTLE, TRAIN).__contains__)}
    must = "be empty unless algorithm=task (no shipped loss reads other columns)"
    extra = config.algorithm.loss_columns
    require(not extra or config.algorithm.reads_columns, LOSS_COLUMNS, must, extra)
    writers = _writers(stages)
    for stage in stages.values():
        _check_reads(stage, writers)
    for stage in own:
        _check_own(stage, stages)
        if isinstance(stage.run, External):
            _check_external(stage, stage.run, config)
    _check_kinds(stages)
    needs = _needs(stages, writers)
    try:
        ordered = {name: stages[name] for name in TopologicalSorter(needs).static_order()}
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ValueError(f"stages must not wait for each other in a circle, got {circle}") from None
    return Graph(ordered, needs, config.environment.is_used)


def _shipped(config: Config) -> Iterator[Stage]:
    written = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
    written += [KEPT_IDS] * (config.sampling.top_k > 0)
    algorithm, reward = config.algorithm, config.reward
    of_episode = (EPISODE_REWARD,) * (ENVIRONMENT in reward.functions)
    of_episode += (EPISODE_REWARDS,) * bool(reward.episode_rewards)
    yield Stage(GENERATE, EXECUTORS[GENERATE], writes=(*written, *of_episode))
    yield Stage(
        SCORE,
        EXECUTORS[SCORE],
        reads=(*DERIVED, SAMPLING, *of_episode),
        writes=[REWARD, PROMPT_ID, TURNS],
        per=GROUP if GROUP in reward.functions else ROLLOUT,
        workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        max_failure_rate=reward.max_failure_rate,
    )
    trained = [*written, ADVANTAGE, *algorithm.loss_columns]
    if config.has_reference_model:
        checkpoint = algorithm.reference or config.model.checkpoint
        yield Stage(INFER, FrozenModel(checkpoint), writes=[REF_LOGPROBS])
        trained.append(REF_LOGPROBS)
    yield Stage(SETTLE, EXECUTORS[SETTLE], algorithm.reward_columns, [ADVANTAGE], per=GROUP)
    found = [TRAINER_LOGPROBS, PROXIMAL_LOGPROBS, LOSS_WEIGHTS, CLIPPED]
    if algorithm.has_reference and not config.has_reference_model:
        found.append(REF_LOGPROBS)
    yield Stage(TRAIN, EXECUTORS[TRAIN], trained, found)


def _writers(stages: Mapping[str, Stage]) -> dict[str, str]:
    writers: dict[str, str] = {}
    for stage in stages.values():
        for column in stage.writes:
            other = writers.setdefault(column.name, stage.name)
            got = f"{other} and {stage.name}"
            require(other == stage.name, f"column {column.name}", "be written by one stage", got)
            known = COLUMNS.get(column.name, column)
            must = f"have the form {known.dtype}, {known.length}"
            got = f"{column.dtype}, {column.length}"
            require(known == column, f"column {column.name} of stage {stage.name}", must, got)
    return writers


def _check_reads(stage: Stage, writers: Mapping[str, str]) -> None:
    for name in stage.reads:
        if name in DERIVED:
            continue
        keys = {SETTLE: REWARD_COLUMNS, TRAIN: LOSS_COLUMNS}
        where = keys.get(stage.name, f"reads of stage {stage.name}")
        whole = {each for each in writers if each not in COLUMNS or COLUMNS[each].length != TEXT}
        names = ", ".join(sorted(whole | DERIVED.keys()))
        must = f"name columns that some stage writes of each rollout ({names})"
        require(name in whole, where, must, name)


def _check_external(stage: Stage, external: External, config: Config) -> None:
    """Raise ValueError unless consumers can take this stage's rollouts."""
    where = f"External of stage {stage.name}"
    sampler = f"sampler of {where}"
    require_choice(sampler, external.sampler, ("admission", "token_balanced", "rank_aware"))
    for name in ("num_data_ranks", "num_peers"):
        value = getattr(external, name)
        require(isinstance(value, int) and value >= 1, f"{name} of {where}", "be at least 1", value)
    backend = config.cluster.backend
    require(backend == "monarch", "cluster.backend", f"be monarch for {where}", backend)
    must = f"be 1 for {where} (its consumers read storage units on their own host)"
    require(config.cluster.size == 1, "cluster.num_hosts", must, config.cluster.size)


def _check_own(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raise ValueError unless one of the recipe's own stages has valid columns, and another stage
    reads them."""
    where, columns = f"stage {stage.name}", stage.writes
    if isinstance(stage.run, FrozenModel):
        is_logprobs = [(c.dtype, c.length) for c in columns] == [("float32", RESPONSE)]
        must = f'write one Column(name, "float32", "{RESPONSE}"), as a FrozenModel runs it'
        require(is_logprobs, where, must, columns)
        must = f'have per="{ROLLOUT}", as a FrozenModel runs it'
        require(stage.per == ROLLOUT, where, must, stage.per)
        reads = (PROMPT_IDS, RESPONSE_IDS)
        require(stage.reads == reads, where, f"read {reads}, as a FrozenModel runs it", stage.reads)
    for column in columns:
        must = f'have the length "{NUMBER}" or "{RESPONSE}"'
        require(column.length in (NUMBER, RESPONSE), f"column {column.name}", must, column.length)
    read = {name for other in stages.values() for name in other.reads}
    must = (
        "write a column that another stage, algorithm.reward_columns or algorithm.loss_columns "
        "reads (a weight of 0 in algorithm.reward_column_weights only records it)"
    )
    names = [column.name for column in columns]
    require(not names or not read.isdisjoint(names), where, must, ", ".join(names))


def _check_kinds(stages: Mapping[str, Stage]) -> None:
    """Raise ValueError unless reward columns are numbers, and loss columns have an entry per
    response token."""
    columns = {column.name: column for stage in stages.values() for column in stage.writes}
    extra = [name for name in stages[TRAIN].reads if name not in COLUMNS and name != ADVANTAGE]
    kinds = (REWARD_COLUMNS, stages[SETTLE].reads, NUMBER), (LOSS_COLUMNS, extra, RESPONSE)
    for key, names, length in kinds:
        for name in names:
            must = f'name columns of length "{length}" ({name} has "{columns[name].length}")'
            require(columns[name].length == length, key, must, name)


def _needs(stages: Mapping[str, Stage], writers: Mapping[str, str]) -> dict[str, frozenset[str]]:
    needs = {}
    for name, stage in stages.items():
        stored = {writers[column] for column in stored_columns(stage.reads)}
        needs[name] = frozenset(stored | {GENERATE} - {name})
    needs[SETTLE] |= stages.keys() - {SETTLE, TRAIN}
    return needs


def _is_names(value: object, *others: type) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(each, (str, *others)) for each in value)


def _is_in(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and least <= value <= most


KEY = "experience.stages"
LIMIT_S = 30.0  # to look at what is loaded


def check_task(
    source: TaskSource | None,
    functions: Collection[str],
    stages: Sequence[str],
    *,
    tools: Sequence[str] = (),
) -> tuple[list[Stage], Kinds]:
    """Return the stages of these names, in that order, with a FrozenModel, External or the name of
    a function of task.py as `run`; and the environment kinds of these `tools`, which are those of
    `environment.tools`.

    Raises ValueError, in one line with the place in task.py, for a text that does not load, for
    functions or stages that it does not define or that have another form, and for a stage whose
    function cannot be called with its `reads`."""
    setup = {"task_source": source}
    code = UserCode(service=__name__, setup=setup, timeout_s=LIMIT_S, label=FILE, keys="a fixed ")
    answer = run_once(code, Call(None, (sorted(functions), list(stages), list(tools))))
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return [from_data(each) for each in answer["stages"]], as_kinds(answer["kinds"])


def load(setup: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the worker's service: names of functions, of stages and of tools -> {"stages": [data,
    ...], "kinds": {name: data}} or {"mistake": one line}."""
    source = setup["task_source"]
    module = ModuleType("task") if source is None else load_module(source)

    def describe(
        _: None, functions: list[str], stages: list[str], tools: Sequence[str] = ()
    ) -> dict[str, Any]:
        try:
            for name in functions:
                find(module, name)
            found = _named(module, stages) if stages else ()
            ready = [READY[name](ProgramLimits()) for name in tools if name in READY]
            own = module if len(ready) < len(tools) else None
            kinds = definition.describe(own, ready) if tools else {}
            data = [as_data(stage, _run_of(stage, module)) for stage in found]
            return {"stages": data, "kinds": {name: as_json(each) for name, each in kinds.items()}}
        except ValueError as error:
            return {"mistake": str(error)}

    return describe


def as_data(stage: Stage, run: str | dict[str, Any]) -> dict[str, Any]:
    """Return the stage as JSON; `run` stands for its `run`, which `from_data` makes of it."""
    values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    return {**values, "run": run, "writes": [asdict(column) for column in stage.writes]}


def from_data(data: dict[str, Any]) -> Stage:
    """Return the stage of this JSON, as the inverse of `as_data`."""
    run, columns = data["run"], [Column(**column) for column in data["writes"]]
    if isinstance(run, dict):
        run = FrozenModel(**run) if "checkpoint" in run else External(**run)
    return Stage(**{**data, "run": run, "writes": columns})


def _named(module: ModuleType, names: Sequence[str]) -> list[Stage]:
    found = getattr(module, STAGES, None)
    if not isinstance(found, list | tuple) or not all(isinstance(each, Stage) for each in found):
        got = "none" if found is None else shown(found)
        raise ValueError(f"{FILE}: {STAGES} must be a list of Stage, got {got}")
    defined = [stage.name for stage in found]
    for name in names:
        if defined.count(name) > 1:
            raise ValueError(f"{FILE}: {STAGES} must have one {name}, got {defined.count(name)}")
        if name not in defined:
            meant = did_you_mean(difflib.get_close_matches(name, defined, n=1))
            listed = ", ".join(defined) or "none"
            raise ValueError(
                f"{FILE}: {KEY} must name {STAGES} of {FILE} ({listed}), got {name!r}{meant}"
            )
    return [found[defined.index(name)] for name in names]


def _run_of(stage: Stage, module: ModuleType) -> str | dict[str, Any]:
    """Return the name of the stage's function in task.py, or the fields of its FrozenModel or
    External."""
    run = stage.run
    if isinstance(run, FrozenModel):
        return {"checkpoint": str(run.checkpoint)}
    if isinstance(run, External):
        return asdict(run)
    name = next((key for key, value in vars(module).items() if value is run), None)
    if name is None or not callable(run) or isinstance(run, type):
        got = f"the function {run.__qualname__}" if inspect.isfunction(run) else shown(run)
        must = f"run a FrozenModel, External or a function {FILE} defines by name at its top level"
        raise ValueError(f"{FILE}: stage {stage.name} must {must}, got {got}")
    try:
        inspect.signature(run).bind(*stage.reads)
    except TypeError as error:
        reads = ", ".join(stage.reads) or "none"
        must = f"take one argument for each thing that the stage reads ({reads})"
        got = f"{name}{inspect.signature(run)}: {error}"
        where = f"{place_of(run)}: {name} of stage {stage.name}"
        raise ValueError(f"{where} must {must}, got {got}") from error
    except ValueError:  # of a builtin that does not say what it takes
        pass
    return name
