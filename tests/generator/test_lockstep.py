"""Two ranks of one replica in real processes: one order of commands and steps on both."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llamarl.generator.decoding import Lockstep
from tests.trainer.ranks import FORKS

pytestmark = pytest.mark.full

NUM_CALLS = 32


class FakeEngine:
    """A step is a collective over both ranks, and there is work while `left` is above 0.

    The sum that a step computes shows at once whether the other rank is at another step, or has run
    other commands before it.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        store = dist.FileStore(str(folder / "engine"), 2)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        self._group = dist.ProcessGroupGloo(store, rank, 2, options)
        self.log: list[str] = []
        self.left = 0
        self.fails = False

    def run(self, name: str) -> str:
        self.log.append(name)
        self.left += 2
        if name.startswith("bad"):
            raise ValueError(name)
        return name

    def work(self) -> bool:
        if self.fails:
            raise RuntimeError("the engine of this rank broke")
        if self.left <= 0:
            return False
        mark = hash_of(self.log)
        total = torch.tensor([mark])
        self._group.allreduce([total]).wait()
        assert int(total) == 2 * mark, "the ranks are at different steps"
        self.log.append("step")
        self.left -= 1  # last: a reader that sees 0 sees the whole log
        return True


def hash_of(log: list[str]) -> int:
    return sum((index + 1) * (len(name) + ord(name[-1])) for index, name in enumerate(log))


class Rank:
    """A Lockstep around a FakeEngine."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.error: BaseException | None = None
        self.failed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.lockstep = Lockstep(f"rank-{rank}", self._fail, rank=rank, num_ranks=2)

    async def start(self) -> None:
        await self.lockstep.run(self._build)

    def _build(self) -> None:
        self.engine = FakeEngine(self.rank, self.folder)
        self.lockstep.join(str(self.folder / "commands"))
        self.lockstep.begin(self.engine.work)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._loop.call_soon_threadsafe(self.failed.set)

    async def call(self, name: str, delay_s: float) -> str:
        await asyncio.sleep(delay_s)
        key = name.split(".")[0]  # some calls are equal
        return await self.lockstep.run(lambda: self._run(key), key)

    def _run(self, key: str) -> str:
        """Each command also shares what rank 0 has, of a length of its own."""
        number = hash_of(self.engine.log)
        mine = [number] * (number % 3) if self.rank == 0 else None
        shared = self.lockstep.share(mine)
        assert list(shared) == [number] * (number % 3), "not what rank 0 gave here"
        return self.engine.run(key)

    async def close(self) -> None:
        await asyncio.to_thread(self.lockstep.close)


async def interleave(me: Rank) -> tuple[list[str], list[str]]:
    """All calls, each after a delay of this rank's own; a pause in which both sleep, more calls."""
    random.seed(me.rank)
    results = []
    for first in (0, NUM_CALLS // 2):
        names = [f"{'bad' if i % 7 == 0 else 'call'}-{i // 2}.{i}" for i in range(NUM_CALLS // 2)]
        calls = [me.call(f"{first}{name}", random.uniform(0, 0.3)) for name in names]
        results += await asyncio.gather(*calls, return_exceptions=True)
        while me.engine.left:
            await asyncio.sleep(0.05)
    return me.engine.log, [str(result) for result in results]


async def wait_for_death(me: Rank, killed: int) -> str:
    """One rank is killed. Rank 1 waits for rank 0's next round and learns of it at once, rank 0 at
    its next call."""
    await me.call("before", 0)
    (me.folder / f"ready-{me.rank}").touch()
    if me.rank == killed:
        await asyncio.sleep(60)
    while not me.failed.is_set():
        if me.rank == 0 and (me.folder / "killed").exists():
            await asyncio.wait_for(outcome(me.call("after", 0)), 20)
        await asyncio.sleep(0.05)
    assert isinstance(await asyncio.wait_for(outcome(me.call("late", 0)), 20), RuntimeError)
    return str(me.error)


async def outcome(call: Coroutine[None, None, str]) -> object:
    return (await asyncio.gather(call, return_exceptions=True))[0]


async def break_one(me: Rank) -> str:
    """The engine of rank 1 raises; rank 0's next round fails, and so do calls from then on."""
    if me.rank == 1:
        me.engine.fails = True
    while not me.failed.is_set():
        await asyncio.wait([asyncio.create_task(outcome(me.call("after", 0)))], timeout=0.1)
        me.engine.left = 0  # without a step, which would wait for the broken rank
    assert isinstance(await asyncio.wait_for(outcome(me.call("late", 0)), 20), RuntimeError)
    return str(me.error)


async def interleave_and_break(me: Rank) -> tuple[list[str], list[str], str]:
    log, results = await interleave(me)
    log = list(log)
    (me.folder / f"ready-{me.rank}").touch()
    while not (me.folder / f"ready-{1 - me.rank}").exists():
        await asyncio.sleep(0.05)
    return log, results, await break_one(me)


SCENARIOS = {
    "interleave": interleave_and_break,
    "death 0": functools.partial(wait_for_death, killed=0),
    "death 1": functools.partial(wait_for_death, killed=1),
}


def run_rank(rank: int, folder: Path, scenario: str, answers: multiprocessing.Queue) -> None:
    async def main() -> None:
        me = Rank(rank, folder)
        await me.start()
        answer = await SCENARIOS[scenario](me)
        await asyncio.wait_for(me.close(), 20)
        answers.put((rank, answer))

    torch.set_num_threads(1)
    asyncio.run(main())


class Ranks:
    """Both processes."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.answers = FORKS.Queue()
        self.processes = [
            FORKS.Process(target=run_rank, args=(rank, folder, scenario, self.answers))
            for rank in range(2)
        ]
        for process in self.processes:
            process.start()

    def results(self, count: int) -> dict[int, object]:
        return dict(self.answers.get(timeout=60) for _ in range(count))


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Ranks] = []

    def begin(scenario: str) -> Ranks:
        started.append(Ranks(tmp_path, scenario))
        return started[-1]

    yield begin
    for ranks in started:
        for process in ranks.processes:
            process.join(20)
            assert not process.is_alive()


def test_both_ranks_run_the_same_commands_between_the_same_steps_until_one_breaks(start) -> None:
    results = start("interleave").results(2)
    (log_0, results_0, error_0), (log_1, results_1, error_1) = results[0], results[1]
    assert log_0 == log_1
    assert results_0 == results_1
    commands = [name for name in log_0 if name != "step"]
    assert len(commands) == NUM_CALLS
    assert log_0.count("step") == 2 * NUM_CALLS
    assert commands != sorted(commands)
    assert error_1 == "the engine of this rank broke"
    assert error_0


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_makes_the_other_fail_and_not_hang(start, tmp_path: Path, killed) -> None:
    ranks = start(f"death {killed}")
    deadline_s = time.monotonic() + 60
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.kill(ranks.processes[killed].pid, signal.SIGKILL)
    ranks.processes[killed].join()
    (tmp_path / "killed").touch()
    assert ranks.results(1)[1 - killed]
