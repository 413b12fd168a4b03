"""What adapters drop over real ranks: which of them agree, and how a resumed run goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llamarl.core.config import LoraConfig, TrainerConfig
from llamarl.core.process_group import join, leave
from llamarl.core.records import PROMPT_IDS, RESPONSE_IDS
from llamarl.model import adapters as adapter_files
from llamarl.model.architecture import read_architecture
from llamarl.trainer import policy
from llamarl.trainer.parallel import gather, make_mesh
from llamarl.trainer.passes import micro_batch
from llamarl.trainer.policy import Policy, RandomStates
from tests.adapter_oracle import random_adapters
from tests.tiny_checkpoints import write_checkpoint
from tests.trainer.rollouts import make_batch, make_rollouts
from tests.trainer.test_trainer import job, laid_out
from tests.trainer.training import train

pytestmark = pytest.mark.full

LORA = LoraConfig(rank=3, alpha=5.0, dropout=0.3)
ADAPTED = TrainerConfig(lora=LORA, lr=1e-2)
SEED = 11


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44}
    return write_checkpoint(folder, vocab_size=76, attention_bias=True, **sizes)


def forward_backward(policy: Policy) -> dict[str, np.ndarray]:
    """Log-probs and gradients of the same rollouts on every data rank."""
    source = np.random.default_rng(1)
    rows = [source.integers(0, 62, length) for length in (31, 5, 11)]  # 44 tokens: none is added
    columns = {PROMPT_IDS: [row[:1] for row in rows], RESPONSE_IDS: [row[1:] for row in rows]}
    packed = micro_batch(columns, range(len(rows)), policy.model.num_tensor_ranks)
    stats = policy.model(packed, 0.8)
    stats.logprobs.sum().backward()
    seen = {name: gather(each.grad).numpy().copy() for name, each in policy.parameters.items()}
    policy.drop_gradients()
    return seen | {"logprobs": stats.logprobs.detach().numpy().copy()}


async def drop(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, adapter: str, config: TrainerConfig
) -> dict[str, np.ndarray]:
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        mesh = make_mesh("cpu", config)
        return forward_backward(Policy.load(checkpoint, mesh, config, SEED, adapter=adapter))
    finally:
        leave()


async def drop_alone(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, adapter: str, num_data_ranks: int
) -> list[dict[str, np.ndarray]]:
    """The same in one process, with the stream of one data rank after the other."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        mesh = make_mesh("cpu", ADAPTED)
        policy, seen = Policy.load(checkpoint, mesh, ADAPTED, SEED, adapter=adapter), []
        for data_rank in range(num_data_ranks):
            RandomStates(SEED, data_rank, num_data_ranks, torch.device("cpu"))
            seen.append(forward_backward(policy))
        return seen
    finally:
        leave()


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        ("tensor 2", "selective"),
        pytest.param("shard 2 x tensor 2", "none", marks=pytest.mark.long),
        pytest.param("replicate 2 x tensor 2", "full", marks=pytest.mark.long),
        pytest.param("replicate 2 x shard 2", "none", marks=pytest.mark.long),
    ],
)
def test_data_ranks_drop_other_inputs_and_the_ranks_of_one_replica_what_one_process_does(
    ranks: Any, checkpoint: str, tmp_path: Path, layout: str, checkpointing: str
) -> None:
    config = replace(laid_out(layout, ADAPTED), activation_checkpointing=checkpointing)
    adapters = random_adapters(read_architecture(checkpoint), LORA)
    folder = str(tmp_path / "adapter")
    adapter_files.save(
        folder, adapters.items(), lora=LORA, source_folder=checkpoint, dtype=torch.float32
    )
    shared = checkpoint, folder
    (alone,) = ranks(1).run(drop_alone, str(tmp_path / "one"), *shared, config.num_data_ranks)
    found = ranks(config.num_ranks).run(drop, str(tmp_path / "all"), *shared, config)
    for rank, seen in enumerate(found):
        own = alone[rank // config.tensor_parallel]["logprobs"]
        np.testing.assert_allclose(seen["logprobs"], own, rtol=0, atol=1e-4)
    for first, second in itertools.pairwise(alone):
        assert np.abs(first["logprobs"] - second["logprobs"]).max() > 0.05
    for name in adapters:
        summed = sum(each[name] for each in alone)
        error = np.linalg.norm(found[0][name] - summed)
        assert error <= 1e-4 * np.linalg.norm(summed), name


@pytest.mark.parametrize(
    "layout",
    [
        "shard 2",
        pytest.param("replicate 2 x tensor 2", marks=pytest.mark.long),
        pytest.param("shard 4", marks=pytest.mark.long),
    ],
)
def test_steps_with_dropout_after_a_checkpoint_are_those_of_a_run_that_went_on(
    ranks: Any, checkpoint: str, tmp_path: Path, layout: str
) -> None:
    cells, rows = make_rollouts()
    config = laid_out(layout, ADAPTED)
    steps = [[make_batch(rows, config.num_data_ranks, 40, version)] for version in range(3)]
    saving = job(checkpoint, cells, steps, trainer=config, save=str(tmp_path))
    whole = ranks(config.num_ranks).run(train, saving)
    going_on = job(checkpoint, cells, steps[2:], trainer=config, restore=str(tmp_path))
    resumed = ranks(config.num_ranks).run(train, going_on)
    for one, other in zip(whole, resumed, strict=True):
        assert other["version"] == 2
        for name, shard in one["shards"].items():
            np.testing.assert_array_equal(other["shards"][name], shard, err_msg=name)


async def save(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, folder: str, config: TrainerConfig
) -> list[np.ndarray]:
    """Draw some numbers, save; returns the next ones."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        trained = Policy.load(checkpoint, make_mesh("cpu", config), config, SEED)
        torch.rand(5)
        await asyncio.to_thread(trained.snapshot.write, folder, trained.state(4))
        return torch.rand(9).tolist()
    finally:
        leave()


async def restore(
    rank: int, num_ranks: int, rendezvous: str, checkpoint: str, folder: str, config: TrainerConfig
) -> tuple[list[float], list[tuple[str, str]]]:
    """The next numbers after a restore, and what it says."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        trained = Policy.load(checkpoint, make_mesh("cpu", config), config, SEED)
        torch.rand(3)
        found: list[logging.LogRecord] = []
        policy.log.addFilter(lambda record: found.append(record) or True)
        policy.log.setLevel(logging.INFO)
        assert trained.restore(folder) == 4
        dist.barrier()
        policy.log.filters.clear()
        return torch.rand(9).tolist(), [(each.levelname, each.getMessage()) for each in found]
    finally:
        leave()


def derived(data_rank: int, num_data_ranks: int, version: int) -> list[float]:
    before = torch.get_rng_state()
    states = RandomStates(SEED, data_rank, num_data_ranks, torch.device("cpu"))
    states.derive(version)
    numbers = torch.rand(9).tolist()
    torch.set_rng_state(before)
    return numbers


@pytest.mark.parametrize(
    ("before", "after", "dropout"),
    [
        ("tensor 2", "one", 0.3),
        ("shard 2", "tensor 2", 0.3),
        pytest.param("one", "shard 2", 0.0, marks=pytest.mark.long),
        pytest.param("shard 2 x tensor 2", "shard 2", 0.3, marks=pytest.mark.long),
        pytest.param("shard 4", "replicate 2 x tensor 2", 0.0, marks=pytest.mark.long),
    ],
)
def test_another_number_of_data_ranks_goes_on_with_streams_of_seed_and_version_and_says_so(
    ranks: Any, checkpoint: str, tmp_path: Path, before: str, after: str, dropout: float
) -> None:
    adapted = replace(ADAPTED, lora=replace(LORA, dropout=dropout))
    writer, reader = laid_out(before, adapted), laid_out(after, adapted)
    folder = tmp_path / "saved"
    folder.mkdir()
    places = [str(tmp_path / uuid.uuid4().hex) for _ in range(2)]
    next_numbers = ranks(writer.num_ranks).run(save, places[0], checkpoint, str(folder), writer)
    answers = ranks(reader.num_ranks).run(restore, places[1], checkpoint, str(folder), reader)
    is_same = writer.num_data_ranks == reader.num_data_ranks
    for rank, (numbers, said) in enumerate(answers):
        data_rank = rank // reader.tensor_parallel
        if is_same:
            assert numbers == next_numbers[data_rank * writer.tensor_parallel]
            assert said == []
            continue
        assert numbers == derived(data_rank, reader.num_data_ranks, version=4)
        if rank == 0:
            ((level, text),) = said
            assert level == ("WARNING" if dropout else "INFO")
            assert str(folder) in text
            assert "follow from the seed and version 4" in text
        else:
            assert said == []
