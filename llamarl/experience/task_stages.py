"""The stages that a task.py defines in its list `stages`, read without running it here.

Owns: which of them a run may use, and what is wrong with the others. Does not own: the graph they
form (`graph.py`) or running them. Invariant: the text runs in a process that is gone afterwards;
what comes back is data.
"""

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any

from llamarl.experience.columns import Column
from llamarl.experience.graph import External, FrozenModel, Stage
from llamarl.task_file import FILE, STAGES, line_of, load_module
from llamarl.user_code.pool import Call, UserCode, run_once
from llamarl.user_code.report import shown

KEY = "experience.stages"
LIMIT_S = 30.0  # to describe stages that are loaded


def read_stages(task_source: str, names: Sequence[str]) -> list[Stage]:
    """The stages `names` of this text, in that order; `run` is a FrozenModel or the name of a
    function of task.py.

    ValueError, in one line with the line of task.py, for a text that does not load, a name that it
    does not define, or a stage whose function cannot be called with what it reads.
    """
    code = UserCode(
        service=__name__,
        setup={"task_source": task_source},
        timeout_s=LIMIT_S,
        timeout_key="a fixed limit",
        label=FILE,
        call=f"reading {STAGES} of {FILE}",
        functions=FILE,
    )
    answer = run_once(code, Call(None, (list(names),)))
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    return [from_data(each) for each in answer["stages"]]


def load(setup: dict[str, Any]) -> Callable[[None, list[str]], dict[str, Any]]:
    """The service of the worker: names -> {"stages": [data, ...]} or {"mistake": one line}."""
    source = setup["task_source"]
    module = load_module(source)

    def describe(_: None, names: list[str]) -> dict[str, Any]:
        try:
            stages = _named(module, source, names)
            return {"stages": [as_data(stage, _run_of(stage, module, source)) for stage in stages]}
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


def _named(module: ModuleType, source: str, names: Sequence[str]) -> list[Stage]:
    place = f"{FILE}:{line_of(source, STAGES)}"
    found = getattr(module, STAGES, None)
    if not isinstance(found, list | tuple) or not all(isinstance(each, Stage) for each in found):
        got = "none" if found is None else shown(found)
        raise ValueError(f"{place}: {STAGES} must be a list of Stage, got {got}")
    defined = [stage.name for stage in found]
    for name in names:
        if defined.count(name) > 1:
            raise ValueError(f"{place}: {STAGES} must have one {name}, got {defined.count(name)}")
        if name not in defined:
            near = difflib.get_close_matches(name, defined, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            listed = ", ".join(defined) or "none"
            raise ValueError(
                f"{place}: {KEY} must name {STAGES} of {FILE} ({listed}), got {name!r}{meant}"
            )
    return [found[defined.index(name)] for name in names]


def _run_of(stage: Stage, module: ModuleType, source: str) -> str | dict[str, Any]:
    """The name of the stage's function in task.py, or what its FrozenModel or External is made
    from."""
    run, place = stage.run, f"{FILE}:{line_of(source, STAGES)}"
    if isinstance(run, FrozenModel):
        return {"checkpoint": str(run.checkpoint)}
    if isinstance(run, External):
        return asdict(run)
    name = next((key for key, value in vars(module).items() if value is run), None)
    if name is None or not callable(run) or isinstance(run, type):
        got = f"the function {run.__qualname__}" if inspect.isfunction(run) else shown(run)
        must = f"run a FrozenModel, External or a function {FILE} defines by name at its top level"
        raise ValueError(f"{place}: stage {stage.name} must {must}, got {got}")
    code = getattr(inspect.unwrap(run), "__code__", None)
    if code is not None and code.co_filename == FILE:
        place = f"{FILE}:{code.co_firstlineno}"
    if inspect.iscoroutinefunction(run):
        raise ValueError(f"{place}: {name} of stage {stage.name} must not be async, got async")
    try:
        inspect.signature(run).bind(*stage.reads)
    except TypeError as error:
        reads = ", ".join(stage.reads) or "none"
        must = f"take one argument for each thing that the stage reads ({reads})"
        got = f"{name}{inspect.signature(run)}: {error}"
        raise ValueError(f"{place}: {name} of stage {stage.name} must {must}, got {got}") from error
    except ValueError:  # of a builtin that does not say what it takes
        pass
    return name
