"""The planner's law for the publish of the benchmark, with this machine's rates.

No figure of a publish enters its forecast.
"""

from __future__ import annotations

from harness import Values

from llamarl.core.device.names import CPU
from llamarl.planner.simulation.delivery import SideRates, delivery
from llamarl.planner.simulation.stages import Stream, mapped_stages, publish_stages
from llamarl.publish.layout import MESSAGE_BYTES, RankLayout
from llamarl.publish.reshard import num_bytes, plan
from llamarl.publish.transports.routes import TRANSPORTS
from weights_bench.model import NUM_RANKS
from weights_bench.rates import Machine


class Forecast:
    """Forecasts publishes from `source` to `target`; make it within a running event loop."""

    def __init__(self, source: list[RankLayout], target: list[RankLayout]) -> None:
        self._source, self._target = source, target
        self._copies = plan(source, target)
        rank_bytes = num_bytes(self._copies) // NUM_RANKS
        message_bytes = min(MESSAGE_BYTES, rank_bytes // NUM_RANKS)
        self.machine = Machine(rank_bytes, message_bytes)

    def stages_s(self, transport: str, found: Values) -> dict[str, float]:
        """By stage, with these seconds of primitives.

        All four ranks share as many processors as either side has ranks, so nothing of a stream
        goes on beside anything else; a commit swaps memory.
        """
        here, there, message_bytes_per_s = self.machine.rates(found)
        ends = tuple(SideRates(device=CPU, rates=each) for each in (here, there))
        parts = delivery(
            [(copy, copy.num_layers) for copy in self._copies],
            [(layout, 1) for layout in self._source],
            [(layout, 1) for layout in self._target],
            ends=(ends[0], ends[1]),
            transport=transport,
        )
        packing_s = float(parts.packing_s.max())
        moved = mapped_stages(packing_s, 0.0)
        if not TRANSPORTS[transport].is_mapped:
            wire_s = parts.num_bytes.sum(1) / message_bytes_per_s
            sending_s = float((wire_s + parts.num_messages.sum(1) * here.message_s).max())
            moved = Stream(
                packing_s=packing_s,
                sending_s=sending_s,
                receiving_s=(1 + parts.late()) * sending_s,
                unpacking_s=float(parts.unpacking_s.max()),
                overlaps=False,
            ).stages()
        verify_s = float(parts.verify_s.max())
        return publish_stages(moved, phase_s=here.phase_s, verify_s=verify_s, commit_s=0.0)
