"""What supervised fine-tuning reads: the demonstrations that a recipe names.

Owns: what of a recipe counts for it, and reading the files. Does not own: what a demonstration is
(`environments/demonstrations.py`). Invariant: every demonstration that is read has an answer and
fits into the model's positions.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from llamarl.config import (
    Config,
    EmbeddedConfig,
    EnvironmentConfig,
    EvaluationConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
)
from llamarl.config.check import require
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments.demonstrations import make_demonstration, truncate
from llamarl.environments.prompt_files import read_rows
from llamarl.environments.prompt_table import PromptTable, rows_in_memory
from llamarl.recipe.prompt_inputs import TASK, resolve, source_files
from llamarl.types import Prompt

log = logging.getLogger(__name__)

COMMAND = "llamarl sft"


def as_imitation(config: Config) -> Config:
    """The recipe with defaults for all that only rollouts need. ValueError for what the trainer
    cannot do with demonstrations."""
    must = f"be sft with {COMMAND}"
    require(config.algorithm.imitates, "algorithm", must, type(config.algorithm).__name__)
    steps = config.trainer.steps_per_batch
    must = f"be 1 with {COMMAND} (num_steps says how long it trains)"
    require(steps == 1, "trainer.num_mini_batches and trainer.num_passes", must, steps)
    must = f"be left out with {COMMAND} (a held-out loss is no metric of rollouts)"
    config.require(not config.checkpoint.best, "checkpoint.best", must)
    must = f"be left out with {COMMAND} (data.held_out names demonstrations)"
    config.require(not config.evaluation.sets, "evaluation.sets", must)
    return replace(
        config,
        reward=RewardConfig(),
        generator=EmbeddedConfig(max_model_len=2),
        sampling=SamplingConfig(max_tokens=1, rollouts_per_prompt=1),
        placement=PlacementConfig(),
        staleness=StalenessConfig(),
        environment=EnvironmentConfig(),
        evaluation=EvaluationConfig(
            every_steps=config.evaluation.every_steps, max_prompts=config.evaluation.max_prompts
        ),
        experience=replace(config.experience, stages=[], sampler="admission", keep_rollouts=0.0),
        metrics=replace(config.metrics, sample_rollouts=0),
    )


def refuse_imitation(config: Config, command: str) -> None:
    """ValueError for algorithm=sft with a `command` that needs rollouts."""
    must = f"not be sft with {command} ({COMMAND} trains on demonstrations)"
    require(not config.algorithm.imitates, "algorithm", must, "sft")


def read_demonstrations(
    config: Config, tokenizer: Tokenizer, most_positions: int
) -> tuple[PromptTable, list[Prompt]]:
    """The demonstrations to train on, and those held out. ValueError, with file and line, for one
    that cannot be used; with another data.overlong than error, those that are too long are left out
    or cut."""
    data = config.data
    if data.chat and not tokenizer.has_chat_template:
        must = "data.chat must be false for a tokenizer without a chat template"
        raise ValueError(f"{must}, got true with {tokenizer.folder}")
    held_out = [] if data.held_out is None else [data.held_out]
    for key, sources in (("data.prompts", data.sources), ("data.held_out", held_out)):
        must = f"name files of demonstrations with {COMMAND}"
        require(TASK not in sources, key, must, TASK)

    def read(sources: list[str]) -> PromptTable:
        readers = (_read(config, source, tokenizer, most_positions) for source in sources)
        return PromptTable([rows_in_memory(reader) for reader in readers])

    most_held_out = config.evaluation.max_prompts or None
    return read(data.sources), [*islice(read(held_out), most_held_out)]


def _read(
    config: Config, source: str, tokenizer: Tokenizer, most_positions: int
) -> Iterator[Prompt]:
    data = config.data
    limits = (data.max_prompt_tokens, "data.max_prompt_tokens"), (most_positions, "positions")
    most, limit = min(limits)
    words = f"{most} tokens ({limit})"
    num_kept = num_dropped = num_cut = 0
    for path in source_files(config, source):
        for number, row in read_rows(path):
            try:
                found: Prompt | None = make_demonstration(number, row, data, tokenizer)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            assert found is not None
            if (num_tokens := len(found.token_ids)) > most:
                must = f"a demonstration must have at most {words}"
                if data.overlong == "error":
                    raise ValueError(f"{path}:{number}: {must}, got {num_tokens}")
                found = truncate(found, most) if data.overlong == "truncate" else None
                num_cut += found is not None
                num_dropped += found is None
            if found is not None:
                num_kept += 1
                yield replace(found, prompt_id=num_kept + num_dropped)
    if not num_kept:
        of = f" of at most {words}" if num_dropped else ""
        place = resolve(config, source)
        raise ValueError(f"{place} must hold at least one demonstration{of}, got none")
    for number, done in ((num_dropped, "left out"), (num_cut, "cut at their end")):
        if number:
            told = "%d of %d demonstrations in %s have more than %s and are %s"
            log.warning(told, number, num_kept + num_dropped, source, words, done)
