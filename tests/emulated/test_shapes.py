"""Recipes for GPUs, whole and by shapes alone: memory, dtypes and collectives of single ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.core.config import Config, EmbeddedConfig
from llamarl.generator.memory import forecast_generator
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.planner.law import sizes
from llamarl.trainer.memory import forecast_trainer
from tests.emulated.shapes import decode_shapes, fullest_rollouts, train_shapes
from tests.emulated.test_emulated import Process
from tests.places import ROOT
from tests.recipe.composing import compose_recipe

LARGE = ("llama31_70b_math", "llama31_405b_math", "qwen3_235b_a22b_math")
OTHERS = ("llama31_8b_math", "qwen25_7b_math", "qwen3_30b_a3b_math", *LARGE)
RECIPES = [
    "gsm8k_llama32_1b_1gpu",
    *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS),
]
SPLIT = ["trainer.num_ranks=16", "trainer.tensor_parallel=4"]
TOLERANCE = 0.1  # of a plan's peak
BESIDE = {"snapshot", "transfer"}  # which a plan counts, and one pass does not make


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


def read(recipe: str, overrides: Sequence[str] = ()) -> tuple[Config, Path, Architecture]:
    folder = ROOT / "recipes" / recipe
    architecture = folder / "architecture"
    return compose_recipe(folder, overrides), architecture, read_architecture(str(architecture))


def some_ranks(recipe: str, num_ranks: int) -> list[int]:
    """The first and the last; of large models one, which takes half a minute."""
    return sorted({0 if recipe not in LARGE else num_ranks - 1, num_ranks - 1})


def moved_elements(config: Config, architecture: Architecture) -> float:
    """What a rank sends to experts in one forward of the fullest micro-batch."""
    if (experts := architecture.experts) is None or config.trainer.expert_parallel == 1:
        return 0.0
    rollouts, _ = fullest_rollouts(config)
    fed = sum(row.num_prompt_tokens + row.num_tokens - 1 for row in rollouts)
    of_layer = fed / config.trainer.tensor_parallel * experts.num_chosen * architecture.hidden_size
    return of_layer * len(architecture.sparse_layers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gsm8k_llama32_1b_1gpu", []),
        pytest.param("llama31_8b_math", SPLIT, marks=pytest.mark.long),
        *(pytest.param(each, [], marks=pytest.mark.long) for each in OTHERS),
    ],
)
def test_a_trainer_rank_has_the_memory_that_its_plan_says(
    process: Process, recipe: str, overrides: list[str]
) -> None:
    """Construction, a micro-batch that needs the most, an update; and the collectives of the first
    rank and the last one are the same, in the same order."""
    config, folder, architecture = read(recipe, overrides)
    num_ranks = config.trainer.num_ranks
    ranks = some_ranks(recipe, num_ranks)
    seen = [process.run(train_shapes, config, str(folder), rank) for rank in ranks]
    moments = forecast_trainer(config, architecture).moments
    planned = max(sum(n for kind, n in each.items() if kind not in BESIDE) for each in moments)
    assert seen[0].peak_bytes == pytest.approx(planned, rel=TOLERANCE)
    for each in seen:
        assert each.dtypes == {"weights": {"torch.float32"}, "gradients": {"torch.float32"}}
        assert each.collectives == seen[0].collectives
        assert each.peak_bytes <= 1.01 * seen[0].peak_bytes  # rank 0 has the most
    assert bool(seen[0].collectives) == (num_ranks > 1)
    if num_ranks > 1:
        # The plan gathers all weights twice a micro-batch, and reduces gradients once.
        moved: Counter[str] = Counter()
        for name, num_bytes in seen[0].collectives:
            moved[name] += num_bytes
        trainer, number = config.trainer, sizes(architecture)
        dense = (number.total - number.experts) / trainer.tensor_parallel
        experts = number.experts / trainer.expert_parallel
        local_elements = dense / trainer.num_shard_ranks + experts / trainer.num_expert_shard_ranks
        # The embedding and the head stay gathered between forward and backward.
        assert moved["allgather_base"] == pytest.approx(2 * (dense + experts) * 2, rel=TOLERANCE)
        assert moved["reduce_scatter_base"] == pytest.approx(4 * local_elements, rel=0.01)
        # Each expert's tokens travel there and back, in the forward, again in it, and backwards.
        sent = moved_elements(config, architecture)
        assert moved["all_to_all_single"] == pytest.approx(6 * 2 * sent, rel=TOLERANCE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_generator_rank_has_the_memory_that_its_plan_says(
    process: Process, recipe: str, tmp_path: Path
) -> None:
    """Commits, prefills and steps of as many rollouts as it has slots, by the embedded engine."""
    # vLLM lets ranks share a key-value head, of which this model has four.
    overrides = ["generator.num_ranks=4"] * (recipe == "qwen3_235b_a22b_math")
    config, folder, architecture = read(recipe, overrides)
    generator, last = config.generator, config.generator.num_ranks - 1
    seen = [
        process.run(decode_shapes, config, str(folder), rank, str(tmp_path / str(rank)))
        for rank in some_ranks(recipe, last + 1)
    ]
    fields = (
        "num_replicas", "num_ranks", "max_num_seqs", "max_model_len", "dtype", "quantization"
    )  # fmt: skip
    embedded = EmbeddedConfig(device="cuda", **{name: getattr(generator, name) for name in fields})
    weights = replace(config.weights, staging="double_buffer")
    plan = forecast_generator(replace(config, generator=embedded, weights=weights), architecture)
    planned = sum(plan.weights.values()) + plan.kv_cache + sum(plan.working.values())
    assert seen[0].peak_bytes == pytest.approx(planned, rel=TOLERANCE)
    for each in seen:
        is_quantised = generator.quantization != "none"  # in memory of several dtypes
        weights_dtype = "torch.uint8" if is_quantised else "torch.bfloat16"
        assert each.dtypes == {"weights": {weights_dtype}, "cache": {"torch.bfloat16"}}
        assert each.collectives == seen[0].collectives
    a, num_rows, item = architecture, generator.max_num_seqs, 2
    num_steps = [name for name, _ in seen[0].collectives].count("allgather")
    if last:
        decoding = num_rows * a.hidden_size * item
        sums = [size for name, size in seen[0].collectives if name == "allreduce"]
        assert sums.count(decoding) >= num_steps * (2 * a.num_layers + 1)
        gathered = [size for name, size in seen[0].collectives if name == "allgather"]
        assert set(gathered) == {num_rows * a.vocab_size * 4}
