"""Prompts of a file, as a run reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl.config import DataConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments.prompts import read_rows, tokenize_rows
from llamarl.types import Prompt


def read_prompts(
    path: str | Path, config: DataConfig, tokenizer: Tokenizer, **options: Any
) -> list[Prompt]:
    return tokenize_rows(read_rows(Path(path)), path, config, tokenizer, **options)
