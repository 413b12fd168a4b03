"""How fast the replicas of each pool turn out to be.

Owns: the measure, from what comes back. Does not own: the choice of a replica (`balance.py`).
Invariant: without pools all replicas count as equally fast, and nothing is measured.

A replica with n rollouts uses min(n, generator.max_num_seqs) of its slots. A pool's speed is the
tokens that it wrote per second and used slot, times the slots of a replica: so one that has little
to do, and writes little, does not count as slow.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.config.pools import Pool, number_of
from llamarl.types import FinishReason, Request, RolloutInfo

FEWEST_ROLLOUTS = 16  # that a pool must have written before its speed counts
NUM_LATEST = 512  # rollouts that its speed is the mean of, about


@dataclass(slots=True)
class PoolSpeed:
    """What the replicas of one pool have written in which time, old rollouts counting less."""

    num_slots: int
    num_rollouts: int = 0
    num_tokens: float = 0.0
    slots_s: float = 0.0

    @property
    def slot_rate(self) -> float | None:
        """Tokens per second and used slot, once it is known."""
        is_known = self.num_rollouts >= FEWEST_ROLLOUTS and self.slots_s > 0 and self.num_tokens > 0
        return self.num_tokens / self.slots_s if is_known else None


class Speeds:
    """Of replicas in these `pools`; of fewer than two pools nothing is measured."""

    def __init__(self, pools: Sequence[Pool] = ()) -> None:
        self.is_on = len(pools) > 1
        self._kinds = pools
        self._pools = [PoolSpeed(pool.generator.max_num_seqs) for pool in pools]
        self._since_s: dict[int, float] = {}  # by replica, when its rollouts last changed
        self._cut: dict[int, int] = {}  # by row, tokens of a rollout that goes on anywhere

    def of(self, index: int) -> float:
        """Tokens per second of a full replica, 1 where all are alike. Until a pool has written
        enough its slots count as fast as the others'."""
        if not self.is_on:
            return 1.0
        pool = self._pool(index)
        known = [rate for each in self._pools if (rate := each.slot_rate) is not None]
        mean = sum(known) / len(known) if known else 1.0
        return pool.num_slots * (pool.slot_rate or mean)

    def note(self, index: int, num_running: int) -> None:
        """The replica has held this many rollouts since the last note, and that changes."""
        if self.is_on:
            now_s, pool = asyncio.get_running_loop().time(), self._pool(index)
            seconds = now_s - self._since_s.get(index, now_s)
            pool.slots_s += min(num_running, pool.num_slots) * seconds
            self._since_s[index] = now_s

    def observe(self, index: int, request: Request, row: RolloutInfo) -> None:
        """A rollout has stopped there."""
        if not self.is_on:
            return
        before = self._cut.pop(row.row_id, 0) if request.resume else 0
        if row.finish_reason is FinishReason.SEGMENT:
            self._cut[row.row_id] = row.num_generated
        pool, kept = self._pool(index), 1 - 1 / NUM_LATEST
        pool.num_rollouts += 1
        pool.num_tokens = kept * pool.num_tokens + row.num_generated - before
        pool.slots_s *= kept

    def _pool(self, index: int) -> PoolSpeed:
        return self._pools[number_of(self._kinds, index)]
