"""Which pretrained checkpoint is fine-tuned. Invariant: everything that a run knows about the
architecture comes from the checkpoint's own config.json."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.check import check_fields, require


@dataclass(kw_only=True)
class ModelConfig:
    """The checkpoint, in the Hugging Face layout."""

    checkpoint: str = ""
    """Folder with config.json and safetensors files; relative to the recipe's folder."""
    architecture: str | None = None
    """Folder with a config.json of the same architecture, so that the recipe can be planned where
    the checkpoint is not; a run refuses a checkpoint that differs from it (other ids that end a
    completion do not matter)."""
    tokenizer: str | None = None
    """Folder of the tokenizer, if it is not the checkpoint's own."""

    def __post_init__(self) -> None:
        check_fields("model", self)
        require(
            bool(self.checkpoint), "model.checkpoint", "name a checkpoint folder", self.checkpoint
        )
