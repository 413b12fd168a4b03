"""The text of a task.py, as far as it can be judged without running it.

Owns: that judgement, which the controller makes before any process starts. Does not own: loading it
(`task.py`). Invariant: nothing of the text is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

DYNAMIC = {
    "exec",
    "globals",
    "setattr",
    "vars",
}  # with these, only a run shows what is defined


def check_source(source: str, path: str) -> None:
    """Raise ValueError, one line with `path`, unless the source is Python and may define `reward`.

    Nothing is run here: whether it works, the first process that loads it finds out.
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
    names = set(_module_names(tree))
    if names.isdisjoint({"reward", "*", *DYNAMIC}):
        raise ValueError(
            f"{path} must define a function reward(prompt, completion), got "
            f"{', '.join(sorted(names)) or 'no name at all'}"
        )


def _module_names(tree: ast.Module) -> Iterator[str]:
    """Names that the module's own statements may bind, and those of DYNAMIC that it uses."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue  # what it binds inside is its own
        if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in DYNAMIC):
            yield node.id
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        waiting += ast.iter_child_nodes(node)
