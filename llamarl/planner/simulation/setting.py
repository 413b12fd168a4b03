"""What all simulated executors of a run share.

Owns: the record, and the time of a call to another process. Does not own: what an executor does
(`executors.py`, `replica.py`). Invariant: an executor computes on its own `cores` alone.
"""

import asyncio
from dataclasses import dataclass, field

from llamarl.config import Config
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.rollouts import Rollouts
from llamarl.planner.simulation.timeline import SimulatedTimeline
from llamarl.planner.simulation.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The recipe, what it generates, where rollouts are kept, and the record of what happened."""

    config: Config
    workload: Workload
    rollouts: Rollouts = field(default_factory=Rollouts)
    timeline: SimulatedTimeline = field(default_factory=SimulatedTimeline)


class SimulatedExecutor:
    """An executor whose work takes what `costs` says, on the processors `cores`."""

    def __init__(self, setting: Setting, costs: Costs, cores: Cores) -> None:
        self._config, self._workload = setting.config, setting.workload
        self._rollouts, self._timeline = setting.rollouts, setting.timeline
        self._costs, self._cores = costs, cores
        self.writer = ""
        """How what it writes into storage is signed; set by what starts it."""
        self._lock = asyncio.Lock()  # of executors that compute for one call at a time

    async def _travel(self) -> None:
        """A call is on its way to this process."""
        if self._costs.message_s:
            await asyncio.sleep(self._costs.message_s)
