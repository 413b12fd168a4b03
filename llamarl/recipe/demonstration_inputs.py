"""What supervised fine-tuning reads: the demonstrations that a recipe names.

Owns: what of a recipe counts for it, and reading the files. Does not own: what a demonstration is
(`environments/demonstrations.py`). Invariant: every demonstration that is read has an answer and
fits into the model's positions.
"""

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
from llamarl.environments.prompt_cache import (
    PromptSource,
    ShowPieces,
    read_source,
    show_nothing,
)
from llamarl.environments.prompt_table import PromptRows, PromptTable
from llamarl.recipe.prompt_inputs import TASK, resolve, source_files
from llamarl.types import Prompt

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
    algorithm = config.algorithm
    must = f"be tokens or rollouts with {COMMAND}, which has no sampling.max_tokens"
    algorithm.require(algorithm.normalization != "constant", "normalization", must)
    return replace(
        config,
        algorithm=type(algorithm)(
            normalization=algorithm.normalization,
            entropy_coefficient=algorithm.entropy_coefficient,
        ),
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
    config: Config,
    tokenizer: Tokenizer,
    most_positions: int,
    *,
    show: ShowPieces = show_nothing,
) -> tuple[PromptTable, list[Prompt]]:
    """The demonstrations to train on, and those held out. ValueError, with file and line, for one
    that cannot be used; with another data.overlong than error, those that are too long are left out
    or cut."""
    data, limit = config.data, "data.max_prompt_tokens"
    if most_positions < data.max_prompt_tokens:
        data, limit = replace(data, max_prompt_tokens=most_positions), "the model's positions"
    held_out = [] if data.held_out is None else [data.held_out]
    for key, sources in (("data.prompts", data.sources), ("data.held_out", held_out)):
        must = f"name files of demonstrations with {COMMAND}"
        require(TASK not in sources, key, must, TASK)

    def read(name: str) -> PromptRows:
        source = PromptSource(
            name=name,
            place=resolve(config, name),
            files=source_files(config, name),
            data=data,
            tokenizer=tokenizer,
            limit=limit,
            has_answers=True,
        )
        return read_source(source, show=show)

    most_held_out = config.evaluation.max_prompts or None
    found = [PromptTable([*map(read, sources)]) for sources in (data.sources, held_out)]
    return found[0], [*islice(found[1], most_held_out)]
