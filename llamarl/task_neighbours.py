"""The modules of a recipe's folder that its task.py imports.

Owns: which files those are, and importing them by their content. Does not own: task.py itself
(`task_file.py`). Invariant: a module of the recipe's folder is the same text in every process, and
what a later task.py imports never comes from an earlier one.
"""

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

TaskSource = Mapping[str, str]
"""The text of task.py and those of its neighbours, by their paths in the recipe's folder."""
OWN = {"llamarl", "task"}
PACKAGE = "__init__.py"


def neighbours(text: str, folder: Path) -> dict[str, str]:
    """The modules in `folder` that this text imports, and those that they import, by their paths
    there; of a package all modules. A text that does not compile imports none.

    ValueError for one that cannot be read, or that has the name of an installed module in use.
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
    """The text of a file of Python; ValueError, in one line, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be Python in UTF-8, got {error}") from error
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read, got {error}") from error


def make_importable(files: Mapping[str, str]) -> None:
    """Let this process import these modules, by their texts, and no longer those of before."""
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
    """The first parts of the names that the text imports."""
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
    """Those of the module or package of this name; none if the folder has no such one."""
    if (folder / name / PACKAGE).is_file():
        return sorted((folder / name).rglob("*.py"))
    return [path] if (path := folder / f"{name}.py").is_file() else []


def _check_name(name: str, path: Path) -> None:
    """ValueError if this process has imported another module of this name, for all that use that
    one would get the recipe's."""
    loaded = sys.modules.get(name)
    if loaded is None or isinstance(getattr(loaded, "__loader__", None), _Loader):
        return
    file = getattr(loaded, "__file__", None)
    if file is None or Path(file).resolve() != path.resolve():
        raise ValueError(f"{path} must not have the name of an installed module, got {name}")
