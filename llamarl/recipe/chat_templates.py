"""The chat template of a run: a file of the recipe's own, and the day that it says.

Owns: what `data.chat_template` and `data.date` stand for. Does not own: rendering
(`data/tokenizer.py`). Invariant: prompts of a run are the same on the day on which it resumes; an
export has the template that was trained with.
"""

import datetime
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.checkpoints.tokenizer_files import END_FILE, tokenizer_files
from llamarl.config import Config
from llamarl.data.template_day import TODAY
from llamarl.recipe.prompt_inputs import resolve

DATE = "data.date"
TEMPLATE_FILE = "chat_template.jinja"


def with_own_template(config: Config) -> Config:
    """With a tokenizer whose template is that of `data.chat_template`: a folder of links in the
    cache. ValueError, in one line, for a file that cannot be read."""
    if config.data.chat_template is None:
        return config
    path = Path(resolve(config, config.data.chat_template))
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        must = "data.chat_template must name a file of UTF-8 text"
        raise ValueError(f"{must}, got {error}") from error
    source = Path(tokenizer_folder(config))
    files = [each for each in (*tokenizer_files(source), source / END_FILE) if each.is_file()]
    others = [each for each in files if not _is_template(each, source)]
    key = hashlib.sha256("\n".join([str(source), *map(str, others)]).encode() + text)
    from huggingface_hub import cached_assets_path

    try:
        folder = cached_assets_path("llamarl", "tokenizers", key.hexdigest()[:12])
        for each in others:
            with suppress(FileExistsError):
                os.symlink(each, folder / each.name)
        unfinished = folder / f"{TEMPLATE_FILE}.{os.getpid()}"
        unfinished.write_bytes(text)
        unfinished.rename(folder / TEMPLATE_FILE)
    except OSError as error:
        must = "be used where links can be made (HF_ASSETS_CACHE)"
        raise ValueError(f"data.chat_template must {must}, got {error}") from error
    return replace(config, model=replace(config.model, tokenizer=str(folder)))


def with_date(config: Config, saved: Callable[[], Mapping[str, Any]]) -> Config:
    """With the day that the chat template gets, if it asks for one: the recipe's, that of the run
    whose config `saved` gives, or today."""
    folder = Path(tokenizer_folder(config))
    if config.data.date is not None or not any(map(_is_dated, tokenizer_files(folder))):
        return config
    data = saved().get("data")
    kept = data.get("date") if isinstance(data, dict) else None
    date = str(kept or datetime.date.today().isoformat())
    return replace(config, data=replace(config.data, date=date))


def tokenizer_folder(config: Config) -> str:
    """The folder of the tokenizer."""
    return resolve(config, config.model.tokenizer or config.model.checkpoint)


def _is_template(path: Path, folder: Path) -> bool:
    return path.name == TEMPLATE_FILE or path.parent != folder


def _is_dated(path: Path) -> bool:
    is_text = path.suffix == ".jinja" or path.name == "tokenizer_config.json"
    return is_text and TODAY.encode() in path.read_bytes()
