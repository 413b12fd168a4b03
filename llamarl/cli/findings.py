"""What `llamarl check` finds out, line by line, and what a recipe's processes have in memory
now."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import needs_gpu
from llamarl.core.device.names import TOOL, cards_here
from llamarl.core.errors import unwrap
from llamarl.model.architecture import Architecture
from llamarl.planner.memory.ranks import HOST, forecast_memory
from llamarl.scoring.user_code.supervisor import descendants

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


GIB = 2**30
OWN = ("Pss_Anon:", "Pss_Shmem:")  # of smaps_rollup, in KiB; memory of files is left out


def free_bytes() -> list[int]:
    """Of each card."""
    return [card.free_bytes for card in cards_here()]


def compare_with_plan(config: Config, architecture: Architecture, free_before: list[int]) -> str:
    """In words; ValueError if more is in use than the plan counts with."""
    ranks = forecast_memory(config, architecture).ranks
    if needs_gpu(config):
        taken = [before - now for before, now in zip(free_before, free_bytes(), strict=True)]
        if not taken:
            return f"{TOOL} does not say"
        used_bytes, where = max(taken), "on the fullest card"
        planned_bytes = max(rank.total_bytes for rank in ranks if rank.executor != HOST)
    else:
        found = descendants(os.getpid()) or {os.getpid()}
        used_bytes, where = sum(map(_own_bytes, found)), f"in {len(found)} processes"
        planned_bytes = next(rank.total_bytes for rank in ranks if rank.executor == HOST)
    words = f"{used_bytes / GIB:.2f} GiB {where}; the plan counts with {planned_bytes / GIB:.2f}"
    if used_bytes > planned_bytes:
        raise ValueError(
            f"{words}: the recipe may need more than llamarl plan says; leave room for it "
            "(generator.max_num_seqs, trainer.tokens_per_micro_batch)"
        )
    return words


def _own_bytes(process: int) -> int:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(OWN))
    return 0
