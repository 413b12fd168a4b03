"""Which rank runs on which host and GPU.

Owns: the assignment, for a run and for a forecast alike. Does not own: starting processes
(`cluster/`). Invariant: pure; with disaggregated placement no two ranks share a GPU, except that
the reference shares the trainer's.

Devices are taken in order: by the trainer first, then by one replica after another. The ranks of a
replica are on several hosts only if one host is too small for them. Colocated, the replicas begin
again at the first device. Without GPUs a host counts as many devices as an even spread of the ranks
over the hosts needs.
"""

import math
from dataclasses import dataclass

from llamarl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where one rank runs."""

    host: int
    """Index among the run's hosts."""
    gpu: int | None
    """Index among that host's GPUs; None on CPUs."""


def assign(config: Config) -> dict[str, list[Device]]:
    """Executor name ("trainer", "generator-0", "reference") -> the device of each of its ranks.

    ValueError, with the numbers, if the hosts have too few GPUs.
    """
    per_host = devices_per_host(config)
    places: dict[str, range] = {"trainer": range(config.trainer.num_ranks)}
    end = 0 if config.placement.colocated else config.trainer.num_ranks
    for replica in range(config.generator.num_replicas):
        start = _align(end, config.generator.num_ranks, per_host)
        end = start + config.generator.num_ranks
        places[f"generator-{replica}"] = range(start, end)
    num_hosts = math.ceil(max(end, config.trainer.num_ranks) / per_host)
    if num_hosts > config.cluster.size:
        raise ValueError(
            f"cluster.num_hosts must be at least {num_hosts} (trainer.num_ranks "
            f"{config.trainer.num_ranks}, {config.generator.num_replicas} generator replicas of "
            f"{config.generator.num_ranks}, {per_host} devices a host), got {config.cluster.size}"
        )
    kinds = {"trainer": config.trainer.device, "generator": config.generator.device}
    devices = {
        name: [_device(i, per_host, kinds[name.partition("-")[0]]) for i in place]
        for name, place in places.items()
    }
    return devices | {"reference": devices["trainer"]}


def companions(config: Config) -> dict[str, list[Device]]:
    """The devices of executors that compute no tensors: the scorer on the first host, storage units
    on every host, collectors spread over the hosts."""
    counts = {
        "storage": num_storage_units(config),
        "collector": config.generator.num_collectors,
    }
    spread = {
        f"{name}-{i}": [Device(host=i % config.cluster.size, gpu=None)]
        for name, count in counts.items()
        for i in range(count)
    }
    return spread | {"scorer": [Device(host=0, gpu=None)]}


def num_storage_units(config: Config) -> int:
    """Of the whole run; unit i is on host i modulo the number of hosts."""
    return config.experience.units_per_host * config.cluster.size


def units_near(config: Config) -> dict[int, list[int]]:
    """Generator replica -> the storage units on the host of its rank 0, which writes its rollouts.

    None if all is on one host.
    """
    size = config.cluster.size
    if size == 1:
        return {}
    places, units = assign(config), range(num_storage_units(config))
    hosts = {i: places[f"generator-{i}"][0].host for i in range(config.generator.num_replicas)}
    return {replica: [*units[host::size]] for replica, host in hosts.items()}


def devices_per_host(config: Config) -> int:
    """Ranks that one host takes."""
    if "cuda" in (config.trainer.device, config.generator.device):
        return config.cluster.num_gpus_per_host
    num_generator_ranks = config.generator.num_replicas * config.generator.num_ranks
    if config.placement.colocated:
        total = max(config.trainer.num_ranks, num_generator_ranks)
    else:
        total = config.trainer.num_ranks + num_generator_ranks
    even = math.ceil(total / config.cluster.size)
    return math.ceil(even / config.generator.num_ranks) * config.generator.num_ranks


def _align(end: int, num_ranks: int, per_host: int) -> int:
    """The first device from `end` on where `num_ranks` ranks are on one host, or, if they need
    several, begin one."""
    room = per_host - end % per_host
    return end if num_ranks <= room or room == per_host else end + room


def _device(number: int, per_host: int, device: str) -> Device:
    return Device(host=number // per_host, gpu=number % per_host if device == "cuda" else None)
