"""What is done in one place only."""

from __future__ import annotations

import ast
import re

from tests.test_house import FILES, PACKAGE, ROOT, room


def places_of(pattern: str, *outside: str) -> set[str]:
    """The files of the package whose text has this, but for those of some rooms."""
    found = (path for path in FILES if re.search(pattern, path.read_text()))
    return {str(path.relative_to(PACKAGE)) for path in found if room(path) not in outside}


def test_each_job_is_done_in_one_place() -> None:
    assert places_of(r"except\*? \(?[\w, ]*\bExecutorLost\b", "cluster") == {
        "executors/environment_link.py",
        "loop/dispatch.py",
        "loop/saver.py",
        "run/fleet.py",
    }
    assert places_of(r"await [\w.]*collect\(", "executors") == {
        "loop/dispatch.py",
        "loop/rollouts.py",
    }
    assert places_of(r"AF_UNIX") == {"storage/channel.py"}
    assert places_of(r"memfd_create") == {"memory_file.py"}
    assert places_of(r"_PAUSE_S\b.*= |WINDOW_S\b.*= ") <= {"run/mending.py", "loop/gate.py"}


VENDOR = re.compile("cuda|nccl|nvidia", re.IGNORECASE)
OF_A_RECIPE = {"cuda_ipc"}  # what a recipe may call a transport


def names_in(tree: ast.AST) -> list[str]:
    """Identifiers and texts of the code; docstrings are none."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    found: list[str] = []
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg"):
            value = getattr(node, field, None)
            found += [value] if isinstance(value, str) else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            found.append(node.value)
    return found


def test_only_the_room_of_devices_names_a_vendor() -> None:
    for path in FILES:
        if room(path) != "device":
            named = {name for name in names_in(ast.parse(path.read_text())) if VENDOR.search(name)}
            assert named <= OF_A_RECIPE, f"{path}: {named}"


def test_every_module_that_is_imported_exists() -> None:
    """Imports inside functions too, which fail only when they are reached."""
    beside = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    for path in [*FILES, *beside]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llamarl"):
                place = ROOT / (node.module or "").replace(".", "/")
                found = place.is_dir() or place.with_suffix(".py").is_file()
                assert found, f"{path}:{node.lineno} imports {node.module}"
