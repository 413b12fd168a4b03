"""The check of a task.py before a run: it is loaded once, in a process of its own.

Owns: which of its functions and stages a run may use, and what is wrong with the others. Does not
own: the form of a function (`task_file.py`), the graph that stages form (`graph.py`) or running
them. Invariant: the text runs in a process that is gone afterwards; what comes back is data.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any

from llamarl.config.check import did_you_mean
from llamarl.dataflow.columns import Column
from llamarl.dataflow.graph import External, FrozenModel, Stage
from llamarl.environments import definition
from llamarl.environments.contained import ProgramLimits
from llamarl.environments.definition import Kinds, as_kinds
from llamarl.environments.ready_tools import READY
from llamarl.task_file import FILE, STAGES, find, load_module, place_of
from llamarl.task_neighbours import TaskSource
from llamarl.user_code.calls import Call, UserCode, shown
from llamarl.user_code.pool import run_once

KEY = "experience.stages"
LIMIT_S = 30.0  # to look at what is loaded


def check_task(
    source: TaskSource | None,
    functions: Collection[str],
    stages: Sequence[str],
    *,
    tools: Sequence[str] = (),
) -> tuple[list[Stage], Kinds]:
    """The stages of these names, in that order; `run` is a FrozenModel, External or the name of a
    function of task.py. And what episodes take turns with by these `tools`, of
    `environment.tools`.

    ValueError, in one line with the place in task.py, for a text that does not load, one of these
    `functions` or stages that it does not define, a function of another form, or a stage whose
    function cannot be called with what it reads.
    """
    setup = {"task_source": source}
    code = UserCode(service=__name__, setup=setup, timeout_s=LIMIT_S, label=FILE, keys="a fixed ")
    answer = run_once(code, Call(None, (sorted(functions), list(stages), list(tools))))
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return [from_data(each) for each in answer["stages"]], as_kinds(answer["kinds"])


def load(setup: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The service of the worker: names of functions, of stages and of tools -> {"stages": [data,
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
            return {"stages": data, "kinds": kinds}
        except ValueError as error:
            return {"mistake": str(error)}

    return describe


def as_data(stage: Stage, run: str | dict[str, Any]) -> dict[str, Any]:
    """The stage as JSON; `run` is what `from_data` makes its `run` of."""
    values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    return {**values, "run": run, "writes": [asdict(column) for column in stage.writes]}


def from_data(data: dict[str, Any]) -> Stage:
    """The inverse of `as_data`."""
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
    """The name of the stage's function in task.py, or what its FrozenModel or External is made
    from."""
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
