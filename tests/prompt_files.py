"""Prompts of a file, as a run reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl.core.config import DataConfig
from llamarl.core.records import Prompt
from llamarl.model.tokenizer import Tokenizer
from llamarl.prompts.cache import PromptSource, read_source
from llamarl.prompts.files import find_files
from llamarl.prompts.rows import PromptTable


def source_of(
    path: str | Path, config: DataConfig, tokenizer: Tokenizer, **options: Any
) -> PromptSource:
    fields = {"kinds": {}} | options
    return PromptSource(
        name="p",
        place=str(path),
        files=find_files(Path(path)),
        data=config,
        tokenizer=tokenizer,
        **fields,
    )


def read_prompts(
    path: str | Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    most: int | None = None,
    **options: Any,
) -> list[Prompt]:
    source = source_of(path, config, tokenizer, **options)
    return [*PromptTable([read_source(source, most=most)])]
