"""The real controller on simulated executors and a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.build import make_dispatch
from llamarl.errors import GroupLost
from llamarl.loop.dispatch import STOP_S
from llamarl.planner.simulation.clock import run
from llamarl.types import TOKEN_VERSIONS, Purpose, Request, Sampling
from tests.loop.faults import LIVENESS_TIMEOUT_S, Faults
from tests.loop.loop import COSTS, Loop, slower

HARD = {"drop_share": 0.2, "failed_share": 0.02}


def one_token(request: Request) -> int:
    return 1


def four_tokens(request: Request) -> int:
    return 4


def first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize("late", ["wait", "mask"])
@pytest.mark.parametrize("num_steps", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_the_bound_is_never_exceeded_and_is_reached(
    num_steps: int, max_staleness: int, late: str, tmp_path: Path
) -> None:
    loop = Loop(
        max_staleness=max_staleness,
        late=late,
        num_steps=num_steps,
        segment_tokens=16,
        **HARD,
        costs=replace(COSTS, part_s=0.05),
        num_replicas=3,
        max_num_seqs=8,
        faults={
            "generator-1": slower(decode_step_s=0.05, commit_s=0.2),
            "generator-2": Faults(dies_at_s=num_steps / 25),
        },
    )
    run(loop.run(tmp_path))
    ages = loop.staleness()
    assert loop.trainer.version == num_steps
    assert len(ages) > 10 * num_steps
    # With "wait" the order alone must keep the bound: nothing may need masking.
    assert max(ages if late == "mask" else ages + loop.masked()) == max_staleness
    assert "equal_rewards" in loop.run_logger.drops
    assert "failed_reward" in loop.run_logger.drops


@pytest.mark.parametrize("num_steps", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_no_rollout_is_trained_twice_and_every_group_is_whole(
    num_steps: int, tmp_path: Path
) -> None:
    loop = Loop(num_steps=num_steps, **HARD)
    run(loop.run(tmp_path))
    rows = Counter(loop.trained_rows())
    groups = Counter(row.group_id for batch in loop.batches for row in batch.rows)
    assert set(rows.values()) == {1}
    assert set(groups.values()) == {2}
    assert loop.storage.count("trained") == len(rows) == num_steps * 4 * 2
    assert loop.storage.count("dropped") == 2 * len(loop.run_logger.drops)


def test_groups_are_trained_in_admission_order(tmp_path: Path) -> None:
    loop = Loop(num_steps=100, max_staleness=2)
    run(loop.run(tmp_path))
    assert groups_of(loop) == sorted(groups_of(loop))


def test_masking_overtakes_late_groups(tmp_path: Path) -> None:
    loop = Loop(num_steps=100, max_staleness=2, late="mask")
    run(loop.run(tmp_path))
    assert groups_of(loop) != sorted(groups_of(loop))
    assert loop.masked(), "nothing was ever masked: the test would pass without masking"


@pytest.mark.parametrize("num_steps", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_on_policy_training_survives_ninety_percent_drops(num_steps: int, tmp_path: Path) -> None:
    loop = Loop(max_staleness=0, num_steps=num_steps, drop_share=0.9)
    run(loop.run(tmp_path))
    assert loop.trainer.version == num_steps
    assert len(loop.run_logger.drops) > 5 * num_steps * 4
    assert max(loop.staleness()) == 0


def test_a_run_without_any_signal_stops_and_says_why(tmp_path: Path) -> None:
    loop = Loop(drop_share=1.0, max_drops_in_row=100)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert "100 x equal_rewards" in str(error)


def test_the_first_forward_starts_before_the_last_group_arrives(tmp_path: Path) -> None:
    costs = replace(COSTS, part_s=0.001)
    loop = Loop(num_steps=20, groups_per_part=1, max_staleness=0, costs=costs)
    run(loop.run(tmp_path))
    spread = [times[-1] - times[0] for times in loop.part_starts.values()]
    assert max(len(times) for times in loop.part_starts.values()) > 1
    # A slow rollout takes 0.4 s or more; the groups before it did not wait for it.
    assert max(spread) > 0.3


def test_an_exception_in_the_trainer_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(faults={"trainer": Faults(errors={"step": (4, ArithmeticError())})})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ArithmeticError)
    assert loop.trainer.version == 3


@pytest.mark.parametrize(
    ("name", "method"), [("generator-0", "collect"), ("scorer", "score"), ("storage-0", "write")]
)
def test_an_exception_in_any_stage_ends_the_run(name: str, method: str, tmp_path: Path) -> None:
    loop = Loop(faults={name: Faults(errors={method: (3, ZeroDivisionError("boom"))})})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ZeroDivisionError)


def test_losing_every_replica_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(faults={"generator-0": Faults(dies_at_s=2.0)})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    # Whoever notices first: the dispatcher, or a publish that is under way.
    expected = "every generator replica is lost|no generator took version"
    assert re.search(expected, str(first_error(caught.value)))


def test_requests_go_to_the_least_loaded_of_those_that_are_new_enough_or_soon_will_be() -> None:
    async def main() -> list[list[int]]:
        dispatch = make_dispatch(Loop(num_replicas=4, length=one_token).executors)
        for index, version in ((0, 3), (1, 4), (2, 5), (3, 5)):
            dispatch.committed(index, version)
        for row_id, max_tokens in enumerate((20, 20, 20, 1, 2, 3, 4)):
            sampling = Sampling(max_tokens=max_tokens)
            request = Request(
                row_id=row_id, prompt_ids=(row_id,), sampling=sampling, seed=0, min_version=5
            )
            await dispatch.submit([request])
        held = [sorted(dispatch.replicas[index].running) for index in range(4)]
        await dispatch.close()
        return held

    # Of 20 tokens each, the one that has yet to commit counts as having 25: no more goes there.
    assert run(main()) == [[], [0], [1, 3, 5], [2, 4, 6]]


@pytest.mark.parametrize("num_collectors", [0, 1])
@pytest.mark.parametrize("ends", [True, False])
def test_a_replica_that_wakes_after_it_was_given_up_spoils_nothing(
    ends: bool, num_collectors: int
) -> None:
    """It is stopped before its rollouts start elsewhere; or it cannot be, and storage takes nothing
    of what it still writes."""

    async def main() -> tuple[list[int], list[int], float]:
        # It falls silent when its rollout is written, and not yet stored.
        loop = Loop(
            num_replicas=2,
            num_collectors=num_collectors,
            length=one_token,
            faults={
                "generator-0": replace(
                    slower(decode_step_s=0.4), silent_s=(0.42, 20.0), ignores_stop=not ends
                ),
                "generator-1": slower(decode_step_s=10.0),
            },
        )
        silent, other = loop.process("generator-0"), loop.process("generator-1")
        await silent.call_one.commit(0, 0)
        await other.call_one.commit(3, 0)
        dispatch = make_dispatch(loop.executors)
        request = Request(row_id=7, prompt_ids=(1,), sampling=Sampling(max_tokens=1), seed=0)
        await dispatch.submit([request])
        rows = await dispatch.collect()
        end_s = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            rows += await asyncio.wait_for(dispatch.collect(), 20.0)
        assert silent.is_stopped == ends
        assert loop.storage.num_writes[7] == (1 if ends else 2), "it woke, and wrote what it had"
        versions = (await loop.storage.read([7], [TOKEN_VERSIONS]))[TOKEN_VERSIONS][0].tolist()
        await dispatch.close()
        return [row.row_id for row in rows], versions, end_s

    row_ids, versions, end_s = run(main())
    assert row_ids == [7]
    assert versions == [3]
    assert end_s < 0.42 + LIVENESS_TIMEOUT_S + (1.0 if ends else STOP_S) + 10.0 + 0.5


def test_a_replica_given_up_by_a_publish_tells_of_its_rollouts_no_more() -> None:
    async def main() -> list[int]:
        loop = Loop(
            num_replicas=2,
            num_collectors=1,
            length=one_token,
            faults={"generator-0": slower(decode_step_s=5.0)},
        )
        for replica in loop.executors.generators.values():
            await replica.call_one.commit(0, 0)
        dispatch = make_dispatch(loop.executors)
        request = Request(row_id=7, prompt_ids=(1,), sampling=Sampling(max_tokens=1), seed=0)
        await dispatch.submit([request])
        dispatch.lost(0, TimeoutError("commit took too long"))
        rows = await dispatch.collect()
        with contextlib.suppress(TimeoutError):
            rows += await asyncio.wait_for(dispatch.collect(), 20.0)
        await dispatch.close()
        assert loop.process("generator-0").is_stopped
        return [row.row_id for row in rows]

    assert run(main()) == [7]


def test_what_a_hung_replica_held_starts_again_though_its_collector_still_waits_for_it() -> None:
    async def main() -> tuple[list[int], float]:
        loop = Loop(
            num_replicas=2,
            num_collectors=1,
            length=one_token,
            faults={"generator-0": slower(decode_step_s=1e6)},
        )
        loop.process("generator-0").watch = lost_after_10_s  # type: ignore[method-assign]
        for replica in loop.executors.generators.values():
            await replica.call_one.commit(0, 0)
        dispatch = make_dispatch(loop.executors)
        requests = [
            Request(row_id=i, prompt_ids=(i,), sampling=Sampling(max_tokens=1), seed=0)
            for i in (7, 8)
        ]
        await dispatch.submit(requests)
        assert dispatch.replicas[0].running
        rows = [row.row_id for row in await dispatch.collect()]
        while len(rows) < 2:
            rows += [row.row_id for row in await dispatch.collect()]
        await dispatch.close()
        return sorted(rows), asyncio.get_running_loop().time()

    async def lost_after_10_s() -> None:
        await asyncio.sleep(10.0)
        raise GroupLost("generator-0", 0, "silent")

    rows, end_s = run(main())
    assert rows == [7, 8]
    assert 10.0 < end_s < 11.0


@pytest.mark.parametrize("num_collectors", [1, 2])
def test_collectors_tell_of_every_rollout_once_whoever_dies(
    num_collectors: int, tmp_path: Path
) -> None:
    loop = Loop(
        num_steps=60,
        num_replicas=3,
        num_collectors=num_collectors,
        faults={"generator-2": Faults(dies_at_s=1.0)},
    )
    run(loop.run(tmp_path))
    rows = Counter(loop.trained_rows())
    assert set(rows.values()) == {1}
    assert len(rows) == 60 * 4 * 2
    assert {f"generator-{i}" for i in range(3)} <= loop.timeline.bars.keys(), "all have decoded"
    assert loop.storage.count("trained") == len(rows)


def test_an_error_of_an_engine_ends_the_run_through_a_collector_too(tmp_path: Path) -> None:
    faults = Faults(errors={"collect": (2, ArithmeticError("the engine broke"))})
    loop = Loop(num_collectors=1, faults={"generator-0": faults})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert "the engine broke" in str(first_error(caught.value))


def test_evaluations_see_one_version_and_are_never_trained(tmp_path: Path) -> None:
    loop = Loop(num_steps=30, evaluate_every=10, num_held_out=25)
    run(loop.run(tmp_path))
    assert [evaluation.version for evaluation in loop.run_logger.evaluations] == [0, 10, 20, 30]
    assert loop.storage.count("evaluated") == 4 * 25
    assert all(loop.storage.outcomes[i]["outcome"] == "trained" for i in loop.trained_rows())


def test_a_replica_that_commits_slowly_holds_nobody_and_follows_with_the_newest(
    tmp_path: Path,
) -> None:
    async def duration_s(commit_s: float) -> tuple[float, int]:
        loop = Loop(
            num_steps=100,
            max_staleness=2,
            num_replicas=3,
            length=four_tokens,
            faults={"generator-2": Faults(delays_s={"commit": (commit_s, commit_s)})},
        )
        commits: list[int] = []
        replica = loop.process("generator-2").executor
        usual_commit = replica.commit

        async def commit(version: int, bucket: int) -> list[int]:
            commits.append(version)
            return await usual_commit(version, bucket)

        replica.commit = commit
        start_s = asyncio.get_running_loop().time()
        await loop.run(tmp_path)
        assert max(loop.staleness()) <= 2
        assert commits == sorted(set(commits))
        return asyncio.get_running_loop().time() - start_s, len(commits)

    usual_s, num_commits = run(duration_s(0.0))
    slow_s, num_slow_commits = run(duration_s(10.0))
    # All wait out the timeout for the first version, with which they start; later ones delay none.
    assert slow_s < usual_s + 100 * 1.0 * 1.1
    assert num_commits == 101
    assert num_slow_commits < 30


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_replicas_have_their_requests_when_they_commit(max_staleness: int, tmp_path: Path) -> None:
    loop = Loop(
        num_steps=20,
        max_staleness=max_staleness,
        length=four_tokens,
        costs=replace(COSTS, commit_s=1.0),
    )
    replica = loop.process("generator-0").executor
    is_early = []
    submit = replica.submit

    async def watched(requests: list[Request]) -> None:
        training = [request for request in requests if request.purpose is Purpose.TRAIN]
        is_early.extend(r.min_version > replica.version for r in training if r.min_version)
        await submit(requests)

    replica.submit = watched
    run(loop.run(tmp_path))
    assert all(is_early)
    assert len(is_early) >= 4 * 2 * (20 - max_staleness - 1)


def test_a_replica_that_computes_something_else_is_named_within_a_few_steps(
    tmp_path: Path,
) -> None:
    loop = Loop(
        num_steps=50,
        num_replicas=2,
        length=four_tokens,
        faults={"generator-1": Faults(wrong_from=10)},
    )
    checked: list[int] = []
    infer = loop.trainer.infer

    async def watched(row_ids: list[int]) -> list[float]:
        checked.extend(row_ids)
        return await infer(row_ids)

    loop.trainer.infer = watched
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert "generator 1" in str(first_error(caught.value))
    assert 10 <= loop.trainer.version <= 13
    assert len(checked) > 10


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_colocated_executors_take_turns_and_train_the_same_groups(
    max_staleness: int, tmp_path: Path
) -> None:
    def trained(is_colocated: bool) -> Loop:
        loop = Loop(
            num_steps=20,
            max_staleness=max_staleness,
            groups_per_part=2,
            evaluate_every=5,
            num_held_out=10,
            num_replicas=2,
            length=four_tokens,
            is_colocated=is_colocated,
        )
        run(loop.run(tmp_path / str(is_colocated)))
        return loop

    together, apart = trained(True), trained(False)
    evaluated = [evaluation.version for evaluation in together.run_logger.evaluations]
    assert evaluated == [0, 5, 10, 15, 20]
    assert together.trainer.version == 20
    assert max(together.staleness()) <= max_staleness
    assert groups_of(together) == groups_of(apart)


def groups_of(loop: Loop) -> list[int]:
    """Group ids in the order of training."""
    return [row.group_id for batch in loop.batches for row in batch.rows]
