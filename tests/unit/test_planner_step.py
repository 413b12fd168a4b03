"""Simulated step times: what can be worked out by hand, bounds, splits."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import (
    Config,
    DataConfig,
    EmbeddedConfig,
    EnvironmentConfig,
    PlacementConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.generator.decoding import GATHER_S
from llamarl.planner.changes import best_splits
from llamarl.planner.forecast import StepForecast
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import forecast, run, settling_steps, simulate
from llamarl.planner.simulation.workload import make_workload
from llamarl.trainer.losses.clip import PPOConfig
from tests.unit.planner_recipes import LLAMA, make_recipe

PROMPT_TOKENS = 10
LENGTH = 20
GROUPS, ROLLOUTS = 8, 4
SHARED = ("prompt_tokens", "median_tokens", "spread", "num_steps")
TINY = replace(
    LLAMA,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_kv_heads=8,
)
COSTS = Costs(
    decode_step_s=0.01,
    token_s=1e-4,
    forward_share=0.0,
    optimizer_s=0.05,
    write_s=0.02,
    check_s=0.03,
)


def make_config(
    *, max_staleness: int = 1, spread: float = 0.0, num_replicas: int = 1, **sections: Any
) -> Config:
    sections = {
        "generator": EmbeddedConfig(num_replicas=num_replicas, max_num_seqs=64),
        "trainer": TrainerConfig(groups_per_step=GROUPS),
        "sampling": SamplingConfig(rollouts_per_prompt=ROLLOUTS, max_tokens=200),
        **sections,
    }
    return make_recipe(
        staleness=StalenessConfig(max_staleness=max_staleness),
        plan=PlanConfig(
            prompt_tokens=PROMPT_TOKENS, median_tokens=LENGTH, spread=spread, num_steps=8
        ),
        **sections,
    )


TRAIN_S = GROUPS * ROLLOUTS * (PROMPT_TOKENS + LENGTH - 1) * COSTS.token_s + COSTS.optimizer_s


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    write_s = LENGTH * COSTS.decode_step_s  # from the commit on: the requests are there already
    publish_s = COSTS.write_s + COSTS.check_s
    step = simulate(make_config(max_staleness=0), TINY, COSTS)
    assert step.step_s == pytest.approx(write_s + GATHER_S + TRAIN_S + publish_s, rel=1e-6)
    assert step.publish_s == pytest.approx(publish_s, rel=1e-6)
    assert step.busy_shares["trainer"] == pytest.approx(TRAIN_S / step.step_s, rel=1e-6)
    assert (step.mean_staleness, step.max_staleness) == (0.0, 0)
    assert step.trained_tokens_per_s == pytest.approx(GROUPS * ROLLOUTS * LENGTH / step.step_s)


def test_a_step_of_episodes_waits_for_tools_and_trains_observations_too() -> None:
    episodes = make_recipe(
        data=DataConfig(prompts="x", chat=True),
        environment=EnvironmentConfig(tools=["task"]),
        plan=PlanConfig(num_turns=4, tool_s=1.5, tool_spread=0.0, observation_tokens=5),
    )
    config = make_config(max_staleness=0)
    plan = replace(episodes.plan, **{n: getattr(config.plan, n) for n in SHARED})
    config = replace(config, data=episodes.data, environment=episodes.environment, plan=plan)
    tokens = GROUPS * ROLLOUTS * (PROMPT_TOKENS + LENGTH + 3 * 5 - 1)
    train_s = tokens * COSTS.token_s + COSTS.optimizer_s
    step = simulate(config, TINY, COSTS)
    others_s = LENGTH * COSTS.decode_step_s + GATHER_S + COSTS.write_s + COSTS.check_s
    assert step.step_s == pytest.approx(train_s + others_s + 3 * 1.5, rel=1e-6)
    assert step.trained_tokens_per_s == pytest.approx(GROUPS * ROLLOUTS * LENGTH / step.step_s)
    tail = replace(config, plan=replace(plan, tool_spread=1.0))
    assert simulate(tail, TINY, COSTS).step_s > 2 * step.step_s, "the head of the queue waits"


def test_an_asynchronous_step_takes_as_long_as_the_slower_side() -> None:
    config = make_config(max_staleness=1)
    slow_trainer = replace(COSTS, token_s=1e-3)
    train_s = (TRAIN_S - COSTS.optimizer_s) * 10 + COSTS.optimizer_s
    assert simulate(config, TINY, slow_trainer).step_s == pytest.approx(train_s, rel=1e-6)
    slow_generator = replace(COSTS, decode_step_s=0.1)
    step = simulate(config, TINY, slow_generator)
    assert step.busy_shares["generator"] > 0.9
    assert step.step_s < simulate(make_config(max_staleness=0), TINY, slow_generator).step_s


def test_the_gate_bounds_staleness_and_the_same_arguments_give_the_same_times() -> None:
    config = make_config(
        max_staleness=2,
        spread=1.0,
        num_replicas=3,
        sampling=SamplingConfig(rollouts_per_prompt=4, max_tokens=200, segment_tokens=16),
        generator=EmbeddedConfig(num_replicas=3, max_num_seqs=6, kv_after_commit="recompute"),
    )
    costs = replace(COSTS, prefill_token_s=1e-4, decode_row_s=1e-4, message_s=1e-3)
    first, second = (simulate(config, TINY, costs) for _ in range(2))
    assert first == second
    assert 0 < first.mean_staleness <= first.max_staleness <= 2
    for executor in ("generator", "trainer"):
        waits = [s for key, s in first.wait_shares.items() if key.startswith(executor)]
        assert first.busy_shares[executor] + sum(waits) == pytest.approx(1, abs=0.02)


def test_colocated_sides_are_never_busy_at_once() -> None:
    config = make_config(max_staleness=1, spread=0.5, placement=PlacementConfig(colocated=True))
    costs = replace(COSTS, moves_s={"trainer weights": 0.1, "generator kv": 0.2})
    timeline = clock.run(run(config, costs, TINY, make_workload(config), 4))
    ours = [bar for bar in timeline.bars["generator-0"] if bar[2] == "decode"]
    theirs = [bar for bar in timeline.bars["trainer"] if bar[2] == "accumulate"]
    assert ours
    assert theirs
    assert not any(a[0] < b[1] and b[0] < a[1] for a in ours for b in theirs)
    assert forecast(timeline, 2).wait_shares["trainer phase"] > 0.2


@settings(max_examples=4, deadline=None)
@given(
    st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(1e-5, 1e-3), st.floats(0, 0.3), st.data()
)
def test_running_ahead_never_costs_time(
    step_s: float, row_s: float, token_s: float, write_s: float, data: st.DataObject
) -> None:
    costs = Costs(decode_step_s=step_s, decode_row_s=row_s, token_s=token_s, write_s=write_s)
    parts = data.draw(st.sampled_from(["dynamic", "batch"]))
    trainer = TrainerConfig(groups_per_step=GROUPS, parts=parts)
    sync, ahead = (
        simulate(make_config(max_staleness=s, spread=0.6, trainer=trainer), TINY, costs).step_s
        for s in (0, 1)
    )
    assert ahead <= sync * 1.02  # other rollouts are in flight at the ends of the window


@settings(deadline=None)
@given(
    st.integers(1, 64),
    st.integers(0, 5000),
    st.integers(1, 60),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
    st.floats(0, 1e-3),
)
def test_a_chunk_of_decode_steps_takes_what_its_steps_take(
    rows: int, context: int, num_steps: int, read_s: float, context_s: float, flops_s: float
) -> None:
    costs = Costs(
        decode_step_s=1e-3,
        decode_read_s=read_s,
        decode_context_s=context_s,
        decode_flops_s=flops_s,
    )
    steps = [costs.decode_s(rows, context + i * rows) for i in range(num_steps)]
    assert costs.decode_s(rows, context, num_steps) == pytest.approx(sum(steps), rel=1e-6)
    begun = costs.steps_within(rows, context, sum(steps[:-1]) + steps[-1] / 2, num_steps)
    assert begun == num_steps
    assert costs.steps_within(rows, context, steps[0] / 2, num_steps) == 1


def test_processes_share_processors() -> None:
    async def ends() -> list[float]:
        cores = Cores(num_cores=1)
        loop = asyncio.get_running_loop()

        async def work(start_s: float, seconds: float) -> float:
            await asyncio.sleep(start_s)
            await cores.work(seconds)
            return loop.time()

        return list(await asyncio.gather(work(0, 2), work(1, 1), work(5, 1)))

    # From 1 s on both have 1 s left and run at half speed.
    assert clock.run(ends()) == pytest.approx([3, 3, 6])


LATE_S = 1e-3


class LateClockLoop(clock.VirtualClockLoop):
    """Every timer fires LATE_S after it was due, as on a real clock."""

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select

        def jump_late(timeout: float | None) -> Any:
            events = select(timeout)
            if timeout:
                self._now_s += LATE_S
            return events

        self._selector.select = jump_late


def test_late_timers_do_not_add_up() -> None:
    config = make_config(max_staleness=0, spread=0.8)
    # Else two groups end at nearly the same time, and late timers change which one is first.
    config = replace(config, plan=replace(config.plan, group_correlation=0.0))
    costs = replace(COSTS, decode_step_s=0.002, decode_row_s=1e-4)
    expected_s = simulate(config, TINY, costs, num_steps=5).step_s
    with asyncio.Runner(loop_factory=LateClockLoop) as runner:
        timeline = runner.run(run(config, costs, TINY, make_workload(config), 5))
    found_s = forecast(timeline, settling_steps(config, 5)).step_s
    num_others = (
        10  # timers that somebody waits for beside those of decoding, of which there are 50
    )
    assert expected_s < found_s < expected_s + num_others * LATE_S


@pytest.mark.full
def test_a_replay_in_real_time_takes_at_least_what_was_forecast() -> None:
    """How much longer it takes is for the benchmark: a busy machine may delay it without bound."""
    config = make_config(spread=0.5)
    costs = replace(COSTS, decode_step_s=0.004, token_s=1.5e-4)
    expected_s = simulate(config, TINY, costs, num_steps=5).step_s
    for _ in range(3):  # a delay may let rollouts end in another order: then other ones are trained
        timeline = asyncio.run(run(config, costs, TINY, make_workload(config), 5))
        found_s = forecast(timeline, settling_steps(config, 5)).step_s
        if found_s > 0.99 * expected_s:
            break
    assert found_s > 0.99 * expected_s > 0.1


def test_the_best_split_gives_the_busier_side_more() -> None:
    costs = Costs(decode_row_s=1e-3, token_s=1e-5)  # writing takes far longer than training

    def step_of(config: Config, num_steps: int) -> StepForecast:
        return simulate(config, TINY, costs, num_steps=num_steps)

    config = make_config(
        generator=EmbeddedConfig(num_replicas=2, max_num_seqs=64),
        trainer=TrainerConfig(num_ranks=4, groups_per_step=GROUPS),
    )
    found = best_splits(config, step_of(config, 6), step_of, lambda config: True)
    assert found[0].num_replicas >= 4
    own = next(split for split in found if split.num_trainer_ranks == 4)
    assert found[0].step_s < 0.6 * own.step_s


def test_lengths_stay_whatever_their_spread() -> None:
    for spread in (0.0, 3.0, 1e6):
        config = make_config(spread=spread)
        lengths = make_workload(config).lengths
        assert 1 <= min(lengths) <= max(lengths) <= config.sampling.max_tokens
    assert Counter(lengths).keys() == {1, config.sampling.max_tokens}


FORWARD_SHARE = 0.3
FREE = {"write_s": 0.0, "check_s": 0.0, "message_s": 0.0, "forward_share": FORWARD_SHARE}
ROW_TOKENS = PROMPT_TOKENS + LENGTH - 1


def batch_step(
    mini_batches: int, passes: int, *, decode_s: float, proximal: str = "none", more: int = 0
) -> StepForecast:
    trainer = TrainerConfig(
        groups_per_step=GROUPS, num_mini_batches=mini_batches, num_passes=passes, parts="batch"
    )
    config = make_config(
        max_staleness=mini_batches * passes - 1 + more,
        trainer=trainer,
        algorithm=PPOConfig(proximal=proximal),
    )
    return simulate(config, TINY, replace(COSTS, decode_step_s=decode_s, **FREE))


def test_where_generation_takes_the_time_a_second_pass_halves_a_step() -> None:
    once = batch_step(1, 1, decode_s=0.5)
    twice = batch_step(1, 2, decode_s=0.5)
    assert twice.step_s < 0.6 * once.step_s
    assert twice.max_staleness <= 1


def test_where_training_takes_the_time_looking_ahead_costs_a_forward_of_the_later_mini_batches():
    plain = batch_step(3, 1, decode_s=1e-6, more=3)
    ahead = batch_step(3, 1, decode_s=1e-6, more=3, proximal="recompute")
    between = batch_step(3, 1, decode_s=1e-6, more=3, proximal="interpolate")
    forward_s = 2 * GROUPS * ROLLOUTS * ROW_TOKENS * COSTS.token_s * FORWARD_SHARE
    extra_s = 3 * (ahead.step_s - plain.step_s)  # of a batch
    assert forward_s > 0.01
    assert extra_s == pytest.approx(forward_s + COSTS.part_s, rel=0.1)
    assert between.step_s == pytest.approx(plain.step_s)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_the_forecast_is_of_whole_batches(shape: tuple[int, int]) -> None:
    mini_batches, passes = shape
    per_batch = mini_batches * passes
    trainer = TrainerConfig(num_mini_batches=mini_batches, num_passes=passes)
    for more in range(4):
        config = make_config(max_staleness=per_batch - 1 + more, trainer=trainer)
        for num_steps in range(max(3, per_batch + 1), 40):
            skipped = settling_steps(config, num_steps)
            assert 0 < skipped < num_steps
            assert (num_steps - skipped) % per_batch == 0
