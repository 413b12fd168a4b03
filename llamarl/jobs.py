"""What each command does, from a checked config to its result.

Owns: the life of a run: inputs, processes, the loop, tear-down, summary. Does not own: wiring
(`build.py`) or the command line (`main.py`). Invariant: when a job ends, however it ends, none of
its processes is left.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from llamarl.build import build_controller, build_evaluator, make_dispatch
from llamarl.checkpoints import checkpoint, records
from llamarl.cluster import Cluster, ExecutorGroup, GroupLost
from llamarl.config import Config
from llamarl.config.check import require
from llamarl.control import RunControl, listening
from llamarl.data.tokenizer import TextDecoder
from llamarl.executor_groups import Executors, name_parts, running_cluster, spawn_executors
from llamarl.experience.graph import EXECUTORS, GENERATE, SCORE
from llamarl.loop.controller import Controller
from llamarl.loop.evaluation import evaluate_alone
from llamarl.loop.ledger import Ledger
from llamarl.loop.signals import Signals, Stopped
from llamarl.metrics.console import Progress
from llamarl.metrics.ending import is_finished, show_end, show_finished_run
from llamarl.metrics.metrics_log import MetricsLog
from llamarl.metrics.provenance import Record, flatten
from llamarl.metrics.recent_spans import RecentSpans
from llamarl.metrics.rendering import shorten
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import Spans
from llamarl.metrics.summary import SUMMARY_FILE, summarize
from llamarl.metrics.trackers import open_trackers
from llamarl.models.inventory import parameter_shapes
from llamarl.planner.memory.fit import check_fit
from llamarl.protocols import Storage
from llamarl.recipe.inputs import Inputs, read_frozen, read_inputs
from llamarl.recipe.starting_point import starting_point
from llamarl.sessions import Restarts, SessionLost, Start, describe, find_losses, next_start
from llamarl.types import RESPONSE_IDS, Evaluation

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4
CLAIM_S = 5.0  # longest wait for the processes of a killed run to end
GC_THRESHOLDS = 50_000, 20, 20  # rare collections, as tens of thousands of rollouts are open


async def train(config: Config, run_dir: str, console: Console, record: Record) -> dict[str, Any]:
    """Run the loop to its last step; returns the summary, which also lies in `run_dir`."""
    inputs = read_inputs(config)
    check_fit(config, inputs.architecture, read_frozen(config, inputs.graph))
    with claim(run_dir, is_new=config.checkpoint.resume != "auto"):
        state, folder = starting_point(config, inputs, run_dir)
        if config.checkpoint.resume == "auto" and is_finished(config, run_dir, state):
            return show_finished_run(config, run_dir, state, console)
        _check_disk(config, inputs, run_dir)
        record()
        records.cut(run_dir, state.get("records", {}))
        Path(run_dir, SUMMARY_FILE).unlink(missing_ok=True)  # of an end that this run goes on from
        if folder is not None:
            words = f"resumed from version {state['version']} in {shorten(folder)}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        return await _train(config, inputs, run_dir, console, (state, folder))


async def _train(
    config: Config,
    inputs: Inputs,
    run_dir: str,
    console: Console,
    start: Start,
) -> dict[str, Any]:
    spans_folder = f"{run_dir}/spans"
    recent_spans = RecentSpans(spans_folder)
    live = config.metrics.live
    progress = Progress(config.num_steps, live=live, recent_spans=recent_spans, console=console)
    spans = Spans("controller", spans_folder, config.metrics.spans_bytes)
    session = Session(
        config=config,
        inputs=inputs,
        run_dir=run_dir,
        progress=progress,
        spans=spans,
        recent_spans=recent_spans,
        restarts=Restarts(config.cluster.max_restarts),
    )
    parts, first = name_parts(inputs.graph), start
    with progress, contextlib.closing(spans):
        async with _started(config, inputs, run_dir, progress, parts) as (cluster, begun, signals):
            executors: Executors = begun
            while True:
                try:
                    controller = await session.run(executors, signals, start)
                    break
                except SessionLost as lost:
                    progress.show_phase("starting again all but the generators")
                    start, kept = await next_start(config, inputs, run_dir, executors, first)
                    log.warning(describe(lost, start))
                with progress.startup() as report:
                    executors = await spawn_executors(
                        config, inputs, cluster, run_dir, parts=parts, report=report, kept=kept
                    )
            progress.show_phase("stopping the executors")
    summary = summarize(run_dir)
    end = {"version": controller.saver.version, "solved": controller.gate.solved}
    show_end(config, run_dir, summary, end, console)
    return summary


def _has_consumers(inputs: Inputs) -> bool:
    """Whether processes outside hold rollouts, which would be repeated."""
    return any(stage.is_external for stage in inputs.graph.between)


@dataclass(kw_only=True)
class Session:
    """What the sessions of a run share: one lasts from a checkpoint to the run's end, or until an
    executor is lost."""

    config: Config
    inputs: Inputs
    run_dir: str
    progress: Progress
    spans: Spans
    recent_spans: RecentSpans
    restarts: Restarts

    async def run(self, executors: Executors, signals: Signals, start: Start) -> Controller:
        """Drive these executors from `start` to the run's end; SessionLost if some were lost, and
        others may take their place."""
        state, folder = start
        config, run_dir = self.config, Path(self.run_dir)
        assert executors.trainer is not None
        first_step = state["version"] + 1 if state else 0
        trackers = open_trackers(config.metrics.trackers, run_dir, flatten(config), first_step)
        metrics = MetricsLog(run_dir, trackers)
        try:
            if folder is not None:
                self.progress.show_phase("reading the checkpoint")
                await executors.trainer.call_one.restore(folder)
            run_logger = self._run_logger(metrics, executors)
            controller, publisher, dispatch = build_controller(
                config,
                self.inputs,
                executors,
                run_dir=self.run_dir,
                state=state,
                run_logger=run_logger,
                spans=self.spans,
                may_restart=self.restarts.take,
            )
            self.progress.show_phase("connecting trainer and generators")
            await publisher.connect()
            try:
                gc.set_threshold(*GC_THRESHOLDS)
                run_logger.start(state.get("version", 0))
                signals.grant(controller.saver.end_after_step, config.checkpoint.grace_s)
                await self._until_end(controller, executors, signals)
            finally:
                await controller.replica_set.close()
                await dispatch.close()
                await publisher.close()
        finally:
            metrics.close()
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
        )

    async def _until_end(
        self, controller: Controller, executors: Executors, signals: Signals
    ) -> None:
        """Run the loop; whatever ends it ahead of time, what was learnt is saved."""
        try:
            control = RunControl(controller, executors)
            async with listening(self.run_dir, control.answer):
                await _until_lost(controller.run(), executors, lambda: controller.saver.has_last)
        except BaseException as error:
            is_stopped = signals.ended_by is not None or isinstance(error, asyncio.CancelledError)
            losses = [] if is_stopped else await find_losses(executors)
            may_return = losses and all(loss.has_host for loss in losses)
            may_return = may_return and not _has_consumers(self.inputs)
            if may_return and self.restarts.take():
                names = {loss.group for loss in losses}
                if not any(name.startswith(("trainer", "storage")) for name in names):
                    await asyncio.create_task(controller.saver.rescue())
                raise SessionLost(losses, controller.saver.version) from error
            signals.hold()
            self.progress.show_phase("saving what was learnt")
            # As a task of its own: else exceptions in it would name this one as their context.
            await asyncio.create_task(controller.saver.rescue())
            raise


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


async def evaluate(config: Config, run_dir: str, console: Console, record: Record) -> Evaluation:
    """Score the checkpoint on the held-out prompts, without a trainer."""
    require(config.data.held_out is not None, "data.held_out", "name a file to evaluate on", None)
    inputs = read_inputs(config, needs_prompts=False)
    with claim(run_dir, is_new=True):
        record()
        # Off a terminal, standard output is the result alone.
        shown = console if console.is_terminal else Console(quiet=True)
        with Progress(0, live=config.metrics.live, console=shown) as progress:
            parts = {EXECUTORS[GENERATE], EXECUTORS[SCORE]}
            async with _started(config, inputs, run_dir, progress, parts) as (_, executors, _):
                progress.show_phase(f"evaluating {len(inputs.held_out)} prompts")
                result = await _until_lost(_evaluate(config, inputs, executors), executors)
    console.print(
        f"accuracy {result.accuracy:.1%}  reward {result.reward:.4f}  "
        f"mean length {result.mean_tokens:.1f}  truncated {result.truncated_share:.1%}  "
        f"prompts {result.num_prompts}  failed rewards (counted as wrong) {result.num_failed}",
        highlight=False,
        soft_wrap=True,
    )
    return result


async def _evaluate(config: Config, inputs: Inputs, executors: Executors) -> Evaluation:
    dispatch = make_dispatch(config, executors)
    ledger = Ledger(inputs.graph)
    dispatch.hold(set(dispatch.replicas))
    evaluator = build_evaluator(config, inputs, executors, dispatch, ledger, {})
    try:
        score = inputs.graph.stages[SCORE]
        return await evaluate_alone(evaluator, score, executors.stages[score].call_one)
    finally:
        await dispatch.close()


@contextlib.contextmanager
def claim(run_dir: str, *, is_new: bool) -> Iterator[None]:
    """Keep every other run out of the run folder; ValueError if one works or has worked there.

    The run's processes on this machine inherit the claim, and a run that resumes waits up to
    `CLAIM_S` for it. So after a kill it starts only once the killed run's processes have ended.
    """
    path = Path(run_dir, ".lock")
    with path.open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        limit_s = time.monotonic() + (0 if is_new else CLAIM_S)
        while not _is_locked(lock):
            if time.monotonic() > limit_s:
                raise ValueError(
                    f"run_dir must be the folder of one run, got {run_dir}, where another is at "
                    "work"
                )
            time.sleep(0.05)
        if is_new and checkpoint.holds_run(run_dir):
            raise ValueError(
                f"run_dir must be a new folder, or checkpoint.resume=auto to resume the run in "
                f"it, got {run_dir}"
            )
        try:
            yield
        finally:
            if list(path.parent.iterdir()) == [path]:  # refused before it wrote anything
                path.unlink()


def _is_locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released however the processes end
    except BlockingIOError:
        return False
    return True


@contextlib.asynccontextmanager
async def _started(
    config: Config, inputs: Inputs, run_dir: str, progress: Progress, parts: Collection[str]
) -> AsyncIterator[tuple[Cluster, Executors, Signals]]:
    """The cluster, these executors of a run, and the signals that may end it early (`Stopped`)."""
    with Signals() as signals:
        try:
            async with running_cluster(config, run_dir) as cluster:
                try:
                    with progress.startup() as report:
                        executors = await spawn_executors(
                            config, inputs, cluster, run_dir, parts=parts, report=report
                        )
                    yield cluster, executors, signals
                finally:
                    signals.hold()
        except BaseException as error:
            if signals.ended_by is not None:
                raise Stopped(signals.ended_by) from error
            raise


async def _until_lost(
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


def _check_disk(config: Config, inputs: Inputs, run_dir: str) -> None:
    """ValueError unless weights, optimizer state and export of every kept checkpoint fit."""
    shapes = parameter_shapes(inputs.architecture).values()
    model_bytes = sum(math.prod(shape) for shape in shapes) * FLOAT32_BYTES
    needed = model_bytes * (3 * (max(1, config.checkpoint.keep) + 1) + 1)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise ValueError(
            f"run_dir must be on a disk with {math.ceil(needed / 1e6):,} MB free for checkpoints "
            f"and export (lower checkpoint.keep to need less), got {int(free / 1e6):,} MB at "
            f"{run_dir}"
        )
