"""The command `llamarl models`: which families there are, and what runs a checkpoint.

Owns: its texts. Does not own: families (`models/families.py`), or the checks of a run, which come
at its start. Invariant: it reads no weights and fetches none; no code of a checkpoint runs.
"""

import importlib.metadata
import importlib.util
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config.check import require
from llamarl.models.architecture import read_architecture, read_settings
from llamarl.models.families import FAMILIES, causal_families
from llamarl.models.inventory import check_checkpoint, parameter_shapes
from llamarl.models.safetensors_file import read_header, weight_names
from llamarl.recipe.hub_files import list_files
from llamarl.recipe.hub_names import is_hub_name, read_name
from llamarl.recipe.local_inputs import fetch_model

USAGE = """\
usage: llamarl models [FOLDER | hf:ORG/NAME[@REVISION]]

Lists the families of models; or says what a checkpoint is and what runs it. Of a name
config, index and tokenizer are fetched, no weights.
"""
REGISTRY = "model_executor/models/registry.py"  # of vLLM: names the classes that it has
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDTH = 100


def models(arguments: list[str]) -> str:
    """What `llamarl models [CHECKPOINT]` says. ValueError for what is no checkpoint."""
    require(len(arguments) < 2, "CHECKPOINT", "be one folder or name", arguments)
    return _describe(arguments[0]) if arguments else _families()


def _families() -> str:
    known = sorted(causal_families() - FAMILIES.keys())
    ours = "".join(f"  {name:<12}{each.model_class}\n" for name, each in FAMILIES.items())
    others = textwrap.fill(
        ", ".join(known),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return (
        f"trainer=native, with generator=embedded or vllm, by model_type of config.json:\n{ours}"
        f"trainer=transformers, with generator=vllm, the causal language models of transformers "
        f"{importlib.metadata.version('transformers')} (which are tested: docs/recipes.md):\n"
        f"{others}\nllamarl models FOLDER, or hf:ORG/NAME, says what runs a checkpoint\n"
    )


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A checkpoint: its `folder`, the `sizes` in bytes of its weight files by name, and whether
    those are here."""

    title: str
    folder: Path
    sizes: Mapping[str, int]
    has_weights: bool


def _find(text: str) -> FoundModel:
    if not is_hub_name(text):
        folder = Path(text)
        read_settings(folder)  # raises what is wrong with the folder
        paths = [folder / name for name in weight_names(folder)]
        sizes = {path.name: path.stat().st_size for path in paths if path.is_file()}
        is_whole = len(sizes) == len(paths)
        return FoundModel(title=text, folder=folder, sizes=sizes, has_weights=is_whole)
    name = read_name("CHECKPOINT", text, "model")
    folder, pinned = fetch_model("CHECKPOINT", name, has_weights=False)
    listed = list_files("CHECKPOINT", pinned)
    sizes = {name: listed[name] for name in weight_names(folder) if name in listed}
    is_here = all((folder / name).is_file() for name in weight_names(folder))
    return FoundModel(title=str(pinned), folder=folder, sizes=sizes, has_weights=is_here)


def _describe(text: str) -> str:
    model = _find(text)
    values, _ = read_settings(model.folder)
    classes = values.get("architectures") or []
    model_class = str(classes[0]) if isinstance(classes, list) and classes else "no class"
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "")
    native, damaged = _error(read_architecture, model.folder), None
    if model.has_weights:
        damaged = _error(lambda folder: check_checkpoint(folder, is_any=True), model.folder)
    num_bytes = sum(model.sizes.values())
    where = "" if model.has_weights else ", not all of them here"
    files = "file" if len(model.sizes) == 1 else "files"
    positions, vocab = values.get("max_position_embeddings"), values.get("vocab_size")
    has_tokenizer = (model.folder / "tokenizer.json").is_file()
    quantized = values.get("quantization_config") is not None
    reason = "no: its weights are quantised" if quantized else damaged and f"no: {damaged}"
    library = reason or _by_transformers(values)
    engine = reason or _by_vllm(model_class)
    rows = {
        "family": f"{values.get('model_type')} ({model_class})",
        "parameters": _parameters(model, native is None, DTYPE_BYTES.get(dtype)),
        "weights": f"{num_bytes:,} bytes in {len(model.sizes)} safetensors {files}{where}",
        "context": f"{positions} positions, a vocabulary of {vocab}",
        "tokenizer": "tokenizer.json" if has_tokenizer else "none that is read (tokenizer.json)",
        "trainer=native": reason or (f"no: {native}" if native else "yes"),
        "trainer=transformers": library,
        "generator=embedded": reason or ("no: its family is none of ours" if native else "yes"),
        "generator=vllm": engine,
    }
    lines = [f"  {name:<22}{words}\n" for name, words in rows.items()]
    return f"{model.title}\n{''.join(lines)}"


def _parameters(model: FoundModel, is_ours: bool, itemsize: int | None) -> str:
    """How many numbers: by config.json of our families, by the headers of files that are here, or
    by the bytes."""
    if is_ours:
        shapes = parameter_shapes(read_architecture(model.folder)).values()
        return f"{sum(map(math.prod, shapes)):,}"
    if model.has_weights and (headers := _headers(model)) is not None:
        return f"{sum(math.prod(shape) for shape in headers):,}"
    num_bytes = sum(model.sizes.values())
    return f"about {num_bytes // itemsize:,}" if itemsize and num_bytes else "unknown"


def _headers(model: FoundModel) -> list[tuple[int, ...]] | None:
    try:
        headers = [read_header(model.folder / name) for name in model.sizes]
    except ValueError:
        return None
    return [entry.shape for header in headers for entry in header.values()]


def _error(check: Any, folder: Path) -> str | None:
    """What a check says is wrong; None if nothing."""
    try:
        check(folder)
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
