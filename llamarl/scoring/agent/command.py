"""The environment whose episodes a command plays, in a sandbox of its own, as the recipe says: its
reward is that of a check, which runs in the same folder afterwards."""

from __future__ import annotations

import base64
import json
import math
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
from llamarl.scoring.sandbox.containers import Ran
from llamarl.scoring.sandbox.sandboxes import MIB, LocalSandbox, Sandbox, SandboxLimits

ROW_FILES = "files"  # of a prompt's row: texts by path
MAX_FILES_BYTES = 16 * MIB  # that are carried to each host
SHOWN_CHARS = 2000
TRACEBACK = "Traceback (most recent call last):"
Files = Mapping[str, str]
"""Files by their paths, in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """What plays and checks an episode: commands, in which {field} is that of the prompt's row, and
    the `files` that are in the folder before each. A check may take `timeout_s`."""

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
    """Raise ValueError if one of the commands names a field that this prompt's row lacks."""
    words_of(config.command, prompt.fields, "environment.command")
    words_of(config.check_command, prompt.fields, "environment.check_command")


def words_of(command: Sequence[str], row: Mapping[str, Any], key: str) -> list[str]:
    """Return the command with the row's fields, and this Python, in their places. Raises ValueError
    as `filled` does."""
    known = {**row, "python": sys.executable}
    return [filled(word, known, key) for word in command]


class CommandEnvironment(AgentEnvironment):
    """An environment that a command plays."""

    def __init__(self, spec: AgentCommand) -> None:
        self._spec = spec

    async def play(self, url: str, **row: Any) -> float:
        """Run the command, then the check, and return its reward: the number in the last line that
        it prints, else 1 if it exits with 0 and 0 if it exits with 1. Raises RuntimeError for any
        other end, which is a failure and no reward."""
        spec = self._spec
        limits = SandboxLimits(memory_bytes=spec.memory_bytes, disk_bytes=spec.disk_bytes)
        sandbox = LocalSandbox(url, limits, spec.readable, spec.contained)
        try:
            await sandbox.start()
            await _put(sandbox, spec.files)
            for path, text in (row.get(ROW_FILES) or {}).items():
                await sandbox.write(path, str(text).encode())
            command = words_of(spec.command, row, "environment.command")
            ran = await sandbox.run(command, variables(url), math.inf)
            if ran.ended_for:
                raise RuntimeError(f"the agent must keep its limits, got too much {ran.ended_for}")
            if ran.exit_code == 127:  # the shell's and ours: no such program
                raise RuntimeError(f"the agent must start, got {_shown(ran)}")
            failure = f"exit code {ran.exit_code}: {_shown(ran)}"
            self.program_failure = failure if ran.exit_code else ""
            await _put(sandbox, spec.check_files)
            row_text = json.dumps(row, default=str)
            check = words_of(spec.check, row, "environment.check_command")
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


async def _put(sandbox: Sandbox, files: Files) -> None:
    for path, data in files.items():
        await sandbox.write(path, base64.b64decode(data))


def _shown(ran: Ran) -> str:
    return (ran.stderr.strip() or ran.stdout.strip())[-SHOWN_CHARS:]
