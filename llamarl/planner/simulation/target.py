"""A replica's side of publishes, without weights.

Owns: staging memory that is made up, and the time that writing and checking take. Does not own: the
commit, which happens between two decode steps (`replica.py`). Invariant: fingerprints are equal if
the version is.
"""

import asyncio
from functools import partial

from llamarl.core.config.generator import generator_of
from llamarl.core.errors import StaleVersion
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import PARAMETER, Layouts, Setting
from llamarl.publish.layout import StagingHandle
from llamarl.publish.reshard import SplitRoute


class SimulatedTarget(Layouts):
    """WeightTarget of `core/faces.py` but for the commit, and WeightSource, of replica `index` on
    `hosts`."""

    def __init__(
        self, setting: Setting, costs: Costs, cores: Cores, *, index: int, hosts: tuple[str, ...]
    ) -> None:
        super().__init__(setting, costs, cores, hosts=hosts)
        self.index, self.name, self.version = index, f"generator-{index}", -1
        self._weight = generator_of(self._config.generator, index).num_ranks

    async def connect_source(self, route: SplitRoute) -> list[None]:
        return [None for _ in self._hosts]

    async def prepare(self, version: int) -> list[StagingHandle]:
        await self._travel()
        assert version > self.version, (version, self.version)
        self._timeline.offered_s.setdefault(version, asyncio.get_running_loop().time())
        handle = partial(StagingHandle, version=version, replica=self.index)
        return [
            handle(rank=rank, host=host, address=None, num_bytes=4)
            for rank, host in enumerate(self._hosts)
        ]

    async def verify(self, version: int) -> list[dict[str, int]]:
        await self._travel()
        await self._cores.work(self._costs.check_s, self._weight)
        return [{PARAMETER: version} for _ in self._hosts]

    async def abort(self, version: int) -> list[None]:
        return [None for _ in self._hosts]

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        await self._cores.work(self._costs.relay_s)
        return [{PARAMETER: version * len(handles)}]
