"""The house rules, read off the syntax trees: nothing of llamarl is imported here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from tests.places import ROOT

PACKAGE = ROOT / "llamarl"

# From the bottom to the top: a room imports only rooms that stand on an earlier line, or itself.
FLOORS: list[set[str]] = [
    {"core"},
    {"metrics", "model"},
    {"cluster", "publish"},
    {"storage"},
    {"scoring", "trainer"},
    {"generator", "prompts"},
    {"recipe"},
    {"controller"},
    {"planner", "rehearsal", "view"},
    {"cli"},
]
ANNEXES = {"planner", "rehearsal", "view"}  # they see the rooms, and no room sees them
RANK = {room: rank for rank, rooms in enumerate(FLOORS) for room in rooms}
OUTSIDE = {"__init__", "__main__"}  # they lead to the commands
FORBIDDEN_WORDS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
EXECUTOR_CALLERS = {
    "controller/controller.py",
    "controller/dispatch.py",
    "controller/colocation.py",
    "controller/logprob_check.py",
    "controller/engines.py",
    "controller/rollouts.py",
    "publish/publisher.py",
    "publish/replica.py",
}
EXECUTOR_METHODS = {"collect", "accumulate", "infer", "prepare", "commit", "abort", "source_layout"}
BROAD_EXCEPT_MARK = "noqa: BLE001 - "

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.append(node.module or "")
    return names


def eager_modules(tree: ast.Module) -> list[str]:
    """Modules imported when the file is imported: not inside functions or TYPE_CHECKING."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += imported_modules(ast.Module(body=[node], type_ignores=[]))
    return names


def test_every_room_has_its_floor() -> None:
    rooms = {room(path) for path in FILES} - OUTSIDE
    assert rooms == set(RANK)
    assert len(FLOORS) <= 10
    assert len(rooms) <= 16


def defined_names(tree: ast.AST) -> set[str]:
    """What a module binds at its top, also under conditions."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            names |= defined_names(node)
    return names


def test_every_name_that_is_imported_is_there() -> None:
    """In tools and tests too: what runs rarely must not find that out."""
    places = {ROOT: ("llamarl", "tests"), ROOT / "tools": (".",)}
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for root, folders in places.items()
        for folder in folders
        for path in (root / folder).rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    known = {name: defined_names(tree) for name, tree in trees.items()}
    known = {name: found for name, found in known.items() if "*" not in found}
    assert "gpu_bench.setting" in known
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in known:
                inner = {each.removeprefix(f"{node.module}.") for each in files}
                wanted = {alias.name for alias in node.names} - {"*"}
                missing = wanted - known[node.module] - inner
                assert not missing, f"{files[name]}: {node.module} has no {missing}"


def test_imports_point_down() -> None:
    for path in FILES:
        here = room(path)
        for module in imported_modules(TREES[path]):
            there = module.removeprefix("llamarl.").partition(".")[0]
            if here in OUTSIDE or there == here or not module.startswith("llamarl."):
                continue
            assert RANK[there] < RANK[here], f"{path}: {here} imports {there}, above or beside it"
            assert there not in ANNEXES or here == "cli", f"{path} imports an annex, {there}"


def imported_files(path: Path) -> set[Path]:
    """Files of the package that this one imports, at once or later."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llamarl."):
            folder = ROOT / (node.module or "").replace(".", "/")
            inner = {folder / f"{alias.name}.py" for alias in node.names} & TREES.keys()
            found |= inner or {folder.with_suffix(".py"), folder / "__init__.py"} & TREES.keys()
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them; none if there is no circle."""
    done: set[str] = set()

    def follow(way: list[str]) -> list[str]:
        if way[-1] in way[:-1]:
            return way[way.index(way[-1]) :]
        for name in sorted(arrows.get(way[-1], set()) - done):
            if found := follow([*way, name]):
                return found
        done.add(way[-1])
        return []

    return next((found for name in sorted(arrows) if (found := follow([name]))), [])


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {str(path): {str(each) for each in imported_files(path)} for path in FILES}
    assert circle(files | {"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle(files)


def test_only_the_cluster_imports_monarch() -> None:
    for path in FILES:
        if room(path) != "cluster":
            assert not any(m.split(".")[0] == "monarch" for m in imported_modules(TREES[path])), (
                path
            )


def test_the_controller_sees_no_torch_no_monarch_no_hydra() -> None:
    banned = {"torch", "monarch", "hydra", "omegaconf"}
    for module in imported_modules(TREES[PACKAGE / "controller" / "controller.py"]):
        assert module.split(".")[0] not in banned
        assert not module.startswith(("llamarl.cluster", "llamarl.generator", "llamarl.model"))


def test_the_controller_has_no_branch_on_placement_or_engine() -> None:
    text = (PACKAGE / "controller" / "controller.py").read_text().lower()
    assert not re.search(r"\b(vllm|colocated|disaggregated|is_sync|inline)\b", text)


def test_the_config_is_standard_library_only() -> None:
    import sys

    below = ("llamarl.core.device.names", "llamarl.core.fields")
    files = [PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in below]
    for path in [*(PACKAGE / "core" / "config").glob("*.py"), *files]:
        for module in imported_modules(TREES[path]):
            top = module.split(".")[0]
            is_ours = module.startswith("llamarl.core.config") or module in below
            assert top in sys.stdlib_module_names or is_ours, f"{path} {module}"


def test_hydra_is_met_in_one_file() -> None:
    for path in FILES:
        if path != PACKAGE / "recipe" / "composition.py":
            tops = {module.split(".")[0] for module in imported_modules(TREES[path])}
            assert not tops & {"hydra", "omegaconf"}, path


def test_executor_methods_are_called_only_by_their_callers() -> None:
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name in EXECUTOR_CALLERS or room(path) in ("generator", "publish", "trainer"):
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
                function = node.value.func
                if isinstance(function, ast.Attribute):
                    assert function.attr not in EXECUTOR_METHODS, f"{name}: await .{function.attr}"


def test_protocols_have_at_most_six_methods() -> None:
    ends = ("WeightSource", "WeightTarget")
    nodes = TREES[PACKAGE / "publish" / "replica.py"].body
    faces = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in ends]
    assert len(faces) == len(ends)
    for node in [*TREES[PACKAGE / "core" / "faces.py"].body, *faces]:
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
            methods = [item for item in node.body if isinstance(item, ast.AsyncFunctionDef)]
            assert 1 <= len(methods) <= 6, node.name


def test_the_controller_is_read_in_one_go() -> None:
    assert len((PACKAGE / "controller" / "controller.py").read_text().splitlines()) <= 130


def test_names_say_what_things_are() -> None:
    for path in FILES:
        for part in path.relative_to(PACKAGE).parts:
            words = set(part.removesuffix(".py").split("_"))
            assert not words & FORBIDDEN_WORDS, path


def test_every_module_and_public_class_has_a_docstring() -> None:
    for path, tree in TREES.items():
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


def test_broad_excepts_give_their_reason() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        for node in ast.walk(TREES[path]):
            if not isinstance(node, ast.ExceptHandler):
                continue
            assert node.type is not None, f"{path}:{node.lineno} bare except"
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            is_passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if names & {"Exception", "BaseException"} and not is_passed_on:
                assert BROAD_EXCEPT_MARK in lines[node.lineno - 1], f"{path}:{node.lineno}"


def test_nothing_prints() -> None:
    for path in FILES:
        for node in ast.walk(TREES[path]):
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not is_print, f"{path}:{node.lineno}"


def test_waits_with_a_limit_do_not_lose_a_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11 does, if what it waits for ends at the same moment: a stage
    that should end goes on, and the run stands still."""
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Attribute) and node.attr == "wait_for":
                assert ast.unparse(node.value) != "asyncio", f"{path}:{node.lineno}"


def only_restricts_unpickling(tree: ast.AST) -> bool:
    """True if all it takes from pickle is a base class, for a class that says what may be named."""
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    taken = [node for node in taken if "pickle" in imported_modules(node)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    restricted = [
        base
        for node in classes
        for base in node.bases
        if {"find_class"} & {getattr(part, "name", "") for part in node.body}
    ]
    names = [node for node in ast.walk(tree) if getattr(node, "id", "") == "Unpickler"]
    return (
        all(ast.unparse(node) == "from pickle import Unpickler" for node in taken)
        and names != []
        and all(name in restricted for name in names)
    )


def test_no_pickle_is_loaded() -> None:
    for path in FILES:
        if "pickle" in imported_modules(TREES[path]) and room(path) != "cluster":
            assert only_restricts_unpickling(TREES[path]), path
        assert "weights_only=False" not in path.read_text(), path


def config_classes() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for folder in ("core/config", "trainer/losses")
        for path in (PACKAGE / folder).glob("*.py")
        for node in TREES[path].body
        if isinstance(node, ast.ClassDef)
    ]


def test_every_config_field_is_documented() -> None:
    for path, node in config_classes():
        for item, after in zip(node.body, node.body[1:] + [None], strict=True):
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            is_section = not isinstance(item.annotation, ast.Name) or item.annotation.id.endswith(
                "Config"
            )
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            inherited = any(isinstance(base, ast.Name) for base in node.bases)
            assert documented or is_section or inherited, (
                f"{path.name}: {node.name}.{item.target.id}"
            )


def test_every_config_field_is_read_somewhere() -> None:
    rooms = [tree for path, tree in TREES.items() if path.parent.name != "config"]
    parts = [part for _, node in config_classes() for part in node.body]
    properties = [each for each in parts if getattr(each, "decorator_list", ())]  # rooms read them
    nodes = (node for tree in (*rooms, *properties) for node in ast.walk(tree))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    dotted = {name for tree in TREES.values() for name in names_in(tree) if "." in name}
    read |= {name.rpartition(".")[2] for name in dotted}
    for path, node in config_classes():
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                assert item.target.id in read, f"{path.name}: no code reads {item.target.id}"


def test_configs_are_never_changed_after_the_door() -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in ("config", "cfg"), f"{path}:{node.lineno}"


def test_yaml_files_only_select() -> None:
    for folder, most in (("conf", 15), ("recipes", 30)):
        for path in (ROOT / folder).rglob("*.yaml"):
            text = path.read_text()
            assert len(text.splitlines()) <= most, path
            assert "_target_" not in text, path
            yaml.safe_load(text)


def test_skips_name_hardware() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for line in path.read_text().splitlines():
            if re.search(r"pytest\.(skip\(|mark\.skip)", line) and path.name != "test_house.py":
                assert re.search(r"cuda|gpu|core|linux|memory", line, re.IGNORECASE), (
                    f"{path}: {line}"
                )


def places_of(pattern: str, *outside: str) -> set[str]:
    """The files of the package whose text has this, but for those of some rooms."""
    found = (path for path in FILES if re.search(pattern, path.read_text()))
    return {str(path.relative_to(PACKAGE)) for path in found if room(path) not in outside}


def test_each_job_is_done_in_one_place() -> None:
    assert places_of(r"except\*? \(?[\w, ]*\bExecutorLost\b", "cluster") == {
        "scoring/environment.py",
        "controller/dispatch.py",
        "controller/saver.py",
        "controller/supervisor.py",
    }
    assert places_of(r"await [\w.]*collect\(", "generator") == {
        "controller/dispatch.py",
        "controller/rollouts.py",
    }
    # The forwarder runs in a sandbox, where it sees nothing of the package.
    assert places_of(r"AF_UNIX") == {"cluster/sockets.py", "scoring/sandbox/forwarder.py"}
    assert places_of(r"memfd_create") == {"core/memory.py"}
    pauses = places_of(r"_PAUSE_S\b.*= |WINDOW_S\b.*= ")
    assert pauses <= {"controller/supervisor.py", "controller/gate.py"}


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
        if path.parent != PACKAGE / "core" / "device":
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
