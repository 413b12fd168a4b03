"""Local files take the place of the names of the Hub in a recipe.

Nothing is fetched unless a key names it, never code or a pickle, and no weights for a forecast;
after `with_local_files` a run knows paths alone, and its saved config the commits."""

import hashlib
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from llamarl.core.config import Config, LoraConfig
from llamarl.metrics import provenance
from llamarl.model.adapter_inventory import ADAPTER_FILE, read_lora
from llamarl.model.adapter_inventory import CONFIG_FILE as ADAPTER_CONFIG
from llamarl.model.safetensors_file import weight_names
from llamarl.model.tokenizer import END_FILE, TOKENIZER_FILES
from llamarl.prompts.files import SUFFIXES
from llamarl.recipe.hub import (
    TRAIN,
    HubName,
    Kind,
    choose_files,
    fetch_files,
    is_hub_name,
    read_name,
)
from llamarl.recipe.inputs import DATE, with_date, with_own_template
from llamarl.recipe.prompt_inputs import TASK, resolve

CHECKPOINT = "model.checkpoint"
ADAPTER = "model.adapter"
TOKENIZER = "model.tokenizer"
ARCHITECTURE = "model.architecture"
PROMPTS = "data.prompts"
HELD_OUT = "data.held_out"
SETS = "evaluation.sets"
TEACHER = "algorithm.teacher"
LENGTHS = "sampling.replay_lengths"
TEMPLATE = "data.chat_template"
DATA_SETS = (PROMPTS, HELD_OUT, SETS)
NEEDED = {
    "train": (CHECKPOINT, ADAPTER, TOKENIZER, ARCHITECTURE, *DATA_SETS, TEACHER),
    "sft": (CHECKPOINT, ADAPTER, TOKENIZER, ARCHITECTURE, PROMPTS, HELD_OUT),
    "check": (CHECKPOINT, ADAPTER, TOKENIZER, ARCHITECTURE, *DATA_SETS, TEACHER),
    "evaluate": (CHECKPOINT, ADAPTER, TOKENIZER, ARCHITECTURE, HELD_OUT, SETS),
    "plan": (CHECKPOINT, ADAPTER, TOKENIZER, ARCHITECTURE, PROMPTS, TEACHER),
    "rehearse": (CHECKPOINT, TOKENIZER, ARCHITECTURE, PROMPTS),
}
"""By command, the keys whose files it reads; the other commands read none."""
RUNS = {"train", "sft", "evaluate"}
WEIGHTS = RUNS | {"check"}  # the commands that read a checkpoint's
README = "README.md"
CONFIG_FILE = "config.json"
LICENCES = ("LICENSE*", "NOTICE*")  # an export has them too
TEXT_SUFFIXES = (".json", ".model", ".txt", ".jinja")  # of a tokenizer's files


def with_local_files(
    config: Config, command: str, run_dir: str | None = None
) -> tuple[Config, dict[str, Any]]:
    """Return `config` with paths for names, and by key each name with its commit.

    Fetches what the command needs and the cache lacks: for `plan` and `rehearse` no weights, for
    `plan` no prompts. A run that resumes keeps its commits, wherever a branch is now, and the day
    that its chat template says. ValueError, in one line, for a name that is wrong or cannot be had.
    """
    pinned: dict[str, Any] = {}
    saved = partial(_saved_config, config.checkpoint.resume, run_dir)
    for key in NEEDED.get(command, ()):
        value = config.algorithm.reference if key == TEACHER else attrgetter(key)(config)
        paths, names = _texts(value), _texts(value)
        if not any(map(is_hub_name, paths.values())):
            continue
        for place, text in _texts(value).items():
            if is_hub_name(text):
                name = _keep(read_name(key, text, _kind(key)), saved)
                path, name = _find(config, command, key, name) or (text, name)
                paths[place], names[place] = str(path), str(name)
        section, _, field = key.partition(".")
        changed = replace(getattr(config, section), **{field: _like(value, paths)})
        config = replace(config, **{section: changed})
        pinned[key] = _like(value, names)
    config = with_own_template(config) if command in NEEDED else config
    if command in RUNS:
        config = with_date(config, saved)
        pinned |= {} if config.data.date is None else {DATE: config.data.date}
    return _with_lora(config), pinned


def repeatable_inputs(config: Config, pinned: dict[str, Any]) -> dict[str, Any]:
    """Return by key the inputs that `config` names, as they are found from any folder: names of the
    Hub as they are pinned, paths absolute."""
    found: dict[str, Any] = {}
    for key in (*NEEDED["train"], LENGTHS, TEMPLATE):
        of_teacher = config.algorithm.reference if key == TEACHER else None
        value = pinned.get(key, of_teacher if key == TEACHER else attrgetter(key)(config))
        texts = {
            place: text if is_hub_name(text) or text == TASK else resolve(config, text)
            for place, text in _texts(value).items()
            if text
        }
        if texts:
            found[key] = _like(value, texts)
    return found


def _kind(key: str) -> Kind:
    return "dataset" if key in DATA_SETS else "model"


def _texts(value: Any) -> dict[Any, Any]:
    """Return what a key holds, by its name, its place in a list, or 0."""
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value if isinstance(value, list) else [value]))


def _like(value: Any, texts: dict[Any, Any]) -> Any:
    """Return `texts` in the form that `value` had before `_texts`."""
    if isinstance(value, dict):
        return texts
    return [*texts.values()] if isinstance(value, list) else texts[0]


def _with_lora(config: Config) -> Config:
    """Set `trainer.lora` as the adapter to start from has it, unless the recipe gives a rank; its
    dropout is the recipe's in any case. ValueError if the recipe has another alpha or target."""
    folder, given = Path(config.recipe_dir, config.model.adapter), config.trainer.lora
    if not config.model.adapter or given.is_used or not folder.is_dir():
        return config
    lora, unset = read_lora(folder), LoraConfig()
    for name in ("alpha", "targets"):
        got, wanted = getattr(given, name), getattr(lora, name)
        must = f"be left out, or {wanted} as the adapter of model.adapter has it"
        given.require(got in (wanted, getattr(unset, name)), name, must)
    lora = replace(lora, dropout=given.dropout)
    return replace(config, trainer=replace(config.trainer, lora=lora))


def _keep(name: HubName, saved: Callable[[], dict[str, Any]]) -> HubName:
    """Return `name` with the commit that it has in the config of the run that resumes."""
    if name.is_pinned:
        return name
    config = saved()
    for key in NEEDED["train"]:
        section, _, field = key.partition(".")
        inside = config.get(section)
        value = inside.get(field) if isinstance(inside, dict) else None
        for text in filter(is_hub_name, _texts(value).values()):
            kept = read_name(key, text, _kind(key))
            if kept.is_pinned and name.at(str(kept.revision)) == kept:
                return kept
    return name


def path_here(key: str, text: str) -> Path | None:
    """Return the file or folder that the value of a key means, if it is on this machine: a path, or
    a name whose files were fetched before. ValueError for a name of a wrong form."""
    if not is_hub_name(text):
        return Path(text) if Path(text).exists() else None
    name = read_name(key, text, _kind(key))
    with suppress(ValueError):
        if _kind(key) == "model":
            return fetch_model(key, name, has_weights=False, is_offline=True)[0]
        return fetch_rows(key, name, TRAIN if key == PROMPTS else None, is_offline=True)[0]
    return None


def _find(config: Config, command: str, key: str, name: HubName) -> tuple[Path, HubName] | None:
    """Return the file or folder of `name`; None for what a forecast does without."""
    find: Callable[..., tuple[Path, HubName]]
    if key in DATA_SETS:
        find = partial(fetch_rows, key, name, TRAIN if key == PROMPTS else None)
    else:
        choose = (CONFIG_FILE, END_FILE).__contains__ if key == ARCHITECTURE else is_text
        # An adapter's are few, and no adapter without them is read.
        has_weights = key == ADAPTER or (key in (CHECKPOINT, TEACHER) and command in WEIGHTS)
        find = partial(fetch_model, key, name, choose, has_weights=has_weights)
    has_architecture = key == CHECKPOINT and config.model.architecture is not None
    if command == "plan" and (key == PROMPTS or has_architecture):
        with suppress(ValueError):
            return find(is_offline=True)
        return None
    return find()


def is_text(path: str) -> bool:
    """Say whether a file of a model is config, index, tokenizer or licence: of the top folder, and
    no code."""
    parts = PurePosixPath(path).parts
    if len(parts) == 2 and parts[0] in TOKENIZER_FILES:  # the folder of more chat templates
        return path.endswith(TEXT_SUFFIXES)
    is_tokenizer = any(fnmatchcase(path, pattern) for pattern in TOKENIZER_FILES)
    is_licence = any(fnmatchcase(path, pattern) for pattern in LICENCES)
    is_file = path.endswith(".json") or (is_tokenizer and path.endswith(TEXT_SUFFIXES))
    return len(parts) == 1 and (is_file or is_licence)


def fetch_model(
    key: str,
    name: HubName,
    is_needed: Callable[[str], bool] = is_text,
    *,
    has_weights: bool,
    is_offline: bool = False,
) -> tuple[Path, HubName]:
    """Return the folder of a model with the files that are needed, and perhaps the weights, and its
    name with the commit. ValueError as `with_local_files`."""

    def choose_weights(paths: Collection[str]) -> list[str]:
        names = [ADAPTER_FILE] if key == ADAPTER else weight_names(folder)
        if others := [each for each in names if not each.endswith(".safetensors")]:
            raise ValueError(f"{key} must have safetensors in its index, got {others[0]!r}")
        if not {*names} <= {*paths}:
            others = [path for path in paths if path.endswith((".bin", ".pt", ".pth"))]
            got = f"{others[0]} alone, which is a pickle" if others else "no such files"
            raise ValueError(f"{key} must hold {min({*names} - {*paths})}, got {name} with {got}")
        return names

    choose_texts = partial(filter, is_needed)
    files, pinned = fetch_files(key, name, choose_texts, is_offline=is_offline)
    wanted = ADAPTER_CONFIG if key == ADAPTER else CONFIG_FILE
    beside = [path for path in files if path.name == wanted]
    if key != TOKENIZER and not beside:
        raise ValueError(f"{key} must hold {wanted}, got {name} without")
    if not files:
        raise ValueError(f"{key} must hold a tokenizer, got {name} without")
    folder = next(path.parent for path in (*beside, *files))
    if has_weights:
        fetch_files(key, pinned, choose_weights, is_offline=is_offline)
    return folder, pinned


def fetch_rows(
    key: str, name: HubName, split: str | None, *, is_offline: bool = False
) -> tuple[Path, HubName]:
    """Return the file of a split, or a folder with its files in their order, and its name with the
    commit; `split` is that of a name without one. ValueError as `with_local_files`."""

    def choose(paths: Collection[str]) -> list[str]:
        path = "/".join(name.path)
        if path.endswith(SUFFIXES) and path in paths:
            return [path]
        try:
            return choose_files(readme, paths, name.path, split)
        except ValueError as error:
            raise ValueError(f"{key} must {error}, got {name}") from None

    texts, pinned = fetch_files(key, name, lambda paths: {README} & {*paths}, is_offline=is_offline)
    readme = texts[0].read_text("utf-8", "replace") if texts else ""
    files, pinned = fetch_files(key, pinned, choose, is_offline=is_offline)
    return _linked(key, pinned, files), pinned


def _linked(key: str, pinned: HubName, files: list[Path]) -> Path:
    """Make a link to the file, or a folder of links whose names have the order of the files; the
    name of either is that of the data set and the split."""
    from huggingface_hub import cached_assets_path

    owner, _, called = "/".join((pinned.repository, *pinned.path)).partition("/")
    called = called.replace("/", "-").removesuffix(files[0].suffix)
    digest = hashlib.sha256("\n".join(map(str, files)).encode()).hexdigest()[:12]
    try:
        folder = cached_assets_path("llamarl", f"datasets--{owner}", digest)
        if len(files) == 1:
            return _link(folder / f"{called}{files[0].suffix}", files[0])
        for i, path in enumerate(files):
            _link(folder / called / f"{i:05d}{path.suffix}", path)
    except OSError as error:
        if len(files) == 1:
            return files[0]
        must = "be where links to its files can be made (HF_ASSETS_CACHE)"
        raise ValueError(f"{key} must {must}, got {error} for {pinned}") from error
    return folder / called


def _link(link: Path, path: Path) -> Path:
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # made before: the folder's name has what it leads to
        os.symlink(path, link)
    return link


def _saved_config(resume: str, run_dir: str | None) -> dict[str, Any]:
    """Return the config of the run that resumes, which is in `run_dir` or has the checkpoint
    `resume`; empty if there is none."""
    folders = {"off": None, "auto": run_dir}
    folder = folders.get(resume, str(Path(resume).resolve().parent.parent))
    path = Path(folder, provenance.CONFIG_FILE) if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        saved = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} must be the config of the run, got {reason}") from error
    return saved if isinstance(saved, dict) else {}
