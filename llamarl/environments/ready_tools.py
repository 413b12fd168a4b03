"""Tools that a recipe selects by name, beside those of its own task.py.

Owns: these tools. Does not own: how a program is contained (`contained.py`). Invariant: each is a
function with types and a docstring, as a recipe's own are.
"""

from collections.abc import Callable
from typing import Any

from llamarl.environments.contained import ProgramLimits, run_in_turn

SHOWN_CHARS = 4000  # of what a program wrote; the middle of more is left out


def make_python(limits: ProgramLimits) -> Callable[..., Any]:
    """The tool `python`."""

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program; it has no network and no files but a scratch folder
        """
        ran = await run_in_turn(code, "", limits)
        parts = [ran.stdout, ran.stderr]
        if ran.ended_for:
            parts.append(f"(ended: too much {ran.ended_for})")
        elif not ran.is_good and not ran.stderr:
            parts.append(f"(ended with {ran.exit_code})")
        return shorten("\n".join(part.rstrip() for part in parts if part.strip()))

    return python


READY: dict[str, Callable[[ProgramLimits], Callable[..., Any]]] = {"python": make_python}
"""By their names in `environment.tools`."""


def shorten(text: str) -> str:
    """At most SHOWN_CHARS of it, from both ends."""
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
