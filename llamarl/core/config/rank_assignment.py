"""The assignment of ranks to hosts and GPUs.

Devices are taken in order: by the trainer first, then by one replica after another, at the site of
its pool if that names one. The ranks of a replica are on several hosts only if one host is too
small for them. Colocated, the replicas begin again at the first device. Without GPUs a host counts
as many devices as an even spread of the ranks over the hosts needs.

The functions are pure. With disaggregated placement no two ranks share a GPU, except that the
reference shares the trainer's."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.core.config import Config
from llamarl.core.config.generator import Pool, pool_at, pools_of
from llamarl.core.device.names import is_gpu
from llamarl.core.fields import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The place where one rank runs."""

    host: int
    """The index among the run's hosts."""
    gpu: int | None
    """The index among that host's GPUs; None on CPUs."""
    gpu_kind: str = ""
    """The kind of GPU that it must be; "": a `cluster.gpu`."""


def assign(config: Config, num_replicas: int = 0) -> dict[str, list[Device]]:
    """Return the device of each rank, by executor name ("trainer", "generator-0", "reference").

    `num_replicas` may be more than those of the recipe. ValueError, with the numbers, if the hosts
    have too few GPUs.
    """
    pools, per_host = pools_of(config.generator), devices_per_host(config)
    trainer = [*range(config.trainer.num_ranks)]
    places = {"trainer": [_device(i, per_host, config.trainer.device) for i in trainer]}
    home = config.cluster.sites[0] if pools[0].site else ""
    ends = {home: 0 if config.placement.colocated else len(trainer)}  # by site, in its devices
    kinds = {home: ""}  # of the GPUs there; those of a host are alike
    for replica in range(max(pools[-1].replicas.stop, num_replicas)):
        pool = pool_at(config.generator, replica)
        num_ranks = pool.generator.num_ranks
        start = _align(ends.get(pool.site, 0), num_ranks, per_host)
        if kinds.setdefault(pool.site, pool.gpu) != pool.gpu:
            start, kinds[pool.site] = math.ceil(start / per_host) * per_host, pool.gpu
        ends[pool.site] = start + num_ranks
        device, hosts = pool.generator.device, _hosts_at(config, pool.site)
        places[f"generator-{replica}"] = [
            _device(i, per_host, device, hosts, pool.gpu) for i in range(start, start + num_ranks)
        ]
    _check_room(config, pools, ends | {home: max(ends[home], len(trainer))}, per_host)
    _check_sites(config, places)
    return places | {"reference": places["trainer"]}


def place_generator(config: Config, replica: int) -> list[Device]:
    """Return the device of each rank of a replica, whose index may be beyond those of the recipe.

    On GPUs such a replica takes the devices that the recipe leaves free; ValueError, with the
    numbers, if there are too few. On CPUs it runs on the host that its index names in turn.
    """
    if f"generator-{replica}" in (places := assign(config)):
        return places[f"generator-{replica}"]
    pool = pool_at(config.generator, replica)
    if pool.generator.device == "cpu":
        hosts = _hosts_at(config, pool.site)
        host = Device(host=hosts[replica % len(hosts)], gpu=None)
        return [host] * pool.generator.num_ranks
    return assign(config, replica + 1)[f"generator-{replica}"]


def companions(config: Config) -> dict[str, list[Device]]:
    """Return the devices of executors that compute no tensors, at the trainer's site: the scorer on
    its first host, storage units on every one, collectors spread over them."""
    counts = {"storage": num_storage_units(config), "collector": config.generator.num_collectors}
    hosts = home_hosts(config)
    spread = {
        f"{name}-{i}": [Device(host=hosts[i % len(hosts)], gpu=None)]
        for name, count in counts.items()
        for i in range(count)
    }
    return spread | {"scorer": [Device(host=0, gpu=None)]}


def num_storage_units(config: Config) -> int:
    """Return the number of storage units of the whole run; unit i is on host i, modulo their
    number, of the trainer's site."""
    return config.experience.units_per_host * len(home_hosts(config))


def units_near(config: Config) -> dict[int, list[int]]:
    """Return, by replica, the storage units on the host of its rank 0, which writes its rollouts. A
    replica at another site, which has no units, gets all of them. Empty if all units are on one
    host."""
    hosts = home_hosts(config)
    if len(hosts) == 1:
        return {}
    places, units = assign(config), range(num_storage_units(config))
    near = {host: [*units[place :: len(hosts)]] for place, host in enumerate(hosts)}
    own = {i: places[f"generator-{i}"][0].host for i in range(config.generator.num_replicas)}
    return {replica: near.get(host, [*units]) for replica, host in own.items()}


def home_hosts(config: Config) -> list[int]:
    """Return the hosts at the trainer's site, which is the first host's."""
    far = far_sites(config)
    return [host for host in range(config.cluster.size) if host not in far]


def far_sites(config: Config) -> dict[int, str]:
    """Return the site of each host that is not at the trainer's site, by host."""
    sites = config.cluster.sites
    return {host: site for host, site in enumerate(sites) if site != sites[0]}


def needs_gpu(config: Config) -> bool:
    """Return whether the trainer or generators compute on GPUs."""
    generators = (pool.generator.device for pool in pools_of(config.generator))
    return any(map(is_gpu, (config.trainer.device, *generators)))


def devices_per_host(config: Config) -> int:
    """Return how many ranks one host takes."""
    pools = pools_of(config.generator)
    if needs_gpu(config):
        return config.cluster.num_gpus_per_host
    num_ranks: Counter[str] = Counter()  # by site
    for pool in pools:
        num_ranks[pool.site] += len(pool.replicas) * pool.generator.num_ranks
    home = config.cluster.sites[0] if pools[0].site else ""
    if config.placement.colocated:
        num_ranks[home] = max(config.trainer.num_ranks, num_ranks[home])
    else:
        num_ranks[home] += config.trainer.num_ranks
    even = max(math.ceil(n / len(_hosts_at(config, site))) for site, n in num_ranks.items())
    largest = max(pool.generator.num_ranks for pool in pools)
    return math.ceil(even / largest) * largest


def _hosts_at(config: Config, site: str) -> Sequence[int]:
    """Return the hosts of a site; "" stands for all hosts."""
    if not site:
        return range(config.cluster.size)
    return [host for host, each in enumerate(config.cluster.sites) if each == site]


def _check_room(config: Config, pools: list[Pool], ends: dict[str, int], per_host: int) -> None:
    """Raise ValueError, with the numbers, unless each site has as many devices as ranks sit
    there."""
    for site, end in ends.items():
        num_hosts, there = math.ceil(end / per_host), len(_hosts_at(config, site))
        ranks = " and ".join(
            f"{len(pool.replicas)} generator replicas of {pool.generator.num_ranks}"
            for pool in pools
            if pool.site == site
        )
        if site in ("", *config.cluster.sites[:1]):
            ranks = f"trainer.num_ranks {config.trainer.num_ranks}, {ranks}"
        numbers = f"({ranks}, {per_host} devices a host)"
        must = f"name at least {num_hosts} hosts at {site} {numbers}"
        require(num_hosts <= there or not site, "cluster.sites", must, there)
        must = f"be at least {num_hosts} {numbers}"
        require(num_hosts <= there, "cluster.num_hosts", must, there)


def _check_sites(config: Config, devices: dict[str, list[Device]]) -> None:
    """Raise ValueError unless each executor is at one site, and every site except the trainer's has
    a replica."""
    sites = config.cluster.sites or [""] * config.cluster.size
    found = {
        name: dict.fromkeys(sites[place.host] for place in places)
        for name, places in devices.items()
    }
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


def _align(end: int, num_ranks: int, per_host: int) -> int:
    """Return the first device from `end` on where `num_ranks` ranks are on one host, or, if they
    need several hosts, where a host begins."""
    room = per_host - end % per_host
    return end if num_ranks <= room or room == per_host else end + room


def _device(
    number: int, per_host: int, device: str, hosts: Sequence[int] = (), gpu_kind: str = ""
) -> Device:
    """Return the device of this number on these hosts, or on all; the last host takes numbers that
    are too high."""
    place, gpu = divmod(number, per_host)
    host = hosts[min(place, len(hosts) - 1)] if hosts else place
    return Device(host=host, gpu=gpu if is_gpu(device) else None, gpu_kind=gpu_kind)
