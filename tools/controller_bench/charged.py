"""Executors whose calls cost the controller what real messages would, and what that adds up to."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from controller_bench.clock import CostClock
from controller_bench.messages import MessageCosts
from llamarl.core.config import ClusterConfig
from llamarl.core.records import episode_of
from llamarl.generator.specs import HEARTBEAT_S
from llamarl.publish.comparison import Fingerprints

PING_S = ClusterConfig().liveness_timeout_s / 4
NAMES = [  # of Llama 3.1 405B
    f"model.layers.{layer}.{name}.weight"
    for layer in range(126)
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    )
] + ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


@dataclass(kw_only=True)
class Load:
    """What the controller did in the steps that count."""

    elapsed_s: float = 0.0
    num_steps: int = 0
    cpu_s: float = 0.0
    message_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[float, float, str]] = field(default_factory=list)
    busy_shares: dict[str, float] = field(default_factory=dict)
    wait_shares: dict[str, float] = field(default_factory=dict)
    end_s: float = 0.0

    def waited_s(self) -> float:
        """Seconds in which any executor waited."""
        total_s = end_s = 0.0
        for start, stop, _ in sorted(self.waits):
            total_s += max(0.0, stop - max(start, end_s))
            end_s = max(end_s, stop)
        return total_s


class Charged:
    """An executor whose calls cost the controller what real messages would."""

    def __init__(
        self, name: str, executor: Any, costs: MessageCosts, load: Load, idle: Idle
    ) -> None:
        self._name, self._executor = name, executor
        self._costs, self._load, self._idle = costs, load, idle
        self._answered_s = 0.0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            clock = cast(CostClock, asyncio.get_running_loop())
            key = f"{self._name}.{method}"
            num_sent = len(pickle.dumps((method, args, {})))  # as the controller would
            self._load.calls[key] += 1
            self._load.num_bytes[key] += num_sent
            clock.charge(self._costs.seconds(num_sent, 0) - self._costs.call_s / 2)
            clock.send(partial(self._idle.arrive, method, args))
            start_s = clock.time()
            result = await clock.model(self._serve(method, args))
            if (
                method == "collect" and self._name == "generator"
            ):  # simulated replicas do not answer without rows
                heartbeats = int((clock.time() - start_s) / HEARTBEAT_S)
                self._load.calls["generator.heartbeat"] += heartbeats
                clock.charge(heartbeats * self._costs.call_s)
            with clock.free():
                answer = pickle.dumps(result)
            result, num_received = pickle.loads(answer), len(answer)
            self._load.num_bytes[key] += num_received
            num_pings = int((clock.time() - self._answered_s) / PING_S)  # of a silent process
            self._load.calls["ping"] += num_pings
            clock.charge(num_pings * self._costs.call_s)
            self._answered_s = clock.time()
            clock.charge(self._costs.seconds(0, num_received) - self._costs.call_s / 2)
            return result

        return call

    async def _serve(self, method: str, args: tuple[Any, ...]) -> Any:
        result = await getattr(self._executor, method)(*args)
        self._idle.leave(method, result)
        return _sized(f"{self._name}.{method}", result, args)


def _sized(call: str, result: Any, args: tuple[Any, ...]) -> Any:
    """The answer as large as real executors give it; fingerprints of the same version are equal."""
    if call == "generator.prepare":
        return [replace(result[0], rank=rank, address="/dev/shm/x" * 4) for rank in range(8)]
    if call in ("trainer.write", "generator.write", "generator.verify"):
        return [Fingerprints.fromkeys(NAMES, args[0])]
    return result


class Idle:
    """Of an executor whose waiting is not counted."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def arrive(self, method: str, args: tuple[Any, ...]) -> None:
        """A call has come."""

    def leave(self, method: str, result: Any) -> None:
        """It has been answered."""

    def _waited(self, start_s: float, who: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s > start_s:
            self._load.waits.append((start_s, now_s, who))


class IdleTrainer(Idle):
    """Waits from its last answer, or the last of the batch's scores if that came later, to the
    next call: whatever the controller does meanwhile, and whom it asks."""

    def __init__(self, load: Load, scored_s: dict[int, float]) -> None:
        super().__init__(load)
        self._scored_s = scored_s
        self._num_calls, self._since_s = 0, 0.0
        self.made_s = 0.0
        """When it last answered that it had made a version."""

    def arrive(self, method: str, args: tuple[Any, ...]) -> None:
        if method in ("accumulate", "step", "infer"):
            start_s = self._since_s
            if method == "accumulate":
                rows = args[0].rows
                scored = {episode_of(row.row_id)[0] for row in rows}
                start_s = max(start_s, *(self._scored_s.pop(row_id) for row_id in scored))
            if not self._num_calls:
                self._waited(start_s, f"trainer {method}")
            self._num_calls += 1

    def leave(self, method: str, result: Any) -> None:
        if method in ("accumulate", "step", "infer"):
            self._num_calls -= 1
            self._since_s = asyncio.get_running_loop().time()
        if method == "step":
            self.made_s = self._since_s


class IdleReplica(Idle):
    """Waits with a free slot and an empty queue from the trainer's answer, which made room for work
    that the replica's version allows, at the earliest from its commit, until that comes."""

    def __init__(self, load: Load, replica: Any, max_num_seqs: int, trainer: IdleTrainer) -> None:
        super().__init__(load)
        self._replica, self._max_running = replica, max_num_seqs
        self._trainer = trainer
        self._committed_s = 0.0

    def arrive(self, method: str, args: tuple[Any, ...]) -> None:
        if method != "submit" or self._replica.num_running >= self._max_running:
            return
        if any(request.min_version <= self._replica.version for request in args[0]):
            self._waited(max(self._trainer.made_s, self._committed_s), "replica")

    def leave(self, method: str, result: Any) -> None:
        if method == "commit":
            self._committed_s = asyncio.get_running_loop().time()


class IdleScorer(Idle):
    """Remembers when the last stage was done with each rollout."""

    def __init__(self, load: Load, scored_s: dict[int, float]) -> None:
        super().__init__(load)
        self._scored_s = scored_s

    def leave(self, method: str, result: Any) -> None:
        now_s = asyncio.get_running_loop().time()
        self._scored_s |= {score.row_id: now_s for score in result}
