"""The frozen models that run stages beside the policy: references, teachers.

Owns: which of them a recipe names, and whether they can read the policy's tokens. Does not own: the
policy (`inputs.py`), or running them (`executors/reference.py`). Invariant: an id is the same token
for the policy and for each of them.
"""

import os
from contextlib import suppress
from pathlib import Path

from llamarl.config import Config, TransformersConfig
from llamarl.config.check import require
from llamarl.config.pools import pools_of
from llamarl.data.tokenizer import Tokenizer, check_teacher, load_tokenizer
from llamarl.dataflow.graph import INFER, FrozenModel, Graph
from llamarl.models.architecture import Architecture, read_architecture
from llamarl.models.inventory import check_checkpoint, check_parallel
from llamarl.models.other_architecture import AnyArchitecture


def read_frozen(config: Config, graph: Graph) -> dict[str, Architecture]:
    """The architectures of the frozen models that run stages, by stage; without the policy's own
    reference, and those that are not on this machine or of a family that forecasts do not know."""
    found = {}
    for stage in graph.between:
        if isinstance(stage.run, FrozenModel) and stage.name not in _own(config):
            with suppress(ValueError):
                found[stage.name] = read_architecture(_folder(config, stage.run))
    return found


def check_models(
    config: Config, graph: Graph, architecture: AnyArchitecture, tokenizer: Tokenizer
) -> None:
    """ValueError unless the frozen models of stages can read the policy's tokens."""
    for stage in graph.between:
        if isinstance(stage.run, FrozenModel) and stage.name not in _own(config):
            folder = _folder(config, stage.run)
            is_any = isinstance(config.trainer, TransformersConfig)  # its code computes them too
            found = check_checkpoint(folder, is_any=is_any)
            key, own = f"the vocabulary of {folder} (stage {stage.name})", architecture.vocab_size
            if stage.name == INFER:
                check_teacher(tokenizer, load_tokenizer(folder), found.vocab_size)
                must = f"be at least the policy's {own}, of which generators draw"
                require(found.vocab_size >= own, key, must, found.vocab_size)
            else:
                require(found.vocab_size == own, key, f"be the policy's {own}", found.vocab_size)
            longest = max(pool.generator.max_model_len for pool in pools_of(config.generator))
            must = f"be at least generator.max_model_len {longest}"
            key = f"the positions of {folder} (stage {stage.name})"
            require(found.max_positions >= longest, key, must, found.max_positions)
            check_parallel(found, config.trainer, config.generator)


def _own(config: Config) -> set[str]:
    """Stages whose model is the checkpoint that the policy begins as."""
    return set() if config.algorithm.reference else {INFER}


def _folder(config: Config, model: FrozenModel) -> str:
    return os.path.abspath(Path(config.recipe_dir, model.checkpoint))
