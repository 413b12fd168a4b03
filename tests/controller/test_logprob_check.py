"""Log-prob checks on fakes: which replicas fail it, which pass, and what becomes of the rows."""

import asyncio
import gc
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from llamarl.cli.check_trial import same_rollouts
from llamarl.controller.balance import RowIds
from llamarl.controller.logprob_check import (
    FACTOR,
    FLOOR,
    NUM_LATEST,
    NUM_PROOFS,
    NUM_START_ROWS,
    NUM_TOKENS,
    Tolerance,
)
from llamarl.core.records import GENERATOR_LOGPROBS, RESPONSE_IDS, Purpose
from tests.controller.logprob_setting import SAMPLING, CheckSetting


async def test_of_many_replicas_a_few_are_asked_at_each_version_and_all_in_turn():
    setting = CheckSetting(range(64))
    asked = []
    for version in range(4):
        await setting.publish(version)
        asked.append({request.replica for request in setting.dispatch.asked})
        setting.dispatch.asked.clear()
    assert [len(each) for each in asked] == [16] * 4
    assert set.union(*asked) == set(range(64))


async def test_requests_are_short_of_the_training_distribution_and_belong_to_the_check_alone():
    setting = CheckSetting()
    await setting.start()
    await setting.publish(1)
    requests = setting.dispatch.asked
    assert [request.replica for request in requests] == [
        *[0] * NUM_START_ROWS,
        *[1] * NUM_START_ROWS,
        *[0, 1],
    ]
    assert {r.sampling for r in requests} == {replace(SAMPLING, max_tokens=NUM_TOKENS)}
    assert {r.purpose for r in requests} == {Purpose.CHECK}
    assert [r.min_version for r in requests] == [0] * 2 * NUM_START_ROWS + [1] * 2
    assert len({(r.prompt_ids, r.seed) for r in requests}) == len(requests)


async def test_rows_lie_in_a_storage_unit_on_the_host_of_the_replica_that_writes_them():
    setting = CheckSetting()
    setting.dispatch.units = {0: 1, 1: 2}
    setting.engines.gate.allocate_rows = RowIds(0, 3).take
    await setting.start()
    await setting.publish(1)
    units = {(each.replica, each.row_id % 3) for each in setting.dispatch.asked}
    assert units == {(0, 1), (1, 2)}


@pytest.mark.parametrize("lie", [0.5, float("nan"), float("inf")])
async def test_a_replica_that_decodes_with_something_else_is_named(lie):
    setting = CheckSetting()
    await setting.start()
    await setting.publish(1)
    setting.trainer.noise = lambda replica: lie if replica == 1 else 1e-5
    what = rf"generator 1 must write with version 1, .* by {lie:.2g}, tolerated: 0.001"
    with pytest.raises(RuntimeError, match=what):
        await setting.logprob_check.check(1)


async def test_a_coarser_engine_gets_more_tolerance_and_must_exceed_it_repeatedly():
    setting, noise = CheckSetting(), random.Random(1)
    setting.trainer.noise = lambda replica: noise.uniform(0.01, 0.05)
    await setting.start()
    assert FACTOR * 0.01 < setting.logprob_check.tolerances["generator"].value <= FACTOR * 0.05
    for version in range(1, 31 * NUM_PROOFS + 1):  # outliers, but never NUM_PROOFS running
        difference = 2.0 if version % NUM_PROOFS == 1 else 0.02
        setting.trainer.noise = lambda replica, difference=difference: difference
        await setting.publish(version)
        scalars = await setting.logprob_check.check(version)
        assert scalars["logprob_check_difference"] == difference
    setting.trainer.noise = lambda replica: 2.0 if replica == 1 else 0.02
    for version in range(200, 199 + NUM_PROOFS):
        await setting.publish(version)
        await setting.logprob_check.check(version)
    await setting.publish(300)
    with pytest.raises(RuntimeError, match=r"generator 1 .* differ from the trainer's by 2, "):
        await setting.logprob_check.check(300)


def healthy(rng, middle):
    """The largest difference of a row of a bfloat16 engine: half are below `middle`, a tenth above
    seven times that, one in a hundred up to 80 times that."""
    if rng.random() < 0.01:
        return middle * rng.uniform(30.0, 80.0)
    return middle * math.exp(rng.gauss(0.0, 1.55))


def first_proof(seed, num_steps, num_replicas, growth, lie_from=None, lie=None):
    """The step at which a simulated run is said to be wrong, or None: differences grow `growth`
    times, and from `lie_from` on replica 0 writes with something else."""
    rng, tolerance = random.Random(seed), Tolerance()
    start = rng.uniform(0.01, 0.04)
    for replica in range(num_replicas):
        for _ in range(NUM_START_ROWS):
            assert tolerance.find_excess(replica, healthy(rng, start)) is None
    for step in range(num_steps):
        for replica in range(num_replicas):
            difference = healthy(rng, start * growth ** (step / num_steps))
            if lie is not None and replica == 0 and step >= lie_from:
                difference = lie(rng)
            if tolerance.find_excess(replica, difference) is not None:
                return step
    return None


@pytest.mark.parametrize(
    ("num_steps", "num_replicas", "num_runs"),
    [
        (500, 1, 300),
        pytest.param(2000, 1, 300, marks=pytest.mark.slow),
        pytest.param(2000, 16, 100, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("growth", [pytest.param(1.0, marks=pytest.mark.slow), 10.0])
def test_healthy_runs_whose_differences_grow_are_left_in_peace(
    num_steps, num_replicas, num_runs, growth
):
    proofs = [first_proof(seed, num_steps, num_replicas, growth) for seed in range(num_runs)]
    assert sum(step is not None for step in proofs) < num_runs / 100


@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize(
    ("middle", "spread", "limit", "share"),
    [(3.5, 0.9, 300, 0.9), (20.0, 0.2, NUM_PROOFS, 1.0)],
    ids=["weights of one layer doubled", "permuted or missing"],
)
def test_another_policy_is_found_among_growing_differences(
    middle, spread, limit, share, num_replicas
):
    def lie(rng):  # as measured with the shipped checkpoint in bfloat16
        return middle * math.exp(rng.gauss(0.0, spread))

    steps = [first_proof(seed, 500, num_replicas, 5.0, 200, lie) for seed in range(30)]
    assert sum(step is not None and 200 <= step < 200 + limit for step in steps) >= share * 30


def test_differences_that_no_rounding_explains_are_found_however_slowly_they_came():
    tolerance, step = Tolerance(), 0
    for _ in range(NUM_START_ROWS):
        assert tolerance.find_excess(0, 0.02) is None
    while tolerance.find_excess(0, 0.02 * 10 ** (step / 500)) is None:
        step += 1
    assert 500 * math.log10(50) <= step < 500 * math.log10(50) + NUM_LATEST


@pytest.mark.parametrize(("dtype", "is_found"), [("float32", True), ("bfloat16", False)])
def test_an_engine_of_float32_that_computes_another_model_from_the_start_is_found(dtype, is_found):
    async def main():
        setting = CheckSetting(replicas=(0,), dtype=dtype)
        setting.trainer.noise = lambda replica: 0.3
        if not is_found:
            await setting.start()
            return
        with pytest.raises(RuntimeError, match=r"generator 0 .* by 0\.3, tolerated: 0\.05 "):
            await setting.start()

    asyncio.run(main())


def test_a_replica_that_is_wrong_now_and_then_is_warned_of_at_growing_intervals(caplog):
    async def main():
        setting = CheckSetting(mode="warn")
        await setting.start()
        for version in range(1, 22):
            lies = version % 2 == 1
            setting.trainer.noise = lambda replica, lies=lies: 0.5 if lies and replica else 1e-5
            await setting.publish(version)
            assert (await setting.logprob_check.check(version))["logprob_check_rows"] == 2

    asyncio.run(main())
    warnings = [record.message for record in caplog.records]
    assert [text.split(",")[0] for text in warnings] == [
        f"generator 1 must write with version {version}" for version in (1, 19)
    ]
    assert warnings[1].endswith("(10 times so far)")


async def test_switched_off_nothing_is_asked_or_compared():
    setting = CheckSetting(mode="off")
    await setting.publish(0)
    assert await setting.logprob_check.check(0) == {}
    assert not setting.dispatch.asked
    assert not setting.rollouts.open


@pytest.mark.parametrize("liar", [0, 1])
async def test_a_lie_at_the_start_is_no_measure_of_what_is_normal(liar):
    setting = CheckSetting()
    setting.trainer.noise = lambda replica: 7.0 if replica == liar else 0.02
    with pytest.raises(RuntimeError, match=f"generator {liar} must write with version 0"):
        await setting.start()


async def test_outliers_at_the_start_are_normal_for_coarse_engines():
    setting, noise = CheckSetting(), random.Random(2)
    setting.trainer.noise = lambda replica: 5.0 if noise.random() < 0.1 else 0.03
    await setting.start()
    assert setting.logprob_check.tolerances["generator"].value == FACTOR * 0.03


async def test_what_is_normal_in_one_pool_is_no_measure_of_another():
    setting = CheckSetting(pools=["num_replicas=1", "num_replicas=1 max_num_seqs=8"])
    setting.trainer.noise = lambda replica: (1e-5, 0.02)[replica]
    scalars = await setting.start()
    first, second = setting.logprob_check.tolerances.values()
    assert first.value == FLOOR
    assert second.value == FACTOR * 0.02 == scalars["logprob_check_tolerance"]
    await setting.publish(5)
    assert await setting.logprob_check.check(5)
    setting.trainer.noise = lambda replica: (0.01, 0.02)[replica]
    await setting.publish(6)
    with pytest.raises(RuntimeError, match="generator 0 must write with version 6"):
        await setting.logprob_check.check(6)


@pytest.mark.parametrize("serves", [4, 6, (4, 5), (5, 6)])
async def test_rows_of_another_version_are_retired_and_not_compared(serves):
    setting = CheckSetting()
    await setting.start()
    setting.trainer.noise = lambda replica: 3.0
    await setting.publish(5, serves=serves)
    assert await setting.logprob_check.check(5) == {"logprob_check_rows": 0}
    assert set(setting.storage.outcomes) == set(range(setting.num_rows))
    assert not setting.rollouts.open
    assert len(setting.trainer.asked) == 1  # the start's


async def test_a_row_that_never_comes_costs_nothing():
    setting = CheckSetting()
    await setting.start()
    setting.never_come = {1}
    setting.logprob_check.committed(1, 1)
    setting.logprob_check.committed(0, 1)
    setting.dispatch.replicas[0] = 1
    await setting.pass_time()
    assert (await setting.logprob_check.check(1))["logprob_check_rows"] == 1
    assert len(setting.rollouts.rows(Purpose.CHECK)) == 1  # the run retires it in the end
    assert await setting.logprob_check.check(2) == {"logprob_check_rows": 0}


async def test_few_rows_are_not_enough_to_know_what_is_normal():
    setting = CheckSetting(replicas=[0])
    setting.dispatch.replicas.clear()
    setting.logprob_check.committed(0, 0)  # its start rows are lost
    await setting.pass_time()
    setting.dispatch.replicas[0] = 0
    for version in range(1, NUM_START_ROWS + 1):
        known = setting.logprob_check.tolerances
        assert all(each.value is None for each in known.values())
        await setting.publish(version)
        scalars = await setting.logprob_check.check(version)
        assert scalars["logprob_check_rows"] == 1
    assert setting.logprob_check.tolerances["generator"].value == FLOOR


def test_a_request_that_all_replicas_refuse_ends_the_run(caplog):
    async def main():
        setting = CheckSetting()
        setting.dispatch.error = ValueError("prompts must have a token, got none")
        await setting.start()
        with pytest.raises(ValueError, match="prompts must have a token"):
            await setting.serving

    asyncio.run(main())
    gc.collect()  # asyncio complains of errors that were not asked for when it frees their tasks
    assert "never retrieved" not in caplog.text


def test_a_longest_completion_below_that_of_a_logprob_check_is_kept():
    setting = CheckSetting()
    short = replace(SAMPLING, max_tokens=3)
    logprob_check = replace(setting.logprob_check, sampling=short)

    async def main():
        logprob_check.committed(0, 0)
        await setting.pass_time()

    asyncio.run(main())
    assert setting.dispatch.asked[0].sampling.max_tokens == 3


def columns(*rollouts):
    return {
        RESPONSE_IDS: [np.array(ids, np.int32) for ids, _ in rollouts],
        GENERATOR_LOGPROBS: [np.array(logprobs, np.float32) for _, logprobs in rollouts],
    }


PLAIN = columns(([1, 2, 3, 4], [-1, -2, -3, -4]), ([5, 6, 7], [-1, -1, -1]))


def test_equal_rollouts_are_the_same():
    assert same_rollouts(PLAIN, PLAIN, 0.01).startswith("2 of 2 rollouts are the same")


def test_a_token_that_rounding_changed_is_no_mistake():
    others = columns(([1, 2, 3, 9], [-1, -2, -3.005, -8]), ([5, 6, 7], [-1, -1, -1]))
    assert same_rollouts(PLAIN, others, 0.01).startswith("1 of 2 rollouts are the same")


@pytest.mark.parametrize(
    "others",
    [
        columns(([1, 2, 3, 4], [-1, -2, -3.1, -4]), ([5, 6, 7], [-1, -1, -1])),
        columns(([9, 2, 3, 4], [-1, -2, -3, -4]), ([5, 9, 7], [-1, -1, -1])),
        columns(([1], [-1]), ([5], [-1])),
    ],
)
def test_log_probs_that_are_apart_and_rollouts_that_are_others_are(others):
    with pytest.raises(RuntimeError, match=r"set generator\.enforce_eager=true"):
        same_rollouts(PLAIN, others, 0.01)
