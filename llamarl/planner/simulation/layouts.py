"""The layouts that simulated executors report to the publisher.

Owns: one made-up parameter for each bucket of a publish. Does not own: what a publish does to an
executor (`replica.py`, `executors.py`). Invariant: all ranks of an executor on one host count as
one.
"""

from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import Setting, SimulatedExecutor
from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout, Route


class Layouts(SimulatedExecutor):
    """One rank on each of `hosts`, each with the made-up parameters, one per bucket.

    With staging=bucket decoding stands still from the first bucket's commit on; an empty one here.
    """

    def __init__(
        self, setting: Setting, costs: Costs, cores: Cores, *, hosts: tuple[str, ...]
    ) -> None:
        super().__init__(setting, costs, cores)
        self._hosts = hosts
        is_cut = self._config.weights.staging == "bucket"
        self._buckets = ("first", "rest") if is_cut else ("rest",)

    async def source_layout(self) -> list[RankLayout]:
        return self._layouts((self._buckets,))

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None for _ in self._hosts]

    def _layouts(self, buckets: tuple[tuple[str, ...], ...]) -> list[RankLayout]:
        box = Box(start=(0,), stop=(1,), buffer="all", offset=0, strides=(1,))
        layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
        parameters = dict.fromkeys(self._buckets, layout)
        return [
            RankLayout(rank=rank, host=host, parameters=parameters, buckets=buckets)
            for rank, host in enumerate(self._hosts)
        ]
