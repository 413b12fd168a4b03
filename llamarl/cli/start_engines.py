"""`llamarl.start_engines`: the executors of a recipe under a loop of the caller's own
(docs/library.md)."""

import os
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from llamarl.cli.train import claim
from llamarl.controller.fit import check_fit
from llamarl.controller.library import LibraryEngines
from llamarl.controller.starter import name_executors, running_cluster, spawn_executors
from llamarl.controller.wiring import Wiring
from llamarl.core.config import Config
from llamarl.core.extensions import TaskSource
from llamarl.core.faces import RunObserver
from llamarl.core.fields import require
from llamarl.metrics.console import Progress
from llamarl.metrics.provenance import RECIPE_FOLDER, WriteProvenance, write_provenance
from llamarl.metrics.rendering import CLOCK
from llamarl.metrics.shares import RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog, flatten, open_trackers
from llamarl.model.tokenizer import keep_tokenizer
from llamarl.recipe.composition import RECIPE_FILE, compose, to_config, to_yaml
from llamarl.recipe.inputs import read_frozen, read_inputs
from llamarl.recipe.local_inputs import repeatable_inputs, with_local_files
from llamarl.recipe.prompt_inputs import refuse_sft, with_last_step
from llamarl.scoring.stages import EXECUTORS, GENERATE, TRAIN


@asynccontextmanager
async def start_engines(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    executors: Collection[str] | None = None,
    metrics: bool = False,
) -> AsyncIterator["LibraryEngines"]:
    """Start the executors of a recipe; at the block's end none of their processes is left.

    `recipe` is its folder, `overrides` are KEY=VALUE as on the command line. `executors` are those
    to start besides storage (None: all): generator, trainer, scorer, reference, stages of the
    recipe's own. Without the trainer, generators start with the checkpoint's weights as version 0.
    `run_dir` must be new. With `metrics`, steps and evaluations go into its metrics files and are
    shown as by `llamarl train`. ValueError, in one line, says what the caller must change.
    """
    composed = compose(recipe, overrides, run_dir)
    given = to_config(composed)
    config, pinned = with_local_files(given, "train")

    def write(task: TaskSource | None) -> None:
        values = {"recipe_dir": RECIPE_FOLDER, **repeatable_inputs(given, pinned)}
        file = Path(recipe, RECIPE_FILE)
        write_provenance(config.run_dir, sys.argv, to_yaml(composed, values), file, task)

    async with running_engines(config, write, executors, metrics) as engines:
        yield engines


@asynccontextmanager
async def running_engines(
    config: Config,
    write: WriteProvenance,
    executors: Collection[str] | None = None,
    metrics: bool = False,
) -> AsyncIterator["LibraryEngines"]:
    """Start the executors of a config, as `start_engines` does; `write` keeps in the run folder
    what it was started with."""
    must = "be none under a loop of one's own, whose order is its own"
    config.require(config.dispatch.ranker == "none", "dispatch.ranker", must)
    must = "be off under a loop of one's own, which calls load_state"
    config.require(config.checkpoint.resume == "off", "checkpoint.resume", must)
    refuse_sft(config, "start_engines")
    inputs = read_inputs(config)
    config = with_last_step(config, len(inputs.prompts))
    known = name_executors(inputs.graph)
    chosen = known if executors is None else set(executors)
    must = f"be some of {', '.join(sorted(known))}"
    got = ", ".join(sorted(chosen)) or "none"
    require(chosen <= known and bool(chosen), "executors", must, got)
    has_both = {EXECUTORS[GENERATE], EXECUTORS[TRAIN]} <= chosen
    must = "be false unless generator and trainer are among the executors"
    colocated = config.placement.colocated
    config.require(has_both or not colocated, "placement.colocated", must)
    if chosen == known:
        check_fit(config, inputs.architecture, read_frozen(config, inputs.graph))
    folder = os.path.abspath(config.run_dir)
    os.makedirs(folder, exist_ok=True)
    with claim(folder, is_new=True):
        write(inputs.task_source)
        keep_tokenizer(inputs.tokenizer_folder, folder)
        async with running_cluster(config, folder) as cluster:
            started = await spawn_executors(
                config, inputs, cluster, folder, names=chosen, report=lambda name, state: None
            )
            spans = Spans("controller", f"{folder}/spans")
            wiring = Wiring(config, inputs, started, folder, spans)
            with closing(spans), _observing(wiring, metrics) as observer:
                fields = wiring.engine_fields(observer)
                engines = LibraryEngines(**fields, wiring=wiring, names=chosen)
                async with engines.running():
                    yield engines


@contextmanager
def _observing(wiring: Wiring, has_metrics: bool) -> Iterator[RunObserver]:
    """Provide the observer of a loop: one that logs nothing, or one that logs and shows it as a
    run."""
    if not has_metrics:
        yield RunObserver()
        return
    config, run_dir = wiring.config, wiring.run_dir
    recent = RecentSpans(f"{run_dir}/spans")
    trackers = open_trackers(config.metrics.trackers, Path(run_dir), flatten(config), 0)
    CLOCK.restart()
    progress = Progress(config.last_step, live=config.metrics.live, recent_spans=recent)
    with closing(MetricsLog(run_dir, trackers)) as log, progress:
        run_logger = wiring.make_run_logger(log, progress, recent)
        run_logger.start(0)
        yield run_logger
