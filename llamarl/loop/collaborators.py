"""What the controller works with besides the loop's own parts: the executors, what the
recipe decides, and who follows the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamarl.experience.graph import Stage
from llamarl.protocols import Generator, Processor, Storage, Trainer
from llamarl.types import Batch, Evaluation, Group, Request, StepStats, Verdict


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The executors by role, and by the stage between generate and settle that each runs."""

    generator: Generator
    stages: Mapping[Stage, Processor]
    trainer: Trainer
    storage: Storage


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Pure functions of metadata, with the recipe's config bound to them.

    `make_requests` takes a group, and `sampling` in place of the recipe's. `make_batch` takes
    groups, the trainer's version and the oldest version it may learn from.
    """

    make_requests: Callable[..., list[Request]]
    filter_group: Callable[[Group], Verdict]
    make_batch: Callable[[Sequence[Group], int, int], Batch]


class RunObserver(Protocol):
    """Follows a run, which goes the same way whatever the observer does."""

    def log_group(self, group: Group, verdict: Verdict) -> None:
        """`group` is scored, and will be trained on or not."""

    def log_publish(self, seconds: float) -> None:
        """A version is active on the generators, `seconds` after its publish began."""

    def log_evaluation(self, evaluated: Evaluation | None) -> None:
        """A held-out evaluation is finished; None if generators were lost with it."""

    async def log_step(
        self,
        stats: StepStats,
        groups: Sequence[Group],
        oldest_version: int,
        found: dict[str, float],
    ) -> None:
        """The optimizer step that made `stats.version` from `groups` has ended. Tokens older than
        `oldest_version` had no weight in it. `found`: of the log-prob check and of its parts."""
