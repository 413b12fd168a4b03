"""The moments at which a run is saved: after due steps, and when it ends early.

Owns: which steps are due, which version and state a checkpoint of a running loop holds, and the
work that an end must wait for. Does not own: folders (`checkpoint.py`) or signals (`signals.py`).
Invariant: a saved state names the trainer's version, every prompt that was drawn and neither
trained nor dropped by then, and records that hold that version's step and all that was dropped.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llamarl.checkpoints import checkpoint
from llamarl.config import CheckpointConfig
from llamarl.errors import ExecutorLost, NoGenerator, mark_seen, unwrap
from llamarl.loop.colocation import Colocation, Phase
from llamarl.loop.engines import Engines
from llamarl.loop.evaluation import Evaluator
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class Saver:
    """Saves one run. `last` is the version to end with: the first one that is made after the event
    loop's `deadline_s`, if that comes before; the one that the run starts with counts as saved."""

    config: CheckpointConfig
    run_dir: str
    engines: Engines
    colocation: Colocation
    evaluator: Evaluator
    spans: Spans
    last: int
    deadline_s: float = math.inf
    _saved: tuple[int, str] = field(init=False)  # version, and why it is the last one
    _under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    _whole: set[asyncio.Future[None]] = field(default_factory=set)
    _taking: set[asyncio.Future[None]] = field(default_factory=set)  # states, one at most
    _made: asyncio.Event = field(default_factory=asyncio.Event)  # by the step under way
    _step: list[asyncio.Future[object]] = field(default_factory=list)  # one at most
    _saving: asyncio.Future[None] | None = None
    _end: Callable[[], None] | None = None
    _is_over: bool = False  # for the deadline has come
    _has_phases: bool = True  # else the trainer has the device for good

    def __post_init__(self) -> None:
        self._saved = self.version, ""

    @property
    def version(self) -> int:
        """The trainer's."""
        return self.engines.version

    @property
    def ended_by(self) -> str:
        """The limit that has made a version the last one, other than `num_steps`; or ""."""
        if self.engines.gate.ran_out:
            return "num_epochs"
        return "max_hours" if self._is_over else ""

    async def start_step(self, step: Coroutine[Any, Any, object]) -> None:
        """Start `step`, once the one before has ended, and wait until it has called `made`.

        If the caller is cancelled it goes on to its end, and `rescue` waits for it: a version that
        was made is logged.
        """
        try:
            await self._end_step()
        except BaseException:
            step.close()
            raise
        made = self._made = asyncio.Event()  # new: the end of the step before may still set its own
        task = self._protect(step)
        task.add_done_callback(lambda _: made.set())
        await made.wait()
        if task.done():
            task.result()
        self._step = [task]

    async def whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that changes both the state and the records. It is done even if the run is
        cancelled, and no state is saved amid it; while one is taken, new work waits."""
        try:
            while self._taking:
                await asyncio.wait(self._taking)
        except asyncio.CancelledError:
            work.close()
            raise
        task = self._protect(work)
        self._whole.add(task)
        task.add_done_callback(self._whole.discard)
        await asyncio.shield(task)

    async def end_whole(self) -> None:
        """Wait until the `whole` work that was begun is done."""
        await asyncio.gather(*map(asyncio.shield, self._whole))

    def made(self) -> None:
        """The trainer has made the next version."""
        self._made.set()
        if asyncio.get_running_loop().time() >= self.deadline_s:
            self._is_over = self.version < self.last
            self.last = min(self.last, self.version)
        if self._end is not None:
            self._end()

    def end_after_step(self, end: Callable[[], None]) -> None:
        """Call `end`, which cancels the run, once the trainer has made its next version."""
        self._end = end

    @property
    def has_last(self) -> bool:
        """Whether the last step is made: what is left to do is to write."""
        return self.version >= self.last

    def is_due(self) -> bool:
        """See `CheckpointConfig.is_due`."""
        return self.config.is_due(self.version, self.last)

    async def save(self, tasks: asyncio.TaskGroup) -> None:
        """Save the trainer's version, unless that was done, once its step is logged.

        Returns once training may go on: the trainer's state is copied, and written meanwhile. A
        failure ends `tasks`, which do not end before the save; the next save waits for it.
        """
        await self._end_step()
        while self._saving is not None and not self._saving.done():
            await asyncio.wait({self._saving})
        copied = asyncio.Event()
        self._saving = saving = self._protect(self._save(copied.set))
        saving.add_done_callback(lambda _: copied.set())
        await copied.wait()
        if saving.done():
            saving.result()
        else:
            tasks.create_task(_wait_for(saving))

    async def export(self) -> None:
        """Write the trainer's weights in the Hugging Face layout, if the config wants them. This
        needs no generators: those that are lost by now have made room."""
        if not self.config.export:
            return
        try:
            async with self.colocation.phase(Phase.TRAIN) if self._has_phases else nullcontext():
                await self._export()
        except NoGenerator:
            await self.colocation.recall()
            await self._export()

    async def _export(self) -> None:
        assert self.engines.trainer is not None
        await self.engines.trainer.export(f"{self.run_dir}/export", self.config.export_dtype)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Around the loop of a run. Executors that are lost once the last version is made cost an
        evaluation or lines of the archive; the version is saved nevertheless."""
        try:
            yield
        except* (ExecutorLost, NoGenerator) as losses:
            if not self.has_last:
                raise
            log.warning("version %d may lack its evaluation: %s", self.version, unwrap(losses))
            while self._under_way:
                await asyncio.gather(*self._under_way, return_exceptions=True)
            self._has_phases = False
            await self.colocation.recall()
            await asyncio.shield(self._protect(self._save()))

    async def rescue(self) -> None:
        """Save the version of a run that ends early, once work under way is done.

        Takes at most `checkpoint.save_s` and never raises: a warning says what could not be saved.
        """
        try:
            async with asyncio.timeout(self.config.save_s):
                while self._under_way:
                    await asyncio.gather(*self._under_way, return_exceptions=True)
                if self._saved[0] != self.version:
                    await self.colocation.recall()
                    await self._save()
        except Exception as error:  # noqa: BLE001 - what ended the run must not be hidden by this
            why = f"it took over {self.config.save_s:g} s" if _is_timeout(error) else error
            log.warning("version %d could not be saved: %s", self.version, why)

    async def _end_step(self) -> None:
        """Wait until the last step has ended; raises what it raised."""
        await asyncio.gather(*map(asyncio.shield, self._step))

    async def _save(self, on_copied: Callable[[], None] | None = None) -> None:
        """Save the present state; with `on_copied`, called once that may change, from a copy."""
        taking = asyncio.get_running_loop().create_future()
        self._taking.add(taking)
        try:
            while self._whole:
                await asyncio.wait(self._whole)
        finally:  # what follows is done before any other task runs, up to the end of the copies
            self._taking.discard(taking)
            taking.set_result(None)
        version, solved = self.version, self.engines.gate.solved
        end = solved or self.ended_by
        if (version, end) == self._saved:
            return
        state: dict[str, Any] = {"version": version, "evaluated": self.evaluator.version}
        state |= self.engines.gate.state(version)
        if solved:
            state["solved"] = solved
        with self.spans.span("checkpoint", "mark", version=version):
            trainer = self.engines.trainer
            assert trainer is not None
            await checkpoint.save(self.run_dir, trainer, state, self.config.keep, on_copied)
        self._saved = version, end

    def _protect(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start `work` as a task that goes on when the run is cancelled."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(mark_seen)  # the run may end before it is awaited
        return task


async def _wait_for(saving: asyncio.Future[None]) -> None:
    await asyncio.shield(saving)


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) and not str(error)
