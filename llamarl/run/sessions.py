"""The sessions of a run: what a lost executor ends, and what the next session begins with.

Owns: one session after the other, from started executors to the loop's end, and where each begins.
Does not own: which losses a run survives, how often, or what is started again (`fleet.py`); the
first start, or the run's end (`jobs.py`). Invariant: a session begins at a committed checkpoint, or
where the run began, with files that end there; so each rollout is in the archive once, and each
step in the metrics.
"""

import asyncio
import gc
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarl.checkpoints import positions
from llamarl.config import Config
from llamarl.errors import ExecutorLost
from llamarl.loop.controller import Controller
from llamarl.loop.imitation import Imitation
from llamarl.metrics.console import Progress
from llamarl.metrics.recent_spans import RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog, flatten, open_trackers
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.starting_point import starting_point
from llamarl.run.control import RunControl, listening
from llamarl.run.fleet import Fleet
from llamarl.run.imitation_wiring import build_imitation
from llamarl.run.signals import Signals
from llamarl.run.wiring import Wiring

log = logging.getLogger(__name__)

GC_THRESHOLDS = 1_000_000, 20, 20  # rare collections, as tens of thousands of rollouts are open

Start = tuple[dict[str, Any], str | None]
"""The state that a session begins with, and the checkpoint that holds it, if any."""


Loop = Controller | Imitation
"""What drives the executors of a session."""


class SessionLost(Exception):  # noqa: N818 - an outcome more than an error
    """Executors were lost at `version`, and the run goes on without them from a checkpoint."""

    def __init__(self, losses: Sequence[ExecutorLost], version: int) -> None:
        super().__init__(", ".join(f"{loss.executor}" for loss in losses))
        self.losses, self.version = losses, version


@dataclass
class Sessions:
    """The sessions of one run: each lasts from a checkpoint to the run's end, or until an executor
    is lost without which the loop cannot go on."""

    config: Config
    inputs: Inputs
    run_dir: str
    progress: Progress
    spans: Spans
    recent_spans: RecentSpans
    deadline_s: float = math.inf
    """Of the event loop: the step in which it comes is the last one."""

    async def run(self, fleet: Fleet, signals: Signals, first: Start) -> Loop:
        """Drive the executors of the fleet, and those that take their place, from `first` to the
        run's end."""
        start, has_begun = first, True
        while True:
            try:
                if not has_begun:
                    await self._start_again(fleet, signals, start)
                has_begun = True
                return await self._run(fleet, signals, start)
            except SessionLost as lost:
                has_begun = False
                self.progress.show_phase("starting again all but the generators")
                await fleet.end_session()
                start = await next_start(self.config, self.inputs, self.run_dir, first)
                log.warning(describe(lost, start))

    async def _start_again(self, fleet: Fleet, signals: Signals, start: Start) -> None:
        """Start the executors of a further session; SessionLost if one was lost meanwhile."""
        with self.progress.startup() as report:
            loss = await fleet.start_again(report)
        if loss is not None:
            if signals.ended_by is None and fleet.may_start_again([loss]):
                raise SessionLost([loss], start[0].get("version", 0)) from loss
            raise loss

    async def _run(self, fleet: Fleet, signals: Signals, start: Start) -> Loop:
        """One session; SessionLost if executors were lost, and others may take their place."""
        state, _ = start
        first_step = state["version"] + 1 if state else 0
        run_dir, config = Path(self.run_dir), self.config
        trackers = open_trackers(config.metrics.trackers, run_dir, flatten(config), first_step)
        async with AsyncExitStack() as exits:
            exits.callback((metrics := MetricsLog(run_dir, trackers)).close)
            try:
                controller = await self._prepare(fleet, start, metrics, exits)
            except Exception as error:
                losses = (
                    [] if isinstance(error, ValueError) else await fleet.find_losses(of_all=True)
                )
                if signals.ended_by is None and fleet.may_start_again(losses):
                    raise SessionLost(losses, state.get("version", 0)) from error
                raise
            signals.grant(controller.saver.end_after_step, config.checkpoint.grace_s)
            await self._until_end(controller, fleet, signals)
        return controller

    async def _prepare(
        self, fleet: Fleet, start: Start, metrics: MetricsLog, exits: AsyncExitStack
    ) -> Loop:
        """Bring the executors to `start` and connect them; `exits` undo that."""
        state, folder = start
        executors = fleet.executors
        assert executors.trainer is not None
        if folder is not None:
            self.progress.show_phase("reading the checkpoint")
            await executors.trainer.call_one.restore(folder)
        wiring = Wiring(self.config, self.inputs, executors, self.run_dir, self.spans, state)
        run_logger = wiring.make_run_logger(metrics, self.progress, self.recent_spans)
        is_imitation = self.config.algorithm.imitates
        build = build_imitation if is_imitation else Wiring.build_controller
        controller: Loop = build(wiring, fleet, run_logger, deadline_s=self.deadline_s)
        for each in (controller.engines, fleet):  # closed in reverse
            exits.push_async_callback(each.close)
        if not is_imitation:
            self.progress.show_phase("connecting trainer and generators")
            await controller.engines.connect()
        gc.set_threshold(*GC_THRESHOLDS)
        run_logger.start(state.get("version", 0))
        return controller

    async def _until_end(self, controller: Loop, fleet: Fleet, signals: Signals) -> None:
        """Run the loop; whatever ends it ahead of time, what was learnt is saved."""
        try:
            control = RunControl(self.config, controller, fleet)
            async with listening(self.run_dir, control.answer):
                await fleet.guard(controller.run())
        except BaseException as error:
            is_stopped = signals.ended_by is not None or isinstance(error, asyncio.CancelledError)
            losses = [] if is_stopped else await fleet.find_losses()
            if signals.ended_by is None and fleet.may_start_again(losses):
                if not any(loss.executor.startswith(("trainer", "storage")) for loss in losses):
                    await asyncio.create_task(controller.saver.rescue())
                raise SessionLost(losses, controller.saver.version) from error
            signals.hold()
            self.progress.show_phase("saving what was learnt")
            # As a task of its own: else exceptions in it would name this one as their context.
            await asyncio.create_task(controller.saver.rescue())
            raise


async def next_start(config: Config, inputs: Inputs, run_dir: str, first: Start) -> Start:
    """Cut the files to the newest checkpoint of the run; `first` is where the run began."""
    again = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    start = await asyncio.to_thread(starting_point, again, inputs, run_dir)
    state, folder = start
    positions.cut(run_dir, state.get("positions", {}))
    return first if folder is None else start


def describe(lost: SessionLost, start: Start) -> str:
    """One line: what was lost, where the run goes on, and what that costs."""
    state, folder = start
    version = state.get("version", 0)
    place = "its beginning" if folder is None else Path(folder).name
    names = ", ".join(dict.fromkeys(loss.executor for loss in lost.losses))
    num_steps = lost.version - version
    steps = {0: "no step is", 1: "1 step is"}.get(num_steps, f"{num_steps} steps are")
    reasons = "; ".join(loss.reason.splitlines()[0] for loss in lost.losses if loss.reason)
    return f"lost {names} ({reasons}): the run goes on from {place}, {steps} repeated"
