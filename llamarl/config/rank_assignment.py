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
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    _check_sites(config, devices)
    return devices | {"reference": devices["trainer"]}


def place_generator(config: Config, replica: int) -> list[Device]:
    """The device of each rank of a replica that may be more than those of the recipe.

    On GPUs it takes the devices that the recipe leaves free; ValueError, with the numbers, if there
    are too few. Else it runs on the host that its index names in turn.
    """
    if f"generator-{replica}" in (places := assign(config)):
        return places[f"generator-{replica}"]
    if config.generator.device == "cpu":
        host = Device(host=replica % config.cluster.size, gpu=None)
        return [host] * config.generator.num_ranks
    more = replace(config, generator=replace(config.generator, num_replicas=replica + 1))
    return assign(more)[f"generator-{replica}"]


def companions(config: Config) -> dict[str, list[Device]]:
    """The devices of executors that compute no tensors, at the trainer's site: the scorer on its
    first host, storage units on every one, collectors spread over them."""
    counts = {
        "storage": num_storage_units(config),
        "collector": config.generator.num_collectors,
    }
    hosts = home_hosts(config)
    spread = {
        f"{name}-{i}": [Device(host=hosts[i % len(hosts)], gpu=None)]
        for name, count in counts.items()
        for i in range(count)
    }
    return spread | {"scorer": [Device(host=0, gpu=None)]}


def num_storage_units(config: Config) -> int:
    """Of the whole run; unit i is on host i, modulo their number, of the trainer's site."""
    return config.experience.units_per_host * len(home_hosts(config))


def units_near(config: Config) -> dict[int, list[int]]:
    """Generator replica -> the storage units on the host of its rank 0, which writes its rollouts;
    all units for one at another site, which has none.

    None if all units are on one host.
    """
    hosts = home_hosts(config)
    if len(hosts) == 1:
        return {}
    places, units = assign(config), range(num_storage_units(config))
    near = {host: [*units[place :: len(hosts)]] for place, host in enumerate(hosts)}
    own = {i: places[f"generator-{i}"][0].host for i in range(config.generator.num_replicas)}
    return {replica: near.get(host, [*units]) for replica, host in own.items()}


def home_hosts(config: Config) -> list[int]:
    """The hosts at the trainer's site, which is the first host's."""
    far = far_sites(config)
    return [host for host in range(config.cluster.size) if host not in far]


def far_sites(config: Config) -> dict[int, str]:
    """Host -> its site, of those at other sites than the trainer's."""
    sites = config.cluster.sites
    return {host: site for host, site in enumerate(sites) if site != sites[0]}


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


def _check_sites(config: Config, devices: dict[str, list[Device]]) -> None:
    """ValueError unless each executor is at one site, and every site but the trainer's has a
    replica."""
    sites = config.cluster.sites or [""] * config.cluster.size
    found = {name: _sites_of(places, sites) for name, places in devices.items()}
    for name, some in found.items():
        if len(some) > 1:
            raise ValueError(
                f"cluster.sites must have all ranks of {name} at one site, got {', '.join(some)}"
            )
    used = {site for some in found.values() for site in some}
    for site in dict.fromkeys(sites):
        if site not in used:
            raise ValueError(
                f"cluster.sites must give every site a generator replica, got none at {site} "
                f"(generator.num_replicas {config.generator.num_replicas}, the ranks fill host "
                "after host)"
            )


def _sites_of(places: Sequence[Device], sites: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(sites[place.host] for place in places)]


def _align(end: int, num_ranks: int, per_host: int) -> int:
    """The first device from `end` on where `num_ranks` ranks are on one host, or, if they need
    several, begin one."""
    room = per_host - end % per_host
    return end if num_ranks <= room or room == per_host else end + room


def _device(number: int, per_host: int, device: str) -> Device:
    return Device(host=number // per_host, gpu=number % per_host if device == "cuda" else None)
