"""Automatic scaling: as many replicas as generation needs to keep up with training.

Per step, T_gen is the time in which the replicas had rollouts that they could write, on average
over them, and T_train the time in which the trainer did not wait for a batch. By StreamRL's rule a
replica is added when the excess of generation reaches what it saves, here of n replicas that share
the work equally:

    T_gen - T_train >= T_gen - T_gen n / (n + 1)        i.e.  T_gen n / (n + 1) >= T_train

and by its mirror one is removed when the excess of training reaches what that costs:

    T_train - T_gen >= T_gen n / (n - 1) - T_gen        i.e.  T_gen n / (n - 1) <= T_train

After either, the other rule holds at most at equality; with `MARGIN` on both it does not hold, so
constant lengths end in a constant number of replicas.


The number of replicas stays within `generator.elastic`, and changes by one at a time, only after
several steps in a row have asked for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from llamarl.controller.dispatch import Dispatch
from llamarl.controller.gate import Gate

log = logging.getLogger(__name__)

MARGIN = 1.05
NUM_STEPS = 3  # in a row that must ask for the same
SAMPLES_PER_STEP = 50
FIRST_PERIOD_S = 0.05  # between two samples, as long as no step has been timed


def wanted_change(num_replicas: int, gen_s: float, train_s: float, limits: Sequence[int]) -> int:
    """Return the change that one step asks for: 1, -1 or 0 replicas."""
    n, (fewest, most) = num_replicas, limits
    if n < most and gen_s * n / (n + 1) >= MARGIN * train_s:
        return 1
    if n > fewest and MARGIN * gen_s * n / (n - 1) <= train_s:
        return -1
    return 0


@dataclass(kw_only=True)
class Elasticity:
    """Watches the loop and scales its replicas within `limits`, the fewest and the most."""

    limits: Sequence[int]
    gate: Gate
    dispatch: Dispatch
    _in_row: list[int] = field(default_factory=list)
    """The changes that the last steps asked for."""

    async def watch(
        self, states: Callable[[], list[str]], scale: Callable[[int], Awaitable[None]]
    ) -> None:
        """Measure and decide, step after step; never return. `states` returns the state of each
        replica, `scale` starts or stops replicas until there are as many as it is given."""
        period_s = FIRST_PERIOD_S
        while True:
            gen_s, train_s, step_s = await self._measure(period_s)
            period_s = step_s / SAMPLES_PER_STEP
            if num_replicas := self._decide(states(), gen_s, train_s):
                await scale(num_replicas)

    async def _measure(self, period_s: float) -> tuple[float, float, float]:
        """Return T_gen, T_train and the duration of the step under way, in seconds, once its
        version is made."""
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

    def _decide(self, states: list[str], gen_s: float, train_s: float) -> int:
        """Return how many replicas there should be; 0 means as many as there are."""
        num_now = len(states)
        if states != ["serving"] * num_now:  # what was measured is of another number of replicas
            self._in_row.clear()
            return 0
        change = wanted_change(num_now, gen_s, train_s, self.limits)
        self._in_row = [*self._in_row, change][-NUM_STEPS:]
        if change == 0 or self._in_row != [change] * NUM_STEPS:
            return 0
        self._in_row.clear()
        num_then = num_now + change
        words = (
            "generators: %d -> %d, for a step takes %.3g s of generation and %.3g s of training "
            "(%d would take %.3g s of generation)"
        )
        then_s = gen_s * num_now / num_then
        log.warning(words, num_now, num_then, gen_s, train_s, num_then, then_s)
        return num_then
