"""The sessions of a run: what a lost executor ends, and what the next session begins with.

Owns: which losses a run survives, how often, and where it goes on. Does not own: a session itself
(`jobs.py`). Invariant: a session begins at a committed checkpoint, or where the run began, with
records that end there; so each rollout is in the archive once, and each step in the metrics.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.checkpoints import records
from llamarl.cluster import ExecutorGroup, GroupLost
from llamarl.config import Config
from llamarl.executor_groups import Executors
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.starting_point import starting_point

log = logging.getLogger(__name__)

WINDOW_S = 3600.0  # over which restarts are counted
REASON_LIMIT_S = 3.0  # for a loss to be noticed after the error that it causes

Start = tuple[dict[str, Any], str | None]
"""The state that a session begins with, and the checkpoint that holds it, if any."""


class SessionLost(Exception):  # noqa: N818 - an outcome more than an error
    """Executors were lost, and the run goes on without them from an earlier version."""

    def __init__(self, losses: list[GroupLost], version: int) -> None:
        super().__init__(", ".join(f"{loss.group}" for loss in losses))
        self.losses, self.version = losses, version


class Restarts:
    """Counts restarts: `limit` within an hour."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun_s: deque[float] = deque()

    def take(self) -> bool:
        """Whether one more may begin now; a warning says why not."""
        now_s = time.monotonic()
        while self._begun_s and self._begun_s[0] < now_s - WINDOW_S:
            self._begun_s.popleft()
        if len(self._begun_s) < self._limit:
            self._begun_s.append(now_s)
            return True
        if self._limit:
            words = "executors were lost more often than cluster.max_restarts=%d times in an hour"
            log.warning(words, self._limit)
        return False


async def find_losses(executors: Executors) -> list[GroupLost]:
    """The vital executors that are lost; what a loss causes may come before it is noticed."""
    watches = [asyncio.ensure_future(group.watch()) for group in executors.vital]
    done, pending = await asyncio.wait(
        watches, timeout=REASON_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
    )
    for watch in pending:
        watch.cancel()
    errors = [watch.exception() for watch in done]
    return [error for error in errors if isinstance(error, GroupLost)]


async def next_start(
    config: Config, inputs: Inputs, run_dir: str, executors: Executors, first: Start
) -> tuple[Start, dict[int, ExecutorGroup]]:
    """End all executors but the generators, which are returned, and cut the records to the newest
    checkpoint of the run; `first` is where the run began."""
    asking = (collector.call_one.close() for collector in executors.collectors)
    await asyncio.gather(*asking, return_exceptions=True)  # one that is lost asks nothing
    groups = executors.generators.items()
    is_kept = await asyncio.gather(*(_reset(index, group, config) for index, group in groups))
    kept = {index: group for (index, group), good in zip(groups, is_kept, strict=True) if good}
    await asyncio.gather(*(group.stop() for group in executors.beside_generators))
    again = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    start = await asyncio.to_thread(starting_point, again, inputs, run_dir)
    state, folder = start
    records.cut(run_dir, state.get("records", {}))
    if folder is None:
        start = first
    return start, kept


async def _reset(replica: int, group: ExecutorGroup, config: Config) -> bool:
    """Let a generator forget the session, before those that it asks are stopped: a message to a
    process that is gone would end it. One that cannot, or is one too many, is stopped; False."""
    if replica < config.generator.num_replicas:
        try:
            await group.call_one.reset()
            return True
        except Exception as error:  # noqa: BLE001 - whatever it is, a new one does without
            log.warning("%s is started again: %s", group.name, error)
    await group.stop()
    return False


def describe(lost: SessionLost, start: Start) -> str:
    """One line: what was lost, where the run goes on, and what that costs."""
    state, folder = start
    version = state.get("version", 0)
    place = "its beginning" if folder is None else Path(folder).name
    names = ", ".join(dict.fromkeys(loss.group for loss in lost.losses))
    num_steps = lost.version - version
    steps = {0: "no step is", 1: "1 step is"}.get(num_steps, f"{num_steps} steps are")
    reasons = "; ".join(loss.reason.splitlines()[0] for loss in lost.losses if loss.reason)
    return f"lost {names} ({reasons}): the run goes on from {place}, {steps} repeated"
