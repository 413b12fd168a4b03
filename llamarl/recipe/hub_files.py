"""Files of the Hugging Face Hub, fetched into the cache of huggingface_hub.

Owns: which commit a name means, that its files are there and hold the bytes that the Hub lists, and
one line for each way in which that fails. Does not own: transfers, progress bars, tokens and the
cache, which are that library's. Invariant: only the files that the caller chose are fetched; what
is returned was compared with its hash since it was written.

The cache calls a file by its hash: the SHA-256 of large files, git's SHA-1 of small ones. The
library compares sizes alone.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from llamarl.config.check import require
from llamarl.recipe.hub_names import HubName

GRACE_S = 2.0  # for threads to remove what they have of a file when a signal ends the command
ANSWER_S = 60.0  # for one list of the Hub
PACE_BYTES, PACE_S = 2**16, 60.0  # of a transfer: so many bytes within so many seconds, at least
MAX_FILES = 1_000_000  # of one commit
MAX_THREADS = 8  # more would wait for the disk
MAX_REASON_CHARS = 200
HASHES = {64: "sha256", 40: "sha1"}  # by the digits of a file's name in the cache
T = TypeVar("T")
Choose = Callable[[Collection[str]], Collection[str]]
"""Paths in a repository -> those that are needed."""


def fetch_files(
    key: str, name: HubName, choose: Choose, *, is_offline: bool = False
) -> tuple[list[Path], HubName]:
    """The files of `name` that `choose` picks, in its order, and `name` with its commit.

    Fetches what the cache lacks, or nothing if `is_offline`. ValueError, in one line with `key`, if
    a file cannot be had, there is no room for all, or one holds other bytes than the Hub lists.
    """
    from huggingface_hub import HfApi

    with _explained(key, name):
        resolve = partial(HfApi().resolve_revision, name.repository, repo_type=name.kind)
        found = _ask(lambda: resolve(revision=name.revision, local_files_only=is_offline))
        pinned = name.at(found.resolved)
    sizes = list_files(key, pinned, is_offline=is_offline)
    chosen = [*choose(sizes)]
    folder = _cached_folder(pinned)
    files = [folder / path for path in chosen]
    if missing := [path for path in chosen if not (folder / path).exists()]:
        _check_space(key, name, sum(sizes[path] for path in missing))
        with _explained(key, name):
            _download(pinned, missing, is_offline)
    _verify(key, pinned, files)
    return files, pinned


def _download(pinned: HubName, paths: list[str], is_offline: bool) -> None:
    """Fetch these files; raises what the library does, and TimeoutError for a Hub that sends too
    slowly."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    is_ended, num_bytes = threading.Event(), 0

    class Bar(tqdm):
        """What the library's threads call with all that they have fetched."""

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
    """What the library's `call` returns; TimeoutError if that takes too long."""

    def look() -> None:
        raise TimeoutError(f"the Hub gave no whole answer in {ANSWER_S:g} s")

    return _in_thread(call, threading.Event(), ANSWER_S, look)


def _in_thread(
    call: Callable[[], T], is_ended: threading.Event, look_s: float, look: Callable[[], None]
) -> T:
    """What the library's `call` returns, or what it raises. It waits for its threads whatever
    happens, so it has one here: a signal, or what `look` raises in each interval of `look_s`, ends
    this call at once, and the threads once they see `is_ended`."""

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
    """Path -> bytes of all files of a commit. Where neither cache nor Hub has the list, it is of
    the files that are in the cache. ValueError, in one line with `key`, if there is none."""
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
    """Path -> bytes of what the Hub lists; TypeError for what is no such list."""
    found = {each.path: each.size for each in files}
    for path, size in found.items():
        if type(path) is not str or type(size) is not int or size < 0:
            raise TypeError(f"a list of paths and their bytes, got {path!r:.50} with {size!r:.50}")
    return found


def _cached_folder(pinned: HubName) -> Path:
    """Where the cache has the files of a commit, if it has any."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    of_repository = repo_folder_name(repo_id=pinned.repository, repo_type=pinned.kind)
    return Path(constants.HF_HUB_CACHE, of_repository, "snapshots", str(pinned.revision))


def _check_space(key: str, name: HubName, num_bytes: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    with _explained(key, name):
        there = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(there).free
    must = f"be in a cache with room for {num_bytes:,} bytes more (HF_HOME says where it is)"
    if free < num_bytes:
        raise ValueError(f"{key} must {must}, got {name} and {free:,} bytes free at {cache}")


def _verify(key: str, pinned: HubName, paths: list[Path]) -> None:
    """ValueError, naming the first, unless these files hold what the cache calls them by.

    A file is read once after it was written: an empty file beside the cache says that it was. What
    is wrong is removed, so that the same command fetches it again.
    """
    records = _records_of(pinned)
    unread = []
    for path in paths:
        require(path.is_file(), key, f"hold {path.name} ({pinned.download_command()})", str(pinned))
        blob = path.readlink().name if path.is_symlink() else ""
        record = records / blob if records is not None else None
        is_read = record is not None and _is_newer(record, path)
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
                with suppress(OSError):  # a cache that cannot be written to is read each time
                    record.touch()


def _records_of(pinned: HubName) -> Path | None:
    """The folder of what was read; None where none can be made."""
    from huggingface_hub import cached_assets_path

    repository = pinned.repository.replace("/", "--")
    with suppress(OSError):
        return cached_assets_path("llamarl", "verified", f"{pinned.kind}s--{repository}")
    return None


def _is_newer(record: Path, path: Path) -> bool:
    try:
        return record.stat().st_mtime_ns >= path.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _digest(unread: tuple[Path, str, Path | None]) -> str:
    path, blob, _ = unread
    with path.open("rb") as file:
        if HASHES[len(blob)] == "sha256":
            return hashlib.file_digest(file, "sha256").hexdigest()
        git = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        return hashlib.file_digest(file, lambda: git).hexdigest()


def _errors() -> tuple[type[Exception], ...]:
    """What the library and its transfers raise for a Hub that is not there or answers otherwise."""
    from huggingface_hub import errors

    of_hub = (errors.HTTPError, errors.RevisionResolutionError, errors.EntryNotFoundError)
    wrong = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
    return (*of_hub, *wrong, OSError, RuntimeError)


@contextmanager
def _explained(key: str, name: HubName) -> Iterator[None]:
    """Calls of the library, whose errors become one line each."""
    try:
        yield
    except _errors() as error:
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
