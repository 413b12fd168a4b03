"""The config of evaluations, and of the versions that are kept on disk."""

import re
from dataclasses import dataclass, field

from llamarl.core.fields import DAY_S, Section, choice, number

HELD_OUT = "held_out"  # the name of a held-out set that has no other
SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)


@dataclass(kw_only=True)
class EvaluationConfig(Section):
    """Held-out evaluation on one fixed version."""

    every_steps: int = number(0, least=0, most=10**9)
    """Steps between evaluations; 0 evaluates only before the first and after the last step. With
    `checkpoint.best` and several steps per batch a version that falls amid a batch is put off to
    that after its last step, which can be saved."""
    sets: dict[str, str] = field(default_factory=dict)
    """Several held-out sets in place of `data.held_out`, by name, each a file, a folder or a name
    of the Hub as there: {gsm8k: hf:openai/gsm8k/main/test, math500: math500.parquet}. Each has its
    own accuracy beside that of all prompts together."""
    max_prompts: int = number(0, least=0, most=10**9)
    """Use only the first this many prompts of each held-out set; 0 means all."""
    rollouts_per_prompt: int = number(1, least=1, most=256)
    """Rollouts n of each held-out prompt. Above 1 the accuracy is their mean (avg@n), and pass@k
    and maj@k are reported: whether one of k rollouts is right, and whether the answer is that most
    of k give. Needs a `temperature` above 0."""
    at_k: list[int] = field(default_factory=list, metadata={"least": 1, "most": 256})
    """Every k of pass@k and maj@k, at most `rollouts_per_prompt`; [] is that number alone."""
    patience: int = number(0, least=0, most=10**6)
    """The run ends after this many evaluations in a row without a better one, by
    `checkpoint.best`; 0: it never ends early. Needs `every_steps`."""
    temperature: float = number(0.0, least=0, most=100)
    """Softmax temperature of held-out completions; 0 is greedy."""
    top_p: float = number(1.0, above=0, most=1)
    """Keep only the likeliest tokens with this total probability; 1 is off. Unlike
    `sampling.top_p` it may be below 1."""
    max_tokens: int = number(0, least=0, most=2**24)
    """Longest completion; 0 takes sampling.max_tokens."""

    def check(self) -> None:
        is_sampled = self.temperature == 0 or self.temperature >= 1e-3
        self.require(is_sampled, "temperature", "be 0 (greedy) or at least 0.001")
        num_rollouts = self.rollouts_per_prompt
        must = f"be above 0 with evaluation.rollouts_per_prompt={num_rollouts} (greedy ones: equal)"
        self.require(num_rollouts == 1 or self.temperature > 0, "temperature", must)
        must = f"be at most evaluation.rollouts_per_prompt ({num_rollouts})"
        self.require(max(self.at_k, default=1) <= num_rollouts, "at_k", must)
        is_once = len({*self.at_k}) == len(self.at_k)
        self.require(is_once, "at_k", "name each k once")
        is_repeated = self.patience == 0 or self.every_steps > 0
        self.require(is_repeated, "patience", "be 0 without evaluation.every_steps")
        must = "have names of up to 40 letters, digits, dots, - and _"
        self.require(all(SET_NAME.fullmatch(str(name)) for name in self.sets), "sets", must)
        are_named = all(isinstance(each, str) and each for each in self.sets.values())
        are_read = are_named and "task" not in self.sets.values()
        self.require(are_read, "sets", "have a file, a folder or hf:ORG/NAME for each name")

    @property
    def ks(self) -> list[int]:
        """Every k that is reported."""
        return self.at_k or [self.rollouts_per_prompt] * (self.rollouts_per_prompt > 1)

    def metrics(self, has_answers: bool) -> list[str]:
        """Return the metrics that the best version may be chosen by; of each, larger values are
        better."""
        names = ["accuracy", "reward", *(f"pass_at_{k}" for k in self.ks)]
        names += [f"maj_at_{k}" for k in self.ks if has_answers]
        return [*names, *(f"{each}/{name}" for each in self.sets for name in names)]


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """The states of the trainer that are saved to disk, and when."""

    every_steps: int = number(10, least=0, most=10**9)
    """Steps between checkpoints; 0 saves only when the run ends. After a kill or the loss of the
    trainer the steps since the newest one are repeated: five on average by default. The trainer
    waits only until its state is copied to host memory (12 bytes per parameter, over all ranks).
    Take more where the disk needs longer for a checkpoint than these steps take, for a save waits
    for the one before."""
    grace_s: float = number(15.0, least=0, most=DAY_S)
    """After SIGTERM the step under way may take this long to end, then what is complete is saved.
    Schedulers kill 30 s or later after it: leave time for the save."""
    keep: int = number(2, least=0, most=10**6)
    """Newest checkpoints kept; 0 keeps all."""
    best: str = ""
    """Metric of evaluations by which the best version is kept too, marked as checkpoints/best, and
    exported as export-best: accuracy | reward | pass_at_K | maj_at_K, or that of one set, such as
    gsm8k/accuracy. Each version that is evaluated is saved then. Empty: only the newest are kept.
    Version 0 does not count."""
    resume: str = "off"
    """off | auto (the newest committed checkpoint of run_dir, if any) | a checkpoint folder."""
    export: bool = True
    """Write the final weights in the Hugging Face layout."""
    export_dtype: str = choice("float32", "bfloat16")
    """What the exported weights are rounded to: float32 (as they were trained) | bfloat16 (half
    the size)."""
    export_every_steps: int = number(0, least=0, most=10**9)
    """Steps between exports to exports/step-... in the run's folder, for which training waits; all
    of them stay. 0: none before the end."""

    def is_due(self, version: int, last: int) -> bool:
        """Return whether a save is due: at the last version and at every multiple of
        `every_steps`."""
        return version == last or (self.every_steps > 0 and version % self.every_steps == 0)

    def is_export_due(self, version: int) -> bool:
        """Return whether an export is due: at every multiple of `export_every_steps`."""
        return self.export_every_steps > 0 and version % self.export_every_steps == 0
