"""The loop and its replicas: who gets a request, who is given up, who commits when."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.controller.wiring import make_dispatch
from llamarl.core.errors import ExecutorLost
from llamarl.core.records import TOKEN_VERSIONS, Purpose, Request, Sampling
from llamarl.planner.simulation.clock import run
from llamarl.publish.replica import WeightTarget
from tests.simulation.faults import LIVENESS_TIMEOUT_S, Faults
from tests.simulation.loop import COSTS, Loop, first_error, slower
from tests.simulation.test_loop import four_tokens, one_token


def test_requests_go_to_the_least_loaded_of_those_that_are_new_enough_or_soon_will_be() -> None:
    async def main() -> list[list[int]]:
        loop = Loop(num_replicas=4, length=one_token)
        dispatch = make_dispatch(loop.config, loop.executors)
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
    """It is stopped; or it cannot be, and storage takes nothing of what it still writes."""

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
        await silent.one(WeightTarget).commit(0)
        await other.one(WeightTarget).commit(3)
        dispatch = make_dispatch(loop.config, loop.executors)
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
    assert end_s < 0.42 + LIVENESS_TIMEOUT_S + 10.0 + 0.5


def test_a_replica_given_up_by_a_publish_reports_no_more_rollouts() -> None:
    async def main() -> list[int]:
        loop = Loop(
            num_replicas=2,
            num_collectors=1,
            length=one_token,
            faults={"generator-0": slower(decode_step_s=5.0)},
        )
        for replica in loop.executors.generators.values():
            await replica.one(WeightTarget).commit(0)
        dispatch = make_dispatch(loop.config, loop.executors)
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
            await replica.one(WeightTarget).commit(0)
        dispatch = make_dispatch(loop.config, loop.executors)
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
        raise ExecutorLost("generator-0", 0, "silent")

    rows, end_s = run(main())
    assert rows == [7, 8]
    assert 10.0 < end_s < 11.0


@pytest.mark.parametrize("num_collectors", [1, 2])
def test_collectors_report_every_rollout_once_whichever_process_dies(
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


@pytest.mark.long
def test_a_replica_that_commits_slowly_holds_no_other_and_takes_the_newest_version_next(
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

        async def commit(version: int) -> list[int]:
            commits.append(version)
            return await usual_commit(version)

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
