"""The dispatcher under whatever may happen to its replicas, in any order, on a virtual clock."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.wiring import make_dispatch
from llamarl.core.errors import ExecutorLost, NoGenerator
from llamarl.core.records import RESPONSE_IDS, FinishReason, Purpose, Request, RolloutInfo, Sampling
from llamarl.planner.simulation.clock import run
from llamarl.publish.replica import WeightTarget
from tests.simulation.faults import LIVENESS_TIMEOUT_S, Faults
from tests.simulation.loop import Loop

NUM_REPLICAS = 3
PAUSES_S = [0.0, 0.0, 0.001, 0.01, 0.06, 1.0, 6.0]
replicas = st.integers(0, NUM_REPLICAS - 1)
events = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4), st.sampled_from([0, 2])),
    st.tuples(st.just("submit to"), replicas, st.integers(1, 2)),
    st.tuples(st.just("commit"), replicas),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("lose"), replicas),
    st.tuples(st.just("kill"), replicas),
    st.tuples(st.just("freeze"), replicas),
    st.tuples(st.just("thaw"), replicas),
)
scripts = st.lists(
    st.tuples(events, st.integers(0, 3), st.sampled_from(PAUSES_S)), min_size=2, max_size=20
)


def five_tokens(request: Request) -> int:
    return 5


@dataclass
class Play:
    """One script, and what came out of `collect`; a cut rollout goes on, as in the controller."""

    num_collectors: int
    ends: bool
    asked: dict[int, Request] = field(default_factory=dict)
    stops: Counter[int] = field(default_factory=Counter)
    stopped: dict[int, RolloutInfo] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    async def perform(self, script: list[Any]) -> None:
        faults = Faults(ignores_stop=not self.ends)
        loop = Loop(
            num_replicas=NUM_REPLICAS,
            num_collectors=self.num_collectors,
            length=five_tokens,
            faults={f"generator-{i}": faults for i in range(NUM_REPLICAS)},
        )
        self.storage, self.replicas = loop.storage, loop.executors.generators
        self.dispatch = make_dispatch(loop.config, loop.executors)
        self.versions = dict.fromkeys(self.replicas, 0)
        for index, replica in self.replicas.items():
            await replica.one(WeightTarget).commit(0)
            self.dispatch.committed(index, 0)
        hearing = asyncio.create_task(self._hear())
        calls = []
        try:
            for (name, *arguments), num_ticks, pause_s in script:
                calls.append(asyncio.create_task(self._act(name, *arguments)))
                for _ in range(num_ticks):  # what happens in the same moment interleaves
                    await asyncio.sleep(0)
                await asyncio.sleep(pause_s) if pause_s else None
            async with asyncio.timeout(200.0):
                await asyncio.gather(*calls)
                while not hearing.done() and self.stopped.keys() != self.asked.keys():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"never came: {self.asked.keys() - self.stopped.keys()}") from None
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, *calls, return_exceptions=True)
            await asyncio.sleep(30.0)  # whatever wakes late does so now
            await self.dispatch.close()
        if hearing.done() and not hearing.cancelled():
            hearing.result()

    async def _act(self, name: str, *arguments: int) -> None:
        if name == "submit":
            await self.dispatch.submit(self._requests(*arguments))
        elif name == "submit to":
            index, count = arguments
            requests = [replace(each, replica=index) for each in self._requests(count, 0)]
            await self.dispatch.submit(requests)
        elif name == "abort":
            await self.dispatch.abort_requests(list(range(arguments[0])))
        elif name == "commit":
            (index,) = arguments
            self.versions[index] += 1
            version = self.versions[index]
            with contextlib.suppress(ExecutorLost):
                await self.replicas[index].one(WeightTarget).commit(version)
                self.dispatch.committed(index, version)
        elif name == "thaw":
            self.replicas[arguments[0]].thaw()
        elif name == "freeze":
            replica = self.replicas[arguments[0]]
            replica.freeze()
            await asyncio.sleep(LIVENESS_TIMEOUT_S)
            if not replica.is_frozen:
                return
            if self._may_go(arguments[0]):
                replica.lose("silent")
                await asyncio.sleep(LIVENESS_TIMEOUT_S)
            replica.thaw()  # the last one, or one that is given up
        elif self._may_go(arguments[0]):
            if name == "lose":
                self.dispatch.lost(arguments[0], TimeoutError("a commit took too long"))
            else:
                self.replicas[arguments[0]].die()

    def _may_go(self, index: int) -> bool:
        """Whether a replica stays if this one is lost; counts it as lost then."""
        if len(self.gone | {index}) == NUM_REPLICAS:
            return False
        self.gone.add(index)
        return True

    def _requests(self, count: int, segment_tokens: int) -> list[Request]:
        number = len(self.asked)
        requests = [
            Request(
                row_id=row_id,
                prompt_ids=(number,),
                sampling=Sampling(max_tokens=5),
                seed=0,
                segment_tokens=segment_tokens,
            )
            for row_id in range(number, number + count)
        ]
        self.asked |= {request.row_id: request for request in requests}
        return requests

    async def _hear(self) -> None:
        while True:
            for row in await self.dispatch.collect():
                if row.finish_reason is FinishReason.SEGMENT:
                    cut = replace(self.asked[row.row_id], resume=True)
                    await self.dispatch.submit([cut])
                else:
                    self.stops[row.row_id] += 1
                    self.stopped[row.row_id] = row


@pytest.mark.full
@pytest.mark.parametrize("num_collectors", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.long)])
@settings(max_examples=100, deadline=None)
@given(script=scripts)
def test_every_rollout_stops_exactly_once_whatever_happens_to_the_replicas(
    num_collectors: int, ends: bool, script: list[Any]
) -> None:
    play = Play(num_collectors, ends)

    async def main() -> None:
        await play.perform(script)
        for row_id, row in play.stopped.items():
            if row.finish_reason is not FinishReason.ABORTED:
                (ids,) = (await play.storage.read([row_id], [RESPONSE_IDS]))[RESPONSE_IDS]
                assert len(ids) == row.num_tokens == 5

    run(main())
    assert play.stops == Counter(dict.fromkeys(play.asked, 1))


def test_losing_the_last_replica_is_an_error_of_collect(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = Loop(length=five_tokens, faults={"generator-0": Faults(dies_at_s=0.02)})
        dispatch = make_dispatch(loop.config, loop.executors)
        await loop.process("generator-0").one(WeightTarget).commit(0)
        request = Request(row_id=0, prompt_ids=(1,), sampling=Sampling(max_tokens=5), seed=0)
        await dispatch.submit([request])
        try:
            with pytest.raises(NoGenerator, match="every generator replica is lost") as caught:
                await dispatch.collect()
            assert isinstance(caught.value.__cause__, ExecutorLost)
        finally:
            await dispatch.close()

    run(main())
    assert "generator 0: its 1 rollouts are lost too: it was the last one" in caplog.text


@pytest.mark.parametrize("num_collectors", [0, 1])
def test_a_lost_storage_unit_is_named_and_costs_no_replica(
    num_collectors: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica's own call to the unit raises first, before the unit's watcher knows."""

    lost = ExecutorLost("storage-1", None, "killed")
    faults = Faults(errors={"collect": (1, lost)})

    async def main() -> None:
        loop = Loop(
            num_replicas=2,
            num_collectors=num_collectors,
            faults={"generator-0": faults, "generator-1": faults},
        )
        dispatch = make_dispatch(loop.config, loop.executors)
        request = Request(row_id=0, prompt_ids=(1,), sampling=Sampling(max_tokens=5), seed=0)
        await dispatch.submit([request])
        with pytest.raises(ExecutorLost, match="lost executor storage-1: killed"):
            await dispatch.collect()
        assert len(dispatch.replicas) == 2
        await dispatch.close()

    run(main())
    assert "start again" not in caplog.text


def test_replicas_that_keep_their_version_evaluate_it_and_get_nothing_that_needs_a_newer_one() -> (
    None
):
    async def main() -> None:
        loop = Loop(num_replicas=2, length=five_tokens)
        dispatch = make_dispatch(loop.config, loop.executors)
        for index, replica in loop.executors.generators.items():
            await replica.one(WeightTarget).commit(5)
            dispatch.committed(index, 5)
        dispatch.hold({0})

        def ask(row_id: int, version: int, purpose: Purpose) -> Request:
            return Request(
                row_id=row_id,
                prompt_ids=(row_id,),
                sampling=Sampling(max_tokens=5),
                seed=0,
                min_version=version,
                purpose=purpose,
            )

        await dispatch.submit([ask(i, 6, Purpose.TRAIN) for i in range(4)])
        await dispatch.submit([ask(i, 5, Purpose.EVALUATE) for i in range(4, 8)])
        held = {index: sorted(each.running) for index, each in dispatch.replicas.items()}
        assert held == {0: [4, 5, 6, 7], 1: [0, 1, 2, 3]}
        loop.process("generator-0").freeze()  # before it has written any
        dispatch.lost(0, TimeoutError("a commit took too long"))
        given_up: list[RolloutInfo] = []
        while len(given_up) < 4:  # on the other one another version may write them
            given_up += await dispatch.collect()
        assert {row.row_id: str(row.finish_reason) for row in given_up} == dict.fromkeys(
            range(4, 8), "aborted"
        )
        await dispatch.close()

    run(main())


def test_an_evaluation_waits_for_a_replica_that_is_yet_to_commit_its_version() -> None:
    async def main() -> None:
        loop = Loop(num_replicas=1, length=five_tokens)
        dispatch = make_dispatch(loop.config, loop.executors)
        (replica,) = loop.executors.generators.values()
        await replica.one(WeightTarget).commit(5)
        dispatch.committed(0, 5)
        dispatch.on_lost = lambda index, why: None  # replicas are started again
        dispatch.hold(set(), True)  # version 6 is published, and this one was kept at 5
        sampling = Sampling(max_tokens=5)
        asked = [
            Request(
                row_id=i,
                prompt_ids=(i,),
                sampling=sampling,
                seed=0,
                min_version=6,
                purpose=Purpose.EVALUATE,
            )
            for i in range(2)
        ]
        await dispatch.submit(asked)
        await replica.one(WeightTarget).commit(6)
        dispatch.hold({0}, True)
        dispatch.committed(0, 6)
        written: list[RolloutInfo] = []
        async with asyncio.timeout(60.0):
            while len(written) < 2:
                written += await dispatch.collect()
        assert {span.version for row in written for span in row.spans} == {6}
        await dispatch.close()

    run(main())


def test_a_replica_that_does_not_answer_delays_no_request_of_the_others() -> None:
    async def main() -> None:
        loop = Loop(length=five_tokens, num_replicas=2)
        dispatch = make_dispatch(loop.config, loop.executors)
        for index in (0, 1):
            await loop.executors.generators[index].one(WeightTarget).commit(0)
            dispatch.committed(index, 0)
        loop.process("generator-0").freeze()
        requests = [
            Request(row_id=i, prompt_ids=(i,), sampling=Sampling(max_tokens=5), seed=0)
            for i in range(8)
        ]
        async with asyncio.timeout(LIVENESS_TIMEOUT_S / 2):  # long before it counts as lost
            await dispatch.submit(requests)
            found = await dispatch.collect()
        assert {row.replica for row in found} == {1}
        await dispatch.close()

    run(main())
