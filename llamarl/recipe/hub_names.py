"""What a name such as `hf:ORG/NAME@REVISION` says: a model or a data set of the Hugging Face Hub.

Owns: the form of such names. Does not own: files (`hub_files.py`), or which files a split is
(`hub_splits.py`). Invariant: a name that is pinned to a commit means the same files for ever.
"""

import re
import shlex
from dataclasses import dataclass, replace
from typing import Literal

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
    """A repository of the Hub; `path` is what of it: nothing of a model, and of a data set a split,
    a config and a split, or a file. Without `revision` it is the default branch."""

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

    def at(self, revision: str) -> "HubName":
        """The same of another revision."""
        return replace(self, revision=revision)

    def download_command(self) -> str:
        """What puts the repository into the cache."""
        options = ["--repo-type", "dataset"] if self.kind == "dataset" else []
        options += ["--revision", self.revision] if self.revision else []
        return shlex.join(["hf", "download", self.repository, *options])


def is_hub_name(text: object) -> bool:
    """Whether this value of a key is such a name, perhaps a wrong one, and no path."""
    return isinstance(text, str) and text.startswith(PREFIX)


def read_name(key: str, text: str, kind: Kind) -> HubName:
    """The name `text` that `key` has. ValueError for one of no such form."""
    found = NAME.fullmatch(text.removeprefix(PREFIX))
    path = tuple(found[2].split("/")[1:]) if found else ()
    if found is None or {"..", "."} & {*path} or (kind == "model" and path):
        raise ValueError(f"{key} must be {FORMS[kind]}, got {text!r}")
    return HubName(kind=kind, repository=found[1], path=path, revision=found[3])
