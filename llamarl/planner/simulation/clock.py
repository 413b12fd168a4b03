"""Virtual time, and the processors that simulated executors compute on.

The clock jumps to the next timer whenever nothing is runnable. Time stands still while anything is
runnable or a thread works, so a simulation gives the same times on any machine. Code that reads
`time.monotonic` instead of the loop's clock sees real time: a simulation must not use what it
measures.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 2.0  # what a thread may still be doing when all tasks wait


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock: `asyncio.sleep(3600)` costs nothing, and a deadlock raises
    instead of waiting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._threads: set[asyncio.Future[Any]] = set()
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if self._threads and timeout != 0:
                return select()  # the end of a thread wakes the loop
            if timeout is None:
                events = select(THREAD_S)
                if not events:
                    raise RuntimeError("deadlock: every task waits and no timer is set")
                return events
            self._now_s += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return future

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self._now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual clock.

    Cycles are collected afterwards: looking for them among all rollouts in flight takes a third of
    a simulation, and there are few.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            return runner.run(main)
    finally:
        if was_enabled:
            gc.enable()


class Job:
    """Work of `total_s` seconds on a free processor, on `weight` processors side by side."""

    def __init__(self, total_s: float, then: Callable[[], None], weight: int, now_s: float) -> None:
        self.total_s = total_s
        self.then = then
        self.weight = weight
        self.done_s = 0.0
        self.since_s = now_s
        self.timer: asyncio.TimerHandle | None = None


class Cores:
    """`num_cores` processors for all jobs; with 0 every job has processors of its own.

    With k processes at work each runs at min(1, num_cores / k) of its speed when alone, times
    `shared_speed` as soon as two run side by side (caches, memory and, where two cores are threads
    of one, its units are shared).
    """

    def __init__(self, num_cores: int = 0, shared_speed: float = 1.0) -> None:
        self._num_cores = num_cores
        self._shared_speed = shared_speed
        self._jobs: dict[Job, None] = {}
        self._due_s: float | None = None  # when the job was to end whose `then` is being called

    def time(self) -> float:
        """Return the loop's time; while a job's `then` runs, the time at which the job was due."""
        return asyncio.get_running_loop().time() if self._due_s is None else self._due_s

    def start(self, seconds: float, then: Callable[[], None], weight: int = 1) -> Job:
        """Begin a job; `then` is called at its end."""
        if self._num_cores:
            self._advance()
        job = Job(seconds, then, weight, self.time())
        self._jobs[job] = None
        self._schedule(job)
        return job

    async def work(self, seconds: float, weight: int = 1) -> None:
        """Do a job and wait for its end."""
        if seconds > 0:
            done = asyncio.Event()
            self.start(seconds, done.set, weight)
            await done.wait()

    async def sleep(self, seconds: float) -> None:
        """Wait without computing."""
        await asyncio.sleep(seconds)

    def done_s(self, job: Job) -> float:
        """Return the seconds of the job's work that are done."""
        return job.done_s + max(0.0, self.time() - job.since_s) * self._speed()

    def cut(self, job: Job, total_s: float) -> None:
        """Let a running job end once `total_s` of it are done."""
        job.total_s = max(total_s, self.done_s(job))
        self._schedule(job)

    def _advance(self) -> None:
        """Count what has been done, before the speed changes."""
        now_s, speed = self.time(), self._speed()
        for job in self._jobs:
            job.done_s += max(0.0, now_s - job.since_s) * speed
            job.since_s = max(now_s, job.since_s)

    def _schedule(self, job: Job) -> None:
        """Set the timer of a job that is new or ends earlier; on shared processors that of every
        job, because all ends have moved."""
        loop, now_s, speed = asyncio.get_running_loop(), self.time(), self._speed()
        for each in self._jobs if self._num_cores else (job,):
            if each.timer is not None:
                each.timer.cancel()
            rest_s = max(0.0, each.total_s - self.done_s(each)) / speed
            each.timer = loop.call_at(now_s + rest_s, self._end, each)

    def _end(self, job: Job) -> None:
        assert job.timer is not None
        self._due_s = job.timer.when()
        if self._num_cores:
            self._advance()
        del self._jobs[job]
        if self._num_cores and self._jobs:
            self._schedule(next(iter(self._jobs)))
        job.then()
        self._due_s = None

    def _speed(self) -> float:
        num_working = sum(job.weight for job in self._jobs) if self._num_cores else 0
        if num_working <= 1:
            return 1.0
        speed = min(1.0, self._num_cores / num_working)
        return speed * (self._shared_speed if self._num_cores > 1 else 1.0)
