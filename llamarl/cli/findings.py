"""The findings of `llamarl check`, line by line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from llamarl.core.errors import unwrap


@dataclass
class Findings:
    """Shows each check on the console when it has ended; `failed` names those that did not pass."""

    console: Console
    failed: list[str] = field(default_factory=list)

    def skip(self, name: str, why: str) -> None:
        """Show that the check cannot be run here."""
        self._say("skipped", name, why)

    def ask(self, name: str, check: Callable[[], str]) -> None:
        """Run `check` and show whether it passes."""
        with self._asked(name) as words:
            words.append(check())

    async def await_for(
        self, name: str, limit_s: float, remedy: str, check: Awaitable[str]
    ) -> bool:
        """Return whether `check` passes within `limit_s`; `remedy` says what to do if it does not
        end."""
        with self._asked(name) as words:
            try:
                async with asyncio.timeout(limit_s):
                    words.append(await check)
            except TimeoutError as error:
                raise RuntimeError(f"did not end within {limit_s:g} s: {remedy}") from error
        return name not in self.failed

    @contextmanager
    def _asked(self, name: str) -> Iterator[list[str]]:
        """Show the figure that the block appends, or its error, which says what to change."""
        words: list[str] = []
        start_s, answer = time.monotonic(), "ok"
        try:
            yield words
        except Exception as error:  # noqa: BLE001 - whatever went wrong is what was asked
            answer, words = "FAILED", [" ".join(str(unwrap(error)).split()) or type(error).__name__]
            self.failed.append(name)
        took_s = time.monotonic() - start_s
        self._say(answer, name, f"{words[0]} ({took_s:.1f} s)" if took_s >= 0.1 else words[0])

    def _say(self, answer: str, name: str, words: str) -> None:
        line = f"{answer:<8}{name:<24}{words}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
