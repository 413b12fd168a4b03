"""Tasks in the form of the framework Harbor: folders with task.toml, the agent's instruction, the
environment, and tests that leave the reward in a file.

A task becomes a row of prompts, which has all that an episode of it needs: its files too, as hosts
need not share folders. What a task asks for and is not done here is refused as it is read."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamarl.core.records import TASK, read_json
from llamarl.scoring.sandbox.containers import Ran
from llamarl.scoring.sandbox.sandboxes import MIB, Sandbox

TASK_FILE, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "Dockerfile"
TESTS, LOGS, AGENT = "/tests", "/logs", "/agent"  # folders in a sandbox
VERIFIER = f"{LOGS}/verifier"
SCRIPT = "test.sh"
REWARD_FILES = "reward.json", "reward.txt"  # the first of them that is there counts
MAX_BYTES = 16 * MIB  # of a task's files
SHOWN_CHARS = 2000
BUILT = "llamarl-task"  # the name of images that are built from a Dockerfile
TIMEOUT_S = 600.0  # of tests, where task.toml sets none
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}  # in MiB
UNKNOWN: Mapping[str, Sequence[str]] = {
    "": ("steps",),
    "agent": ("user", "network_mode", "allowed_hosts"),
    "verifier": (
        *("user", "network_mode", "allowed_hosts"),
        *("environment_mode", "environment", "collect"),
    ),
    "environment": (
        *("allowed_hosts", "gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir"),
        *("healthcheck",),
    ),
}
"""By section of task.toml, what a task may not ask for."""
NONE: tuple[object, ...] = (None, 0, [], {}, "shared")  # values that ask for nothing
Files = Mapping[str, str]
"""Files by their paths, in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task: its `image`, which the Dockerfile in `build` makes if task.toml names none; the
    folder in which programs start, if it is known; what they find in their environment; the tests
    and those of them that are programs. `files` are those that the Dockerfile copies, for a sandbox
    without an image, unless it `needs_image` for a reason. Limits are None where the task leaves
    them open."""

    name: str
    image: str
    build: str = ""
    workdir: str | None = None
    files: Files = field(default_factory=dict)
    needs_image: str = ""
    tests: Files = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = TIMEOUT_S
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    num_cpus: float | None = None
    memory_mib: int | None = None
    storage_mib: int | None = None
    has_internet: bool = True


def find_tasks(folder: Path) -> list[Path]:
    """Return the task.toml of each task in a folder, or of the task that it is, in the order of
    their names. Raises ValueError for a folder that is half a task."""
    if (folder / TASK_FILE).is_file():
        return [folder / TASK_FILE]
    found = []
    for each in sorted(folder.iterdir()):
        names = [name for name in (TASK_FILE, INSTRUCTION) if (each / name).is_file()]
        if len(names) == 1:
            missing = INSTRUCTION if names == [TASK_FILE] else TASK_FILE
            raise ValueError(f"{each} must hold {missing} beside {names[0]}, got no such file")
        found += [each / TASK_FILE] * bool(names)
    return found


def task_of(row: Mapping[str, Any]) -> HarborTask | None:
    """Return the task that a row of prompts is, if it is one."""
    return read_json(HarborTask, row[TASK]) if isinstance(row.get(TASK), dict) else None


def read_row(path: Path) -> dict[str, Any]:
    """Return the row of the task with this task.toml. Raises ValueError, which names the file, if
    the task is not whole or asks for what cannot be done."""
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a readable TOML file, got: {error}") from error
    folder, reader = path.parent, _Reader(path, found)
    reader.refuse_unknown()
    environment = folder / "environment"
    for compose in (*environment.glob("docker-compose.y*ml"), *folder.glob("*/.harborignore")):
        raise ValueError(f"{path.parent} must be a task without {compose.name}, got {compose}")
    if not (folder / "tests" / SCRIPT).is_file():
        raise ValueError(f"{folder} must hold tests/{SCRIPT}, got no such file")
    tests, programs = read_files(folder / "tests")
    image, build = reader.text("environment", "docker_image"), ""
    if not image and (environment / DOCKERFILE).is_file():
        image, build = f"{BUILT}:{digest_of(environment)}", str(environment)
    copied = _Copied(environment, reader.text("environment", "workdir"))
    task = HarborTask(
        name=reader.text("task", "name") or folder.name,
        image=image,
        build=build,
        workdir=copied.workdir,
        files=copied.files,
        needs_image=copied.why_not,
        tests=tests,
        programs=(*programs, *({SCRIPT} - {*programs})),
        agent_timeout_s=reader.number("agent", "timeout_sec"),
        verifier_timeout_s=reader.number("verifier", "timeout_sec") or TIMEOUT_S,
        variables=reader.variables("environment"),
        verifier_variables=reader.variables("verifier"),
        num_cpus=reader.number("environment", "cpus"),
        memory_mib=reader.mib("memory"),
        storage_mib=reader.mib("storage"),
        has_internet=reader.has_internet(),
    )
    try:
        question = without_canary((folder / INSTRUCTION).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / INSTRUCTION} must be readable text, got: {error}") from error
    return {"question": question, "task": task.name, "image": image, TASK: asdict(task)}


def without_canary(text: str) -> str:
    """Return an instruction without the lines before it that mark it as data of a benchmark."""
    lines = text.split("\n")
    while lines and CANARY.match(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def read_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the files of a folder in base64, by their paths in it, and the paths of those that can
    be executed. Raises ValueError for links, and for more than MAX_BYTES."""
    files, programs, num_bytes = dict[str, str](), list[str](), 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"a task's files must be plain files, got {path}")
        if path.is_file():
            num_bytes += path.stat().st_size
            if num_bytes > MAX_BYTES:
                raise ValueError(f"{folder} must hold at most {MAX_BYTES // MIB} MiB, got more")
            name = str(path.relative_to(folder))
            files[name] = base64.b64encode(path.read_bytes()).decode()
            programs += [name] * bool(path.stat().st_mode & 0o100)
    return files, programs


def digest_of(folder: Path) -> str:
    """Return a digest of what is in a folder, short enough for the tag of an image."""
    found = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_mode}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:12]


class _Reader:
    """The values of a task.toml, which are checked as they are read."""

    def __init__(self, path: Path, found: Mapping[str, Any]) -> None:
        self._path, self._found = path, found

    def get(self, section: str, key: str) -> Any:
        """Return a value, None if it is not there. Raises ValueError if the section is none."""
        inside = self._found if not section else self._found.get(section, {})
        if not isinstance(inside, dict):
            self._refuse(section, "be a table", inside)
        return inside.get(key)

    def refuse_unknown(self) -> None:
        """Raise ValueError for what a task asks for and is not done here."""
        for section, keys in UNKNOWN.items():
            for key in keys:
                if (value := self.get(section, key)) not in NONE:
                    self._refuse(f"{section}.{key}", "be left out, as llamarl has no such", value)
        system = self.get("environment", "os")
        if str(system or "linux").lower() != "linux":
            self._refuse("environment.os", "be linux", system)

    def text(self, section: str, key: str) -> str:
        value = self.get(section, key)
        if not isinstance(value or "", str):
            self._refuse(f"{section}.{key}", "be a text", value)
        return value or ""

    def number(self, section: str, key: str) -> float | None:
        value = self.get(section, key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            self._refuse(f"{section}.{key}", "be a number above 0", value)
        return float(value)

    def mib(self, name: str) -> int | None:
        """Return the MiB of memory_mb, or of memory, which is such as 2G; so of storage."""
        size, text = self.number("environment", f"{name}_mb"), self.get("environment", name)
        if text is not None:
            match = re.fullmatch(r"([0-9.]+)([GMK])", str(text).strip().upper())
            with suppress(ValueError):
                size = float(match[1]) * SIZES[match[2]] if match else None
            if not match or not size:
                self._refuse(f"environment.{name}", "be such as 2G", text)
        return None if size is None else max(1, int(size))

    def variables(self, section: str) -> dict[str, str]:
        found = self.get(section, "env") or {}
        for name, value in found.items() if isinstance(found, dict) else [("env", found)]:
            if not isinstance(value, str) or "${" in value:
                must = "be a text without ${, as no variables of the run are passed on"
                self._refuse(f"{section}.env.{name}", must, value)
        return dict(found)

    def has_internet(self) -> bool:
        """Return whether the task may use the internet, as one may that says nothing of it."""
        mode, allowed = (self.get("environment", key) for key in ("network_mode", "allow_internet"))
        if mode not in (None, "public", "no-network"):
            self._refuse("environment.network_mode", "be public or no-network", mode)
        return bool(mode != "no-network" and (mode is not None or allowed is not False))

    def _refuse(self, key: str, must: str, value: object) -> None:
        raise ValueError(f"{self._path}: {key.lstrip('.')} must {must}, got {value!r:.80}")


class _Copied:
    """What a Dockerfile does, if it does nothing but to copy files: the folder where programs start
    and the files by their places; or else why it needs an image."""

    def __init__(self, folder: Path, workdir: str) -> None:
        self.workdir: str | None = workdir or None
        self.files: dict[str, str] = {}
        self.why_not = ""
        try:
            self._read(folder)
        except _NeedsImageError as error:
            self.why_not, self.files = str(error), {}

    def _read(self, folder: Path) -> None:
        path = folder / DOCKERFILE
        if not path.is_file():
            raise _NeedsImageError(f"it has no environment/{DOCKERFILE}")
        here, copied = "/", dict[str, str]()
        for name, words in _steps(path.read_text("utf-8", "replace")):
            if name == "WORKDIR" and len(words) == 1:
                here = posixpath.join(here, words[0])
            elif name == "COPY" and len(words) >= 2 and not (folder / ".dockerignore").exists():
                copied |= _copy(folder, words[:-1], posixpath.join(here, words[-1]))
            elif name != "FROM" or "AS" in map(str.upper, words):
                raise _NeedsImageError(f"its {DOCKERFILE} has {name} {' '.join(words):.60}")
        home = self.workdir or posixpath.normpath(here)
        for place in copied:
            if not place.startswith(f"{home}/"):
                raise _NeedsImageError(f"its {DOCKERFILE} copies {place}, outside of {home}")
        if home == "/":
            raise _NeedsImageError(f"its {DOCKERFILE} has no WORKDIR")
        self.workdir, self.files = home, copied


class _NeedsImageError(Exception):
    """A Dockerfile does more than to copy files."""


def _steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the instructions of a Dockerfile, each with its words."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        try:
            words = shlex.split(rest)
        except ValueError:
            words = [rest]
        if name.upper() == "COPY" and (re.search(r"[$*?\[]", rest) or rest.startswith("--")):
            raise _NeedsImageError(f"its {DOCKERFILE} has {line.strip():.60}")
        yield name.upper(), words


def _copy(folder: Path, sources: Sequence[str], target: str) -> dict[str, str]:
    """Return the files that these sources are at their target."""
    found: dict[str, str] = {}
    for name in sources:
        source = folder / posixpath.normpath(f"/{name}").lstrip("/")
        if source.is_dir():
            files, _ = read_files(source)
            found |= {f"{target.rstrip('/')}/{path}": data for path, data in files.items()}
        elif source.is_file() and not source.is_symlink():
            is_folder = target.endswith(("/", "/.")) or len(sources) > 1
            place = f"{target}/{source.name}" if is_folder else target
            found[place] = base64.b64encode(source.read_bytes()).decode()
        else:
            raise ValueError(f"{folder / DOCKERFILE} must copy files that are there, got {name}")
    return {posixpath.normpath(path): data for path, data in found.items()}


async def verify(sandbox: Sandbox, task: HarborTask) -> float:
    """Run the task's tests in the sandbox where an agent has worked, and return the reward that
    they leave. Raises RuntimeError if they leave none."""
    for folder in (TESTS, VERIFIER):  # which the agent may have filled
        await sandbox.empty(folder)
    for path, data in task.tests.items():
        is_program = path in task.programs
        await sandbox.write(f"{TESTS}/{path}", base64.b64decode(data), is_executable=is_program)
    variables = {**task.variables, **task.verifier_variables}
    command = ["sh", "-c", f"{TESTS}/{SCRIPT}"]  # a script without #! too
    ran = await sandbox.run(command, variables, task.verifier_timeout_s, has_model=False)
    if ran.ended_for:
        must = f"keep their limits (of time {task.verifier_timeout_s:g} s)"
        raise RuntimeError(_failed(task, must, f"too much {ran.ended_for}", ran))
    for name in REWARD_FILES:
        with suppress(FileNotFoundError):
            left = await sandbox.read(f"{VERIFIER}/{name}")
            try:
                return reward_of(name, left.decode())
            except (ValueError, OverflowError, RecursionError) as error:
                must = f"leave a finite number in {VERIFIER}/{name}"
                raise RuntimeError(_failed(task, must, str(error), ran)) from error
    must = f"leave a reward in {VERIFIER}/{' or '.join(REWARD_FILES)}"
    raise RuntimeError(_failed(task, must, f"exit code {ran.exit_code} and no such file", ran))


def reward_of(name: str, text: str) -> float:
    """Return the reward in a file of this name: a number, or in JSON an object with the number
    `reward`, or with one number. Raises ValueError if there is none."""
    if not name.endswith(".json"):
        return _finite(float(text))
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.80}, which is no object")
    for key, value in found.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{value!r:.80} for {key}")
        _finite(float(value))
    if "reward" not in found and len(found) != 1:
        raise ValueError(f"{', '.join(found) or 'none'}, of which none is named reward")
    return float(found.get("reward", next(iter(found.values()))))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value}")
    return value


def _failed(task: HarborTask, must: str, got: str, ran: Ran) -> str:
    said = (ran.stderr.strip() or ran.stdout.strip())[-SHOWN_CHARS:]
    return f"the tests of task {task.name} must {must}, got {got}" + (f": {said}" if said else "")
