"""Code that holds up its process, or never ends, costs its own episode."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamarl.core.records import EpisodeState, StageStatus
from tests.scoring.played import ADD, call, playing

pytestmark = pytest.mark.full

BLOCKING = """
import asyncio, socket, threading, time

lock = threading.Lock()
lock.acquire()
left, right = socket.socketpair()

class Env:
    def reset(self, **row):
        self.total = 0

    def add(self, amount: int) -> int:
        '''Adds.

        Args:
            amount: how much
        '''
        self.total += amount
        return self.total

    async def wait(self, seconds: float) -> str:
        '''Waits as it should.

        Args:
            seconds: how long
        '''
        await asyncio.sleep(seconds)
        return "waited"

    async def sleeps(self) -> str:
        '''Sleeps.'''
        time.sleep(1000)

    async def locks(self) -> str:
        '''Waits for a lock.'''
        lock.acquire()

    async def reads(self) -> str:
        '''Reads.'''
        right.recv(1)

    async def loops(self) -> str:
        '''Computes.'''
        while True:
            pass

    async def stubborn(self) -> str:
        '''Goes on once.'''
        try:
            time.sleep(1000)
        except BaseException:
            time.sleep(1000)

    async def within(self) -> str:
        '''Sleeps in a task of its own.'''
        async def sleeping():
            time.sleep(1000)
        await asyncio.gather(sleeping())

    async def deaf(self) -> str:
        '''Computes where no signal is looked for.'''
        sum(range(10**13))

    def get_reward(self):
        return float(self.total)

environment = Env
"""


ALIKE = [
    pytest.param(tool, marks=pytest.mark.long) for tool in ("sleeps", "locks", "reads", "within")
]


@pytest.mark.parametrize("tool", ["loops", "stubborn", *ALIKE])
async def test_a_coroutine_that_blocks_fails_its_own_episode(tmp_path: Path, tool: str) -> None:
    async with playing(tmp_path, task=BLOCKING, timeout_s=1.0) as setting:
        rows = range(8)
        await setting.begin_all(rows)
        for row in rows:
            assert (await setting.turn(row, ADD)).state is EpisodeState.GOES_ON
        pids = setting.executor._pools[0].pids
        blocked, waiting, *others = await asyncio.gather(
            setting.turn(0, call(tool)),
            setting.turn(1, call("wait", '{"seconds": 0.3}')),
            *(setting.turn(row, ADD) for row in rows[2:]),
        )
        assert blocked.status is StageStatus.HUNG
        assert "environment.timeout_s" in blocked.error
        assert 'File "task.py"' in blocked.error, "it says where it was"
        for each in (waiting, *others):
            assert (each.status, each.state) == (StageStatus.OK, EpisodeState.GOES_ON)
        assert setting.executor._pools[0].pids == pids, "its process goes on"
        for row in rows[2:]:
            assert (await setting.turn(row, "So.<|im_end|>")).reward == 4.0


async def test_one_that_cannot_be_interrupted_fails_and_the_others_begin_again(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, task=BLOCKING, timeout_s=3.0) as setting:
        rows = range(4)
        await setting.begin_all(rows)
        wait = call("wait", '{"seconds": 2.4}')
        asked = [call("deaf"), wait, wait]
        found = await asyncio.gather(*(setting.turn(row, text) for row, text in enumerate(asked)))
        assert found[0].status is StageStatus.HUNG
        assert "in deaf" in found[0].error
        for each in found[1:]:
            assert (each.status, each.state) == (StageStatus.OK, EpisodeState.LOST)
        assert (await setting.turn(3, ADD)).state is EpisodeState.LOST
        assert (await setting.begin(3, attempt=1)).state is EpisodeState.GOES_ON


AGENT = """
import json, time, urllib.request

from llamarl.scoring.agent import AgentEnvironment

class Agent(AgentEnvironment):
    def play(self, url, hangs=False, **row):
        if hangs:
            time.sleep(1000)
        body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
        urllib.request.urlopen(f"{url}/chat/completions", body).read()
        return 1.0

environment = Agent
"""
SYNCHRONOUS = AGENT.replace("    def play", "    async def play")  # waits for its own event loop
NUM_HUNG = 32  # as many as a process outlives; one more may be lost with it


@pytest.mark.long
async def test_a_program_that_asks_without_await_in_a_coroutine_fails_its_own_episode(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, task=SYNCHRONOUS, timeout_s=2.0) as setting:
        found = await asyncio.gather(setting.begin(1), setting.begin(2, hangs=True))
        for each in found:
            assert each.status is not StageStatus.OK
            assert "in play" in each.error
        (pid,) = setting.executor._pools[0].pids
        assert (await setting.begin(3)).status is not StageStatus.OK
        assert setting.executor._pools[0].pids == [pid], "its process goes on"


@pytest.mark.long
async def test_programs_of_agents_that_never_end_are_counted_and_their_process_is_replaced(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path, task=AGENT, timeout_s=3.0, num_workers=1) as setting:
        (pid,) = setting.executor._pools[0].pids
        hung = (setting.begin(row, hangs=True) for row in range(NUM_HUNG))
        found = await asyncio.gather(*hung)
        assert {each.status for each in found} == {StageStatus.HUNG}
        assert "in play" in found[0].error
        row = NUM_HUNG
        while setting.executor._pools[0].pids == [pid]:  # it ends by itself, and is seen to
            await setting.begin(row := row + 1)
        begun = await setting.begin(row := row + 1)
        assert begun.state is EpisodeState.GOES_ON
        ended = asyncio.create_task(setting.open(row, 1))
        assert (await setting.turn(row, "So.<|im_end|>")).state is EpisodeState.CLOSED
        assert (await ended).reward == 1.0
