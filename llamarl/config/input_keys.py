"""The pretrained checkpoint and the prompts. The architecture comes from the checkpoint's own
config.json; the order of prompts is a function of seed and position alone, so a run can resume
anywhere."""

import datetime
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from llamarl.config.check import Section, choice, number

ENDING = re.compile(r"\.[a-z]+$")  # of a file; a folder may be called v1.2
NOT_IN_TAGS = re.compile(r"[^\w.-]")  # of metrics
OF_TEMPLATES = {"messages", "tools", "add_generation_prompt"}


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The checkpoint, in the Hugging Face layout."""

    checkpoint: str = ""
    """Folder with config.json and safetensors files; a relative path starts at the recipe's folder,
    also as an argument, unlike `run_dir` | hf:ORG/NAME or hf:ORG/NAME@REVISION, a model of the
    Hugging Face Hub, which is fetched into the cache of huggingface_hub."""
    architecture: str | None = None
    """Folder with a config.json of the same architecture, so that the recipe can be planned without
    the checkpoint; a run refuses a checkpoint that differs from it (except in the ids that end a
    completion)."""
    tokenizer: str | None = None
    """Folder of the tokenizer, if it is not the checkpoint's own."""
    adapter: str = ""
    """Folder of an adapter of this checkpoint to start from, as an export or the peft library
    writes it, or hf:ORG/NAME; `trainer.lora` is then the adapter's, if it is not given. Empty:
    none, or adapters that start without effect."""

    def check(self) -> None:
        self.require(bool(self.checkpoint), "checkpoint", "name a checkpoint folder or hf:ORG/NAME")


@dataclass(kw_only=True)
class DataConfig(Section):
    """Where prompts come from."""

    prompts: Any = ""
    """Training prompts, one source or a list of several: each is a .jsonl, .parquet or .arrow file
    or a folder of such, whose relative path starts at the recipe's folder | hf:ORG/NAME, a data set
    of the Hub, with /SPLIT (else train), /CONFIG/SPLIT or /FILE after it, and @REVISION at the
    end | task (what `prompts` in the recipe's own task.py makes)."""
    weights: list[float] = field(default_factory=list, metadata={"above": 0, "most": 1e9})
    """How often prompts come from each source of `prompts`, in its order: any numbers, of which the
    shares count. After every prompt each source has given its share to within one or two. Each is
    walked on its own, so a small one comes round more often. Empty: all sources are walked as one,
    so each prompt comes once per epoch."""
    held_out: str | None = None
    """Evaluation prompts, one source of the same form; null skips evaluation."""
    options: dict[str, Any] = field(default_factory=dict)
    """What `prompts` in the recipe's own task.py gets, by the names of its arguments."""
    prompt_field: str = "question"
    """Field with the question: text, or a list of messages. `a.b` is field b of the object in a.
    Rows without `question` may have it in `prompt`, as those for TRL and verl do."""
    completion_field: str | None = "completion"
    """Field with the answer of a demonstration, for `llamarl sft`: text, or with `chat` a list of
    messages too | null (with `chat`: `prompt_field` has whole conversations, of which the
    assistant's turns are learnt)."""
    chat: bool = False
    """Wrap a question that is text in the tokenizer's chat template; else it is plain text. A list
    of messages always goes through the template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template gets beside the messages, such as {enable_thinking: false}."""
    chat_template: str | None = None
    """File with a chat template in Jinja, in place of the tokenizer's own; an export has it too."""
    date: str | None = None
    """The day, such as 2026-05-01, that a chat template gets when it asks for today's
    (`strftime_now`); null takes that of the run's first start, which config.yaml then has, so that
    a run that resumes on another day has the same prompts."""
    system: str | None = None
    """System message put first; needs `chat`."""
    shuffle: bool = True
    """Take the prompts of each epoch in an order drawn from the run's seed."""
    max_prompt_tokens: int = number(1024, least=1, most=2**24)
    """Longest prompt, or demonstration with its answer."""
    overlong: str = choice("error", "drop", "truncate")
    """What a prompt of more tokens is, or of more than `sampling.max_tokens` (held-out:
    `evaluation.max_tokens`) leaves of `generator.max_model_len`: error (it names the line) | drop
    (such prompts are left out) | truncate (only their last tokens are kept). A line says how many
    were left out or cut."""
    repeat_share: float = number(1.0, least=0.001, most=1)
    """Curriculum: a prompt whose latest group gave no signal, as all its rewards were equal (all
    right, or all wrong), is asked again with this probability in each later epoch; once a group of
    it gives a signal, in each. 1: every prompt is asked in every epoch."""

    @property
    def sources(self) -> list[str]:
        """Those of `prompts`."""
        return self.prompts if isinstance(self.prompts, list) else [self.prompts]

    @property
    def source_names(self) -> list[str]:
        """What metrics call each source: its file's name without its ending, with its place if two
        have the same."""
        names = [ENDING.sub("", PurePath(each).name) for each in self.sources]
        stems = [NOT_IN_TAGS.sub("_", name) for name in names]
        if len({*stems}) == len(stems):
            return stems
        return [f"{stem}_{place}" for place, stem in enumerate(stems)]

    def check(self) -> None:
        must = "name a file of prompts, hf:ORG/NAME or task, or be a list of such"
        is_named = all(isinstance(each, str) and each for each in self.sources)
        self.require(bool(self.sources) and is_named, "prompts", must)
        is_once = len({*self.sources}) == len(self.sources)
        self.require(is_once, "prompts", "name each source once")
        is_read = "task" in (*self.sources, self.held_out)
        must = "stay empty unless data.prompts or data.held_out is task"
        self.require(is_read or not self.options, "options", must)
        self.require(self.system is None or self.chat, "system", "stay unset without data.chat")
        num = len(self.sources)
        must = f"have one number for each of the {num} sources of data.prompts, or be empty"
        self.require(len(self.weights) in (0, num), "weights", must)
        own = OF_TEMPLATES.intersection(self.chat_template_kwargs)
        must = f"leave out {', '.join(sorted(OF_TEMPLATES))}, which llamarl sets"
        self.require(not own, "chat_template_kwargs", must)
        self.require(self.date is None or _is_date(self.date), "date", "be such as 2026-05-01")


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
