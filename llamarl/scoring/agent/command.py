"""The environment whose episodes a command plays, in a sandbox of its own, as the recipe says: its
reward is that of a check, which runs in the same folder afterwards, or of the tests of a task."""

from __future__ import annotations

import base64
import json
import math
import posixpath
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.core.config import EnvironmentConfig
from llamarl.core.fields import require
from llamarl.core.records import Prompt, filled
from llamarl.scoring.agent.environment import AgentEnvironment
from llamarl.scoring.agent.server import MODEL
from llamarl.scoring.agent.tasks import AGENT, LOGS, TESTS, HarborTask, task_of, verify
from llamarl.scoring.sandbox.containers import Ran
from llamarl.scoring.sandbox.docker import ContainerSandbox
from llamarl.scoring.sandbox.sandboxes import MIB, LocalSandbox, Sandbox, SandboxLimits

ROW_FILES = "files"  # of a prompt's row: texts by path
MAX_FILES_BYTES = 16 * MIB  # that are carried to each host
SHOWN_CHARS = 2000
OWN_LOGS = "agent", "verifier", "artifacts"  # folders that a task finds in /logs
TRACEBACK = "Traceback (most recent call last):"
Files = Mapping[str, str]
"""Files by their paths, in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """What plays and checks an episode: commands, in which {field} is that of the prompt's row, and
    the `files` that are in the folder before each. A check may take `timeout_s`. With an `image`
    they run in containers, which `engine` makes."""

    command: Sequence[str]
    check: Sequence[str]
    files: Files = field(default_factory=dict)
    check_files: Files = field(default_factory=dict)
    readable: Sequence[str] = ()
    memory_bytes: int = SandboxLimits().memory_bytes
    disk_bytes: int = SandboxLimits().disk_bytes
    contained: bool = True
    timeout_s: float = 30.0
    max_programs: int = 32
    image: str = ""
    engine: str = "docker"
    internet: bool = False


def read_command(config: EnvironmentConfig, folder: str, *, contained: bool) -> AgentCommand:
    """Return the recipe's command, with the files that it names in the recipe's `folder`. Raises
    ValueError if one cannot be read."""
    own = Path(folder)
    return AgentCommand(
        command=config.command,
        check=config.check_command,
        files=read_files(own, config.files, "environment.files"),
        check_files=read_files(own, config.check_files, "environment.check_files"),
        readable=config.readable,
        memory_bytes=config.memory_mib * MIB,
        disk_bytes=config.disk_mib * MIB,
        contained=contained,
        timeout_s=config.timeout_s,
        max_programs=config.max_programs,
        image=config.image,
        engine=config.engine,
        internet=config.internet,
    )


def read_files(folder: Path, name: str | None, key: str) -> dict[str, str]:
    """Return the files of this folder of the recipe; none without a name."""
    if name is None:
        return {}
    top, found, num_bytes = folder / name, dict[str, str](), 0
    require(top.is_dir(), key, "be a folder", str(top))
    for path in sorted(each for each in top.rglob("*") if each.is_file()):
        data = path.read_bytes()
        num_bytes += len(data)
        must = f"hold at most {MAX_FILES_BYTES // MIB} MiB"
        require(num_bytes <= MAX_FILES_BYTES, key, must, f"more in {top}")
        found[str(path.relative_to(top))] = base64.b64encode(data).decode()
    return found


def check_command(config: EnvironmentConfig, prompt: Prompt) -> None:
    """Raise ValueError if one of the commands or the image names a field that this prompt's row
    lacks, or if the sandbox is none for its task."""
    row = prompt.fields
    words_of(config.command, row, "environment.command")
    words_of(config.check_command, row, "environment.check_command")
    if config.image:
        must = f"name an image for each row, also for prompt {prompt.prompt_id}"
        require(bool(image_of(config.image, row)), "environment.image", must, config.image)
    if not config.command:
        return
    if (task := task_of(row)) is None:
        must = "name a program, as a prompt that is no task brings no tests"
        config.require(bool(config.check_command), "check_command", must)
        return
    for name in ("check_command", "check_files"):
        must = f"be left out, as the task {task.name} brings its tests"
        config.require(not getattr(config, name), name, must)
    must = f"be docker for the task {task.name}, as {task.needs_image}"
    config.require(bool(config.image) or not task.needs_image, "sandbox", must)
    must = f"be at least the {task.verifier_timeout_s:g} s that the tests of {task.name} may take"
    config.require(config.timeout_s >= task.verifier_timeout_s, "timeout_s", must)


def image_of(image: str, row: Mapping[str, Any]) -> str:
    """Return the image for this prompt's row."""
    return filled(image, row, "environment.image")


def words_of(
    command: Sequence[str], row: Mapping[str, Any], key: str, python: str = sys.executable
) -> list[str]:
    """Return the command with the row's fields, and the program `python`, in their places. Raises
    ValueError as `filled` does."""
    known = {**row, "python": python}
    return [filled(word, known, key) for word in command]


def make_sandbox(
    spec: AgentCommand, url: str, row: Mapping[str, Any], task: HarborTask | None
) -> Sandbox:
    """Return a sandbox for an episode of this row, which may be a task."""
    limits = SandboxLimits(memory_bytes=spec.memory_bytes, disk_bytes=spec.disk_bytes)
    home: dict[str, Any] = {}
    if task is not None:
        memory, storage = task.memory_mib, task.storage_mib
        limits = SandboxLimits(
            memory_bytes=spec.memory_bytes if memory is None else memory * MIB,
            disk_bytes=spec.disk_bytes if storage is None else storage * MIB,
        )
        home = {"home": task.workdir, "folders": (TESTS, LOGS, AGENT)}
    if spec.image:
        return ContainerSandbox(
            spec.engine,
            image_of(spec.image, row),
            url,
            limits,
            readable=spec.readable,
            internet=spec.internet,
            num_cpus=None if task is None else task.num_cpus,
            **home,
        )
    return LocalSandbox(url, limits, spec.readable, spec.contained, **home)


class CommandEnvironment(AgentEnvironment):
    """An environment that a command plays."""

    def __init__(self, spec: AgentCommand) -> None:
        self._spec = spec

    async def play(self, url: str, **row: Any) -> float:
        """Run the command, then the check, and return its reward: the number in the last line that
        it prints, else 1 if it exits with 0 and 0 if it exits with 1; or that of the task's tests.
        Raises RuntimeError for any other end, which is a failure and no reward."""
        spec, task = self._spec, task_of(row)
        sandbox = make_sandbox(spec, url, row, task)
        python = "python3" if spec.image else sys.executable
        try:
            await sandbox.start()
            await _put(sandbox, spec.files, "" if task is None else AGENT)
            for path, text in (row.get(ROW_FILES) or {}).items():
                await sandbox.write(path, str(text).encode())
            if task is not None:
                for name in OWN_LOGS:
                    await sandbox.empty(f"{LOGS}/{name}")
                await _put(sandbox, {} if spec.image else task.files)
            command = words_of(spec.command, row, "environment.command", python)
            own = variables(url) | dict(task.variables if task is not None else {})
            limit_s = math.inf if task is None else task.agent_timeout_s or math.inf
            ran = await sandbox.run(command, own, limit_s)
            is_late = task is not None and ran.ended_for == "time"  # its work is tested as it is
            if ran.ended_for and not is_late:
                raise RuntimeError(f"the agent must keep its limits, got too much {ran.ended_for}")
            if ran.exit_code == 127:  # the shell's and ours: no such program
                raise RuntimeError(f"the agent must start, got {_shown(ran)}")
            failure = f"exit code {ran.exit_code}: {_shown(ran)}"
            self.program_failure = failure if ran.exit_code else ""
            if task is not None:
                return await verify(sandbox, task)
            await _put(sandbox, spec.check_files)
            row_text = json.dumps(row, default=str)
            check = words_of(spec.check, row, "environment.check_command", python)
            told = {"LLAMARL_ROW": row_text}
            checked = await sandbox.run(check, told, spec.timeout_s, has_model=False)
            return reward_of(checked)
        finally:
            await sandbox.stop()


def variables(url: str) -> dict[str, str]:
    """Return the environment variables by which programs find a model, whatever API they use."""
    plain = url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": plain,
        "ANTHROPIC_API_KEY": "none",
        "LLAMARL_URL": url,
        "LLAMARL_MODEL": MODEL,
    }


def reward_of(ran: Ran) -> float:
    """Return the reward of a check. Raises RuntimeError if it has given none: Python too exits with
    1 where a program breaks, which is no wrong answer."""
    is_broken = ran.exit_code == 1 and TRACEBACK in ran.stderr
    if ran.ended_for or is_broken or ran.exit_code not in (0, 1):
        end = f"too much {ran.ended_for}" if ran.ended_for else f"exit code {ran.exit_code}"
        raise RuntimeError(f"the check must exit with 0 or 1, got {end}: {_shown(ran)}")
    lines = ran.stdout.strip().splitlines()
    try:
        return float(lines[-1]) if lines else float(ran.exit_code == 0)
    except ValueError:
        return float(ran.exit_code == 0)


async def _put(sandbox: Sandbox, files: Files, folder: str = "") -> None:
    for path, data in files.items():
        await sandbox.write(posixpath.join(folder, path), base64.b64decode(data))


def _shown(ran: Ran) -> str:
    return (ran.stderr.strip() or ran.stdout.strip())[-SHOWN_CHARS:]
