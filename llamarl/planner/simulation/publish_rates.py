"""What a rank reaches in each kind of work of a publish.

Owns: these rates, from a card's peaks and the law's shares, and seconds from an effort. Does not
own: efforts (`effort.py`), ways between devices (`publish.py`), peaks or shares. Invariant: a rate
is a peak times the share of its kind of work in `efficiency.py`, or a constant named there or here;
`tools/bench_weights.py` puts measured ones in their place.
"""

import math
from dataclasses import dataclass

from llamarl.core.device.names import is_gpu
from llamarl.planner.efficiency import (
    ANSWER_S,
    CALL_S,
    CORE_READ_BYTES_PER_S,
    CORE_SUM_BYTES_PER_S,
    CORE_TOUCH_BYTES_PER_S,
    LAUNCH_S,
    LAW,
)
from llamarl.planner.hardware import Gpu
from llamarl.planner.simulation.effort import Effort
from llamarl.publish.transports.collective import POLL_S

MESSAGE_S = 20e-6
"""To start one message: a kernel, a rendezvous and a round trip. Our estimate, as no data sheet
says it; it matters only where messages are small."""

TIMER_S = 50e-6
"""By which Linux wakes a thread later than it asked for: the kernel's default timer slack."""

PHASE_S = 10e-3
"""One of prepare, write, verify and commit: a call from the controller to all ranks and back.
Our estimate for a busy event loop."""


@dataclass(frozen=True, kw_only=True)
class PublishRates:
    """Of one rank, bytes per second: `moved` to or from memory by copies, `cached` the same within
    its cache, `summed` there and `read` from memory for fingerprints, memory `touched` for the
    first time, and what a GPU's copies reach of `host` memory (infinite: nothing lies there).

    Seconds: of a call of torch that starts no work (`call_s`), of one that does (`launch_s`), until
    the processor has an answer of the device (`answer_s`), of a message beside its bytes
    (`message_s`), and how late its end is seen (`late_s`), of a call to all ranks (`phase_s`). If
    it `runs_ahead`, a device works while its processor makes the next calls.
    """

    moved_bytes_per_s: float
    cached_bytes_per_s: float
    summed_bytes_per_s: float
    read_bytes_per_s: float
    touched_bytes_per_s: float = math.inf
    host_bytes_per_s: float = math.inf
    call_s: float = CALL_S
    launch_s: float = CALL_S
    answer_s: float = 0.0
    message_s: float = MESSAGE_S
    late_s: float = 0.0
    phase_s: float = PHASE_S
    runs_ahead: bool = False

    def seconds(self, effort: Effort) -> float:
        """What one rank needs for it."""
        num_views = effort.num_calls - effort.num_launches
        calls_s = num_views * self.call_s + effort.num_launches * self.launch_s
        work_s = (
            effort.moved_bytes / self.moved_bytes_per_s
            + effort.cached_bytes / self.cached_bytes_per_s
            + effort.summed_bytes / self.summed_bytes_per_s
            + effort.read_bytes / self.read_bytes_per_s
            + effort.host_bytes / self.host_bytes_per_s
        )
        total_s = max(calls_s, work_s) if self.runs_ahead else calls_s + work_s
        return total_s + effort.num_answers * self.answer_s


def publish_rates(card: Gpu, device: str) -> PublishRates:
    """Those of a rank on a `device` with these peaks."""
    memory_bytes_per_s = card.memory_bytes_per_s * LAW.elementwise
    if not is_gpu(device):
        return PublishRates(
            moved_bytes_per_s=memory_bytes_per_s,
            cached_bytes_per_s=CORE_SUM_BYTES_PER_S,
            summed_bytes_per_s=CORE_SUM_BYTES_PER_S,
            read_bytes_per_s=CORE_READ_BYTES_PER_S,
            touched_bytes_per_s=CORE_TOUCH_BYTES_PER_S,
        )
    # No data sheet says how fast a GPU's cache is: bytes in it count as those in memory.
    return PublishRates(
        moved_bytes_per_s=memory_bytes_per_s,
        cached_bytes_per_s=memory_bytes_per_s,
        summed_bytes_per_s=memory_bytes_per_s,
        read_bytes_per_s=memory_bytes_per_s,
        host_bytes_per_s=card.host_link_bytes_per_s * LAW.link,
        launch_s=LAUNCH_S,
        answer_s=ANSWER_S,
        late_s=POLL_S / 2 + TIMER_S,  # in the mean
        runs_ahead=True,
    )
