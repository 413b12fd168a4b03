"""Automatic scaling: as many replicas as generation needs to keep up with training.

Owns: the measurement of both sides and the decision. Does not own: starting and stopping replicas
(`fleet.py`). Invariant: the number of replicas stays within `generator.elastic`, and changes
by one at a time, only after several steps in a row have asked for it.

Per step, T_gen is the time in which the replicas had rollouts that they could write, on average
over them, and T_train the time in which the trainer did not wait for a batch. By StreamRL's rule a
replica is added when the excess of generation reaches what it saves, here of n replicas that share
the work equally:

    T_gen - T_train >= T_gen - T_gen n / (n + 1)        i.e.  T_gen n / (n + 1) >= T_train

and by its mirror one is removed when the excess of training reaches what that costs:

    T_train - T_gen >= T_gen n / (n - 1) - T_gen        i.e.  T_gen n / (n - 1) <= T_train

After either, the other rule holds at most at equality; with `MARGIN` on both it does not hold, so
constant lengths end in a constant number of replicas.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamarl.loop.dispatch import Dispatch
from llamarl.loop.gate import Gate

log = logging.getLogger(__name__)

MARGIN = 1.05
NUM_STEPS = 3  # in a row that must ask for the same
SAMPLES_PER_STEP = 50
FIRST_PERIOD_S = 0.05  # between two samples, as long as no step has been timed


def wanted_change(num_replicas: int, gen_s: float, train_s: float, limits: Sequence[int]) -> int:
    """1, -1 or 0: what one step asks for."""
    n, (fewest, most) = num_replicas, limits
    if n < most and gen_s * n / (n + 1) >= MARGIN * train_s:
        return 1
    if n > fewest and MARGIN * gen_s * n / (n - 1) <= train_s:
        return -1
    return 0


class Scalable(Protocol):
    """Replicas, which may become more or fewer."""

    def replica_states(self) -> list[str]:
        """What each does; "serving" if it takes requests."""

    async def scale(self, num_replicas: int) -> None:
        """Start or stop some until there are so many."""


@dataclass(kw_only=True)
class Elasticity:
    """Watches the loop, and scales its replicas within `limits`, the fewest and the most."""

    limits: Sequence[int]
    gate: Gate
    dispatch: Dispatch
    _in_row: list[int] = field(default_factory=list)
    """What the last steps asked for."""

    async def watch(self, replicas: Scalable) -> None:
        """Measure and decide, step after step; never returns."""
        period_s = FIRST_PERIOD_S
        while True:
            gen_s, train_s, step_s = await self._measure(period_s)
            period_s = step_s / SAMPLES_PER_STEP
            await self._decide(replicas, gen_s, train_s)

    async def _measure(self, period_s: float) -> tuple[float, float, float]:
        """T_gen, T_train and the duration of the step under way, until its version is made."""
        clock, version = asyncio.get_running_loop().time, self.gate.version
        start_s = before_s = clock()
        gen_s = train_s = 0.0
        while self.gate.version == version:
            await asyncio.sleep(period_s)
            now_s = clock()
            gen_s += (now_s - before_s) * self.dispatch.balance.busy_share
            train_s += (now_s - before_s) * (not self.gate.is_waited_for)
            before_s = now_s
        return gen_s, train_s, before_s - start_s

    async def _decide(self, replicas: Scalable, gen_s: float, train_s: float) -> None:
        states = replicas.replica_states()
        num_replicas = len(states)
        if any(state != "serving" for state in states):
            return self._in_row.clear()  # what was measured is of another number of replicas
        change = wanted_change(num_replicas, gen_s, train_s, self.limits)
        self._in_row = [*self._in_row, change][-NUM_STEPS:]
        if change == 0 or self._in_row != [change] * NUM_STEPS:
            return
        log.warning(
            "generators: %d -> %d, for a step takes %.3g s of generation and %.3g s of training "
            "(%d would take %.3g s of generation)",
            num_replicas,
            num_replicas + change,
            gen_s,
            train_s,
            num_replicas + change,
            gen_s * num_replicas / (num_replicas + change),
        )
        self._in_row.clear()
        await replicas.scale(num_replicas + change)
