"""Replicas that are lost and started again, or added and removed, while the loop runs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from llamarl.cluster import Executor
from llamarl.controller.starter import Starter
from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import make_dispatch
from llamarl.core.config.rank_assignment import Device
from llamarl.core.errors import ExecutorLost, NoGenerator
from llamarl.generator.specs import CollectorSpec
from llamarl.planner.simulation.clock import run
from llamarl.publish.publisher import Publisher
from tests.simulation.faults import Faults, FaultyProcess, dying
from tests.simulation.loop import COSTS, Loop, first_error, slower

RESTART_COSTS = replace(COSTS, start_s=1.0)


def check_trained(loop: Loop, max_staleness: int = 1) -> None:
    """Every rollout was trained once, within the bound, and the last version was made."""
    rows = loop.trained_rows()
    assert len(rows) == len(set(rows)) == loop.num_steps * 4 * 2
    assert max(loop.staleness()) <= max_staleness
    assert loop.trainer.version == loop.num_steps


@pytest.mark.parametrize("num_collectors", [0, 1])
@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_replica_that_dies_again_and_again_is_started_again_and_takes_work(
    tmp_path: Path, num_replicas: int, max_staleness: int, num_collectors: int
) -> None:
    loop = Loop(
        num_replicas=num_replicas,
        num_collectors=num_collectors,
        max_staleness=max_staleness,
        max_restarts=5,
        costs=RESTART_COSTS,
        faults=dying("generator-0", 1.0, 5.0, 11.0),
    )
    run(loop.run(tmp_path))
    check_trained(loop, max_staleness)
    again = loop.process("generator-0")
    assert again.num_calls["submit"] > 0, "it must get requests"
    assert again.num_calls["commit"] > 0, "it must have committed first"


def test_what_a_lost_replica_had_stored_is_not_written_again(tmp_path: Path) -> None:
    loop = Loop(
        num_steps=2,
        max_staleness=0,
        max_restarts=1,
        length=lambda request: 300,
        segment_tokens=50,
        faults=dying("generator-0", 1.2),
    )
    run(loop.run(tmp_path))
    check_trained(loop, 0)
    assert loop.cluster.spawned["generator-0"].num_calls["submit"] > 2, "it was cut before"
    assert max(loop.storage.num_writes.values()) == 300 // 50


def test_training_goes_on_with_the_other_replicas_meanwhile(tmp_path: Path) -> None:
    loop = Loop(
        num_replicas=2,
        max_restarts=1,
        costs=replace(COSTS, start_s=30.0),
        faults=dying("generator-0", 2.0),
    )
    run(loop.run(tmp_path))
    check_trained(loop)
    assert loop.timeline.step_ends_s[-1] < 30.0


def test_a_replica_that_dies_each_time_it_starts_ends_the_run_with_the_key_to_raise(
    tmp_path: Path,
) -> None:
    loop = Loop(max_restarts=3, faults=dying("generator-0", 1.0, 1.0, 1.0, 1.0))
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert isinstance(error, NoGenerator)
    assert "generator.max_restarts=3 times within an hour" in str(error)
    assert all(loop.cluster.spawned[f"generator-0 {i}"].is_stopped for i in (2, 3))


def test_a_replica_that_never_gets_its_weights_gets_no_request(tmp_path: Path) -> None:
    """It answers every call but cannot commit; the one that replaces it can."""
    broken = Faults(errors={"commit": (1, RuntimeError("says it is well"))})
    loop = Loop(
        num_replicas=2, max_restarts=3, faults=dying("generator-0", 1.0) | {"generator-0 2": broken}
    )
    run(loop.run(tmp_path))
    check_trained(loop)
    assert loop.cluster.spawned["generator-0 2"].num_calls["commit"] == 1
    assert loop.cluster.spawned["generator-0 2"].num_calls["submit"] == 0
    assert loop.cluster.spawned["generator-0 3"].num_calls["submit"] > 0


def test_a_slow_start_of_the_only_replica_holds_requests_until_it_serves(tmp_path: Path) -> None:
    loop = Loop(
        max_restarts=1, costs=RESTART_COSTS, faults=dying("generator-0", 2.0), num_held_out=3
    )
    run(loop.run(tmp_path))
    check_trained(loop)
    assert [each.version for each in loop.run_logger.evaluations] == [0, loop.num_steps]
    assert all(each.num_prompts == 3 for each in loop.run_logger.evaluations)


@pytest.mark.parametrize("drains", [True, False])
def test_replicas_are_added_and_removed_while_the_loop_runs(tmp_path: Path, drains: bool) -> None:
    async def main() -> list[list[str]]:
        loop = Loop(max_restarts=1, costs=slower(start_s=1.0).costs or COSTS)
        found = []

        async def scale() -> None:
            await asyncio.sleep(2.0)
            await loop.supervisor.scale(3)
            found.append(loop.supervisor.replica_states())
            await asyncio.sleep(4.0)
            found.append(loop.supervisor.replica_states())
            await loop.supervisor.scale(1, drains=drains)
            found.append(loop.supervisor.replica_states())

        scaling = asyncio.create_task(scale())
        await loop.run(tmp_path)
        await scaling
        check_trained(loop)
        return found

    serving = ["serving"] * 3
    assert run(main()) == [["serving", "starting", "starting"], serving, ["serving"]]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 5))]
)
def test_thirty_random_faults_lose_nothing_and_break_no_bound(tmp_path: Path, seed: int) -> None:
    """Of three replicas one or the other dies, falls silent, pauses or is slow."""
    rng = random.Random(seed)
    faults: dict[str, Faults] = {}
    for replica in range(3):
        at_s = 0.0
        for i in range(1, 11):
            at_s += rng.uniform(1.0, 6.0)
            kind = rng.choice(["dies", "silent", "pauses", "slow"])
            name = f"generator-{replica}" + (f" {i}" if i > 1 else "")
            faults[name] = {
                "dies": Faults(dies_at_s=at_s),
                "silent": Faults(silent_s=(at_s, at_s + 100.0)),
                "pauses": Faults(silent_s=(at_s, at_s + 2.0), dies_at_s=at_s + 3.0),
                "slow": replace(slower(decode_step_s=0.05), dies_at_s=at_s),
            }[kind]
    loop = Loop(num_replicas=3, num_steps=150, max_restarts=20, costs=RESTART_COSTS, faults=faults)
    run(loop.run(tmp_path))
    check_trained(loop)
    num_hit = sum(name in faults for name in loop.cluster.spawned)
    assert num_hit >= 25, "the run must last long enough for the faults"


def test_a_replica_that_is_taken_back_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        loop = Loop(max_restarts=1, costs=RESTART_COSTS)

        async def scale() -> None:
            await asyncio.sleep(2.0)
            await loop.supervisor.scale(2)
            await loop.supervisor.scale(1)
            assert loop.supervisor.wanted() == [0]
            assert loop.cluster.spawned["generator-1"].is_stopped
            await loop.supervisor.scale(2)

        scaling = asyncio.create_task(scale())
        await loop.run(tmp_path)
        await scaling
        check_trained(loop)
        assert loop.cluster.spawned["generator-1 2"].num_calls["submit"] > 0

    run(main())


class HangingCluster:
    """A cluster.Cluster for one executor of `loop`, which is started again; the first such start
    hangs in `spawn`, or in the executor's `start`."""

    def __init__(self, loop: Loop, hangs_in: str) -> None:
        self._executors, self._hangs_in = loop.executors, hangs_in
        self._num_spawned = 0

    async def spawn(self, name: str, *spec: object, **options: object) -> Executor:
        self._num_spawned += 1
        hanging = self._hangs_in if self._num_spawned == 1 else ""
        if hanging == "spawn":
            await asyncio.Event().wait()
        group = await self._executors.start(name)

        async def start() -> None:
            if hanging == "start":
                await asyncio.Event().wait()

        cast(FaultyProcess, group).executor.start = start
        return group

    async def add_host(self, address: str) -> int:
        raise NotImplementedError

    async def stop(self) -> None: ...


@pytest.mark.parametrize("role", ["generator-0", "scorer"])
@pytest.mark.parametrize("hangs_in", ["spawn", "start"])
def test_a_start_that_hangs_is_warned_of_and_then_counts_as_one_more_loss(
    tmp_path: Path, role: str, hangs_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(max_restarts=2, max_stage_restarts=2, faults={role: Faults(dies_at_s=1.0)})
    starter = Starter(HangingCluster(loop, hangs_in), {role: [Device(host=0, gpu=None)]}, 600.0)

    async def start(*which: object) -> Executor:
        return await starter.start(role, CollectorSpec(generators={}), lambda name, state: None)

    loop.executors = replace(loop.executors, start=start)
    run(loop.run(tmp_path))
    check_trained(loop)
    assert loop.timeline.step_ends_s[-1] > 600.0
    doing = {"spawn": "starting its processes", "start": "loading"}[hangs_in]
    assert caplog.text.count(f"{role} is still {doing} after 60 s; after cluster") == 1
    assert f"{role}: still {doing} after 600 s (cluster.start_timeout_s)" in caplog.text
    if hangs_in == "start":
        assert loop.cluster.spawned[f"{role} 2"].is_stopped


HOST_LOST = "host tls://10.0.0.9:24440 is lost: its worker daemon does not answer"


@pytest.mark.parametrize("noticed_late", [False, True])
def test_a_replica_whose_host_is_lost_is_given_up_and_the_others_go_on(
    tmp_path: Path, noticed_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of its process may be noticed first: then what fails is a start on that host."""
    faults = {"generator-0": Faults(dies_at_s=2.0, dies_of="died" if noticed_late else HOST_LOST)}
    loop = Loop(num_replicas=2, max_restarts=3, num_held_out=3, evaluate_every=10, faults=faults)
    num_starts = 0

    async def fail(name: str) -> FaultyProcess:
        nonlocal num_starts
        num_starts += 1
        raise ExecutorLost(name, 0, HOST_LOST)

    loop.executors = replace(loop.executors, start=fail)
    run(loop.run(tmp_path))
    check_trained(loop)
    assert num_starts == int(noticed_late)
    assert loop.supervisor.wanted() == [1]
    assert loop.supervisor.missing(3) == [2, 3], "0 would be started on the lost host"
    assert f"generator 0 is not started again, the others go on: {HOST_LOST}" in caplog.text


def test_the_loss_of_every_replicas_host_ends_the_run(tmp_path: Path) -> None:
    faults = {
        "generator-0": Faults(dies_at_s=2.0, dies_of=HOST_LOST),
        "generator-1": Faults(dies_at_s=3.0, dies_of=HOST_LOST),
    }
    with pytest.raises(BaseExceptionGroup) as caught:
        run(Loop(num_replicas=2, max_restarts=3, faults=faults).run(tmp_path))
    error = first_error(caught.value)
    assert isinstance(error, ExecutorLost)
    assert str(error) == f"lost executor generator-1 rank 0: {HOST_LOST}"


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_replica_that_is_lost_as_it_joins_is_started_again_or_forgotten(
    max_restarts: int,
) -> None:
    """The publish loses it before the call that connects it has returned."""

    async def main() -> None:
        loop = Loop(max_restarts=max_restarts)
        dispatch = make_dispatch(loop.config, loop.executors)
        started: list[FaultyProcess] = []
        start_one = loop.executors.start

        async def start(name: str) -> FaultyProcess:
            started.append(cast(FaultyProcess, await start_one(name)))
            return started[-1]

        class LosesTheFirst:
            async def connect_replica(self, replica: int, generator: object) -> None:
                if len(started) == 1:
                    dispatch.lost(replica, ExecutorLost("generator-1", 0, "died"))
                    if not max_restarts:
                        raise ExecutorLost("generator-1", 0, "died")

            async def drop(self, replica: int) -> None: ...

            async def watch(self) -> None: ...

        supervisor = Supervisor(loop.config, replace(loop.executors, start=start))
        supervisor.connect(dispatch, cast(Publisher, LosesTheFirst()))
        await supervisor.scale(2)
        await asyncio.sleep(5.0)
        assert len(started) == 1 + max_restarts
        assert started[0].is_stopped
        assert supervisor.wanted() == [*range(1 + max_restarts)]
        await dispatch.close()

    run(main())


def test_a_replica_that_is_not_started_again_counts_no_more_as_one(tmp_path: Path) -> None:
    loop = Loop(
        num_replicas=4,
        num_steps=40,
        max_restarts=0,
        costs=RESTART_COSTS,
        faults=dying("generator-1", 1.0),
    )
    states: list[list[int]] = []

    async def scale() -> None:
        await asyncio.sleep(2.0)
        supervisor = loop.supervisor
        states.append(supervisor.wanted())
        await supervisor.scale(2)
        states.append(supervisor.wanted())
        await supervisor.scale(3)
        states.append(supervisor.wanted())

    async def main() -> None:
        await asyncio.gather(loop.run(tmp_path), scale())

    run(main())
    assert states == [[0, 2, 3], [0, 2], [0, 1, 2]]
    check_trained(loop)
