"""A recipe's own task.py: which functions it may define, and loading it.

Owns: what each function must look like; running the text as the module `task`. Does not own: where
the text is read (`recipe/task_source.py`), importing its neighbours (`task_neighbours.py`), its
check before a run (`dataflow/task_stages.py`), or what the functions mean (`algorithms/`,
`environments/`, `dataflow/`). Invariant: what is wrong with the text is one line, with the user's
own line.

The text travels by content to every process that runs one of its functions: `reward`,
`group_reward` and those of the list `stages` to processes of their own, `episode_reward` to those
of environments, `prompts` to one that ends when it has made them, `advantages`, `drop`, `sample`
and trackers to the controller, `loss` to the trainer's. It may import what is installed there, and
the modules of the recipe's folder, which travel with it. It is the user's own code: in each of
these processes it may do whatever that process may.
"""

import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from llamarl.errors import TaskError
from llamarl.task_neighbours import TaskSource, make_importable

FILE = "task.py"
STAGES = "stages"  # its list of the dataflow's stages


@dataclass(frozen=True, slots=True)
class Form:
    """What a function must look like: the types that its parameters, by name, and its result may be
    annotated with, the usual one first; with Any among them, by whatever it likes. It need not be
    annotated, and may have more parameters if `has_options`."""

    parameters: Mapping[str, tuple[str, ...]]
    returns: tuple[str, ...]
    may_be_async: bool = False
    has_options: bool = False

    def text(self, name: str) -> str:
        """Its head, as one would write it."""
        parameters = [f"{key}: {types[0]}" for key, types in self.parameters.items()]
        parameters += ["..."] if self.has_options else []
        return f"{name}({', '.join(parameters)}) -> {self.returns[0]}"


NUMBERS = ("Sequence[float]", "list[float]", "tuple[float, ...]")
DICTS = ("dict", "dict[str, float]", "dict[str, Any]")
REWARDS = ("float", "int", "bool", *DICTS, *(f"float | {each}" for each in DICTS))
REWARD_LISTS = (*NUMBERS, *(f"{many}[{each}]" for many in ("list", "Sequence") for each in REWARDS))
ROWS = tuple(
    f"{many}[{row}]"
    for many in ("Iterable", "Iterator", "Sequence", "list")
    for row in ("dict[str, Any]", "dict")
)
FORMS = {
    "reward": Form({"prompt": ("Prompt",), "completion": ("str",)}, REWARDS, True),
    "group_reward": Form(
        {"prompt": ("Prompt",), "completions": ("list[str]", "Sequence[str]")}, REWARD_LISTS, True
    ),
    "majority_answer": Form(
        {"prompt": ("Prompt",), "completion": ("str",)}, ("str | None", "str", "Optional[str]")
    ),
    "episode_reward": Form(
        {
            "prompt": ("Prompt",),
            "messages": ("list[dict[str, Any]]", "Any"),
            "environment": ("Any",),
        },
        ("float", "int", "bool"),
        True,
    ),
    "loss": Form(
        {"inputs": ("LossInputs",)},
        ("Tensor", "tuple[Tensor, Tensor]", "Tensor | tuple[Tensor, Tensor]", "LossTerms"),
    ),
    "prompts": Form({"held_out": ("bool",)}, ROWS, has_options=True),
    "advantages": Form({"rewards": NUMBERS}, NUMBERS),
    "drop": Form({"group": ("ScoredGroup",)}, ("str | None", "None | str", "Optional[str]")),
    "sample": Form(
        {"ready": ("Sequence[ReadyItem]", "list[ReadyItem]"), "count": ("int",)},
        ("tuple[list[int], list[int]]", "Sample"),
    ),
}


def load(source: TaskSource, names: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Run task.py as the module `task`; its functions `names`, each guarded.

    ValueError, one line, for a text that raises or a function that is missing or has another form.
    A function that raises later raises TaskError, one line with the place.
    """
    try:
        module = load_module(source)
    except KeyboardInterrupt:  # Ctrl-C, in the process that the user started
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        got = where(error)
    else:
        return {name: _guarded(name, find(module, name)) for name in names}
    raise ValueError(f"{FILE} must load, got {got}")


def load_module(source: TaskSource) -> ModuleType:
    """Run task.py as the module `task`. Raises whatever it raises."""
    text = source[FILE]
    make_importable({name: each for name, each in source.items() if name != FILE})
    module = ModuleType("task")
    module.__file__ = FILE
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    sys.modules["task"] = module
    exec(compile(text, FILE, "exec"), module.__dict__)
    return module


def find(module: ModuleType, name: str) -> Callable[..., Any]:
    """The function `name` of task.py. ValueError, one line, unless it has its form."""
    function, form = getattr(module, name, None), FORMS[name]
    if not callable(function):
        defined = ", ".join(key for key in vars(module) if not key.startswith("__"))
        got = defined or "no name at all" if function is None else repr(function)
        raise ValueError(f"{FILE} must define {form.text(name)}, got {' '.join(got.split())}")
    return checked(function, name, form)


def checked(function: Callable[..., Any], name: str, form: Form) -> Callable[..., Any]:
    """The function of this name. ValueError, one line, unless it has the form."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin that does not say what it takes
        return function
    is_async, why = inspect.iscoroutinefunction(function), ""
    try:
        bind = signature.bind_partial if form.has_options else signature.bind
        bind(*form.parameters)
    except TypeError as error:
        why = f": {error}"
    if (
        why
        or (is_async and not form.may_be_async)
        or not _has_words(function, signature, name, form)
    ):
        must = f"{place_of(function)}: {name} must be {form.text(name)}"
        raise ValueError(f"{must}, got {'async ' * is_async}{name}{signature}{why}")
    return function


def place_of(function: Callable[..., Any]) -> str:
    """The line of task.py that defines it, if it is a function from there."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename != FILE:
        return FILE
    return f"{FILE}:{code.co_firstlineno}"


def where(error: BaseException) -> str:
    """The error on one line, with the line of task.py it came from."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError) and error.filename and not os.path.isabs(error.filename):
        return f"{text} ({error.filename}, line {error.lineno})"  # of task.py or a neighbour
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename == FILE]
    return f"{text} ({FILE}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except KeyboardInterrupt:  # Ctrl-C, in the process that the user started
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            got = where(error)
        raise TaskError(f"{name} of {FILE} must not raise, got {got}")

    return call


def _has_words(
    function: Callable[..., Any], signature: inspect.Signature, name: str, form: Form
) -> bool:
    """True if the parameters have the form's names and types, or it has another name."""
    if not (isinstance(function, FunctionType) and function.__name__ == name):
        return True
    given = [*signature.parameters.values()][: len(form.parameters)]
    notes = [*(parameter.annotation for parameter in given), signature.return_annotation]
    return [parameter.name.lstrip("_") for parameter in given] == [*form.parameters] and all(
        map(_fits, notes, [*form.parameters.values(), form.returns])
    )


def _fits(annotation: Any, types: tuple[str, ...]) -> bool:
    """True without an annotation, or with one of `types`, whatever module it is named by."""
    if annotation is inspect.Signature.empty or "Any" in types:
        return True
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"[\w.]*\.(?=\w)", "", text).strip("'\"") in ("Any", *types)
