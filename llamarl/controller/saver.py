"""The moments at which a run is saved: after due steps, and when it ends early.

A saved state names the trainer's version, every prompt that was drawn and neither trained nor
dropped by then, and records that hold that version's step and all that was dropped."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llamarl.controller.colocation import Colocation, Phase
from llamarl.controller.engines import Engines
from llamarl.controller.evaluation import Evaluator
from llamarl.core import checkpoint
from llamarl.core.config import CheckpointConfig
from llamarl.core.errors import ExecutorLost, NoGenerator, mark_seen, unwrap
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)
T = TypeVar("T")
SAVE_S = 600.0  # of the save when a run ends early: after it the newest checkpoint is the result


@dataclass(kw_only=True)
class Saver:
    """Saves one run. `last` is the version to end with. If the event loop's `deadline_s` comes
    before, it becomes the first version made after that, and `limit` names this reason. The version
    that the run starts with counts as saved."""

    config: CheckpointConfig
    run_dir: str
    engines: Engines
    colocation: Colocation
    evaluator: Evaluator
    spans: Spans
    last: int
    deadline_s: float = math.inf
    limit: str = ""
    _saved: tuple[int, str, int, int] = field(init=False)
    """The state that is saved: its version, why it is the last one, the best version and the number
    of evaluations since."""
    _exported: int = -1  # the version that was last, while training
    _under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    _whole: set[asyncio.Future[None]] = field(default_factory=set)
    _taking: set[asyncio.Future[None]] = field(default_factory=set)  # states, one at most
    _made: asyncio.Event = field(default_factory=asyncio.Event)  # by the step under way
    _step: list[asyncio.Future[object]] = field(default_factory=list)  # one at most
    _saving: asyncio.Future[None] | None = None
    _asked: int = field(init=False)  # the version that `save` was called for last
    _end: Callable[[], None] | None = None
    _has_phases: bool = True  # else the trainer has the device for good

    def __post_init__(self) -> None:
        best = self.evaluator.best
        self._saved, self._asked = (self.version, "", best.version, best.num_since), self.version

    @property
    def version(self) -> int:
        """The trainer's version."""
        return self.engines.version

    async def start_step(self, step: Coroutine[Any, Any, object]) -> None:
        """Start `step`, once the one before has ended, and wait until it has called `made`.

        If the caller is cancelled, the step goes on to its end and `rescue` waits for it: a version
        that was made is logged.
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
        is_late = asyncio.get_running_loop().time() >= self.deadline_s
        if is_late and not self.has_last:
            self.last = self.version
            await self.engines.gate.end(self.limit)

    async def whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that changes both the state and the records. It is done even if the run is
        cancelled, and no state is saved amid it; while a state is taken, new work waits."""
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
        """Wait until all `whole` work that was begun is done."""
        await asyncio.gather(*map(asyncio.shield, self._whole))

    def made(self) -> None:
        """Note that the trainer has made the next version."""
        self._made.set()
        if self._end is not None:
            self._end()

    def end_after_step(self, end: Callable[[], None]) -> None:
        """Call `end`, which cancels the run, once the trainer has made its next version."""
        self._end = end

    @property
    def has_last(self) -> bool:
        """Whether the last step is made, so that only writing is left to do."""
        return self.version >= self.last

    def is_due(self) -> bool:
        """Return whether to save or export the trainer's version."""
        return self._is_save_due() or self.config.is_export_due(self.version)

    def _is_save_due(self) -> bool:
        """Return whether to save the trainer's version: as `CheckpointConfig` says, or because it
        is evaluated and may turn out to be the best. A save that is due amid a batch comes after
        its last step, since a run that is resumed begins with a new batch."""
        if self.has_last:
            return True
        is_between = self.engines.gate.steps.first_of_batch(self.version) == self.version
        may_be_best = bool(self.config.best) and self.evaluator.is_wanted(self.version)
        since = range(self._asked + 1, self.version + 1)
        is_due = any(self.config.is_due(version, self.last) for version in since)
        return is_between and (may_be_best or is_due)

    async def save(self, tasks: asyncio.TaskGroup) -> None:
        """Export and save the trainer's version, if that is due and not yet done, once its step is
        logged.

        Returns once training may go on: the trainer's state is copied, and written meanwhile. A
        failure ends `tasks`, which do not end before the save; the next save waits for it.
        """
        is_save_due, self._asked = self._is_save_due(), self.version
        await self._end_step()
        if self.config.is_export_due(self.version) and self._exported != self.version:
            self._exported = self.version
            await self._export(f"exports/step-{self.version:08d}")
        if not is_save_due:
            return
        await self.evaluator.measure_before_save(self.version, self.last, self.whole)
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
        """Mark the best version, and write it and the last one in the Hugging Face layout, if the
        config wants them. This needs no generators: those that are lost by now have made room."""
        best = self.evaluator.best.version
        checkpoint.mark_best(self.run_dir, best)
        checkpoint.prune(self.run_dir, self.config.keep, lambda version: version == best)
        if not self.config.export:
            return
        try:
            async with self.colocation.phase(Phase.TRAIN) if self._has_phases else nullcontext():
                await self._export_results()
        except NoGenerator:
            await self.colocation.recall()
            await self._export_results()

    async def _export_results(self) -> None:
        """Export the last version, then the best one, whose weights take the place of the
        trainer's."""
        await self._export("export")
        best = self.evaluator.best.version
        if (folder := checkpoint.find(self.run_dir, best)) is not None:
            assert self.engines.trainer is not None
            if best != self.version:
                await self.engines.trainer.restore(str(folder))
            await self._export("export-best")

    async def _export(self, name: str) -> None:
        assert self.engines.trainer is not None
        await self.engines.trainer.export(f"{self.run_dir}/{name}", self.config.export_dtype)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Run the loop inside this block. Executors that are lost once the last version is made
        cost an evaluation or lines of the archive; the version is saved nevertheless."""
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

        Takes at most `SAVE_S` and never raises: a warning says what could not be saved.
        """
        try:
            async with asyncio.timeout(SAVE_S):
                while self._under_way:
                    await asyncio.gather(*self._under_way, return_exceptions=True)
                if self._saved[0] != self.version:
                    await self.colocation.recall()
                    await self._save()
        except Exception as error:  # noqa: BLE001 - what ended the run must not be hidden by this
            is_late = isinstance(error, TimeoutError) and not str(error)
            why = f"it took over {SAVE_S:g} s" if is_late else error
            log.warning("version %d could not be saved: %s", self.version, why)

    async def _end_step(self) -> None:
        """Wait until the last step has ended; raises its error."""
        await asyncio.gather(*map(asyncio.shield, self._step))

    async def _save(self, on_copied: Callable[[], None] | None = None) -> None:
        """Save the present state; with `on_copied`, save from a copy and call it once the state may
        change. A run that is saved amid a batch ends with that save."""
        if self.engines.gate.steps.first_of_batch(self.version) < self.version:
            await self.engines.retire_used()
        taking = asyncio.get_running_loop().create_future()
        self._taking.add(taking)
        try:
            while self._whole:
                await asyncio.wait(self._whole)
        finally:  # what follows is done before any other task runs, up to the end of the copies
            self._taking.discard(taking)
            taking.set_result(None)
        if self.has_last:
            self.evaluator.note_saved(self.version)
        gate, version, best = self.engines.gate, self.version, self.evaluator.best
        known = best.version
        now = version, gate.solved or gate.ended, known, best.num_since
        if now == self._saved:
            return
        state: dict[str, Any] = {"version": version, "evaluated": self.evaluator.version}
        state |= {"best": best.state(), **gate.state(version)}
        if gate.solved:
            state["solved"] = gate.solved
        with self.spans.span("checkpoint", "mark", version=version):
            trainer = self.engines.trainer
            assert trainer is not None
            await checkpoint.save(
                self.run_dir,
                trainer,
                state,
                self.config.keep,
                on_copied,
                best=lambda: best.version,
                is_spared=lambda each: each == known or self._may_be_best(each),
            )
        self._saved = now

    def _may_be_best(self, version: int) -> bool:
        """Return whether a checkpoint's version is still to be evaluated."""
        is_last = version == self.last and self.has_last
        is_wanted = bool(self.config.best) and (is_last or self.evaluator.is_wanted(version))
        return is_wanted and version > self.evaluator.version

    def _protect(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start `work` as a task that goes on when the run is cancelled."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(mark_seen)  # the run may end before it is awaited
        return task


async def _wait_for(saving: asyncio.Future[None]) -> None:
    await asyncio.shield(saving)
