"""A generator that offloads: what memory is freed, and that rollouts stay the same."""

import asyncio
import json

import pytest

from llamarl.core.config import EmbeddedConfig, PlacementConfig, WeightsConfig
from llamarl.core.records import RESPONSE_IDS, Request, Sampling
from llamarl.generator.specs import GeneratorSpec
from llamarl.generator.worker import GeneratorWorker
from llamarl.metrics.span import Spans
from llamarl.storage.client import Store
from tests.allocation import resident_bytes
from tests.fakes import WatchedStorage
from tests.tiny_checkpoints import write_checkpoint
from tests.trainer.training import started

pytestmark = pytest.mark.full

BOTH = ["kv", "weights"]
PROMPT = tuple(range(1, 30))


def test_an_offloaded_generator_frees_its_memory_and_onloads_it_unchanged(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    write_checkpoint(
        folder, hidden_size=512, intermediate_size=2048, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, num_hidden_layers=2, max_position_embeddings=1024,
    )  # fmt: skip
    (seen,) = ranks(1).run(leave_twice, str(folder), str(tmp_path))
    lines = (tmp_path / "generator-0.jsonl").read_text().splitlines()[1:]
    moves = [move for move in map(json.loads, lines) if move["name"] == "offload"]
    left = [sum(move["bytes"] for move in moves[i : i + 2]) for i in (0, 2)]
    assert [move["tag"] for move in moves] == BOTH * 2
    assert min(left) > 75e6
    for shrunk, num_bytes in zip(seen["shrunk"], left, strict=True):
        assert shrunk >= 0.8 * num_bytes
    assert seen["addresses"][0] == seen["addresses"][1]
    tokens = seen["tokens"]
    assert seen["running"] == [1, 1]
    assert len(tokens[0]) == 60
    assert tokens[0] == tokens[1]


async def leave_twice(rank, num_ranks, checkpoint, folder):
    """The same rollout undisturbed and with two absences in its middle; a full cache."""
    storage, spans = WatchedStorage(), Spans("generator-0", folder)
    generator = GeneratorWorker(
        GeneratorSpec(
            replica=0,
            checkpoint=checkpoint,
            load_weights=True,
            config=EmbeddedConfig(max_num_seqs=8, max_model_len=768),
            heartbeat_s=0.2,
            weights=WeightsConfig(),
            placement=PlacementConfig(colocated=True),
            storage=Store([storage]),
            tokenizer=checkpoint,
            run_id="memory",
            run_dir=folder,
        ),
        rank=rank,
        num_ranks=num_ranks,
        spans=spans,
    )
    await started(generator)
    engine, weight_buffer = generator._decoding.engine, generator._buffer
    for memory in engine.movable("kv"):
        memory.fill_(1.0)  # as after many rollouts: its pages are there
    seen = {"shrunk": [], "running": [], "addresses": [addresses(engine, weight_buffer)]}
    received = 0
    for row_id, num_absences in ((0, 0), (1, 2)):
        sampling = Sampling(max_tokens=60)
        await generator.submit(
            [Request(row_id=row_id, prompt_ids=PROMPT, sampling=sampling, seed=5)]
        )
        for _ in range(num_absences):
            while not engine.num_running:
                await asyncio.sleep(0.001)
            seen["running"].append(engine.num_running)
            weight_buffer.staging.fill_(1.0)  # as a publish does
            before = resident_bytes()
            await generator.offload(BOTH)
            seen["shrunk"].append(before - resident_bytes())
            await generator.onload(BOTH)
        while row_id not in storage.rows:
            first, rows = await generator.collect(received)
            received = first + len(rows)
    seen["addresses"].append(addresses(engine, weight_buffer))
    seen["tokens"] = [storage.rows[row_id][RESPONSE_IDS].tolist() for row_id in (0, 1)]
    await generator.close()
    spans.close()
    return seen


def addresses(engine, weight_buffer):
    tensors = [
        *engine.movable("kv"),
        *engine.movable("weights"),
        weight_buffer.active,
        weight_buffer.staging,
    ]
    return [tensor.data_ptr() for tensor in tensors]
