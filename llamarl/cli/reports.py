"""The commands that report on a recipe or make files of a checkpoint: plan, graph, launch, models,
merge."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.controller.starter import name_executor, place_executors
from llamarl.core.config import Config
from llamarl.core.fields import require, require_choice
from llamarl.core.files import read_object
from llamarl.model.adapter_inventory import CONFIG_FILE, read_lora
from llamarl.model.architecture import FAMILIES, causal_families, read_architecture, read_settings
from llamarl.model.inventory import check_checkpoint, parameter_shapes
from llamarl.model.safetensors_file import read_header, weight_names
from llamarl.recipe.hub import REPOSITORY, HubName, is_hub_name, list_files, read_name
from llamarl.recipe.inputs import read_frozen, read_planned_architecture
from llamarl.recipe.local_inputs import fetch_model
from llamarl.recipe.prompt_inputs import read_graph, read_task, with_measured_prompts
from llamarl.recipe.rules import with_processes

MERGE_USAGE = """\
usage: llamarl merge ADAPTER FOLDER [--checkpoint FOLDER] [--dtype float32|bfloat16]

ADAPTER is an adapter's folder, such as the export of a run with trainer.lora. FOLDER
gets the checkpoint with the adapter added to its weights, for engines that know no
adapters. --checkpoint names the checkpoint, if it is not where adapter_config.json says;
the weights are rounded to --dtype, or to that of the checkpoint.
"""
DTYPES = ("float32", "bfloat16")


def merge(arguments: list[str]) -> str:
    """Merge the adapter into its checkpoint; return the text to print. ValueError for wrong
    arguments, or an adapter and a checkpoint that do not fit together."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("places", nargs="*")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--dtype")
    must = "be ADAPTER FOLDER, as `llamarl merge --help` says"
    try:
        options, more = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"arguments must {must}, got {error}") from None
    is_whole = len(options.places) == 2 and not more
    require(is_whole, "arguments", must, " ".join(arguments))
    require_choice("--dtype", options.dtype or DTYPES[0], DTYPES)
    adapter, folder = options.places
    lora = read_lora(adapter, "ADAPTER")
    checkpoint = options.checkpoint or _named_by(adapter)
    must = f"be the folder of the checkpoint of {adapter}"
    require(Path(checkpoint, "config.json").is_file(), "--checkpoint", must, checkpoint)
    require(not Path(folder).exists(), "FOLDER", "not exist yet", folder)
    from llamarl.model import adapters  # here, for it imports torch

    adapters.merge(checkpoint, adapter, folder, options.dtype)
    return f"{folder} is {checkpoint} with an adapter of rank {lora.rank}\n"


def _named_by(adapter: str) -> str:
    """Return the checkpoint's folder, as the adapter names it: a folder, or a model of the Hub,
    whose weights are fetched unless they are in its cache."""
    values = read_object(Path(adapter, CONFIG_FILE))
    name, revision = values.get("base_model_name_or_path") or "", values.get("revision")
    if not isinstance(name, str) or Path(name).is_dir() or not REPOSITORY.fullmatch(name):
        return str(name)
    named = HubName(kind="model", repository=name, revision=revision and str(revision))
    return str(fetch_model("--checkpoint", named, has_weights=True)[0])


MODELS_USAGE = """\
usage: llamarl models [FOLDER | hf:ORG/NAME[@REVISION]]

Lists the families of models; or says what a checkpoint is and what runs it. Of a name
config, index and tokenizer are fetched, no weights.
"""
REGISTRY = "model_executor/models/registry.py"  # of vLLM: names the classes that it has
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDTH = 100


def models(arguments: list[str]) -> str:
    """Return the text of `llamarl models [CHECKPOINT]`. ValueError if CHECKPOINT is no
    checkpoint."""
    require(len(arguments) < 2, "CHECKPOINT", "be one folder or name", arguments)
    if arguments:
        return _describe(arguments[0])
    ours = "".join(f"  {name:<12}{each.model_class}\n" for name, each in FAMILIES.items())
    known = ", ".join(sorted(causal_families() - FAMILIES.keys()))
    lines = textwrap.wrap(known, WIDTH - 2, break_on_hyphens=False)
    others = textwrap.indent("\n".join(lines), "  ")
    return (
        f"trainer=native, with generator=embedded or vllm, by model_type of config.json:\n{ours}"
        f"trainer=transformers, with generator=vllm, the causal language models of transformers "
        f"{importlib.metadata.version('transformers')} (which are tested: docs/recipes.md):\n"
        f"{others}\nllamarl models FOLDER, or hf:ORG/NAME, says what runs a checkpoint\n"
    )


def _describe(text: str) -> str:
    """Return a text about a checkpoint, and what runs it."""
    if is_hub_name(text):
        name = read_name("CHECKPOINT", text, "model")
        folder, pinned = fetch_model("CHECKPOINT", name, has_weights=False)
        text, sizes = str(pinned), list_files("CHECKPOINT", pinned)
    else:
        folder = Path(text)
        read_settings(folder)  # raises what is wrong with the folder
        sizes = {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}
    values, _ = read_settings(folder)
    names = weight_names(folder)
    sizes = {name: sizes[name] for name in names if name in sizes}
    has_weights = all((folder / name).is_file() for name in names)
    classes = values.get("architectures") or []
    model_class = str(classes[0]) if isinstance(classes, list) and classes else "no class"
    native = _error(lambda: read_architecture(folder))
    damaged = _error(lambda: check_checkpoint(folder, is_any=True)) if has_weights else None
    num_bytes = sum(sizes.values())
    where = "" if has_weights else ", not all of them here"
    files = "file" if len(sizes) == 1 else "files"
    positions, vocab = values.get("max_position_embeddings"), values.get("vocab_size")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    quantized = values.get("quantization_config") is not None
    reason = "no: its weights are quantised" if quantized else damaged and f"no: {damaged}"
    rows = {
        "family": f"{values.get('model_type')} ({model_class})",
        "parameters": _parameters(folder, values, native is None, sizes, has_weights),
        "weights": f"{num_bytes:,} bytes in {len(sizes)} safetensors {files}{where}",
        "context": f"{positions} positions, a vocabulary of {vocab}",
        "tokenizer": "tokenizer.json" if has_tokenizer else "none that is read (tokenizer.json)",
        "trainer=native": reason or (f"no: {native}" if native else "yes"),
        "trainer=transformers": reason or _by_transformers(values),
        "generator=embedded": reason or ("no: its family is none of ours" if native else "yes"),
        "generator=vllm": reason or _by_vllm(model_class),
    }
    return f"{text}\n" + "".join(f"  {name:<22}{words}\n" for name, words in rows.items())


def _parameters(
    folder: Path,
    values: Mapping[str, Any],
    is_ours: bool,
    sizes: Mapping[str, int],
    has_weights: bool,
) -> str:
    """Return how many parameters a checkpoint has: by config.json of our families, by the headers
    of files that are here, or by the bytes."""
    if is_ours:
        return f"{sum(map(math.prod, parameter_shapes(read_architecture(folder)).values())):,}"
    with suppress(ValueError):
        headers = [read_header(folder / name) for name in sizes] if has_weights else []
        if shapes := [entry.shape for header in headers for entry in header.values()]:
            return f"{sum(map(math.prod, shapes)):,}"
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "")
    itemsize, num_bytes = DTYPE_BYTES.get(dtype), sum(sizes.values())
    return f"about {num_bytes // itemsize:,}" if itemsize and num_bytes else "unknown"


def _error(check: Callable[[], object]) -> str | None:
    """Return the text of the check's ValueError; None if it raises none."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


def _by_transformers(values: Mapping[str, Any]) -> str:
    version = importlib.metadata.version("transformers")
    if values.get("model_type") in causal_families():
        return f"yes, if its tensors have the names of transformers {version} (seen at the start)"
    if values.get("auto_map"):
        return "no: its code is in its own folder, and does not run"
    return f"no: transformers {version} has no causal language model of this family"


def _by_vllm(model_class: str) -> str:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        if model_class in {family.model_class for family in FAMILIES.values()}:
            return "yes (vLLM is not installed here)"
        return "not known: vLLM is not installed here"
    text = (Path(spec.origin).parent / REGISTRY).read_text("utf-8")
    is_known = re.search(rf'"{re.escape(model_class)}"', text) is not None
    return "yes" if is_known else f"no: vLLM has no {model_class}"


log = logging.getLogger(__name__)


def plan(
    config: Config,
    console: Console,
    *,
    json: str | None,
    trace: str | None,
    sweep: bool,
    only: str | None = None,
) -> None:
    """Say on `console`, and in the file `json`, what the recipe needs and how long its step takes;
    with `only`, forecast the trainer, a generator or a publish alone.

    Reads no weights and makes no run folder; of prompts and tokenizer it reads only what their
    length needs. Starts one short process if it uses a task.py.
    """
    from llamarl.controller.memory import forecast_memory
    from llamarl.planner.recipe import forecast_one_side, forecast_recipe, timed
    from llamarl.planner.report import figures, memory_figures, render_memory, render_report

    check_writable("--json", json)
    architecture = read_planned_architecture(config)
    if only is not None:
        require(not (trace or sweep), "--only", "come without --trace and --sweep", only)
        return _say(console, json, *forecast_one_side(only, _planned(config), architecture))
    frozen = read_frozen(config, read_graph(config, read_task(config))[0])
    config = _planned(config)
    if not timed(config) and not (trace or sweep):
        memory = forecast_memory(config, architecture, frozen)
        return _say(console, json, render_memory(config, memory), memory_figures(memory))
    forecast = forecast_recipe(config, architecture, frozen=frozen, run_dir=trace, sweep=sweep)
    _say(console, json, render_report(config, forecast), figures(config, forecast))


def _planned(config: Config) -> Config:
    """Return the recipe as it is planned: with all lengths of its workload in `plan`, and in
    processes of its own. The log says which guesses are smaller than usual."""
    from llamarl.planner.simulation.workload import shrunk_guesses, with_lengths

    config = with_measured_prompts(config)
    if words := shrunk_guesses(config):
        log.warning(words)
    return with_processes(with_lengths(config))


def _say(console: Console, path: str | None, text: str, figures: dict[str, Any]) -> None:
    """Print the text, and write the figures where they are asked for."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if path is not None:
        write_text("--json", path, dumps(figures, indent=2) + "\n")


def graph(config: Config, console: Console, *, mermaid: str | None, run: str | None) -> None:
    """Print the recipe's stages and what goes between them; `run` is the folder of a run of it.

    Reads no prompts, tokenizer or weights; starts one short process if it uses a task.py.
    """
    from llamarl.cli.graph import Dataflow, read_flows

    check_writable("--mermaid", mermaid)
    found = read_graph(config, read_task(config))[0]
    executors = {name: name_executor(stage) for name, stage in found.stages.items()}
    places = place_executors(config, found)
    flows = read_flows(run) if run is not None else None
    dataflow = Dataflow(graph=found, executors=executors, places=places, flows=flows)
    console.print(dataflow.render(), markup=False, highlight=False, soft_wrap=True, end="")
    if mermaid is not None:
        write_text("--mermaid", mermaid, dataflow.draw())


def check_writable(flag: str, path: str | None) -> None:
    """Raise ValueError unless a file can be written where this option names one."""
    if path is not None:
        folder = Path(path).absolute().parent
        is_able = folder.is_dir() and os.access(folder, os.W_OK) and not Path(path).is_dir()
        require(is_able, flag, "name a file in a folder that can be written to", path)


def write_text(flag: str, path: str, text: str) -> None:
    """Write the file that an option names. Raises ValueError if that fails."""
    try:
        Path(path).write_text(text)
    except OSError as error:  # its permissions may be right all the same
        raise ValueError(f"{flag} must name a file that can be written, got {error}") from error


def launch(config: Config, console: Console, *, command: list[str]) -> None:
    """Print the file to submit so that `llamarl train` with the arguments `command` runs there."""
    from llamarl.cluster.launch import render

    console.print(render(config, command), markup=False, highlight=False, soft_wrap=True, end="")
