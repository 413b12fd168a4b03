"""How long collectives take.

Owns: bandwidth and latency of a group of ranks. Does not own: what is sent, or constants
(`efficiency.py`, `hardware.py`). Invariant: one law for every collective of trainer and generators.
"""

import math

from llamarl.core.config import Config
from llamarl.planner.efficiency import BETWEEN_HOSTS_S, HOP_S, LAW
from llamarl.planner.hardware import Gpu


def rate(config: Config, gpu: Gpu, num_ranks: int, stride: int = 1) -> float:
    """Bytes per second that one rank gets in a collective of `num_ranks` ranks, `stride` devices
    apart.

    Within a host the links carry it. Between hosts the network cards of all the group's ranks on a
    host bring in what comes from others, and the links pass it on.
    """
    num_per_host = _num_per_host(config, stride)
    bytes_per_s = gpu.link_bytes_per_s * LAW.link
    if num_ranks > num_per_host:
        bytes_per_s = min(bytes_per_s, num_per_host * gpu.card_bytes_per_s * LAW.card)
    return bytes_per_s


def latency_s(config: Config, num_ranks: int, within_host_s: float, stride: int = 1) -> float:
    """Seconds of the smallest collective: `within_host_s`, or what crossing hosts takes."""
    if num_ranks == 1:
        return 0.0
    num_hosts = math.ceil(num_ranks / _num_per_host(config, stride))
    if num_hosts == 1:
        return within_host_s
    return max(within_host_s, BETWEEN_HOSTS_S) + HOP_S * (math.ceil(math.log2(num_hosts)) - 1)


def _num_per_host(config: Config, stride: int) -> int:
    """Ranks of the group on one host."""
    return max(1, config.cluster.num_gpus_per_host // stride)
