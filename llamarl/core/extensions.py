"""Loads code that is not the library's own: a recipe's task.py with its neighbours, and the entry
points of other packages."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import spec_from_loader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from llamarl.core.errors import TaskError


def load_extensions(group: str) -> None:
    """Import the modules that installed packages name under this group, such as
    `llamarl.transports`; each one adds its own entries to the table. An exception of a module is
    passed on, with a note that names the module."""
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            error.add_note(f"while {entry.value}, the entry point {entry.name} of {group}, loads")
            raise


TaskSource = Mapping[str, str]
"""The text of task.py and those of its neighbours, by their paths in the recipe's folder."""
OWN = {"llamarl", "task"}
PACKAGE = "__init__.py"


def neighbours(text: str, folder: Path) -> dict[str, str]:
    """Return the texts of the modules in `folder` that this text imports, and of those that they
    import, by their paths there; for a package, of all its modules. A text that does not compile
    imports none.

    ValueError for a module that cannot be read, or that has the name of an installed module in use.
    """
    found: dict[str, str] = {}
    texts = [text]
    while texts:
        for name in _imported(texts.pop()):
            for path in _files(folder, name):
                place = path.relative_to(folder).as_posix()
                if place not in found:
                    _check_name(name, path)
                    found[place] = read_source(path)
                    texts.append(found[place])
    return found


def read_source(path: Path) -> str:
    """Return the text of a file of Python; ValueError, in one line, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be Python in UTF-8, got {error}") from error
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read, got {error}") from error


def make_importable(files: Mapping[str, str]) -> None:
    """Let this process import these modules by their texts, and forget those of an earlier call."""
    for name, module in [*sys.modules.items()]:
        if isinstance(getattr(module, "__loader__", None), _Loader):
            del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
    if files:
        sys.meta_path.insert(0, _Finder(files))


class _Finder(MetaPathFinder):
    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        stem = fullname.replace(".", "/")
        for file in (f"{stem}/{PACKAGE}", f"{stem}.py"):
            if file in self._files:
                return spec_from_loader(fullname, _Loader(file, self._files[file]))
        return None


class _Loader(ExecutionLoader):
    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_filename(self, fullname: str) -> str:
        return self._file

    def is_package(self, fullname: str) -> bool:
        return self._file.endswith(f"/{PACKAGE}")


def _imported(text: str) -> set[str]:
    """Return the first parts of the names that the text imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # shown where it is run
        return set()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    return {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names


def _files(folder: Path, name: str) -> Iterable[Path]:
    """Return the files of the module or package of this name; none if the folder does not have
    it."""
    if (folder / name / PACKAGE).is_file():
        return sorted((folder / name).rglob("*.py"))
    return [path] if (path := folder / f"{name}.py").is_file() else []


def _check_name(name: str, path: Path) -> None:
    """Raise ValueError if this process has imported another module of this name, for its users
    would get the recipe's instead."""
    loaded = sys.modules.get(name)
    if loaded is None or isinstance(getattr(loaded, "__loader__", None), _Loader):
        return
    file = getattr(loaded, "__file__", None)
    if file is None or Path(file).resolve() != path.resolve():
        raise ValueError(f"{path} must not have the name of an installed module, got {name}")


FILE = "task.py"
STAGES = "stages"  # its list of the dataflow's stages


@dataclass(frozen=True, slots=True)
class Form:
    """The signature that a function of task.py must have: the types that its parameters, by name,
    and its result may be annotated with, the usual one first. Where Any is among them, any
    annotation will do. A function need not be annotated, and may have more parameters if
    `has_options`."""

    parameters: Mapping[str, tuple[str, ...]]
    returns: tuple[str, ...]
    may_be_async: bool = False
    has_options: bool = False

    def text(self, name: str) -> str:
        """Return the signature as one would write it."""
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
    """Run task.py as the module `task`; return its functions `names`, each guarded.

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
    """Run task.py as the module `task` and return it. Raises whatever task.py raises."""
    text = source[FILE]
    make_importable({name: each for name, each in source.items() if name != FILE})
    module = ModuleType("task")
    module.__file__ = FILE
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    sys.modules["task"] = module
    exec(compile(text, FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def find(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function `name` of task.py. ValueError, one line, unless it has its form."""
    function, form = getattr(module, name, None), FORMS[name]
    if not callable(function):
        defined = ", ".join(key for key in vars(module) if not key.startswith("__"))
        got = defined or "no name at all" if function is None else repr(function)
        raise ValueError(f"{FILE} must define {form.text(name)}, got {' '.join(got.split())}")
    return checked(function, name, form)


def checked(function: Callable[..., Any], name: str, form: Form) -> Callable[..., Any]:
    """Return the function of this name. ValueError, one line, unless it has the form."""
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
    """Return the line of task.py that defines the function, if it is from there."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename != FILE:
        return FILE
    return f"{FILE}:{code.co_firstlineno}"


def where(error: BaseException) -> str:
    """Return the error on one line, with the line of task.py it came from."""
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
    """Return whether the parameters have the form's names and types, or the function has another
    name."""
    if not (isinstance(function, FunctionType) and function.__name__ == name):
        return True
    given = [*signature.parameters.values()][: len(form.parameters)]
    notes = [*(parameter.annotation for parameter in given), signature.return_annotation]
    return [parameter.name.lstrip("_") for parameter in given] == [*form.parameters] and all(
        map(_fits, notes, [*form.parameters.values(), form.returns])
    )


def _fits(annotation: Any, types: tuple[str, ...]) -> bool:
    """Return whether there is no annotation, or one of `types`, whatever module it is named by."""
    if annotation is inspect.Signature.empty or "Any" in types:
        return True
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"[\w.]*\.(?=\w)", "", text).strip("'\"") in ("Any", *types)
