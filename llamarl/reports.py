"""The commands that only say something about a recipe: plan, graph, launch.

Owns: what they read and where they write it. Does not own: the texts (`planner/report/`,
`cluster/deploy/`) or runs (`jobs.py`). Invariant: they make no run folder and read no weights.
"""

import logging
import os
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.config import Config
from llamarl.config.check import require
from llamarl.models.architecture import Architecture
from llamarl.recipe.frozen_models import read_frozen
from llamarl.recipe.inputs import read_planned_architecture
from llamarl.recipe.prompt_inputs import with_measured_prompts
from llamarl.recipe.rehearsal import with_processes
from llamarl.recipe.task_source import read_graph, read_task
from llamarl.run.starter import name_executor, place_executors

log = logging.getLogger(__name__)


def plan(
    config: Config,
    console: Console,
    *,
    json: str | None,
    html: str | None,
    trace: str | None,
    sweep: bool,
    only: str | None = None,
) -> None:
    """Say on `console`, and in the files `json` and `html`, what the recipe needs and does; `only`
    the trainer, a generator or a publish.

    Reads no weights and makes no run folder; of prompts and tokenizer only what their length needs.
    Starts one short process if it uses a task.py.
    """
    from llamarl.planner.hardware import timed
    from llamarl.planner.memory.ranks import forecast_memory
    from llamarl.planner.report.published import published_figures
    from llamarl.planner.report.recipe import figures, forecast_recipe, memory_figures
    from llamarl.planner.report.text import (
        assumptions,
        render_memory,
        render_page,
        render_report,
        title_of,
    )

    _check_writable("--json", json)
    _check_writable("--html", html)
    architecture = read_planned_architecture(config)
    if only is not None:
        return _plan_one_side(only, config, architecture, console, json, html or trace or sweep)
    frozen = read_frozen(config, read_graph(config, read_task(config))[0])
    config = _planned(config)
    if not timed(config) and not (html or trace or sweep):
        memory = forecast_memory(config, architecture, frozen)
        text, found = render_memory(config, memory), memory_figures(memory)
        return _say(console, text, json, found)
    # The paper trains all weights.
    published = None if config.trainer.lora.is_used else published_figures(architecture)
    forecast = forecast_recipe(
        config,
        architecture,
        frozen=frozen,
        run_dir=trace,
        sweep=sweep,
        is_published=published is not None,
    )
    text = render_report(config, forecast, published)
    _say(console, text, json, figures(config, forecast))
    if html is not None:
        title, words = title_of(config, forecast), assumptions(config, forecast)
        page = render_page(title, text, words, forecast.memory)
        _write("--html", html, page)


def _plan_one_side(
    only: str,
    config: Config,
    architecture: Architecture,
    console: Console,
    json: str | None,
    other: object,
) -> None:
    """`other`: an option that is for whole recipes."""
    from llamarl.planner.report.one_side import forecast_one_side

    require(not other, "--only", "come without --html, --trace and --sweep", only)
    config = _planned(config)
    text, figures = forecast_one_side(only, config, architecture)
    _say(console, text, json, figures)


def _planned(config: Config) -> Config:
    """The recipe as it is planned: with all lengths of its workload in `plan`, and with processes,
    of which what it is compared with may have more. The log says which guesses are smaller than
    usual."""
    from llamarl.planner.simulation.workload import shrunk_guesses, with_lengths

    config = with_measured_prompts(config)
    if words := shrunk_guesses(config):
        log.warning(words)
    return with_processes(with_lengths(config))


def _say(console: Console, text: str, path: str | None, figures: dict[str, Any]) -> None:
    """Print the text, and write the figures where they are asked for."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if path is not None:
        _write("--json", path, dumps(figures, indent=2) + "\n")


def graph(
    config: Config,
    console: Console,
    *,
    mermaid: str | None,
    run: str | None,
) -> None:
    """Print the recipe's stages and what goes between them; `run` is the folder of a run of it.

    Reads no prompts, tokenizer or weights; starts one short process if it uses a task.py.
    """
    from llamarl.planner.report.dataflow import Dataflow, read_flows

    _check_writable("--mermaid", mermaid)
    found = read_graph(config, read_task(config))[0]
    executors = {name: name_executor(stage) for name, stage in found.stages.items()}
    places = place_executors(config, found)
    flows = read_flows(run) if run is not None else None
    dataflow = Dataflow(graph=found, executors=executors, places=places, flows=flows)
    console.print(dataflow.render(), markup=False, highlight=False, soft_wrap=True, end="")
    if mermaid is not None:
        _write("--mermaid", mermaid, dataflow.draw())


def _check_writable(flag: str, path: str | None) -> None:
    if path is None:
        return
    folder = Path(path).absolute().parent
    is_able = folder.is_dir() and os.access(folder, os.W_OK) and not Path(path).is_dir()
    require(is_able, flag, "name a file in a folder that can be written to", path)


def _write(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:  # its permissions may be right all the same
        raise ValueError(f"{flag} must name a file that can be written, got {error}") from error


def launch(config: Config, console: Console, *, command: list[str]) -> None:
    """Print what to submit so that `llamarl train` with the arguments `command` runs there."""
    from llamarl.cluster.deploy.launch import render

    console.print(render(config, command), markup=False, highlight=False, soft_wrap=True, end="")
