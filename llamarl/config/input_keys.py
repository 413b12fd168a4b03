"""The pretrained checkpoint and the prompts. The architecture comes from the checkpoint's own
config.json; the order of prompts is a function of seed and position alone, so a run can resume
anywhere."""

from dataclasses import dataclass, field
from typing import Any

from llamarl.config.check import Section, choice, number


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The checkpoint, in the Hugging Face layout."""

    checkpoint: str = ""
    """Folder with config.json and safetensors files; relative to the recipe's folder."""
    architecture: str | None = None
    """Folder with a config.json of the same architecture, so that the recipe can be planned without
    the checkpoint; a run refuses a checkpoint that differs from it (except in the ids that end a
    completion)."""
    tokenizer: str | None = None
    """Folder of the tokenizer, if it is not the checkpoint's own."""
    adapter: str = ""
    """Folder of an adapter of this checkpoint to start from, as an export or the peft library
    writes it; `trainer.lora` is then the adapter's, if it is not given. Empty: none, or adapters
    that start without effect."""

    def check(self) -> None:
        self.require(bool(self.checkpoint), "checkpoint", "name a checkpoint folder")


@dataclass(kw_only=True)
class DataConfig(Section):
    """Where prompts come from."""

    prompts: str = ""
    """Training prompts: a .jsonl or .parquet file, whose relative path starts at the recipe's
    folder | task (what `prompts` in the recipe's own task.py makes)."""
    held_out: str | None = None
    """Evaluation prompts in the same form; null skips evaluation."""
    options: dict[str, Any] = field(default_factory=dict)
    """What `prompts` in the recipe's own task.py gets, by the names of its arguments."""
    prompt_field: str = "question"
    """Field with the question: text, or for a chat template a list of messages."""
    chat: bool = False
    """Wrap the question in the tokenizer's chat template; else it is plain text."""
    system: str | None = None
    """System message put first; needs `chat`."""
    shuffle: bool = True
    """Take the prompts of each epoch in an order drawn from the run's seed."""
    max_prompt_tokens: int = number(1024, least=1, most=2**24)
    """Longest prompt; prompts are never cut."""
    too_long: str = choice("error", "drop")
    """What a prompt of more tokens is, or of more than `sampling.max_tokens` (held-out:
    `evaluation.max_tokens`) leaves of `generator.max_model_len`: error (it names the line) | drop
    (such prompts of both files are left out, and a line says how many)."""

    def check(self) -> None:
        self.require(bool(self.prompts), "prompts", "name a .jsonl or .parquet file, or task")
        is_read = "task" in (self.prompts, self.held_out)
        must = "stay empty unless data.prompts or data.held_out is task"
        self.require(is_read or not self.options, "options", must)
        self.require(self.system is None or self.chat, "system", "stay unset without data.chat")
