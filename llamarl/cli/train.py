"""The commands train, sft and evaluate, from a checked config to their result.

When a job ends, however it ends, none of its processes is left."""

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.cluster.os_process import HIDDEN, hidden_files
from llamarl.controller.engines import Engines
from llamarl.controller.fit import check_fit
from llamarl.controller.sessions import Sessions, Signals, Start, Stopped
from llamarl.controller.starter import name_executors, running_cluster, spawn_executors
from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import Wiring
from llamarl.core import checkpoint, files
from llamarl.core.config import Config
from llamarl.core.errors import NoGenerator
from llamarl.core.faces import RunObserver
from llamarl.core.fields import HOUR_S, require
from llamarl.core.groups import Evaluation
from llamarl.metrics.console import Progress
from llamarl.metrics.held_out import append_results, result_line
from llamarl.metrics.provenance import WriteProvenance
from llamarl.metrics.rendering import find_program, is_finished, shorten, show_end, tokenizing_bar
from llamarl.metrics.shares import RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.summary import SUMMARY_FILE
from llamarl.model.inventory import parameter_shapes
from llamarl.model.tokenizer import keep_tokenizer
from llamarl.recipe.inputs import Inputs, make_prompts, read_frozen, read_inputs
from llamarl.recipe.prompt_inputs import (
    as_sft,
    mini_batches,
    refuse_sft,
    with_last_step,
)
from llamarl.recipe.starting_point import starting_point
from llamarl.scoring.stages import EXECUTORS, GENERATE, SCORE, TRAIN

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4
CLAIM_S = 5.0  # longest wait for the processes of a killed run to end


async def train(
    config: Config, run_dir: str, console: Console, write_provenance: WriteProvenance
) -> dict[str, Any]:
    """Run the loop to its last step; return the summary, which is also written into `run_dir`."""
    refuse_sft(config, "llamarl train")
    return await _run(config, run_dir, console, write_provenance)


async def sft(
    config: Config, run_dir: str, console: Console, write_provenance: WriteProvenance
) -> dict[str, Any]:
    """Run the loop on demonstrations, with the trainer alone; return the summary as `train`
    does."""
    return await _run(as_sft(config), run_dir, console, write_provenance)


async def _run(
    config: Config, run_dir: str, console: Console, write_provenance: WriteProvenance
) -> dict[str, Any]:
    now_s = asyncio.get_running_loop().time()
    deadline_s = now_s + config.max_hours * HOUR_S if config.max_hours else math.inf
    with tokenizing_bar(console) as show:
        inputs = read_inputs(config, show=show)
    whole, config = config, with_last_step(config, len(inputs.prompts))
    check_fit(config, inputs.architecture, read_frozen(config, inputs.graph))
    with claim(run_dir, is_new=config.checkpoint.resume != "auto"):
        state, folder = starting_point(config, inputs, run_dir)
        prompts = make_prompts(config, inputs, state)
        known = {"limit": prompts.limit} if config.num_steps < whole.most_steps else {}
        if prompts.limit and not mini_batches(config).num_steps(int(prompts.num_left)):
            known["ended"] = prompts.limit
        if config.checkpoint.resume == "auto" and is_finished(config, run_dir, state | known):
            summary = show_end(config, run_dir, state | known, console)
            console.print("this run had finished before: nothing was started", highlight=False)
            return summary
        _check_disk(config, inputs, run_dir)
        write_provenance(inputs.task_source)
        keep_tokenizer(inputs.tokenizer_folder, run_dir)
        files.cut(run_dir, state.get("positions", {}))
        Path(run_dir, SUMMARY_FILE).unlink(missing_ok=True)  # of an end that this run goes on from
        if folder is not None:
            words = f"resumed from version {state['version']} in {shorten(folder)}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        end = await _train(config, inputs, run_dir, console, (state, folder), deadline_s)
        return show_end(config, run_dir, known | end, console)


async def _train(
    config: Config, inputs: Inputs, run_dir: str, console: Console, start: Start, deadline_s: float
) -> dict[str, Any]:
    recent, live = RecentSpans(f"{run_dir}/spans"), config.metrics.live
    progress = Progress(config.last_step, live=live, recent_spans=recent, console=console)
    spans = Spans("controller", f"{run_dir}/spans")
    is_sft = config.algorithm.is_sft
    names = {EXECUTORS[TRAIN]} if is_sft else name_executors(inputs.graph)
    with progress, contextlib.closing(spans):
        async with _started(config, inputs, run_dir, progress, names) as (supervisor, signals):
            common = config, inputs, run_dir, progress, spans, recent
            controller = await Sessions(*common, supervisor, signals, deadline_s).run(start)
            progress.show_phase("stopping the executors")
    version, gate = controller.saver.version, controller.gate
    return {"version": version, "solved": gate.solved, "ended": gate.ended}


async def evaluate(
    config: Config, run_dir: str, console: Console, write_provenance: WriteProvenance
) -> Evaluation:
    """Score the checkpoint on the held-out prompts, without a trainer."""
    require(bool(config.held_out_sets), "data.held_out", "name a file to evaluate on", None)
    with tokenizing_bar(console) as show:
        inputs = read_inputs(config, needs_prompts=False, show=show)
    with claim(run_dir, is_new=True):
        write_provenance(inputs.task_source)
        keep_tokenizer(inputs.tokenizer_folder, run_dir)
        # Off a terminal, standard output is the result alone.
        shown = console if console.is_terminal else Console(quiet=True)
        with Progress(0, live=config.metrics.live, console=shown) as progress:
            names = {EXECUTORS[GENERATE], EXECUTORS[SCORE]}
            async with _started(config, inputs, run_dir, progress, names) as (supervisor, _):
                progress.show_phase(f"evaluating {len(inputs.held_out)} prompts")
                spans = Spans("controller", f"{run_dir}/spans")
                wiring = Wiring(config, inputs, supervisor.executors, run_dir, spans)
                with contextlib.closing(spans):
                    result = await supervisor.guard(_evaluate(wiring))
    append_results(run_dir, result)
    for name, found in [("", result), *result.sets.items()]:
        console.print(result_line(name, found), markup=False, highlight=False, soft_wrap=True)
    words = f"each prompt with its completion and reward: {find_program('llamarl')} view "
    console.print(words + shorten(run_dir), markup=False, highlight=False, soft_wrap=True)
    return result


async def _evaluate(wiring: Wiring) -> Evaluation:
    """Evaluate the checkpoint's weights, which generators hold as version 0."""
    engines = Engines(**wiring.engine_fields(RunObserver()))
    evaluator = wiring.make_evaluator(engines)
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(engines.serve())
            result = await evaluator.evaluate(0, is_last=True)
            serving.cancel()
    finally:
        await engines.close()
    if result is None:
        raise NoGenerator("every generator replica is lost")
    return result


@contextlib.contextmanager
def claim(run_dir: str, *, is_new: bool) -> Iterator[None]:
    """Keep every other run out of the run folder; ValueError if one works or has worked there.
    Files that the run writes meanwhile are hidden from other users.

    The run's processes on this machine inherit the claim, and a run that resumes waits up to
    `CLAIM_S` for it. So after a kill it starts only once the killed run's processes have ended.
    """
    path = Path(run_dir, ".lock")
    with hidden_files(), path.open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        limit_s = time.monotonic() + (0 if is_new else CLAIM_S)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released however processes end
                break
            except BlockingIOError:
                if time.monotonic() > limit_s:
                    must = f"be the folder of one run, got {run_dir}, where another is at work"
                    raise ValueError(f"run_dir must {must}") from None
                time.sleep(0.05)
        if is_new and checkpoint.holds_run(run_dir):
            must = "be a new folder, or checkpoint.resume=auto to resume the run in it"
            raise ValueError(f"run_dir must {must}, got {run_dir}")
        if is_new and list(path.parent.iterdir()) == [path]:
            path.parent.chmod(path.parent.stat().st_mode & ~HIDDEN)
        try:
            yield
        finally:
            if list(path.parent.iterdir()) == [path]:  # refused before it wrote anything
                path.unlink()


@contextlib.asynccontextmanager
async def _started(
    config: Config, inputs: Inputs, run_dir: str, progress: Progress, names: Collection[str]
) -> AsyncIterator[tuple[Supervisor, Signals]]:
    """Provide the supervisor of these executors of a run, and the signals that may end it early
    (`Stopped`)."""
    with Signals() as signals:
        try:
            async with running_cluster(config, run_dir) as cluster:
                spawn = partial(spawn_executors, config, inputs, cluster, run_dir, names=names)
                try:
                    with progress.startup() as report:
                        executors = await spawn(report=report)
                    yield Supervisor(config, executors, spawn), signals
                finally:
                    signals.hold()
        except BaseException as error:
            if signals.ended_by is not None:
                raise Stopped(signals.ended_by) from error
            raise


def _check_disk(config: Config, inputs: Inputs, run_dir: str) -> None:
    """Raise ValueError unless weights, optimizer state and export of every kept checkpoint fit."""
    shapes = parameter_shapes(inputs.architecture).values()
    model_bytes = sum(math.prod(shape) for shape in shapes) * FLOAT32_BYTES
    kept = config.checkpoint
    num_saved = max(1, kept.keep) + 1 + 2 * bool(kept.best)  # the best, and what may become it
    every = kept.export_every_steps
    num_exported = 1 + bool(kept.best) + ((config.last_step or 0) // every if every else 0)
    needed = model_bytes * (3 * num_saved + num_exported)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run_dir).free
    must = f"be on a disk with {math.ceil(needed / 1e6):,} MB free for checkpoints and export"
    if free < needed:
        got = f"{int(free / 1e6):,} MB at {run_dir}"
        raise ValueError(f"run_dir must {must} (lower checkpoint.keep to need less), got {got}")
