"""The sessions of a run: how a lost executor or a signal ends one, and what the next one begins
with."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from llamarl.controller.control import RunControl, listening
from llamarl.controller.controller import Controller
from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import Wiring
from llamarl.core import files
from llamarl.core.config import Config
from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import Trainer
from llamarl.metrics.console import Progress, end_display
from llamarl.metrics.shares import RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog, flatten, open_trackers
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.starting_point import starting_point

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 - what happened
    """Raised when a signal ended the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Cancels the current task on SIGINT or SIGTERM; a context manager for the main thread."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._received: signal.Signals | None = None
        self._is_ending = False
        self._grace_s = 0.0
        self._end_after_step: Callable[[Callable[[], None]], None] | None = None
        self.ended_by: signal.Signals | None = None

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def grant(self, end_after_step: Callable[[Callable[[], None]], None], grace_s: float) -> None:
        """Let SIGTERM end the job after the step under way, `grace_s` later at the latest.

        `end_after_step` is called with the function that ends the job.
        """
        self._end_after_step, self._grace_s = end_after_step, grace_s

    def hold(self) -> None:
        """Let no signal cancel the job any more, since its end has begun."""
        self._is_ending = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == self._received == signal.SIGINT:
            end_display()
            os._exit(128 + number)  # the executors see that this process is gone
        if self._received is None or number == signal.SIGINT:
            self._received = signal.Signals(number)
            self._loop.call_soon_threadsafe(self._answer, self._received)

    def _answer(self, number: signal.Signals) -> None:
        if self._is_ending:
            return
        if number is signal.SIGINT:
            log.warning("interrupted; Ctrl-C again ends at once and saves nothing")
        elif self._end_after_step is not None:
            log.warning("terminated; the step under way may take %g s to end", self._grace_s)
            self._end_after_step(lambda: self._end(number))
            self._loop.call_later(self._grace_s, self._end, number)
            return
        self._end(number)

    def _end(self, number: signal.Signals) -> None:
        if not self._is_ending:
            self.ended_by, self._is_ending = number, True
            self._task.cancel()


GC_THRESHOLDS = 1_000_000, 20, 20  # rare collections, as tens of thousands of rollouts are open

Start = tuple[dict[str, Any], str | None]
"""The state that a session begins with, and the checkpoint that holds it, if any."""


class SessionLost(Exception):  # noqa: N818 - an outcome more than an error
    """Raised when executors were lost at `version` and the run goes on without them from a
    checkpoint."""

    def __init__(self, losses: Sequence[ExecutorLost], version: int) -> None:
        super().__init__(", ".join(f"{loss.executor}" for loss in losses))
        self.losses, self.version = losses, version


@dataclass
class Sessions:
    """Runs the sessions of one run: each lasts from a checkpoint to the run's end, or until an
    executor is lost without which the loop cannot go on."""

    config: Config
    inputs: Inputs
    run_dir: str
    progress: Progress
    spans: Spans
    recent_spans: RecentSpans
    supervisor: Supervisor
    signals: Signals
    deadline_s: float = math.inf
    """A time of the event loop's clock: the step during which it comes is the last one."""

    async def run(self, first: Start) -> Controller:
        """Drive the executors, and those that take their place, from `first` to the run's end."""
        start, is_further = first, False
        while True:
            try:
                if is_further:
                    await self._start_again(start)
                return await self._run(start)
            except SessionLost as lost:
                is_further = True
                self.progress.show_phase("starting again all but the generators")
                await self.supervisor.end_session()
                start = await next_start(self.config, self.inputs, self.run_dir, first)
                log.warning(describe(lost, start))

    async def _start_again(self, start: Start) -> None:
        """Start the executors of a further session; SessionLost if one was lost meanwhile."""
        with self.progress.startup() as report:
            loss = await self.supervisor.start_again(report)
        if loss is not None:
            if self._may_start_again([loss]):
                raise SessionLost([loss], start[0].get("version", 0)) from loss
            raise loss

    def _may_start_again(self, losses: Sequence[ExecutorLost]) -> bool:
        return self.signals.ended_by is None and self.supervisor.may_start_again(losses)

    async def _run(self, start: Start) -> Controller:
        """Run one session; SessionLost if executors were lost, and others may take their place."""
        state, _ = start
        first_step = state["version"] + 1 if state else 0
        run_dir, config = Path(self.run_dir), self.config
        trackers = open_trackers(config.metrics.trackers, run_dir, flatten(config), first_step)
        async with AsyncExitStack() as exits:
            exits.callback((metrics := MetricsLog(run_dir, trackers)).close)
            try:
                controller = await self._prepare(start, metrics, exits)
            except Exception as error:
                is_loss = not isinstance(error, ValueError)
                losses = await self.supervisor.find_losses(of_all=True) if is_loss else []
                if self._may_start_again(losses):
                    raise SessionLost(losses, state.get("version", 0)) from error
                raise
            self.signals.grant(controller.saver.end_after_step, config.checkpoint.grace_s)
            await self._until_end(controller)
        return controller

    async def _prepare(
        self, start: Start, metrics: MetricsLog, exits: AsyncExitStack
    ) -> Controller:
        """Bring the executors to `start` and connect them; `exits` undo that."""
        (state, folder), supervisor = start, self.supervisor
        executors = supervisor.executors
        assert executors.trainer is not None
        if folder is not None:
            self.progress.show_phase("reading the checkpoint")
            await executors.trainer.one(Trainer).restore(folder)
        wiring = Wiring(self.config, self.inputs, executors, self.run_dir, self.spans, state)
        run_logger = wiring.make_run_logger(metrics, self.progress, self.recent_spans)
        controller = wiring.build_controller(supervisor, run_logger, deadline_s=self.deadline_s)
        for each in (controller.engines, supervisor):  # closed in reverse
            exits.push_async_callback(each.close)
        if not self.config.algorithm.is_sft:
            self.progress.show_phase("connecting trainer and generators")
        await controller.engines.connect()
        gc.set_threshold(*GC_THRESHOLDS)
        run_logger.start(state.get("version", 0))
        return controller

    async def _until_end(self, controller: Controller) -> None:
        """Run the loop; if it ends early, save what was learnt."""
        supervisor, signals = self.supervisor, self.signals
        try:
            control = RunControl(self.config, controller, supervisor)
            async with listening(self.run_dir, control.answer):
                await supervisor.guard(controller.run())
        except BaseException as error:
            is_stopped = signals.ended_by is not None or isinstance(error, asyncio.CancelledError)
            losses = [] if is_stopped else await supervisor.find_losses()
            if self._may_start_again(losses):
                if not any(loss.executor.startswith(("trainer", "storage")) for loss in losses):
                    await asyncio.create_task(controller.saver.rescue())
                raise SessionLost(losses, controller.saver.version) from error
            signals.hold()
            if controller.saver.version > 0:
                self.progress.show_phase("saving what was learnt")
            # In a task of its own: else exceptions in it would name this one as their context.
            await asyncio.create_task(controller.saver.rescue())
            raise


async def next_start(config: Config, inputs: Inputs, run_dir: str, first: Start) -> Start:
    """Cut the run's files to its newest checkpoint, and return the start of the next session: that
    checkpoint, or `first`, where the run began."""
    again = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    start = await asyncio.to_thread(starting_point, again, inputs, run_dir)
    state, folder = start
    files.cut(run_dir, state.get("positions", {}))
    return first if folder is None else start


def describe(lost: SessionLost, start: Start) -> str:
    """Return one line that says what was lost, where the run goes on, and how many steps are
    repeated."""
    state, folder = start
    version = state.get("version", 0)
    place = "its beginning" if folder is None else Path(folder).name
    names = ", ".join(dict.fromkeys(loss.executor for loss in lost.losses))
    num_steps = lost.version - version
    steps = {0: "no step is", 1: "1 step is"}.get(num_steps, f"{num_steps} steps are")
    reasons = "; ".join(loss.reason.splitlines()[0] for loss in lost.losses if loss.reason)
    return f"lost {names} ({reasons}): the run goes on from {place}, {steps} repeated"
