"""Memory as forecast: against real tensors, by hand, and as knobs are turned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller import fit
from llamarl.controller.fit import check_fit, upper_bound_bytes
from llamarl.controller.memory import forecast_memory, fullest
from llamarl.core.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    LoraConfig,
    PlacementConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.weights import BufferLayout, tensors
from llamarl.generator.memory import forecast_generator, generator_layouts, kv_cache_bytes
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.inventory import parameter_shapes
from llamarl.model.transformer import Transformer
from llamarl.publish.layout import RankLayout
from llamarl.publish.target import WeightBuffer
from llamarl.recipe.inputs import read_planned_architecture
from llamarl.trainer import activations
from llamarl.trainer.activations import (
    Watch,
    forecast_activations,
    forecast_inference,
    fullest_packings,
)
from llamarl.trainer.losses.clip import GRPOConfig
from llamarl.trainer.memory import trainer_layouts
from tests.places import ROOT
from tests.planner.planner_recipes import LLAMA, make_recipe
from tests.recipe.composing import compose_recipe

CPU = torch.device("cpu")
CUDA_TRAINER = TrainerConfig(device="cuda", compute_dtype="bfloat16", num_ranks=8)
CUDA_GENERATOR = EmbeddedConfig(device="cuda", dtype="bfloat16", max_model_len=2048)
LARGEST = ROOT / "recipes" / "llama31_405b_math"


def on_gpus(**sections: object) -> Config:
    made = {
        "trainer": CUDA_TRAINER,
        "generator": CUDA_GENERATOR,
        "weights": WeightsConfig(transport="collective"),
        "cluster": ClusterConfig(num_hosts=8),
    }
    return make_recipe(**made | sections)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Config, object]:
    """A recipe, and an architecture that its tensor-parallel ranks divide, if not much more."""
    tensor, shard, replicate = (draw(st.integers(1, most)) for most in (4, 5, 3))
    architecture = replace(
        LLAMA,
        num_layers=1,
        vocab_size=tensor * draw(st.integers(1, 9)),
        hidden_size=draw(st.integers(1, 11)),
        intermediate_size=tensor * draw(st.integers(1, 7)),
        num_heads=tensor * 2,
        num_kv_heads=tensor,
        head_dim=2 * draw(st.integers(1, 3)),
        mlp_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )
    trainer = TrainerConfig(
        num_ranks=tensor * shard * replicate, tensor_parallel=tensor, replicate=replicate
    )
    return make_recipe(trainer=trainer, generator=EmbeddedConfig(num_ranks=tensor)), architecture


def covered(ranks: list[RankLayout], name: str) -> torch.Tensor:
    """How many ranks hold each element."""
    count = torch.zeros(ranks[0].parameters[name].shape, dtype=torch.int64)
    for rank in ranks:
        for box in rank.parameters[name].boxes:
            count[tuple(map(slice, box.start, box.stop))] += 1
    return count


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_boxes_of_all_ranks_tile_every_parameter(drawn: tuple[Config, object]) -> None:
    config, architecture = drawn
    trainers = trainer_layouts(config, architecture)
    generators = generator_layouts(config, architecture)
    for name, shape in parameter_shapes(architecture).items():
        module, kind = name.split(".")[-2:]
        is_whole = "norm" in module or (kind == "bias" and module in ("o_proj", "down_proj"))
        copies = config.trainer.tensor_parallel if is_whole else 1
        assert (covered(trainers, name) == config.trainer.replicate * copies).all(), name
        assert (covered(generators, name) == copies).all(), name
        assert trainers[0].parameters[name].shape == shape


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activations_of_three_layers_are_those_of_a_real_pass(checkpointing: str) -> None:
    trainer = TrainerConfig(tokens_per_micro_batch=150, activation_checkpointing=checkpointing)
    config = make_recipe(trainer=trainer, generator=EmbeddedConfig(max_model_len=40))
    model = Transformer(LLAMA)
    for layer in model.model.layers:
        layer.checkpointing = checkpointing
    (lengths,) = fullest_packings(150, 39)
    token_ids = torch.arange(sum(lengths)) % 96
    watch = Watch(model.parameters(), CPU)
    with watch:
        packing = make_packing(lengths)
        placed = replace(packing, positions=packing.positions.clone())
        stats = model(ModelInputs(token_ids, placed, token_ids), 1.0)
        saved = watch.num_bytes
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
    planned = forecast_activations(config, LLAMA)
    assert planned.saved_bytes == pytest.approx(saved, rel=0.01)
    # Gradients of parameters stay here; there they are FSDP's affair.
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    peak = planned.saved_bytes + max(planned.logits_bytes, planned.block_bytes)
    assert peak <= watch.peak_bytes <= peak + gradients


@pytest.mark.parametrize("kernel_dtype", ["float32", "bfloat16"])
def test_many_tokens_follow_from_fewer(kernel_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = replace(CUDA_TRAINER, compute_dtype=kernel_dtype, tokens_per_micro_batch=20001)
    config = on_gpus(trainer=trainer, generator=replace(CUDA_GENERATOR, max_model_len=100))
    passed = forecast_activations(config, LLAMA)
    reference = forecast_inference(config, LLAMA)
    monkeypatch.setattr(activations, "MOST_TOKENS", 5000)
    derived = forecast_activations(config, LLAMA)
    for name, num_bytes in passed._asdict().items():
        assert getattr(derived, name) == pytest.approx(num_bytes, rel=0.02), name
    assert forecast_inference(config, LLAMA) == pytest.approx(reference, rel=0.02)


def test_the_405b_model_by_hand() -> None:
    # 126 layers of 2 x 16384^2 (q, o), 2 x 16384 x 1024 (k, v), 3 x 16384 x 53248 and two norms;
    # embedding and head of 128256 x 16384, one norm: 405.9e9 parameters.
    layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    total = 126 * layer + 2 * 128256 * 16384 + 16384
    assert round(total / 1e9, 1) == 405.9
    # The trainer has 512 ranks, 8 of them tensor parallel; a replica has 8 ranks, in fp8.
    config = compose_recipe(LARGEST, [f"recipe_dir='{LARGEST}'"])
    trainer, generator = forecast_memory(config, read_planned_architecture(config)).ranks
    norms = (2 * 126 + 1) * 16384  # whole on each tensor-parallel rank
    held = 4 * ((total - norms) / 512 + norms / 64)
    padding = 4 * 128256 * 16384 / 512  # 16032 rows a slice are no multiple of 64
    assert held <= trainer.bytes_by_kind["weights"] <= held + 0.01 * padding
    assert trainer.bytes_by_kind["optimizer"] == pytest.approx(2 * held, rel=0.01)
    two_layers_and_the_rest = 2 * (2 * layer + 2 * 128256 * 16384) / 8
    assert trainer.bytes_by_kind["unsharded"] == pytest.approx(two_layers_and_the_rest, rel=0.01)
    fp8 = (126 * (layer - 2 * 16384) + 2 * 2 * 128256 * 16384) / 8
    assert generator.bytes_by_kind["weights"] == pytest.approx(fp8, rel=0.01)
    assert generator.host_bytes_by_kind["staging"] == generator.bytes_by_kind["weights"]


KNOBS = {
    "trainer.tokens_per_micro_batch": (64, 100, 300, 1000),
    "generator.max_num_seqs": (2, 4, 5, 64),
    "generator.max_model_len": (17, 64, 300),
    "architecture.num_layers": (1, 2, 3, 9),
    "architecture.vocab_size": (96, 128, 4096),
}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(KNOBS)), st.data())
def test_turning_a_knob_up_never_shrinks_memory(knob: str, data: st.DataObject) -> None:
    pairs = st.lists(st.sampled_from(KNOBS[knob]), min_size=2, max_size=2, unique=True)
    small, large = sorted(data.draw(pairs))
    transport = data.draw(st.sampled_from(["shared_memory", "collective"]))
    frozen = data.draw(st.sampled_from([{}, {"teacher": replace(LLAMA, num_layers=9)}]))
    optimizer = data.draw(st.sampled_from(["adamw", "sgd"]))
    totals = []
    for value in (small, large):
        trainer = TrainerConfig(tokens_per_micro_batch=128, optimizer=optimizer, weight_decay=0.1)
        config = make_recipe(weights=WeightsConfig(transport=transport), trainer=trainer)
        section, name = knob.split(".")
        architecture = LLAMA
        if section == "architecture":
            architecture = replace(LLAMA, **{name: value})
        else:
            part = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: part})
        ranks = forecast_memory(config, architecture, frozen).ranks
        totals.append({rank.executor: rank.total_bytes for rank in ranks})
        assert upper_bound_bytes(config, architecture, frozen) >= totals[-1]["host"]
    assert all(totals[0][side] <= totals[1][side] for side in totals[0])
    assert totals[0] != totals[1]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_model_that_runs_a_stage_takes_what_the_reference_takes(num_ranks: int) -> None:
    trainer = replace(CUDA_TRAINER, num_ranks=num_ranks)
    with_reference, plain = (
        on_gpus(trainer=trainer, algorithm=GRPOConfig(kl_coefficient=kl)) for kl in (0.1, 0.0)
    )
    expected, found = (
        forecast_memory(config, LLAMA, frozen).ranks[0].bytes_by_kind
        for config, frozen in ((with_reference, {}), (plain, {"teacher": LLAMA}))
    )
    assert found == {
        "stage teacher" if kind == "reference" else kind: num_bytes
        for kind, num_bytes in expected.items()
    }
    assert "reference" in expected


@pytest.mark.full
def test_what_does_not_fit_is_refused_with_numbers_and_a_change(monkeypatch) -> None:
    monkeypatch.setattr(fit, "available_bytes", lambda: 10 << 20)
    monkeypatch.setattr("llamarl.controller.memory.available_bytes", lambda: 10 << 20)
    with pytest.raises(ValueError, match=r"all processes of a host must fit into the 0.0 GiB that"):
        check_fit(make_recipe(), LLAMA)
    trainer = CUDA_TRAINER
    config = on_gpus(
        trainer=replace(trainer, tokens_per_micro_batch=32768),
        generator=replace(CUDA_GENERATOR, num_ranks=8),
        cluster=ClusterConfig(num_hosts=2),
    )
    large = {"num_layers": 8, "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 4096}
    architecture = replace(LLAMA, **large, num_heads=128, num_kv_heads=8, head_dim=128)
    words = (
        r"the fullest trainer must fit into the 79.6 GiB that one H100-80GB has, got \d+.\d GiB "
        r"\(activations .*\); trainer.activation_checkpointing=full: .* GiB on the fullest trainer"
    )
    with pytest.raises(ValueError, match=words) as caught:
        check_fit(config, architecture)
    assert "\n" not in str(caught.value)
    check_fit(
        replace(config, trainer=replace(trainer, activation_checkpointing="full")), architecture
    )


def test_colocated_with_offloading_needs_the_larger_side_and_without_it_the_sum() -> None:
    base = {
        "trainer": replace(CUDA_TRAINER, num_ranks=1),
        "weights": WeightsConfig(transport="cuda_ipc"),
        "cluster": ClusterConfig(),
    }
    turns = PlacementConfig(colocated=True, offload="pinned")
    ranks = {
        rank.executor: rank
        for rank in forecast_memory(on_gpus(**base, placement=turns), LLAMA).ranks
    }
    assert sorted(ranks) == ["generator", "sync", "trainer"]
    together = forecast_memory(
        on_gpus(**base, placement=PlacementConfig(colocated=True, offload="none")), LLAMA
    ).ranks
    (rank,) = together
    reserve = rank.bytes_by_kind["reserve"]
    parts = [ranks[side].total_bytes - reserve for side in ("trainer", "generator")]
    assert rank.total_bytes == sum(parts) + reserve
    # What left the trainer is its weights and moments, what left the generator weights and cache.
    num_elements = sum(math.prod(shape) for shape in parameter_shapes(LLAMA).values())
    moved = 12 * num_elements + 4 * len(parameter_shapes(LLAMA))
    assert ranks["trainer"].host_bytes_by_kind == {"offloaded": moved}
    config = on_gpus(**base, placement=turns)
    elements = BufferLayout(LLAMA, "bfloat16").memory.num_elements
    moved = 2 * elements + kv_cache_bytes(config, LLAMA)
    assert ranks["generator"].host_bytes_by_kind == {"offloaded": moved}
    assert fullest(ranks.values()).total_bytes == max(r.total_bytes for r in ranks.values())


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("staging", ["double_buffer", "host"])
@pytest.mark.parametrize(("is_padded", "rank"), [(False, 0), (True, 3)])
def test_a_rank_holds_what_is_forecast_while_the_next_version_is_prepared(
    quantization: str, staging: str, is_padded: bool, rank: int
) -> None:
    weights = WeightsConfig(staging=staging)
    config = EmbeddedConfig(quantization=quantization, max_num_seqs=4, max_model_len=64)
    trainer = TrainerConfig(lora=LoraConfig(rank=rank))
    engine = EmbeddedEngine(LLAMA, config, is_padded=is_padded, lora=trainer.lora)
    weight_buffer = WeightBuffer(engine.memory, weights, replica=0, rank=0, run_id="memory")
    try:
        held = [block.flat for block in weight_buffer._blocks]
        made = [engine.process_weights(weight_buffer.active)]
        engine.commit(made[0], 0)
        made.append(engine.process_weights(weight_buffer.staging))
        held += [tensor for each in made for tensor in tensors(each)]
        recipe = make_recipe(generator=config, weights=weights, trainer=trainer)
        forecast = forecast_generator(recipe, LLAMA)
        expected = sum((forecast.weights | forecast.host).values())
        # Norms in float32 are beside the weight buffer, and few: the forecast leaves them out.
        norms = 4 * (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size * len(made)
        assert expected <= num_bytes(held) <= expected + norms
    finally:
        weight_buffer.close()
        engine.close()


def num_bytes(held: list[torch.Tensor]) -> int:
    """Of their memories, each once."""
    memories = [tensor.untyped_storage() for tensor in held]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
