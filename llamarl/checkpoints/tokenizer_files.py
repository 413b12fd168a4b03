"""The files of a tokenizer, and copies of them.

Owns: which files of a checkpoint's folder are its tokenizer. Does not own: reading them
(`data/tokenizer.py`). Invariant: a run's folder has the tokenizer that the run has used, so its
rollouts can be read wherever the folder is.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates",
)
"""By pattern; an export has them too."""
END_FILE = "generation_config.json"  # may name ids that end a sequence
TOKENIZER_FOLDER = "tokenizer"  # of a run's folder


def copy_files(source: str | Path, patterns: Iterable[str], folder: Path) -> None:
    """Copy what matches of `source` into `folder`, which exists, over what is there."""
    for pattern in patterns:
        for path in Path(source).glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif path.is_file():  # a tokenizer loads without what cannot be read
                shutil.copyfile(path, folder / path.name)


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Those of a folder, in one order."""
    paths = {path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)}
    inner = {path for each in paths if each.is_dir() for path in each.rglob("*")}
    return sorted(path for path in paths | inner if path.is_file())


def keep_tokenizer(source: str | Path, run_dir: str | Path) -> None:
    """Copy a tokenizer into the folder of a run. OSError if the disk is full."""
    folder = Path(run_dir, TOKENIZER_FOLDER)
    folder.mkdir(exist_ok=True)
    copy_files(source, (*TOKENIZER_FILES, END_FILE), folder)
