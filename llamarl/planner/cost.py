"""What the GPUs of a recipe cost.

Owns: the sum, and throughput per cost. Does not own: prices (`hardware.py`, `plan.gpu_prices`) or
throughput. Invariant: a cost adds up prices of one source; without a price for each kind of GPU
there is none.
"""

from collections import Counter
from dataclasses import dataclass

from llamarl.config import Config
from llamarl.config.rank_assignment import assign
from llamarl.config.run import read_prices
from llamarl.planner.hardware import GPUS

HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the GPUs that have a rank: how many there are of each kind, and an hour of one.

    `unit` says what prices are in.
    """

    num_gpus: dict[str, int]
    prices: dict[str, float]
    unit: str

    @property
    def per_hour(self) -> float:
        """Of all GPUs."""
        return sum(number * self.prices[kind] for kind, number in self.num_gpus.items())

    def throughput(self, tokens_per_s: float) -> float:
        """Tokens for one unit of price."""
        return tokens_per_s * HOUR_S / self.per_hour


def kinds_of(config: Config) -> dict[str, int]:
    """The GPUs that have a rank, by kind, the trainer's first."""
    devices = {device for places in assign(config).values() for device in places}
    places = {(device.host, device.gpu): device.gpu_kind for device in devices}
    counts = Counter(kind or config.cluster.gpu for (_, i), kind in places.items() if i is not None)
    return dict(sorted(counts.items(), key=lambda item: item[0] != config.cluster.planned_gpu))


def cost_of(config: Config) -> Cost | None:
    """None on CPUs, and if the price of a kind is not known. ValueError if `plan.gpu_prices` leaves
    one out."""
    num_gpus, own = kinds_of(config), read_prices(config.plan.gpu_prices)
    if own and (missing := [kind for kind in num_gpus if kind not in own]):
        raise ValueError(f"plan.gpu_prices must name {missing[0]}, got {', '.join(own)}")
    known = own or {kind: gpu.price for kind, gpu in GPUS.items() if gpu.price is not None}
    if not num_gpus or any(kind not in known for kind in num_gpus):
        return None
    unit = "plan.gpu_prices" if own else "hours of an H20"
    return Cost(num_gpus=num_gpus, prices={kind: known[kind] for kind in num_gpus}, unit=unit)
