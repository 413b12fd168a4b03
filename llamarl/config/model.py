"""The pretrained checkpoint that is fine-tuned. A run takes the architecture from the checkpoint's
own config.json."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.check import Section


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The checkpoint, in the Hugging Face layout."""

    key = "model"

    checkpoint: str = ""
    """Folder with config.json and safetensors files; relative to the recipe's folder."""
    architecture: str | None = None
    """Folder with a config.json of the same architecture, so that the recipe can be planned without
    the checkpoint; a run refuses a checkpoint that differs from it (except in the ids that end a
    completion)."""
    tokenizer: str | None = None
    """Folder of the tokenizer, if it is not the checkpoint's own."""

    def check(self) -> None:
        self.require(bool(self.checkpoint), "checkpoint", "name a checkpoint folder")
