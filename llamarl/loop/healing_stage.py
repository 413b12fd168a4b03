"""The executor of a stage, started again when it is lost.

Owns: which processes run the stage now, and the repeat of calls that had not ended. Does not own:
how processes are started (`start` does), how often (`may_restart`), or what is ready for the stage
(`ledger.py`). Invariant: all that a call to `process` leaves, its results and its cells in storage,
is of the same processes. Whatever earlier ones wrote is erased before the call is repeated, and
storage takes nothing from them afterwards, even if they do not end.

A stage can be repeated since all that it reads is in storage, and what it found is not used before
its call has ended.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from llamarl.cluster import ExecutorGroup
from llamarl.errors import GroupLost
from llamarl.experience.graph import Stage
from llamarl.protocols import Storage
from llamarl.types import StageItem, StageResult

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # after a start that failed; doubled after the next one
STOP_LIMIT_S = 30.0  # for lost processes to end, before others take their place


class HealingStage:
    """protocols.Processor of `stage`, which runs in `groups[stage]`: that is kept up to date.

    `start` starts it again, and gets how often it was lost before.
    """

    def __init__(
        self,
        stage: Stage,
        groups: dict[Stage, ExecutorGroup],
        start: Callable[[Stage, int], Awaitable[ExecutorGroup]],
        storage: Storage,
        may_restart: Callable[[], bool],
    ) -> None:
        self._stage, self._groups, self._start = stage, groups, start
        self._storage, self._may_restart = storage, may_restart
        self.num_losses = 0
        self._losses: asyncio.Queue[GroupLost] = asyncio.Queue()  # that calls met with
        self._serves = asyncio.Event()
        self._serves.set()

    @property
    def name(self) -> str:
        """The executor's."""
        return self._groups[self._stage].name

    @property
    def is_serving(self) -> bool:
        """Whether it can compute, as far as is known."""
        return self._serves.is_set()

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        """See `protocols.Processor`. Without end if the executor is lost for good, which `watch`
        raises."""
        row_ids = [row_id for rows, _ in items for row_id in rows]
        names = [column.name for column in self._stage.writes]
        while True:
            await self._serves.wait()
            group, num_losses = self._groups[self._stage], self.num_losses
            try:
                results: Sequence[StageResult] = await group.call_one.process(items)
                return results
            except GroupLost as loss:
                if loss.group != group.name:  # what it needs, such as a storage unit
                    raise
                if num_losses == self.num_losses:
                    self._serves.clear()
                    self._losses.put_nowait(loss)
            await self._serves.wait()
            await self._storage.erase(row_ids, names, self.num_losses)

    async def watch(self) -> None:
        """Start the executor again whenever it is lost; raises the loss once that may not be."""
        while True:
            loss = await self._wait_lost(self._groups[self._stage])
            self._serves.clear()
            await self._heal(loss)
            self._losses = asyncio.Queue()  # all were of the processes before
            self._serves.set()

    async def _wait_lost(self, group: ExecutorGroup) -> GroupLost:
        """A call may find the loss before it is noticed."""
        found = asyncio.ensure_future(self._losses.get())
        noticed = asyncio.ensure_future(group.watch())
        try:
            await asyncio.wait({found, noticed}, return_when=asyncio.FIRST_COMPLETED)
            error = noticed.exception() if noticed.done() else found.result()
            if isinstance(error, GroupLost):
                return error
            raise error or GroupLost(group.name, None, "it was stopped")
        finally:
            found.cancel()
            noticed.cancel()

    async def _heal(self, loss: Exception) -> None:
        """Start other processes; those that do not come up count as one more loss."""
        pause_s = FIRST_PAUSE_S
        while True:
            group = self._groups[self._stage]
            is_placed = not isinstance(loss, GroupLost) or loss.has_host
            if not (is_placed and self._may_restart()):
                raise loss
            reason = str(loss).splitlines()[0]
            log.warning("%s is started again, and nothing else: %s", group.name, reason)
            await asyncio.wait({asyncio.ensure_future(group.stop())}, timeout=STOP_LIMIT_S)
            self.num_losses += 1
            try:
                self._groups[self._stage] = await self._start(self._stage, self.num_losses)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the next start may do
                loss = error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
