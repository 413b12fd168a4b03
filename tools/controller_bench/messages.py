"""What a message costs the controller's process, Monarch's threads included.

It is measured on real Monarch actors, which a worker daemon on this machine serves, as daemons do
in large runs: what ranks say to each other passes through the daemon.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from demo_two_hosts import worker

from llamarl.cluster import make_cluster
from llamarl.cluster.certificates import make_certificates
from llamarl.core.config import ClusterConfig
from llamarl.core.faces import Worker


@dataclass(frozen=True, kw_only=True)
class MessageCosts:
    """Seconds of one call with its answer, and of each byte of them once they are pickled.

    `ranks_s`: of a call on `NUM_RANKS` ranks, which goes through their first one. It costs more
    than a call on one, and is what calls on replicas and on the trainer are charged.
    """

    call_s: float
    sent_byte_s: float
    received_byte_s: float
    ranks_s: float
    num_actors: int

    def seconds(self, num_sent_bytes: int, num_received_bytes: int) -> float:
        """Of one call."""
        return (
            self.call_s
            + num_sent_bytes * self.sent_byte_s
            + num_received_bytes * self.received_byte_s
        )


class Actor(Worker):
    """Answers with what it was last given to keep."""

    def __init__(self, spec: Any, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._kept: Any = None

    async def keep(self, value: Any) -> None:
        self._kept = value

    async def answer(self, value: Any) -> Any:
        return self._kept


NUM_RANKS = 16
SHAPES: list[tuple[Any, Any]] = [  # argument, answer
    (None, None),
    (b"x" * 10_000, None),
    (b"x" * 200_000, None),
    (None, b"x" * 10_000),
    (None, b"x" * 200_000),
]


def measure(num_actors: int, num_calls: int, num_rounds: int) -> MessageCosts:
    """Fit the model on `num_calls` calls of each shape; of several rounds the cheapest counts."""
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        make_certificates(folder, ["127.0.0.1"])
        files = {name: f"{folder}/{name}.pem" for name in ("ca", "certificate", "private_key")}
        with worker(Path(folder), PYTHONPATH=os.pathsep.join(sys.path)) as (address, _):
            config = ClusterConfig(hosts=[address], **files)
            return asyncio.run(_measure(config, folder, num_actors, num_calls, num_rounds))


async def _measure(
    config: ClusterConfig, folder: str, num_actors: int, num_calls: int, num_rounds: int
) -> MessageCosts:
    cluster = make_cluster(config, spans_folder=None, logs_folder=folder)
    try:
        single = [await cluster.spawn(f"replica-{i}", Actor, {}) for i in range(num_actors)]
        ranks = await cluster.spawn("ranks", Actor, {}, NUM_RANKS)
        points = []
        for argument, kept in SHAPES:
            await asyncio.gather(*(group.one(Actor).keep(kept) for group in single))
            calls = [group.one(Actor) for group in single]
            best_s = await _cheapest(calls, argument, num_calls, num_rounds)
            points.append((_num_bytes(("answer", (argument,), {})), _num_bytes(kept), best_s))
        ranks_s = await _cheapest([ranks.one(Actor)] * num_actors, None, num_calls, num_rounds)
    finally:
        await cluster.stop()
    table = np.array(points)
    columns = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
    weights = 1 / table[:, 2]  # relative errors count
    fitted, *_ = np.linalg.lstsq(columns * weights[:, None], table[:, 2] * weights, rcond=None)
    call_s, sent_s, received_s = (max(0.0, float(value)) for value in fitted)
    return MessageCosts(
        call_s=call_s,
        sent_byte_s=sent_s,
        received_byte_s=received_s,
        ranks_s=ranks_s,
        num_actors=num_actors,
    )


async def _cheapest(callees: list[Any], argument: Any, num_calls: int, num_rounds: int) -> float:
    """CPU seconds of one call, all callees at once."""
    each = max(1, num_calls // len(callees))

    async def call(callee: Any) -> None:
        for _ in range(each):
            await callee.answer(argument)

    found = []
    await asyncio.gather(*(callee.answer(argument) for callee in callees))  # connects
    for _ in range(num_rounds):
        start_s = _cpu_s()
        await asyncio.gather(*map(call, callees))
        found.append((_cpu_s() - start_s) / (each * len(callees)))
    return min(found)


def _num_bytes(value: Any) -> int:
    return len(pickle.dumps(value))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
