"""The trainer of a mixture of experts: layouts, checkpoints between them, frozen routers,
adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.core.config import LoraConfig, TrainerConfig
from llamarl.core.records import PROMPT_IDS, RESPONSE_IDS, ROUTED_EXPERTS
from llamarl.model.experts import as_cell
from tests.tiny_checkpoints import load, write_checkpoint
from tests.trainer.rollouts import make_batch, make_rollouts
from tests.trainer.test_trainer import ADAM, SGD, job, relative_errors
from tests.trainer.training import train

pytestmark = pytest.mark.full

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
LAYOUTS = {
    "one": TrainerConfig(),
    "expert 2": TrainerConfig(num_ranks=2, expert_parallel=2),
    "shard 2": TrainerConfig(num_ranks=2),
    "tensor 2, expert 2": TrainerConfig(num_ranks=2, tensor_parallel=2, expert_parallel=2),
    "expert 4": TrainerConfig(num_ranks=4, expert_parallel=4),
    "shard 2 x expert 2": TrainerConfig(num_ranks=4, expert_parallel=2),
    "replicate 2 x expert 2": TrainerConfig(num_ranks=4, replicate=2, expert_parallel=2),
    "tensor 2, shard 4": TrainerConfig(num_ranks=4, tensor_parallel=2),
}
NAMES = ("num_ranks", "tensor_parallel", "replicate", "expert_parallel")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "mixture", **MIXTURE)


def laid_out(layout: str, config: TrainerConfig, **more: Any) -> TrainerConfig:
    other = LAYOUTS[layout]
    return dataclasses.replace(config, **{name: getattr(other, name) for name in NAMES}, **more)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_steps_and_norms_are_those_of_one_process(
    ranks: Any, mixture: str, is_replayed: bool
) -> None:
    cells, rows = make_rollouts()
    if is_replayed:
        rng = np.random.default_rng(0)
        for cell in cells.values():
            num_fed = len(cell[PROMPT_IDS]) + len(cell[RESPONSE_IDS]) - 1
            scores = rng.random((num_fed, 2, 8)).argsort(-1)[..., :2]
            cell[ROUTED_EXPERTS] = as_cell(scores.astype(np.uint8))
    seen = {}
    for layout in LAYOUTS:
        config = laid_out(layout, SGD)
        steps = [[make_batch(rows, config.num_data_ranks, 40)]]
        run = job(mixture, cells, steps, trainer=config, replays_routing=is_replayed)
        seen[layout] = ranks(config.num_ranks).run(train, run)[0]
    one = seen["one"]
    for layout, found in seen.items():
        errors = relative_errors(found["gradients"][0], one["gradients"][0])
        assert max(errors.values()) <= 2e-6, (layout, errors)
        assert max(relative_errors(found["weights"], one["weights"]).values()) <= 1e-6, layout
        for name, value in one["stats"][0].scalars.items():
            assert found["stats"][0].scalars[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (
                layout,
                name,
            )
        np.testing.assert_allclose(
            found["stats"][0].expert_loads, one["stats"][0].expert_loads, rtol=1e-9
        )
    total = sum(float(np.sum(g.astype("f8") ** 2)) for g in one["gradients"][0].values())
    norm = np.sqrt(total) / sum(row.num_tokens for row in rows)
    assert one["stats"][0].scalars["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_ranks_without_any_rollout_take_part_in_the_metrics(ranks: Any, mixture: str) -> None:
    cells, rows = make_rollouts(3)
    config = laid_out("expert 4", SGD)
    (alone,), (first, *others) = (
        ranks(each.num_ranks).run(
            train,
            job(mixture, cells, [[make_batch(rows, each.num_data_ranks, 999)]], trainer=each),
        )
        for each in (SGD, config)
    )
    one, many = (seen["stats"][0] for seen in (alone, first))
    for other in others:
        assert other["stats"][0] == many
    for name, value in one.scalars.items():
        assert many.scalars[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    np.testing.assert_allclose(many.expert_loads, one.expert_loads, rtol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("expert 2", "one"),
        ("expert 2", "expert 4"),
        ("tensor 2, expert 2", "shard 2 x expert 2"),
        ("one", "tensor 2, expert 2"),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_under_another_layout(
    ranks: Any, mixture: str, tmp_path: Path, before: str, after: str
) -> None:
    cells, rows = make_rollouts()
    writer, reader = laid_out(before, ADAM), laid_out(after, ADAM)
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    saved.mkdir()
    steps = [[make_batch(rows, writer.num_data_ranks, 40, version)] for version in (0, 1)]
    whole = ranks(writer.num_ranks).run(
        train, job(mixture, cells, steps, trainer=writer, save=str(saved), export=str(exported))
    )[0]
    again = job(mixture, cells, [], trainer=reader, restore=str(saved), export=str(exported) + "-1")
    resumed = ranks(reader.num_ranks).run(train, again)[0]
    before_last = job(mixture, cells, steps[:1], trainer=writer)
    expected = ranks(writer.num_ranks).run(train, before_last)[0]["weights"]
    for name, want in expected.items():
        np.testing.assert_array_equal(resumed["weights"][name], want, err_msg=name)
    for folder, weights in ((exported, whole["weights"]), (f"{exported}-1", resumed["weights"])):
        for name, parameter in load(folder).named_parameters():
            np.testing.assert_array_equal(parameter.detach().numpy(), weights[name])


def test_a_frozen_router_stays_and_all_else_is_trained(
    ranks: Any, mixture: str, tmp_path: Path
) -> None:
    cells, rows = make_rollouts()
    start = {name: each.detach().numpy() for name, each in load(mixture).named_parameters()}
    for layout in ("one", "shard 2 x expert 2"):
        config = laid_out(layout, ADAM, freeze_router=True)
        steps = [[make_batch(rows, config.num_data_ranks, 40)]]
        run = job(mixture, cells, steps, trainer=config, export=str(tmp_path / layout))
        found = ranks(config.num_ranks).run(train, run)[0]["weights"]
        assert found.keys() == start.keys()
        for name, weight in found.items():
            assert np.array_equal(weight, start[name]) == name.endswith("mlp.gate.weight"), name
        assert load(tmp_path / layout) is not None


def test_adapters_of_attention_train_beside_sharded_experts(ranks: Any, mixture: str) -> None:
    cells, rows = make_rollouts()
    seen = []
    for layout in ("one", "expert 2", "tensor 2, expert 2", "shard 2 x expert 2"):
        config = laid_out(layout, SGD, lora=LoraConfig(rank=2))
        steps = [[make_batch(rows, config.num_data_ranks, 40)]]
        found = ranks(config.num_ranks).run(train, job(mixture, cells, steps, trainer=config))[0]
        assert all(".self_attn." in name for name in found["weights"])
        seen.append(found["gradients"][0])
    for other in seen[1:]:
        norms = {name: np.linalg.norm(grad) for name, grad in seen[0].items()}
        kept = [name for name, norm in norms.items() if norm > 0]  # those of A are 0 at first
        assert kept
        for name in kept:
            assert np.linalg.norm(other[name] - seen[0][name]) <= 2e-6 * norms[name], name


def test_adapters_of_experts_are_refused_by_name(ranks: Any, mixture: str) -> None:
    cells, rows = make_rollouts(3)
    config = dataclasses.replace(SGD, lora=LoraConfig(rank=2, targets=["gate_proj"]))
    steps = [[make_batch(rows, 1, 40)]]
    with pytest.raises(RuntimeError, match=r"lora\.targets must be all-linear, or name q_proj, k_"):
        ranks(1).run(train, job(mixture, cells, steps, trainer=config))


def test_a_record_of_another_model_ends_the_step_in_one_line(ranks: Any, mixture: str) -> None:
    cells, rows = make_rollouts(3)
    for cell in cells.values():
        num_fed = len(cell[PROMPT_IDS]) + len(cell[RESPONSE_IDS]) - 1
        cell[ROUTED_EXPERTS] = as_cell(np.full((num_fed, 2, 2), 9, np.uint8))
    run = job(mixture, cells, [[make_batch(rows, 1, 40)]], replays_routing=True)
    with pytest.raises(RuntimeError, match="ValueError: routed_experts must name experts below 8"):
        ranks(1).run(train, run)
