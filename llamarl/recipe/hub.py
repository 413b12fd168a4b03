"""Names of the Hugging Face Hub: models and data sets, fetched into the cache of
huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import yaml

from llamarl.core.fields import require
from llamarl.prompts.files import SUFFIXES

PREFIX = "hf:"
PART = r"[A-Za-z0-9_][\w.-]*"
REPOSITORY = re.compile(f"{PART}/{PART}")
NAME = re.compile(rf"({PART}/{PART})((?:/[^/@\s]+)*)(?:@([^@\s]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
Kind = Literal["model", "dataset"]
FORMS: dict[Kind, str] = {
    "model": "hf:ORG/NAME or hf:ORG/NAME@REVISION",
    "dataset": "hf:ORG/NAME, /SPLIT, /CONFIG/SPLIT or /FILE after it, and @REVISION at the end",
}


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A name stands for a repository of the Hub. `path` says what of it: nothing of a model, and of
    a data set a split, a config and a split, or a file. Without `revision` it is the default
    branch."""

    kind: Kind
    repository: str
    path: tuple[str, ...] = ()
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return PREFIX + "/".join((self.repository, *self.path)) + at

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which does not move."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubName:
        """Return the name with another revision."""
        return replace(self, revision=revision)

    def download_command(self) -> str:
        """Return the command that puts the repository into the cache."""
        options = ["--repo-type", "dataset"] if self.kind == "dataset" else []
        options += ["--revision", self.revision] if self.revision else []
        return shlex.join(["hf", "download", self.repository, *options])


def is_hub_name(text: object) -> bool:
    """Say whether this value of a key is such a name, perhaps a wrong one, and no path."""
    return isinstance(text, str) and text.startswith(PREFIX)


def read_name(key: str, text: str, kind: Kind) -> HubName:
    """Return the name `text` that `key` has. ValueError for one of no such form."""
    found = NAME.fullmatch(text.removeprefix(PREFIX))
    path = tuple(found[2].split("/")[1:]) if found else ()
    if found is None or {"..", "."} & {*path} or (kind == "model" and path):
        raise ValueError(f"{key} must be {FORMS[kind]}, got {text!r}")
    return HubName(kind=kind, repository=found[1], path=path, revision=found[3])


ONLY = "default"  # the config of a repository that names none
TRAIN = "train"
MAX_SHOWN = 12  # configs and splits in an error
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?")
HEAD = re.compile(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)


def choose_files(
    readme: str, paths: Collection[str], path: Sequence[str], default_split: str | None
) -> list[str]:
    """Return the files that `path` means of a repository with these `paths`: nothing
    (`default_split` of the default config), a split or a config, or a config and a split. They are
    given by `configs` at the head of README.md or, if there are none, by the names of the files.

    ValueError, which says what there is, if it means none, or for a damaged head.
    """
    configs = _read_configs(readme)
    files = sorted(each for each in paths if each.endswith(SUFFIXES))
    listed = {each["config_name"]: _splits_of(each, files) for each in configs}
    splits = {name: found for name, found in listed.items() if found}
    for file in files if not splits else ():
        config, split = _by_name(PurePosixPath(file))
        splits.setdefault(config, {}).setdefault(split, []).append(file)
    marked = [each["config_name"] for each in configs if each.get("default") is True]
    default = next((name for name in (*marked, ONLY) if name in splits), _single(splits))
    chosen, split_name = default, default_split
    if len(path) == 1 and path[0] in splits and path[0] not in splits.get(default or "", {}):
        chosen = path[0]
    elif path:
        chosen, split_name = "/".join(path[:-1]) or default, path[-1]
    those = splits.get(chosen or "", {})
    found = those.get(split_name or _single(those) or "")
    if found is None:
        names = [f"{config}/{split}" for config, each in splits.items() for split in each]
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        if names:
            raise ValueError(f"name one of the splits {', '.join(names[:MAX_SHOWN])}{more}")
        by = f"({', '.join(SUFFIXES)}, by `configs` in README.md or their names)"
        raise ValueError(f"have files of splits {by}, got none")
    kinds = {PurePosixPath(each).suffix for each in found}
    if len(kinds) > 1:
        raise ValueError(f"name a file, as {chosen}/{split_name} has {' and '.join(sorted(kinds))}")
    return found


def _read_configs(readme: str) -> list[Mapping[str, Any]]:
    """Return the entries of `configs` that have a name, of the YAML between the first two lines of
    dashes."""
    found = HEAD.match(readme.replace("\r\n", "\n"))
    try:
        head = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"have YAML at the head of README.md, got {reason}") from error
    listed = head.get("configs") if isinstance(head, dict) else None
    every = listed if isinstance(listed, list) else []
    return [
        each for each in every if isinstance(each, dict) and type(each.get("config_name")) is str
    ]


def _splits_of(config: Mapping[str, Any], files: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split of an entry of `configs`. Its `data_files` are one text or
    several, a mapping by split, or entries with a split and a path."""
    folder = str(config.get("data_dir") or "").strip("/")
    found: dict[str, list[str]] = {}
    named = config.get("data_files")
    if named is None:
        for path in files:
            if folder and path.startswith(f"{folder}/"):
                found.setdefault(_by_name(PurePosixPath(path))[1], []).append(path)
        return found
    entries = [*named.items()] if isinstance(named, dict) else [(TRAIN, named)]
    if isinstance(named, list) and all(isinstance(each, dict) for each in named):
        entries = [(each.get("split", TRAIN), each.get("path")) for each in named]
    for split, given in entries:
        texts = [t for t in (given if isinstance(given, list) else [given]) if type(t) is str]
        patterns = [f"{folder}/{each.removeprefix('./')}".lstrip("/") for each in texts]
        paths = dict.fromkeys(path for each in patterns for path in files if _matches(path, each))
        found[str(split)] = [*paths]
    return {split: paths for split, paths in found.items() if paths}


def _matches(path: str, pattern: str) -> bool:
    """Say whether a path matches as in a file system: `*` stays in its folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(path, pattern.replace("**/", "*"))
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _by_name(path: PurePosixPath) -> tuple[str, str]:
    """Return config and split by the file's name: `CONFIG/SPLIT-00000-of-00002.parquet`,
    `SPLIT.jsonl`, or `CONFIG/SPLIT/0000.parquet`. A folder `data` is no config."""
    folders = [name for name in path.parts[:-1] if name != "data"]
    shard = SHARD.fullmatch(path.stem)
    split = shard[1] if shard else path.stem
    if split.isdigit() and folders:
        split = folders.pop()
    return "/".join(folders) or ONLY, split


def _single(names: Mapping[str, object]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


GRACE_S = 2.0  # for threads to remove what they have of a file when a signal ends the command
ANSWER_S = 60.0  # for one list of the Hub
PACE_BYTES, PACE_S = 2**16, 60.0  # of a transfer: so many bytes within so many seconds, at least
MAX_FILES = 1_000_000  # of one commit
MAX_THREADS = 8  # more would wait for the disk
MAX_REASON_CHARS = 200
HASHES = {64: "sha256", 40: "sha1"}  # by the digits of a file's name in the cache
T = TypeVar("T")
Choose = Callable[[Collection[str]], Iterable[str]]
"""Paths in a repository -> those that are needed."""


def fetch_files(
    key: str, name: HubName, choose: Choose, *, is_offline: bool = False
) -> tuple[list[Path], HubName]:
    """Return the files of `name` that `choose` picks, in its order, and `name` with its commit.

    Fetches what the cache lacks, or nothing if `is_offline`. ValueError, in one line with `key`, if
    a file cannot be had, there is no room for all, or one holds other bytes than the Hub lists.
    """
    from huggingface_hub import HfApi, constants

    with _explained(key, name):
        resolve = partial(HfApi().resolve_revision, name.repository, repo_type=name.kind)
        found = _ask(lambda: resolve(revision=name.revision, local_files_only=is_offline))
        pinned = name.at(found.resolved)
    sizes = list_files(key, pinned, is_offline=is_offline)
    chosen = [*choose(sizes)]
    folder = _cached_folder(pinned)
    files = [folder / path for path in chosen]
    if missing := [path for path in chosen if not (folder / path).exists()]:
        num_bytes, cache = sum(sizes[path] for path in missing), Path(constants.HF_HUB_CACHE)
        with _explained(key, name):
            places = (cache.absolute(), *cache.absolute().parents)
            free = shutil.disk_usage(next(each for each in places if each.exists())).free
        must = f"be in a cache with room for {num_bytes:,} bytes more (HF_HOME says where it is)"
        if free < num_bytes:
            raise ValueError(
                f"{key} must {must}, got {name} and {free:,} bytes free at {places[0]}"
            )
        with _explained(key, name):
            _download(pinned, missing, is_offline)
    _verify(key, pinned, files)
    return files, pinned


def _download(pinned: HubName, paths: list[str], is_offline: bool) -> None:
    """Fetch these files; raise what the library does, and TimeoutError for a Hub that sends too
    slowly."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    is_ended, num_bytes = threading.Event(), 0

    class Bar(tqdm):
        """The library's threads call this bar with all that they have fetched."""

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal num_bytes
            if is_ended.is_set():
                raise InterruptedError("the command has ended")
            num_bytes += int(n or 0)
            return super().update(n)

    def look() -> None:
        nonlocal num_bytes
        if num_bytes < PACE_BYTES:
            raise TimeoutError(f"the Hub sent {num_bytes:,} bytes in {PACE_S:g} s")
        num_bytes = 0

    # So that `update` is called often enough where little comes.
    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, PACE_BYTES)
    fetch = partial(
        snapshot_download,
        pinned.repository,
        repo_type=pinned.kind,
        revision=pinned.revision,
        allow_patterns=[escape(path) for path in paths],
        local_files_only=is_offline,
        tqdm_class=Bar,
    )
    _in_thread(fetch, is_ended, PACE_S, look)


def _ask(call: Callable[[], T]) -> T:
    """Return what the library's `call` returns; TimeoutError if that takes too long."""

    def look() -> None:
        raise TimeoutError(f"the Hub gave no whole answer in {ANSWER_S:g} s")

    return _in_thread(call, threading.Event(), ANSWER_S, look)


def _in_thread(
    call: Callable[[], T], is_ended: threading.Event, look_s: float, look: Callable[[], None]
) -> T:
    """Return what the library's `call` returns, or raise what it raises. It waits for its threads
    whatever happens, so it has one here: a signal, or what `look` raises in each interval of
    `look_s`, ends this call at once, and the threads once they see `is_ended`."""

    def work() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    done: Future[T] = Future()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while not wait([done], look_s).done:
            look()
        return done.result()
    except (KeyboardInterrupt, SystemExit, TimeoutError):
        is_ended.set()
        thread.join(GRACE_S)
        raise


def list_files(key: str, pinned: HubName, *, is_offline: bool = False) -> Mapping[str, int]:
    """Return the bytes of all files of a commit, by path. Where neither cache nor Hub has the list,
    it is of the files that are in the cache. ValueError, in one line with `key`, if there is
    none."""
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    repository, kind, commit = pinned.repository, pinned.kind, pinned.revision
    with suppress(CachedRepoTreeNotFoundError), _explained(key, pinned):
        return _sizes(get_cached_repo_tree(repository, repo_type=kind, revision=commit))
    folder = _cached_folder(pinned)
    paths = [each for each in folder.rglob("*") if each.is_file()]
    there = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    if is_offline:
        return there
    try:
        with _explained(key, pinned):
            ask = partial(HfApi().list_repo_tree, repository, repo_type=kind, revision=commit)
            tree = _ask(lambda: [*islice(ask(recursive=True), MAX_FILES)])
            return _sizes(each for each in tree if isinstance(each, RepoFile))
    except ValueError:
        if not there:
            raise
        return there


def _sizes(files: Iterable[Any]) -> dict[str, int]:
    """Return the bytes by path of what the Hub lists; TypeError for what is no such list."""
    found = {each.path: each.size for each in files}
    for path, size in found.items():
        if type(path) is not str or type(size) is not int or size < 0:
            raise TypeError(f"a list of paths and their bytes, got {path!r:.50} with {size!r:.50}")
    return found


def _cached_folder(pinned: HubName) -> Path:
    """Return where the cache has the files of a commit, if it has any."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=pinned.repository, repo_type=pinned.kind)
    return Path(constants.HF_HUB_CACHE, folder, "snapshots", str(pinned.revision))


def _verify(key: str, pinned: HubName, paths: list[Path]) -> None:
    """Raise a ValueError, naming the first, unless these files hold what the cache calls them by.

    A file is read once after it was written: an empty file beside the cache says that it was. What
    is wrong is removed, so that the same command fetches it again.
    """
    from huggingface_hub import cached_assets_path

    records, unread = None, []
    with suppress(OSError):  # a cache that cannot be written to is read each time
        repository = pinned.repository.replace("/", "--")
        records = cached_assets_path("llamarl", "verified", f"{pinned.kind}s--{repository}")
    for path in paths:
        require(path.is_file(), key, f"hold {path.name} ({pinned.download_command()})", str(pinned))
        blob = path.readlink().name if path.is_symlink() else ""
        record, is_read = records / blob if records is not None else None, False
        with suppress(FileNotFoundError):
            written_ns = path.stat().st_mtime_ns
            is_read = record is not None and record.stat().st_mtime_ns >= written_ns
        if len(blob) in HASHES and not is_read:
            unread.append((path, blob, record))
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(_digest, unread)
        for (path, blob, record), found in zip(unread, digests, strict=True):
            if found != blob:
                for each in (path.resolve(), path.parent / path.readlink(), path):
                    each.unlink(missing_ok=True)
                raise ValueError(
                    f"{key} must get {path.name} of {pinned} as the Hub lists it "
                    f"({HASHES[len(blob)]} {blob[:12]}...), got other bytes ({found[:12]}...): the "
                    "file is removed, and the same command fetches it again"
                )
            if record is not None:
                with suppress(OSError):
                    record.touch()


def _digest(unread: tuple[Path, str, Path | None]) -> str:
    path, blob, _ = unread
    with path.open("rb") as file:
        if HASHES[len(blob)] == "sha256":
            return hashlib.file_digest(file, "sha256").hexdigest()
        git = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        return hashlib.file_digest(file, lambda: git).hexdigest()


@contextmanager
def _explained(key: str, name: HubName) -> Iterator[None]:
    """Make one line of what the library and its transfers raise for a Hub that is not there or
    answers otherwise."""
    from huggingface_hub import errors

    of_hub = (errors.HTTPError, errors.RevisionResolutionError, errors.EntryNotFoundError)
    wrong = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
    try:
        yield
    except (*of_hub, *wrong, OSError, RuntimeError) as error:
        raise ValueError(f"{key} must {_must(name, error)}") from error


def _must(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' * (name.kind == 'dataset')}{name.repository}"
    reason = (" ".join(str(error).split()) or type(error).__name__)[:MAX_REASON_CHARS]
    match error:
        case errors.GatedRepoError():
            return (
                f"be a repository that you may read, got {name}, which is gated: accept its terms "
                f"at {page}, then `hf auth login` once"
            )
        case errors.RevisionNotFoundError():
            return f"name a branch, tag or commit of {page}, got {name}"
        case errors.RepositoryNotFoundError():
            return (
                f"be a {name.kind} of the Hub, got {name}, which is not at {page}, or is private "
                "(then `hf auth login` once)"
            )
        case errors.HfHubHTTPError() if error.response is not None:
            status = error.response.status_code
            return f"be a repository that the Hub gives out, got status {status} for {name}"
        case OSError(errno=int(), strerror=str(words)) if not isinstance(error, ConnectionError):
            cache = constants.HF_HUB_CACHE
            return f"be in a cache that can be written to, got {words} for {name} at {cache}"
    return (
        f"be in the cache at {constants.HF_HUB_CACHE}, or the Hub be reached, got {name}: "
        f"`{name.download_command()}` where there is a network ({reason})"
    )
