"""Arrays go from executor to executor: the controller's messages do not grow with rollouts."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig
from llamarl.core.faces import GeneratorReplica, Processor, Report, Storage, Worker
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    Request,
    RolloutInfo,
    Sampling,
    StageItem,
    StageResult,
    StageStatus,
)
from llamarl.scoring.stage_worker import StageSpec, StageWorker
from llamarl.scoring.stages import Stage
from llamarl.storage.client import Store
from llamarl.storage.columns import Column
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.fakes import stopped

pytestmark = pytest.mark.full

NUM_ROLLOUTS = 64


class Weighed:
    """An executor whose messages are weighed as the cluster pickles them."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.num_bytes = 0
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            result = await getattr(self.executor, method)(*args)
            self.num_bytes += len(pickle.dumps((method, args))) + len(pickle.dumps(result))
            self.calls.append(method)
            return result

        return call


class Writer(Worker):
    """Stores rollouts of a fixed length and reports their rows, as a generator does."""

    def __init__(self, storage, *, rank, num_ranks, spans) -> None:
        self.storage = storage
        self.rows: list[RolloutInfo] = []

    async def submit(self, requests: list[Request]) -> None:
        num_tokens = requests[0].sampling.max_tokens
        num_rows = len(requests)
        code = FINISH_CODES[FinishReason.LENGTH]
        columns = {
            PROMPT_IDS: [np.array(request.prompt_ids, np.int32) for request in requests],
            RESPONSE_IDS: [np.arange(num_tokens, dtype=np.int32)] * num_rows,
            GENERATOR_LOGPROBS: [np.zeros(num_tokens, np.float32)] * num_rows,
            TOKEN_VERSIONS: [np.zeros(num_tokens, np.int32)] * num_rows,
            SAMPLING: [np.array([1.0, 0, 1.0, num_tokens, 0, code])] * num_rows,
        }
        await self.storage.write([request.row_id for request in requests], columns)
        self.rows = [
            stopped(
                request.row_id,
                (0, num_tokens),
                reason=FinishReason.LENGTH,
                num_prompt_tokens=len(request.prompt_ids),
            )
            for request in requests
        ]

    async def collect(self, received: int) -> Report:
        return received, self.rows


class Reader(Worker):
    """Reads what the writer stored and rewards its length, as a scorer does."""

    def __init__(self, storage, *, rank, num_ranks, spans) -> None:
        self.storage = storage

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        row_ids = [row_id for (row_id,), _ in items]
        cells = (await self.storage.read(row_ids, [RESPONSE_IDS]))[RESPONSE_IDS]
        rewards = [np.array([float(cell[-1] + 1)]) for cell in cells]
        await self.storage.write(row_ids, {REWARD: rewards})
        return [
            StageResult(row_id=row_id, numbers={REWARD: float(reward[0])})
            for row_id, reward in zip(row_ids, rewards, strict=True)
        ]


TASK = """
def count(ids):
    return float(len(ids))
def doubled(ids):
    return [2.0 * each for each in ids]
def total(column):
    return sum(column)
def ranked(reward, amount):
    return [sum(other < mine for other in amount) / len(amount) for mine in amount]
def blend(rank, length):
    return [a + b for a, b in zip(rank, length)]
"""
STAGES = (
    Stage("count", "count", [RESPONSE_IDS], ["length"]),
    Stage("double", "doubled", [RESPONSE_IDS], [Column("doubles", "float32", "response")]),
    Stage("sum", "total", ["doubles"], ["amount"]),
    Stage("rank", "ranked", [REWARD, "amount"], ["ranked"], per="group"),
    Stage("blend", "blend", ["ranked", "length"], ["blended"], per="group"),
)
"""Five of the recipe's own behind the scorer; one of them writes an entry per token."""


async def bytes_per_rollout(folder: Path, *lengths: int) -> list[list[float]]:
    """For rollouts of each length, per rollout: bytes of the controller's messages without STAGES,
    of all its messages, and of one read of the arrays."""
    cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(folder))
    try:
        units = await asyncio.gather(
            *(
                cluster.spawn(
                    f"storage-{unit}",
                    StorageWorker,
                    StorageSpec(unit=unit, archive_folder=str(folder)),
                )
                for unit in range(2)
            )
        )
        store = Store([unit.one(Storage) for unit in units])
        generator, *stages = await asyncio.gather(
            cluster.spawn("generator-0", Writer, store),
            cluster.spawn("scorer", Reader, store),
            *(cluster.spawn(stage.name, StageWorker, spec_of(stage, store)) for stage in STAGES),
        )
        await asyncio.gather(*(group.one(Worker).start() for group in (*units, *stages[1:])))
        return [
            await weigh(
                [
                    Weighed(generator.one(GeneratorReplica)),
                    *(Weighed(group.one(Processor)) for group in stages),
                ],
                [Weighed(unit.one(Storage)) for unit in units],
                Weighed(store),
                range(place * NUM_ROLLOUTS, (place + 1) * NUM_ROLLOUTS),
                num_tokens,
            )
            for place, num_tokens in enumerate(lengths)
        ]
    finally:
        await cluster.stop()


async def weigh(
    executors: list[Weighed], units: list[Weighed], reader: Weighed, rows: range, num_tokens: int
) -> list[float]:
    row_ids, sampling = list(rows), Sampling(max_tokens=num_tokens)
    requests = [
        Request(row_id=row_id, prompt_ids=(1, 2, 3), sampling=sampling, seed=row_id)
        for row_id in row_ids
    ]
    await executors[0].submit(requests)
    _, reported = await executors[0].collect(0)
    assert [row.row_id for row in reported] == row_ids
    alone = [((row_id,), None) for row_id in row_ids]
    groups = [(tuple(row_ids[i : i + 8]), None) for i in range(0, NUM_ROLLOUTS, 8)]
    scores = await executors[1].process(alone)
    assert {score.reward for score in scores} == {float(num_tokens)}
    for stage, executor in zip(STAGES, executors[2:], strict=True):
        results = await executor.process(groups if stage.per == "group" else alone)
        assert [result.row_id for result in results] == row_ids
        assert {result.status for result in results} == {StageStatus.OK}
    assert results[0].numbers == {"blended": float(num_tokens)}
    await reader.read(row_ids, [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS])
    await Store(list(units)).retire(row_ids, {"outcome": "trained", "version": 0})
    alone_bytes = sum(each.num_bytes for each in executors[:2] + units)
    graph_bytes = alone_bytes + sum(each.num_bytes for each in executors[2:])
    found = alone_bytes, graph_bytes, reader.num_bytes
    return [num_bytes / NUM_ROLLOUTS for num_bytes in found]


def spec_of(stage: Stage, store: Store) -> StageSpec:
    numbers = frozenset({REWARD, "amount", "ranked", "length"} & {*stage.reads})
    return StageSpec(
        stage=stage, numbers=numbers, tokenizer="", task_source={"task.py": TASK}, storage=store
    )


@pytest.mark.long
def test_the_controllers_bytes_per_rollout_do_not_grow_with_its_length_through_six_stages(
    tmp_path: Path, record_property
) -> None:
    found = asyncio.run(bytes_per_rollout(tmp_path / "run", 64, 4096))
    (short, short_graph, short_arrays), (long, long_graph, long_arrays) = found
    record_property("controller_bytes_per_rollout", {64: short_graph, 4096: long_graph})
    assert abs(long - short) <= 4  # a larger integer takes a byte more
    assert abs(long_graph - short_graph) <= 4
    assert long < 130
    assert long_graph < 340  # about 40 for each of STAGES
    assert long_arrays > 40 * short_arrays  # what a read by the controller would have cost
    assert len((tmp_path / "run" / "rollouts-1.jsonl").read_text().splitlines()) == 2 * 32
