"""What `llamarl check` finds out, line by line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from llamarl.core.errors import unwrap

NAME_WIDTH = 24
SHOWN = {True: "ok", False: "FAILED", None: "skipped"}


@dataclass(frozen=True, slots=True)
class Finding:
    """`is_passed` None: it was not asked; `words` are the figure, or what to change."""

    name: str
    is_passed: bool | None
    words: str
    duration_s: float = 0.0

    def line(self) -> str:
        took = f" ({self.duration_s:.1f} s)" if self.duration_s >= 0.1 else ""
        return f"{SHOWN[self.is_passed]:<8}{self.name:<{NAME_WIDTH}}{self.words}{took}"


@dataclass
class Findings:
    """All so far; each is shown on the console when it is found."""

    console: Console
    found: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The names of the checks that did not pass."""
        return [each.name for each in self.found if each.is_passed is False]

    def add(self, finding: Finding) -> None:
        self.found.append(finding)
        self.console.print(finding.line(), markup=False, highlight=False, soft_wrap=True)

    def skip(self, name: str, why: str) -> None:
        """The check cannot be asked here."""
        self.add(Finding(name, None, why))

    def ask(self, name: str, check: Callable[[], str]) -> bool:
        """Whether `check` passes."""
        with self._asked(name) as words:
            words.append(check())
        return name not in self.failed

    async def await_for(
        self, name: str, limit_s: float, remedy: str, check: Awaitable[str]
    ) -> bool:
        """Whether `check` passes within `limit_s`; `remedy` says what to do if it does not end."""
        with self._asked(name) as words:
            try:
                async with asyncio.timeout(limit_s):
                    words.append(await check)
            except TimeoutError as error:
                raise RuntimeError(f"did not end within {limit_s:g} s: {remedy}") from error
        return name not in self.failed

    @contextmanager
    def _asked(self, name: str) -> Iterator[list[str]]:
        """The block appends its figure; an error is the answer."""
        words: list[str] = []
        start_s = time.monotonic()
        try:
            yield words
        except Exception as error:  # noqa: BLE001 - whatever went wrong is what was asked
            text = " ".join(str(unwrap(error)).split()) or type(error).__name__
            self.add(Finding(name, False, text, time.monotonic() - start_s))
        else:
            self.add(Finding(name, True, words[0], time.monotonic() - start_s))
