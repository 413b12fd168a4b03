"""Which rank sits where: every layout of a cluster that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import Config
from llamarl.config.rank_assignment import assign, companions
from tests.unit.test_config import MINIMUM, make_config

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


def test_hosts_too_few_are_named_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_hosts must be at least 3 \(.*num_ranks 16, 2 .* 1$"):
        assign(with_sizes(GPUS, 16, 2, 4, 1))


def test_on_two_cpu_hosts_trainer_and_generators_sit_apart_and_storage_on_both() -> None:
    config = with_sizes(CPUS, 2, 2, 1, 2)
    hosts = {name: [device.host for device in places] for name, places in assign(config).items()}
    assert hosts["trainer"] == [0, 0]
    assert (hosts["generator-0"], hosts["generator-1"]) == ([1], [1])
    config = replace(config, experience=replace(config.experience, units_per_host=2))
    beside = {name: places[0].host for name, places in companions(config).items()}
    assert beside == {"scorer": 0, "storage-0": 0, "storage-1": 1, "storage-2": 0, "storage-3": 1}
