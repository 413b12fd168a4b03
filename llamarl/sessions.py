"""The sessions of a run: what a lost executor ends, and what the next session begins with.

Owns: one session after the other, from started executors to the loop's end; which losses a run
survives, how often, and where it goes on. Does not own: the first start, or the run's end
(`jobs.py`); what is started again alone (`loop/`). Invariant: a session begins at a committed
checkpoint, or where the run began, with files that end there; so each rollout is in the archive
once, and each step in the metrics.
"""

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from llamarl.build import build_controller
from llamarl.checkpoints import positions
from llamarl.cluster import Cluster, ExecutorGroup, GroupLost
from llamarl.config import Config
from llamarl.config.rank_assignment import place_generator
from llamarl.control import RunControl, listening
from llamarl.data.tokenizer import TextDecoder
from llamarl.executor_groups import Executors, KeptGenerators, name_parts, spawn_executors
from llamarl.loop.controller import Controller
from llamarl.loop.signals import Signals
from llamarl.metrics.console import Progress
from llamarl.metrics.recent_spans import RecentSpans
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog, flatten, open_trackers
from llamarl.protocols import Storage
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.starting_point import starting_point
from llamarl.types import RESPONSE_IDS

log = logging.getLogger(__name__)

GC_THRESHOLDS = 50_000, 20, 20  # rare collections, as tens of thousands of rollouts are open
WINDOW_S = 3600.0  # over which restarts are counted
REASON_LIMIT_S = 3.0  # for a loss to be noticed after the error that it causes

Start = tuple[dict[str, Any], str | None]
"""The state that a session begins with, and the checkpoint that holds it, if any."""


class SessionLost(Exception):  # noqa: N818 - an outcome more than an error
    """Executors were lost at `version`, and the run goes on without them from a checkpoint."""

    def __init__(self, losses: Sequence[GroupLost], version: int) -> None:
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


@dataclass(kw_only=True)
class Sessions:
    """The sessions of one run: each lasts from a checkpoint to the run's end, or until an executor
    is lost without which the loop cannot go on."""

    config: Config
    inputs: Inputs
    run_dir: str
    progress: Progress
    spans: Spans
    recent_spans: RecentSpans
    restarts: Restarts = field(init=False)
    _replicas: list[int] = field(default_factory=list)  # those that the last session had

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.config.cluster.max_restarts)

    async def run(
        self, cluster: Cluster, begun: Executors, signals: Signals, first: Start
    ) -> Controller:
        """Drive the executors that have `begun`, and those that take their place, from `first` to
        the run's end."""
        executors: Executors | None = begun
        start, kept = first, KeptGenerators({}, {})
        while True:
            try:
                executors = executors or await self._start_again(cluster, kept, signals, start)
                return await self._run(executors, signals, start)
            except SessionLost as lost:
                self.progress.show_phase("starting again all but the generators")
                if executors is None:  # what was started for a further session has been stopped
                    kept = await reset_generators(kept)
                else:
                    kept = await keep_generators(self.config, executors, self._replicas)
                executors = None
                start = await next_start(self.config, self.inputs, self.run_dir, first)
                log.warning(describe(lost, start))

    async def _start_again(
        self, cluster: Cluster, kept: KeptGenerators, signals: Signals, start: Start
    ) -> Executors:
        """The executors of a further session; SessionLost if one was lost meanwhile."""
        options: dict[str, Any] = {"parts": name_parts(self.inputs.graph), "kept": kept}
        try:
            with self.progress.startup() as report:
                return await spawn_executors(
                    self.config, self.inputs, cluster, self.run_dir, report=report, **options
                )
        except GroupLost as loss:
            if self._may_go_on([loss], signals):
                raise SessionLost([loss], start[0].get("version", 0)) from loss
            raise

    async def _run(self, executors: Executors, signals: Signals, start: Start) -> Controller:
        """One session; SessionLost if executors were lost, and others may take their place."""
        state, _ = start
        first_step = state["version"] + 1 if state else 0
        run_dir, config = Path(self.run_dir), self.config
        trackers = open_trackers(config.metrics.trackers, run_dir, flatten(config), first_step)
        self._replicas = sorted(executors.generators)
        async with AsyncExitStack() as exits:
            exits.callback((metrics := MetricsLog(run_dir, trackers)).close)
            try:
                controller = await self._prepare(executors, start, metrics, exits)
            except Exception as error:
                groups = [*executors.beside_generators, *executors.generators.values()]
                losses = [] if isinstance(error, ValueError) else await find_losses(groups)
                if self._may_go_on(losses, signals):
                    raise SessionLost(losses, state.get("version", 0)) from error
                raise
            signals.grant(controller.saver.end_after_step, config.checkpoint.grace_s)
            await self._until_end(controller, executors, signals)
        return controller

    async def _prepare(
        self, executors: Executors, start: Start, metrics: MetricsLog, exits: AsyncExitStack
    ) -> Controller:
        """Bring the executors to `start` and connect them; `exits` undo that."""
        state, folder = start
        assert executors.trainer is not None
        if folder is not None:
            self.progress.show_phase("reading the checkpoint")
            await executors.trainer.call_one.restore(folder)
        run_logger = self._run_logger(metrics, executors)
        controller, publisher, dispatch = build_controller(
            self.config,
            self.inputs,
            executors,
            run_dir=self.run_dir,
            state=state,
            run_logger=run_logger,
            spans=self.spans,
            may_restart=self.restarts.take,
        )
        for each in (publisher, dispatch, controller.replica_set):  # closed in reverse
            exits.push_async_callback(each.close)
        self.progress.show_phase("connecting trainer and generators")
        await publisher.connect()
        gc.set_threshold(*GC_THRESHOLDS)
        run_logger.start(state.get("version", 0))
        return controller

    def _run_logger(self, metrics: MetricsLog, executors: Executors) -> RunLogger:
        return RunLogger(
            log=metrics,
            progress=self.progress,
            spans=self.spans,
            recent_spans=self.recent_spans,
            read_completions=partial(_read_completions, executors.storage, self.inputs.tokenizer),
            num_samples=self.config.metrics.sample_rollouts,
            answer_field=self.config.reward.answer_field,
            prompt_field=self.config.data.prompt_field,
        )

    async def _until_end(
        self, controller: Controller, executors: Executors, signals: Signals
    ) -> None:
        """Run the loop; whatever ends it ahead of time, what was learnt is saved."""
        try:
            control = RunControl(controller, executors)
            async with listening(self.run_dir, control.answer):
                await until_lost(controller.run(), executors, lambda: controller.saver.has_last)
        except BaseException as error:
            self._replicas = controller.replica_set.wanted()
            is_stopped = signals.ended_by is not None or isinstance(error, asyncio.CancelledError)
            losses = [] if is_stopped else await find_losses(executors.vital)
            if self._may_go_on(losses, signals):
                if not any(loss.group.startswith(("trainer", "storage")) for loss in losses):
                    await asyncio.create_task(controller.saver.rescue())
                raise SessionLost(losses, controller.saver.version) from error
            signals.hold()
            self.progress.show_phase("saving what was learnt")
            # As a task of its own: else exceptions in it would name this one as their context.
            await asyncio.create_task(controller.saver.rescue())
            raise

    def _may_go_on(self, losses: Sequence[GroupLost], signals: Signals) -> bool:
        """Whether others may take the place of what was lost, which counts as one restart. Not of
        what consumers outside hold rollouts of, for these would be repeated."""
        is_placed = bool(losses) and all(loss.has_host for loss in losses)
        has_consumers = any(stage.is_external for stage in self.inputs.graph.between)
        is_over = signals.ended_by is not None or has_consumers
        return is_placed and not is_over and self.restarts.take()


async def until_lost(
    work: Coroutine[Any, Any, Any],
    executors: Executors,
    has_learnt: Callable[[], bool] = lambda: False,
) -> Any:
    """Run `work`, but end at once with the reason if an executor that it cannot spare is lost.

    Once `has_learnt` (the last version is made) only the trainer's loss does that; a call to any
    other lost executor raises inside `work`.
    """

    async def watch(group: ExecutorGroup) -> None:
        try:
            await group.watch()
        except GroupLost:
            if group is executors.trainer or not has_learnt():
                raise

    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(watch(group)) for group in executors.vital]
        result = await tasks.create_task(work)
        for watching in watches:
            watching.cancel()
    return result


async def find_losses(groups: Iterable[ExecutorGroup]) -> list[GroupLost]:
    """Those of these executors that are lost; what that causes may come before it is noticed."""
    watches = [asyncio.ensure_future(group.watch()) for group in groups]
    done, pending = await asyncio.wait(
        watches, timeout=REASON_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
    )
    for watch in pending:
        watch.cancel()
    errors = [watch.exception() for watch in done]
    return [error for error in errors if isinstance(error, GroupLost)]


async def keep_generators(
    config: Config, executors: Executors, wanted: Collection[int]
) -> KeptGenerators:
    """End all executors of a session but these generators, as far as they can go on."""
    asking = (collector.call_one.close() for collector in executors.collectors)
    await asyncio.gather(*asking, return_exceptions=True)  # one that is lost asks nothing
    names = {f"generator-{index}": index for index in wanted}
    places = {n: executors.places.get(n) or place_generator(config, i) for n, i in names.items()}
    kept = await reset_generators(KeptGenerators(executors.generators, places))
    await asyncio.gather(*(group.stop() for group in executors.beside_generators))
    return kept


async def reset_generators(kept: KeptGenerators) -> KeptGenerators:
    """Let these generators forget what they know of a session; those that can."""
    groups = kept.groups.items()
    is_wanted = [f"generator-{index}" in kept.places for index, _ in groups]
    resets = (_reset(group, wanted) for (_, group), wanted in zip(groups, is_wanted, strict=True))
    is_reset = await asyncio.gather(*resets)
    return KeptGenerators(dict(compress(groups, is_reset)), kept.places)


async def next_start(config: Config, inputs: Inputs, run_dir: str, first: Start) -> Start:
    """Cut the files to the newest checkpoint of the run; `first` is where the run began."""
    again = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    start = await asyncio.to_thread(starting_point, again, inputs, run_dir)
    state, folder = start
    positions.cut(run_dir, state.get("positions", {}))
    return first if folder is None else start


async def _reset(group: ExecutorGroup, is_wanted: bool) -> bool:
    """Let a generator forget the session, before those that it asks are stopped: a message to a
    process that is gone would end it. One that cannot, or is one too many, is stopped; False."""
    if is_wanted:
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


async def _read_completions(
    storage: Storage, tokenizer: TextDecoder, row_ids: list[int]
) -> dict[int, str]:
    """The text of a few rows that are still in storage."""
    if not row_ids:
        return {}
    try:
        columns = await storage.read(row_ids, [RESPONSE_IDS])
    except GroupLost:  # the step's numbers are written down nevertheless
        return {}
    return dict(zip(row_ids, map(tokenizer.decode, columns[RESPONSE_IDS]), strict=True))
