"""Simulated step times: what is worked out by hand, bounds, splits, stretches of decode steps."""

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
from llamarl.core.records import Request, Sampling
from llamarl.generator.decoding import GATHER_S
from llamarl.generator.engine.scheduler import QueuedRequest
from llamarl.planner.changes import best_splits
from llamarl.planner.forecast import StepForecast
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import forecast, run, settling_steps, simulate
from llamarl.planner.simulation.slots import Slot, Slots
from llamarl.planner.simulation.workload import make_workload
from llamarl.trainer.losses.clip import PPOConfig
from tests.planner.planner_recipes import LLAMA, make_recipe

PROMPT_TOKENS = 10
LENGTH = 20
GROUPS, ROLLOUTS = 8, 4
SHARED = ("prompt_tokens", "median_tokens", "spread", "num_steps")
TINY = replace(
    LLAMA, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_kv_heads=8
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


DECODING = Costs(decode_step_s=1e-3, decode_row_s=1e-4, decode_context_s=1e-5)


def make_slots(lengths: list[int]) -> Slots:
    slots = Slots(len(lengths), DECODING)
    for row_id, length in enumerate(lengths):
        request = Request(
            row_id=row_id,
            prompt_ids=(0,) * PROMPT_TOKENS,
            sampling=Sampling(max_tokens=100),
            seed=row_id,
        )
        slot = Slot(QueuedRequest(request=request), number=row_id, start=0)
        slot.total = length
        slots.add(slot)
    return slots


def decode(lengths: list[int], num_steps: int) -> tuple[float, int, list[int]]:
    """Step by step: seconds, tokens cached of those that still run, and who has ended."""
    seconds = 0.0
    for step in range(num_steps):
        running = [length for length in lengths if length > step]
        seconds += DECODING.decode_s(len(running), len(running) * (PROMPT_TOKENS - 1 + step))
    running = [length for length in lengths if length > num_steps]
    context = len(running) * (PROMPT_TOKENS - 1 + num_steps)
    return seconds, context, [i for i, length in enumerate(lengths) if length <= num_steps]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_a_stretch_takes_what_its_steps_take(lengths: list[int], data: st.DataObject) -> None:
    slots = make_slots(lengths)
    last = data.draw(st.sampled_from(range(len(lengths))))
    pieces = slots.plan(lambda slot, num_left: slot.request.row_id == last)
    assert (slots.steps, len(slots)) == (0, len(lengths))
    assert pieces[-1].steps == lengths[last]
    for piece in pieces:
        assert piece.done_s == pytest.approx(decode(lengths, piece.steps)[0])
    ended = [slot.request.row_id for slot in slots.advance(pieces[-1].steps)]
    assert ended == sorted(ended, key=lambda i: (lengths[i], i))
    _, context, known = decode(lengths, pieces[-1].steps)
    assert (slots.context, sorted(ended)) == (context, known)


@settings(deadline=None)
@given(LENGTHS, st.floats(0, 1))
def test_a_stretch_is_cut_at_the_end_of_the_step_at_work(lengths: list[int], part: float) -> None:
    slots = make_slots(lengths)
    pieces = slots.plan(lambda slot, num_left: num_left == 0)
    now_s = part * pieces[-1].done_s
    done = [piece for piece in pieces[:-1] if piece.done_s <= now_s]
    if done:
        list(slots.advance(done[-1].steps))
    cut = slots.cut(done[-1].done_s if done else 0.0, now_s, pieces[len(done)])
    assert cut.done_s == pytest.approx(decode(lengths, cut.steps)[0])
    assert now_s <= cut.done_s + 1e-9
    assert decode(lengths, cut.steps - 1)[0] <= now_s + 1e-9


def test_what_is_taken_out_leaves_the_cache() -> None:
    slots = make_slots([5, 9, 2])
    assert [slot.request.row_id for slot in slots.advance(3)] == [2]
    assert [slot.request.row_id for slot in slots.remove({0, 2})] == [0]
    assert (len(slots), slots.context) == (1, PROMPT_TOKENS - 1 + 3)
