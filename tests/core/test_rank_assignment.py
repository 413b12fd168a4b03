"""Which rank sits where: every layout of a cluster that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import (
    assign,
    companions,
    num_storage_units,
    place_generator,
    units_near,
)
from tests.recipe.test_config import MINIMUM, make_config

GPUS = make_config(*MINIMUM, "trainer.device=cuda", "generator.device=cuda", "weights=collective")
CPUS = make_config(*MINIMUM, "weights=collective")


def with_sizes(base: Config, trainer: int, replicas: int, ranks: int, hosts: int) -> Config:
    return replace(
        base,
        trainer=replace(base.trainer, num_ranks=trainer),
        generator=replace(base.generator, num_replicas=replicas, num_ranks=ranks),
        cluster=replace(base.cluster, num_hosts=hosts),
    )


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_no_two_ranks_share_a_gpu_and_no_replica_straddles_hosts(trainer, replicas, ranks) -> None:
    config = with_sizes(GPUS, trainer, replicas, ranks, 64)
    devices = assign(config)
    assert devices.pop("reference") == devices["trainer"]
    taken = [device for places in devices.values() for device in places]
    assert len(set(taken)) == len(taken) == trainer + replicas * ranks
    assert all(0 <= device.gpu < 8 for device in taken)
    for index in range(replicas):
        hosts = {device.host for device in devices[f"generator-{index}"]}
        assert len(hosts) == max(1, ranks // 8)


def test_on_two_cpu_hosts_trainer_and_generators_sit_apart_and_storage_on_both() -> None:
    config = with_sizes(CPUS, 2, 2, 1, 2)
    hosts = {name: [device.host for device in places] for name, places in assign(config).items()}
    assert hosts["trainer"] == [0, 0]
    assert (hosts["generator-0"], hosts["generator-1"]) == ([1], [1])
    config = replace(config, experience=replace(config.experience, units_per_host=2))
    beside = {name: places[0].host for name, places in companions(config).items()}
    assert beside == {"scorer": 0, "storage-0": 0, "storage-1": 1, "storage-2": 0, "storage-3": 1}


def at_sites(trainer: int, replicas: int, ranks: int, *sites: str) -> Config:
    config = with_sizes(CPUS, trainer, replicas, ranks, len(sites))
    return replace(config, cluster=replace(config.cluster, sites=[*sites]))


def test_rollouts_are_stored_at_the_trainers_site_alone() -> None:
    config = at_sites(2, 4, 1, "here", "here", "there")
    hosts = {name: places[0].host for name, places in companions(config).items()}
    assert hosts == {"scorer": 0, "storage-0": 0, "storage-1": 1}
    assert num_storage_units(config) == 2
    assert units_near(config) == {0: [1], 1: [1], 2: [0, 1], 3: [0, 1]}
    assert units_near(at_sites(1, 3, 1, "here", "there")) == {}, "all units are on one host"


def with_pools(config: Config, *texts: str) -> Config:
    return replace(config, generator=replace(config.generator, num_replicas=1, pools=[*texts]))


def test_each_pool_has_its_own_ranks_and_gpus_of_another_kind_begin_a_host() -> None:
    four = with_sizes(GPUS, 4, 1, 1, 4)
    places = assign(with_pools(four, "num_ranks=2", "num_ranks=4 num_replicas=3 gpu=H20-96GB"))
    found = {name: [(d.host, d.gpu, d.gpu_kind) for d in some] for name, some in places.items()}
    assert found["generator-0"] == [(0, 4, ""), (0, 5, "")]
    assert [place[0] for place in found["generator-1"] + found["generator-2"]] == [1] * 8
    assert found["generator-3"] == [(2, gpu, "H20-96GB") for gpu in range(4)]
    mixed = with_pools(four, "num_replicas=2", "device=cpu")
    assert [d.gpu for d in assign(mixed)["generator-2"]] == [None]


def test_pools_sit_at_the_site_that_they_name() -> None:
    config = with_pools(
        at_sites(2, 1, 1, "here", "there"), "num_replicas=3 site=there", "site=here"
    )
    hosts = {name: places[0].host for name, places in assign(config).items()}
    assert [hosts[f"generator-{i}"] for i in range(4)] == [1, 1, 1, 0]
    assert place_generator(config, 7)[0].host == 0, "one more is of the last pool"


def with_gpus(config: Config, num_gpus_per_host: int) -> Config:
    return replace(
        config,
        trainer=replace(config.trainer, device="cuda"),
        cluster=replace(config.cluster, num_gpus_per_host=num_gpus_per_host),
    )


WRONG = {
    "hosts": (with_sizes(GPUS, 16, 2, 4, 1), r"^cluster.num_hosts must be at least 3"),
    "pools": (
        with_pools(with_sizes(GPUS, 4, 1, 1, 1), "num_replicas=2", "num_ranks=4"),
        r"at least 2 \(.* 2 generator .* of 1 and 1 .* of 4",
    ),
    "hosts of a site": (
        with_gpus(
            with_pools(
                at_sites(2, 1, 1, "here", "there"), "num_replicas=3 site=there", "site=here"
            ),
            2,
        ),
        r"2 hosts at here \(trainer.num_ranks 2, 1 .* got 1$",
    ),
    "a site without generator": (
        at_sites(1, 1, 1, "here", "there", "moon"),
        r"^cluster.sites must .*every site a generator replica, .* at moon ",
    ),
    "a trainer of two sites": (
        at_sites(3, 1, 1, "here", "there"),
        r"^cluster.sites must .*all ranks of trainer at one site, got here, there$",
    ),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_hosts_that_cannot_hold_all_ranks_are_named(wrong: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign(wrong)
