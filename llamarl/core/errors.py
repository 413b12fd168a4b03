"""Exceptions that several packages raise or catch, and warnings that a run may repeat with every
step."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class UserCodeError(RuntimeError):
    """Code of the recipe failed; the text holds its traceback, without frames of llamarl."""


class RemoteError(RuntimeError):
    """An executor raised something that cannot travel; the message is its text."""


class ExecutorLost(RuntimeError):  # noqa: N818 - what happened, as in the log line
    """A process of an executor died or fell silent.

    `rank` is None where only the executor is known, as in a call from one executor to another.
    """

    def __init__(self, executor: str, rank: int | None = None, reason: str = "") -> None:
        super().__init__(executor, rank, reason)
        self.executor = executor
        self.rank = rank
        self.reason = reason

    @property
    def has_host(self) -> bool:
        """Whether the host is still there; if it is lost, nothing can be started there."""
        return not self.reason.startswith("host ")

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        reason = f": {self.reason}" if self.reason else ""
        return f"lost executor {self.executor}{rank}{reason}"


class NoGenerator(RuntimeError):  # noqa: N818 - what happened, as in the log line
    """Every generator replica is lost, so no rollout can be written."""


class Diverged(RuntimeError):  # noqa: N818 - names what was found
    """A loss or a gradient is not a finite number."""


class FingerprintMismatch(RuntimeError):  # noqa: N818 - names what was found
    """A generator's memory does not hold what was written; ends the run."""


class StaleVersion(RuntimeError):  # noqa: N818 - names what was found
    """The source no longer holds the version it should write; the target takes a newer one."""


class NotStored(KeyError):  # noqa: N818 - names what was found
    """A row was never written, or is retired."""


class TargetLost(RuntimeError):  # noqa: N818 - an outcome more than an error
    """A source cannot reach a replica's memory; only that replica is given up."""


class ReplicaLost(Exception):  # noqa: N818 - an outcome more than an error
    """A replica raised (the cause) or did not answer in time; it is connected no more."""


class TaskError(UserCodeError):
    """A function of the recipe's task.py failed; the text is one line that names it."""


def unwrap(error: BaseException) -> BaseException:
    """Return the exception that ended the run, out of the groups that wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def all_at_once(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run these coroutines at once; return their results. If one fails, the others are cancelled
    and end before its error is raised."""
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        failed = unwrap(errors)
    if failed is not None:  # here, so that the group is not its context
        raise failed
    return [task.result() for task in begun]


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks; return once they have ended, however they did."""
    ending = [*tasks]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def mark_seen(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from warning of this future's exception, which may have no waiter left."""
    if not future.cancelled():
        future.exception()


class RepeatedWarnings:
    """Writes a warning the 1st, 10th, 100th ... time that it comes, with the count from the 10th
    on."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[Hashable] = Counter()

    def warn(self, words: str, *args: object, about: Hashable = None) -> None:
        """Warn of `words` % `args`. Equal words `about` the same thing count as one warning,
        whatever the arguments are."""
        self._counts[words, about] += 1
        count = self._counts[words, about]
        if count == 10 ** (len(str(count)) - 1):
            times = f" ({count:,} times so far)" if count > 1 else ""
            self._log.warning(words + times, *args)
