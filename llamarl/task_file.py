"""A recipe's own task.py: which functions it may define, their check, and loading it.

Owns: what each function must look like; running the text as the module `task`. Does not own: where
the text is read (`recipe/inputs.py`) or what the functions mean (`algorithms/`, `environments/`,
`experience/`).
Invariant: `check` runs nothing of the text; tracebacks show the user's own lines.

The text travels by content to every process that runs one of its functions: `reward` to those of
the reward pool, `advantages`, `drop`, `sample` and trackers to the controller, `loss` to the
trainer's, those of the list `stages` to processes of their own. It may import what is installed
there, but not its neighbours in the recipe's folder. It is the user's own code: in each of these
processes it may do whatever that process may.
"""

import ast
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from llamarl.errors import TaskError

FILE = "task.py"
STAGES = "stages"  # its list of the dataflow's stages
DYNAMIC = {"exec", "globals", "setattr", "vars"}  # with these, only a run shows what is defined


@dataclass(frozen=True, slots=True)
class Form:
    """What a function must look like: the types that its parameters, by name, and its result may be
    annotated with, the usual one first. It need not be annotated."""

    parameters: Mapping[str, tuple[str, ...]]
    returns: tuple[str, ...]

    def text(self, name: str) -> str:
        """Its head, as one would write it."""
        parameters = [f"{key}: {types[0]}" for key, types in self.parameters.items()]
        return f"{name}({', '.join(parameters)}) -> {self.returns[0]}"


NUMBERS = ("Sequence[float]", "list[float]", "tuple[float, ...]")
FORMS = {
    "reward": Form({"prompt": ("Prompt",), "completion": ("str",)}, ("float", "int", "bool")),
    "loss": Form({"inputs": ("LossInputs",)}, ("Tensor", "tuple[Tensor, Tensor]", "LossTerms")),
    "advantages": Form({"rewards": NUMBERS}, NUMBERS),
    "drop": Form({"group": ("ScoredGroup",)}, ("str | None", "None | str", "Optional[str]")),
    "sample": Form(
        {"ready": ("Sequence[ReadyItem]", "list[ReadyItem]"), "count": ("int",)},
        ("tuple[list[int], list[int]]", "Sample"),
    ),
}


def check(source: str, path: str, names: Collection[str]) -> None:
    """Raise ValueError, one line with `path`, unless the text is Python and defines `names`, each
    in its form as far as that can be told without running it. A name is one of FORMS, or STAGES.

    What is bound in another way than by `def` is left to the process that loads it.
    """
    try:
        tree = ast.parse(source, path)
        compile(tree, path, "exec")
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        shown = f": {error.text.strip()!r}" if error.text else ""
        raise ValueError(f"{path} must be Python, got {error.msg}{line}{shown}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # null characters, deep nesting
        raise ValueError(f"{path} must be Python, got {error or type(error).__name__}") from error
    bound = dict(_bound(tree))
    for name in names:
        if bound.keys().isdisjoint({name, "*", *DYNAMIC}):
            got = ", ".join(sorted(bound)) or "no name at all"
            wanted = f"{STAGES}: list[Stage]" if name == STAGES else FORMS[name].text(name)
            raise ValueError(f"{path} must define {wanted}, got {got}")
        function = bound.get(name)
        if name in FORMS and isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            _check_form(function, path)


def load(source: str, names: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Run the text as the module `task`; its functions `names`, each guarded.

    ValueError, one line, for a text that raises or a function that is missing or takes other
    arguments. A function that raises later raises TaskError, one line with the place.
    """
    try:
        functions = execute(source, names)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        got = where(error)
    else:
        return {name: _guarded(name, function) for name, function in functions.items()}
    raise ValueError(f"{FILE} must load, got {got}")


def execute(source: str, names: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Run the text as the module `task`; its functions `names` as they are.

    Raises ValueError for one that is missing or takes other arguments, and whatever the text
    raises.
    """
    module = load_module(source)
    return {name: _require(name, getattr(module, name, None)) for name in names}


def load_module(source: str) -> ModuleType:
    """Run the text as the module `task`. Raises whatever the text raises."""
    module = ModuleType("task")
    module.__file__ = FILE
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    sys.modules["task"] = module
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def line_of(source: str, name: str) -> int:
    """The line that binds `name` last, as far as that can be told without running the text; else
    1."""
    return getattr(dict(_bound(ast.parse(source))).get(name), "lineno", 1)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            got = where(error)
        raise TaskError(f"{name} of {FILE} must not raise, got {got}")

    return call


def where(error: BaseException) -> str:
    """The error on one line, with the line of task.py it came from."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        return f"{text} ({FILE}, line {error.lineno})"
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename == FILE]
    return f"{text} ({FILE}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text


def _check_form(function: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> None:
    form, given = FORMS[function.name], function.args
    parameters = [*given.posonlyargs, *given.args]
    required = parameters[: len(parameters) - len(given.defaults)]
    wanted = list(form.parameters)
    has_names = [parameter.arg.lstrip("_") for parameter in parameters[: len(wanted)]] == wanted
    is_callable = len(required) <= len(wanted) and None not in given.kw_defaults
    types = [*form.parameters.values(), form.returns]
    notes = [parameter.annotation for parameter in parameters[: len(wanted)]]
    fits = all(map(_fits, [*notes, function.returns], types))
    if isinstance(function, ast.AsyncFunctionDef) or not (has_names and is_callable and fits):
        returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
        got = f"{function.name}({ast.unparse(given)}){returns}"
        is_async = "async " * isinstance(function, ast.AsyncFunctionDef)
        raise ValueError(
            f"{path}:{function.lineno}: {function.name} must be {form.text(function.name)}, "
            f"got {is_async}{got}"
        )


def _fits(annotation: ast.expr | None, types: tuple[str, ...]) -> bool:
    """True without an annotation, or with one of `types`, whatever module it is named by."""
    text = "" if annotation is None else re.sub(r"[\w.]*\.(?=\w)", "", ast.unparse(annotation))
    return text.strip("'\"") in ("", "Any", *types)


def _require(name: str, function: Any) -> Callable[..., Any]:
    wanted = f"{FILE} must define {FORMS[name].text(name)}"
    if not callable(function):
        raise ValueError(f"{wanted}, got {'none' if function is None else repr(function)}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{wanted}, got an async one")
    try:
        inspect.signature(function).bind(*FORMS[name].parameters)
    except TypeError as error:
        raise ValueError(f"{wanted}, got {name}{inspect.signature(function)}: {error}") from error
    except ValueError:  # of a builtin that does not say what it takes
        pass
    return function


def _bound(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """What the module's own statements may bind, by name and in order, and names of DYNAMIC that
    they use."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            continue  # what it binds inside is its own
        if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in DYNAMIC):
            yield node.id, node
        if isinstance(node, ast.alias):
            yield node.asname or node.name, node
        waiting += reversed(list(ast.iter_child_nodes(node)))
