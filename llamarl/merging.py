"""`llamarl merge`: an adapter and the checkpoint that it was trained beside, as one checkpoint.

Owns: the command's arguments. Does not own: reading and writing (`models/adapter_files.py`).
Invariant: what the command writes is complete under its name, or not there.
"""

import argparse
from pathlib import Path

from llamarl.config.check import require, require_choice
from llamarl.json_file import read_object
from llamarl.models.adapter_inventory import CONFIG_FILE, read_lora
from llamarl.recipe.hub_names import REPOSITORY, HubName
from llamarl.recipe.local_inputs import fetch_model

USAGE = (
    "usage: llamarl merge ADAPTER FOLDER [--checkpoint FOLDER] [--dtype float32|bfloat16]\n\n"
    "ADAPTER is an adapter's folder, such as the export of a run with trainer.lora. FOLDER\n"
    "gets the checkpoint with the adapter added to its weights, for engines that know no\n"
    "adapters. --checkpoint names the checkpoint, if it is not where adapter_config.json says;\n"
    "the weights are rounded to --dtype, or to that of the checkpoint.\n"
)
DTYPES = ("float32", "bfloat16")


def merge(arguments: list[str]) -> str:
    """Do it; returns what to say. ValueError for wrong arguments, or what does not fit together."""
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
    from llamarl.models import adapter_files  # here, for it imports torch

    adapter_files.merge(checkpoint, adapter, folder, options.dtype)
    return f"{folder} is {checkpoint} with an adapter of rank {lora.rank}\n"


def _named_by(adapter: str) -> str:
    """The checkpoint's folder, as the adapter names it: a folder, or a model of the Hub, whose
    weights are fetched unless they are in its cache."""
    values = read_object(Path(adapter, CONFIG_FILE))
    name, revision = values.get("base_model_name_or_path") or "", values.get("revision")
    if not isinstance(name, str) or Path(name).is_dir() or not REPOSITORY.fullmatch(name):
        return str(name)
    named = HubName(kind="model", repository=name, revision=revision and str(revision))
    return str(fetch_model("--checkpoint", named, has_weights=True)[0])
