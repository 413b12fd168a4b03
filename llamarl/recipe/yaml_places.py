"""Where in the YAML files of a recipe a mistake is.

Owns: file and line of a key or word, and of what is no YAML. Does not own: what is wrong with a
value (`composition.py`). Invariant: a place is one of the files as written, before composition.
"""

import re
from pathlib import Path

import yaml


def syntax_error(error: yaml.YAMLError, name: str) -> str:
    """One line about what is no YAML, in the file that the error names, or else in `name`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{name} must be YAML, got {' '.join(str(error).split())}"
    path = mark.name if Path(mark.name).is_file() else name
    mistake = f"a mistake at column {mark.column + 1}: {getattr(error, 'problem', '')}"
    return f"{path}:{mark.line + 1}: must be YAML, got {mistake}"


def place_of(recipe: Path, key: str) -> str:
    """`FILE:LINE: ` of a key in the files of a recipe's folder, or nothing."""
    others = sorted(path for path in recipe.parent.glob("*/*.yaml"))
    for path in (recipe, *others):
        group = path.relative_to(recipe.parent).parent.parts
        names = [name.partition("[")[0] for name in key.split(".")]
        if tuple(names[: len(group)]) == group and (line := _line_of(path, names[len(group) :])):
            return f"{path}:{line}: "
    return ""


def _line_of(path: Path, keys: list[str]) -> int | None:
    """Line, from 1, of the nested `keys` in a YAML file."""
    try:
        node: yaml.Node | None = yaml.compose(path.read_text("utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # not the file that Hydra read
        return None
    line = None
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(name, value) for name, value in pairs if name.value == key]
        if not found:
            return None
        name, node = found[-1]
        line = name.start_mark.line + 1
    return line


def place_with(recipe: Path | None, word: str) -> str:
    """`FILE:LINE: ` of the first line of the recipe with this word, or nothing."""
    lines = recipe.read_text("utf-8").splitlines() if recipe is not None else []
    found = [i for i, line in enumerate(lines, 1) if re.search(rf"\b{re.escape(word)}\b", line)]
    return f"{recipe}:{found[0]}: " if found else ""
