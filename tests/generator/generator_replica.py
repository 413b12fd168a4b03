"""A replica, its storage and its source of weights, in one process: what the contract asks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from llamarl.cluster.executor import parts_for
from llamarl.core.config import GeneratorConfig, PlacementConfig, WeightsConfig
from llamarl.core.records import GENERATOR_LOGPROBS, RESPONSE_IDS, Request, RolloutInfo, Sampling
from llamarl.generator.specs import GeneratorSpec
from llamarl.generator.worker import GeneratorWorker
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
from llamarl.model.hf import load_into
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.comparison import MODULUS
from llamarl.publish.layout import Box, ParameterLayout, formats_of
from llamarl.publish.replica import WeightSource, WeightTarget
from llamarl.publish.reshard import plan, split
from llamarl.publish.shards import ShardScales
from llamarl.publish.source import Writer
from llamarl.publish.transports.mapped import this_host
from llamarl.storage.client import Store
from tests.fakes import WatchedStorage

RUNS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """An engine to ask: its config class and fields, a checkpoint, how many ranks, how exact its
    log-probs are, whether it reports what it prefills."""

    config: type[GeneratorConfig]
    checkpoint: str
    fields: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    atol: float = 1e-5
    counts_prefill: bool = True


class Replica:
    """Some GeneratorExecutors, one per rank, asked like a group of the cluster: what a replica
    answers once comes from rank 0, the two ends of a publish answer with a list."""

    def __init__(self, ranks: list[GeneratorWorker]) -> None:
        self.ranks = ranks
        self.received = 0  # as `collect` below has it

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        answers: list[Any] = await getattr(self, method.__name__)(*args)
        return answers

    def __getattr__(self, name: str) -> Callable[..., Coroutine[None, None, Any]]:
        is_listed = name in LISTED

        async def call(*args: Any) -> Any:
            calls = [getattr(rank, name)(*parts_for(i, args)) for i, rank in enumerate(self.ranks)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            return answers if is_listed else answers[0]

        return call


LISTED = {
    name
    for protocol in (WeightSource, WeightTarget)
    for name in vars(protocol)
    if not name.startswith("_")
}


def make(case: EngineCase, storage: WatchedStorage, run_dir: str, **kwargs) -> Replica:
    """A replica whose ranks all live in this process, each with a compute thread of its own."""
    sizes = {"max_num_seqs": 4, "max_model_len": 128}
    fields = {"num_ranks": case.num_ranks} | sizes | case.fields | kwargs.pop("config", {})
    num_ranks = kwargs.pop("num_ranks", case.num_ranks)
    spans = kwargs.pop("spans", Spans("generator-0", None))
    spec = GeneratorSpec(
        replica=kwargs.pop("replica", 3),
        checkpoint=case.checkpoint,
        load_weights=kwargs.pop("load_weights", True),
        config=case.config(**fields),
        weights=WeightsConfig(**kwargs.pop("weights", {})),
        placement=PlacementConfig(colocated=True),
        storage=Store([storage]),
        tokenizer=case.checkpoint,
        run_id=f"test{next(RUNS)}",  # which names the ranks' meeting
        run_dir=run_dir,
        heartbeat_s=kwargs.pop("heartbeat_s", 0.2),
        **kwargs,
    )
    ranks = []
    for rank in range(num_ranks):
        own = Spans(f"generator-0-{rank}", None) if rank else spans
        ranks.append(GeneratorWorker(spec, rank=rank, num_ranks=num_ranks, spans=own))
    return Replica(ranks)


def request(row_id: int, **kwargs) -> Request:
    sampling = Sampling(max_tokens=kwargs.pop("max_tokens", 10), temperature=1.0)
    return Request(
        **{"row_id": row_id, "prompt_ids": (5, 6, 7), "sampling": sampling, "seed": row_id} | kwargs
    )


async def collect(generator: Replica) -> list[RolloutInfo]:
    """The rows that come next; the replica learns with the next call that they have arrived."""
    first, rows = await generator.collect(generator.received)
    generator.received = first + len(rows)
    return rows


async def gather(generator: Replica, num_rows: int) -> list[RolloutInfo]:
    rows: list[RolloutInfo] = []
    while len(rows) < num_rows:
        rows += await asyncio.wait_for(collect(generator), 20)
    return rows


Scenario = Callable[[Replica, WatchedStorage], Coroutine[None, None, None]]


def drive(case: EngineCase, run_dir: str, scenario: Scenario, **kwargs) -> WatchedStorage:
    """Run `scenario` on a started executor, and close it; returns what it was given to write to."""
    storage = WatchedStorage()

    async def main() -> None:
        generator = make(case, storage, run_dir, **kwargs)
        try:
            await generator.start()
            await scenario(generator, storage)
        finally:
            await generator.close()

    asyncio.run(main())
    return storage


def make_source(case: EngineCase, change: float = 0.0) -> Writer:
    """A trainer of one rank, with the checkpoint's weights, all larger by a factor 1 + change."""
    shapes = parameter_shapes(read_architecture(case.checkpoint))
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_into(tensors, case.checkpoint)
    layouts = {}
    for name, tensor in tensors.items():
        tensor.mul_(1 + change)
        box = Box(
            start=(0,) * tensor.ndim,
            stop=tuple(tensor.shape),
            buffer=name,
            offset=0,
            strides=tensor.stride(),
        )
        layouts[name] = ParameterLayout(shape=tuple(tensor.shape), dtype="float32", boxes=(box,))
    formats = formats_of(case.config(**case.fields), read_architecture(case.checkpoint))
    scales = ShardScales(layouts, formats, torch.device("cpu"))
    scales.derive(tensors)
    return Writer(0, this_host(), tensors, layouts, scales=scales)


async def connect(source: Any, generator: Replica, replica: int = 3) -> None:
    is_relay = isinstance(source, Replica)
    layouts = await source.source_layout() if is_relay else [source.layout()]
    target = await generator.target_layout()
    name = "generator-0" if is_relay else "trainer"
    sending, receiving = split(
        plan(layouts, target),
        source=name,
        replica=replica,
        transport="shared_memory",
    )
    if is_relay:
        sent = source.connect_target(replica, sending)
        await asyncio.gather(sent, generator.connect_source(receiving))
    else:
        source.connect(replica, sending.for_rank(0))
        await generator.connect_source(receiving)


async def send(source: Any, generator: Replica, version: int) -> None:
    """Everything but the commit, as the publisher does it."""
    handles = await generator.prepare(version)
    for rank, handle in enumerate(handles):
        assert (handle.version, handle.rank) == (version, rank)
        assert handle.replica == generator.ranks[0]._spec.replica
    if isinstance(source, Replica):
        written = await source.write(version, handles)
    else:
        written = [await asyncio.to_thread(source.write, version, handles)]
    found = total(await generator.verify(version))
    assert found == total(written)
    assert any(found.values())


def total(prints: list[dict[str, int]]) -> dict[str, int]:
    """What all ranks found together."""
    names = {name for found in prints for name in found}
    return {name: sum(found.get(name, 0) for found in prints) % MODULUS for name in names}


async def publish(source: Any, generator: Replica, version: int) -> int:
    """The whole of it; returns how many rollouts were running."""
    if isinstance(source, Writer):
        source.tensors.label(version)
    await send(source, generator, version)
    (num_running,) = set(await generator.commit(version))
    return num_running


def token_columns(storage: WatchedStorage, num_rows: int) -> list[tuple[list[int], np.ndarray]]:
    rows = [storage.rows[row_id] for row_id in range(num_rows)]
    return [(cells[RESPONSE_IDS].tolist(), cells[GENERATOR_LOGPROBS]) for cells in rows]


def assert_same(
    case: EngineCase, one: WatchedStorage, other: WatchedStorage, num_rows: int
) -> None:
    pairs = zip(token_columns(one, num_rows), token_columns(other, num_rows), strict=True)
    for (ids, logprobs), (expected_ids, expected) in pairs:
        assert ids == expected_ids
        np.testing.assert_allclose(logprobs, expected, atol=case.atol)
