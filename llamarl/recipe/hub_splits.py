"""Which files of a data set's repository are a split.

Owns: the two conventions of the Hub: `configs` at the head of README.md, and the names of files.
Does not own: fetching (`hub_files.py`) or reading rows (`environments/prompts.py`). Invariant: only
Parquet, JSON lines and Arrow files are ever part of a split.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import yaml

SUFFIXES = (".parquet", ".jsonl", ".arrow")
ONLY = "default"  # the config of a repository that names none
TRAIN = "train"
MAX_SHOWN = 12  # configs and splits in an error
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?")
Splits = dict[str, dict[str, list[str]]]
"""Config -> split -> its files, in order."""


def is_rows_file(path: str) -> bool:
    """Whether this file of a repository holds rows that a recipe can read."""
    return path.endswith(SUFFIXES)


def read_splits(readme: str, paths: Collection[str]) -> Splits:
    """The splits of a repository with these files, by `configs` at the head of its README.md or, if
    there are none, by the names of the files. ValueError for a damaged head."""
    files = sorted(path for path in paths if is_rows_file(path))
    listed = {each["config_name"]: _splits_of(each, files) for each in _configs(readme)}
    found = {name: splits for name, splits in listed.items() if splits}
    if found or not files:
        return found
    for path in files:
        config, split = _by_name(PurePosixPath(path))
        found.setdefault(config, {}).setdefault(split, []).append(path)
    return found


def default_config(readme: str, splits: Splits) -> str | None:
    """The config that a name without one means: marked as the default, so called, or the only."""
    marked = [each["config_name"] for each in _configs(readme) if each.get("default") is True]
    return next((name for name in (*marked, ONLY) if name in splits), _single(splits))


def choose_files(
    path: Sequence[str], splits: Splits, default: str | None, default_split: str | None
) -> list[str]:
    """The files that `path` means: nothing (`default_split` of the `default` config), a split or a
    config, or a config and a split. ValueError, which says what there is, if it means none."""
    config, split = default, default_split
    if len(path) == 1 and path[0] in splits and path[0] not in splits.get(default or "", {}):
        config = path[0]
    elif path:
        config, split = "/".join(path[:-1]) or default, path[-1]
    those = splits.get(config or "", {})
    found = those.get(split or _single(those) or "")
    if found is None:
        raise ValueError(_nothing(splits))
    kinds = {PurePosixPath(each).suffix for each in found}
    if len(kinds) > 1:
        raise ValueError(f"name a file, as {config}/{split} has {' and '.join(sorted(kinds))}")
    return found


def _configs(readme: str) -> list[Mapping[str, Any]]:
    """The entries of `configs` that have a name."""
    listed = _head(readme).get("configs")
    every = listed if isinstance(listed, list) else []
    return [
        each for each in every if isinstance(each, dict) and type(each.get("config_name")) is str
    ]


def _head(readme: str) -> Mapping[str, Any]:
    """The YAML between the first two lines of dashes."""
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", readme.replace("\r\n", "\n"), re.S)
    try:
        head = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"have YAML at the head of README.md, got {reason}") from error
    return head if isinstance(head, dict) else {}


def _splits_of(config: Mapping[str, Any], files: Sequence[str]) -> dict[str, list[str]]:
    """Split -> files of one entry of `configs`."""
    folder = str(config.get("data_dir") or "").strip("/")
    inside = [path for path in files if not folder or path.startswith(f"{folder}/")]
    if config.get("data_files") is None:
        found: dict[str, list[str]] = {}
        for path in inside if folder else []:
            found.setdefault(_by_name(PurePosixPath(path))[1], []).append(path)
        return found
    patterns = _patterns(config["data_files"])
    chosen = {split: _matching(each, folder, files) for split, each in patterns.items()}
    return {split: paths for split, paths in chosen.items() if paths}


def _patterns(data_files: object) -> dict[str, list[str]]:
    """Split -> patterns: of one text or several, of a mapping by split, or of entries with a split
    and a path."""
    match data_files:
        case str():
            return {TRAIN: [data_files]}
        case dict():
            return {str(split): _texts(value) for split, value in data_files.items()}
        case list() if all(isinstance(each, dict) for each in data_files):
            return {str(each.get("split", TRAIN)): _texts(each.get("path")) for each in data_files}
    return {TRAIN: _texts(data_files)}


def _texts(value: object) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is str]


def _matching(patterns: Sequence[str], folder: str, files: Sequence[str]) -> list[str]:
    """The files that match, in the order of the patterns."""
    full = [f"{folder}/{each.removeprefix('./')}".lstrip("/") for each in patterns]
    return list(dict.fromkeys(path for each in full for path in files if _matches(path, each)))


def _matches(path: str, pattern: str) -> bool:
    """As of a file system: `*` stays in its folder, and `**` does not."""
    if "**" in pattern:
        return fnmatchcase(path, pattern.replace("**/", "*"))
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _by_name(path: PurePosixPath) -> tuple[str, str]:
    """Config and split by the file's name: `CONFIG/SPLIT-00000-of-00002.parquet`, `SPLIT.jsonl`, or
    `CONFIG/SPLIT/0000.parquet`. A folder `data` is no config."""
    folders = [name for name in path.parts[:-1] if name != "data"]
    shard = SHARD.fullmatch(path.stem)
    split = shard[1] if shard else path.stem
    if split.isdigit() and folders:
        split = folders.pop()
    return "/".join(folders) or ONLY, split


def _single(names: Mapping[str, object]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


def _nothing(splits: Splits) -> str:
    """What there is instead."""
    listed = [f"{config}/{split}" for config, each in splits.items() for split in each]
    more = f" and {len(listed) - MAX_SHOWN} more" if len(listed) > MAX_SHOWN else ""
    if not listed:
        kinds = ", ".join(SUFFIXES)
        return f"have files of splits ({kinds}, by `configs` in README.md or their names), got none"
    return f"name one of the splits {', '.join(listed[:MAX_SHOWN])}{more}"
