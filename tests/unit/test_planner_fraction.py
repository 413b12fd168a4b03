"""A fraction of a cluster in place of the whole: when it does, and that it takes as long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.core.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.planner.simulation import clock, fraction
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import fewest_steps, forecast, run, settling_steps
from llamarl.planner.simulation.workload import make_workload
from tests.unit.test_planner_step import TINY, make_config

COSTS = Costs(
    decode_step_s=0.01,
    decode_row_s=2e-4,
    token_s=2e-4,
    optimizer_s=0.1,
    write_s=0.3,
    check_s=0.05,
    commit_s=0.02,
    score_row_s=1e-3,
)


def make_cluster(max_staleness: int, num_replicas: int = 64) -> Config:
    """4 groups of 8 rollouts for each replica, 1 trainer rank for two replicas."""
    return make_config(
        max_staleness=max_staleness,
        spread=0.6,
        num_replicas=num_replicas,
        generator=EmbeddedConfig(num_replicas=num_replicas, max_num_seqs=16, device="cuda"),
        trainer=TrainerConfig(
            num_ranks=num_replicas // 2,
            groups_per_step=4 * num_replicas,
            tokens_per_micro_batch=256,
            device="cuda",
        ),
        sampling=SamplingConfig(rollouts_per_prompt=8, max_tokens=100),
        weights=WeightsConfig(transport="collective"),
        cluster=ClusterConfig(num_hosts=num_replicas),
    )


def step_s(config: Config, k: int, num_steps: int) -> float:
    """The step of a k-th of the cluster."""
    part = fraction.take(config, COSTS, k)
    timeline = clock.run(run(*part, TINY, make_workload(config), num_steps))
    return forecast(timeline, settling_steps(config, num_steps)).step_s


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_fraction_of_a_cluster_takes_as_long_as_the_whole(max_staleness: int) -> None:
    config = make_cluster(max_staleness, num_replicas=128)  # whose half has half of FEWEST_ROLLOUTS
    # Rollouts of one length in part tell less of the mean than as many, and these are few.
    config = replace(config, plan=replace(config.plan, group_correlation=0.0))
    assert fraction.divisor(config, COSTS, fewest_rollouts=2048) == 2
    num_steps = fewest_steps(config)
    assert step_s(config, 2, num_steps) == pytest.approx(step_s(config, 1, num_steps), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "slack"), [(0, 0.03), (1, 0.015)])
def test_a_fraction_does_for_the_largest_clusters(max_staleness: int, slack: float) -> None:
    config = make_cluster(max_staleness, num_replicas=512)
    k = fraction.divisor(config, COSTS)
    assert k == 4
    num_steps = 4 * (max_staleness + 1)  # bursts of S + 1 steps, from the start, are over by then
    assert step_s(config, k, num_steps) == pytest.approx(step_s(config, 1, num_steps), rel=slack)


def test_a_fraction_has_its_share_of_everything() -> None:
    config = make_cluster(0)
    part, costs = fraction.take(config, COSTS, 4)
    trainer, generator = part.trainer, part.generator
    assert (trainer.num_data_ranks, trainer.groups_per_step, generator.num_replicas) == (8, 64, 16)
    assert costs == replace(COSTS, score_row_s=4 * COSTS.score_row_s)
    assert fraction.take(config, COSTS, 1) == (config, COSTS)


def test_only_a_large_cluster_that_divides_is_cut() -> None:
    config = make_cluster(0)
    assert fraction.divisor(config, COSTS, fewest_rollouts=1024) == 2
    assert fraction.divisor(config, COSTS, fewest_rollouts=4096) == 1
    on_shared = replace(COSTS, num_cores=2)
    assert fraction.divisor(config, on_shared, fewest_rollouts=512) == 1
    assert fraction.divisor(make_cluster(0, num_replicas=56), COSTS, fewest_rollouts=512) == 1
    few_ranks = replace(config, trainer=replace(config.trainer, num_ranks=8))
    assert fraction.divisor(few_ranks, COSTS, fewest_rollouts=512) == 1
    odd = replace(config, trainer=replace(config.trainer, groups_per_step=257))
    assert fraction.divisor(odd, COSTS, fewest_rollouts=512) == 1
