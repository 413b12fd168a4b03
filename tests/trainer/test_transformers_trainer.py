"""trainer=transformers over real ranks: the native trainer's numbers, files and memory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from llamarl.core.config import PlacementConfig, TrainerConfig, TransformersConfig
from tests.model.test_transformers_model import write_family
from tests.tiny_checkpoints import write_checkpoint
from tests.trainer.rollouts import make_batch, make_rollouts
from tests.trainer.test_trainer import ADAM, SGD, job, relative_errors
from tests.trainer.training import infer, take_turns, train

pytestmark = pytest.mark.full

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def in_transformers(config: TrainerConfig) -> TransformersConfig:
    return TransformersConfig(**{each.name: getattr(config, each.name) for each in fields(config)})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    return {name: write_checkpoint(place / name, **each) for name, each in FAMILIES.items()}


def backward(ranks, checkpoint, config, num_ranks, budget):
    """(gradients, log pi by row) of one batch."""
    cells, rows = make_rollouts(oldest_version=1)
    batch = make_batch(rows, num_ranks, budget)
    config = replace(config, num_ranks=num_ranks)
    seen = ranks(num_ranks).run(train, job(checkpoint, cells, [[batch]], trainer=config))
    logprobs = {row_id: each for rank in seen for row_id, each in rank["logprobs"].items()}
    return seen[0]["gradients"][0], logprobs


def check_same(found, wanted):
    errors = relative_errors(found[0], wanted[0])
    assert max(errors.values()) <= 1e-4, errors
    assert found[1].keys() == wanted[1].keys()
    for row_id, logprobs in found[1].items():
        np.testing.assert_allclose(logprobs, wanted[1][row_id], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.long) for each in FAMILIES if each != "llama"),
    ],
)
def test_gradients_and_log_probs_are_the_native_trainer_s(ranks, checkpoints, family):
    wanted = backward(ranks, checkpoints[family], SGD, 1, 40)
    for changes, num_ranks, budget in (
        ({}, 1, 40),
        ({"activation_checkpointing": "full"}, 1, 4096),
        ({"activation_checkpointing": "selective", "reshard_after": "step"}, 2, 30),
    ):
        config = in_transformers(replace(SGD, **changes))
        check_same(backward(ranks, checkpoints[family], config, num_ranks, budget), wanted)


def test_ranks_whose_rollouts_cannot_be_packed_stay_in_step(ranks, tmp_path):
    checkpoint = str(write_family(tmp_path / "gemma2", "gemma2"))
    config = in_transformers(SGD)
    wanted = backward(ranks, checkpoint, config, 1, 1)  # one rollout at a time
    for budget in (4096, 30):  # then the ranks' rollouts make different numbers of rows
        check_same(backward(ranks, checkpoint, config, 2, budget), wanted)


def test_the_reference_computes_what_the_native_one_does(ranks, checkpoints):
    cells, _ = make_rollouts(5)
    path = checkpoints["qwen3"]
    wanted = ranks(1).run(infer, path, "", cells, {})[0]
    for num_ranks in (1, 2):
        shares = ranks(num_ranks).run(
            infer, path, f"{path}-reference-{num_ranks}", cells, {}, TransformersConfig
        )
        found = {row_id: each for share in shares for row_id, each in share.items()}
        assert found.keys() == wanted.keys()
        for row_id, logprobs in found.items():
            np.testing.assert_allclose(logprobs, wanted[row_id], rtol=0, atol=1e-5)


def test_a_checkpoint_goes_on_under_other_ranks_and_under_the_native_trainer(
    ranks, checkpoints, tmp_path
):
    cells, rows = make_rollouts()
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    saved.mkdir()
    writer = replace(in_transformers(ADAM), num_ranks=2)
    steps = [[make_batch(rows, 2, 40, version)] for version in (0, 1)]
    paths = {"save": str(saved), "export": str(exported)}
    whole = ranks(2).run(train, job(checkpoints["qwen2"], cells, steps, trainer=writer, **paths))
    last = [[make_batch(rows, 1, 64, version=1)]]
    for reader in (in_transformers(ADAM), ADAM):
        steps = job(checkpoints["qwen2"], cells, last, trainer=reader, restore=str(saved))
        resumed = ranks(1).run(train, steps)[0]
        assert resumed["version"] == 1
        for name, want in whole[0]["weights"].items():
            np.testing.assert_allclose(resumed["weights"][name], want, rtol=0, atol=1e-6)
    library, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, parameter in library.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), whole[0]["weights"][name])


def test_an_offloaded_trainer_learns_the_same(ranks, checkpoints, tmp_path):
    cells, rows = make_rollouts(6)
    steps = [
        [make_batch(part, 2, 60, version) for part in (rows[:3], rows[3:])] for version in range(2)
    ]
    config = replace(in_transformers(ADAM), reshard_after="step")
    placement = PlacementConfig(colocated=True, offload_folder=str(tmp_path))
    stays = job(checkpoints["qwen2"], cells, steps, trainer=config)
    leaves = job(checkpoints["qwen2"], cells, steps, trainer=config, placement=placement)
    expected = ranks(2).run(train, stays)
    for rank, want in zip(ranks(2).run(take_turns, leaves), expected, strict=True):
        assert rank["stats"] == want["stats"]
        assert not rank["moved"]
        for name, shard in want["shards"].items():
            np.testing.assert_array_equal(rank["shards"][name], shard, err_msg=name)
