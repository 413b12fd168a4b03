"""One order of commands and steps on all ranks of a replica.

Owns: which commands run before which step. Does not own: what they do. Invariant: every rank runs
the same commands, in the same order, between the same two steps, whenever the calls reached it.

Every rank gets every call, at any time. Between two steps rank 0 broadcasts the keys of the calls
that run now; the other ranks wait until they have these calls too. A key is made of a call's
content; of equal calls it does not matter which is which. Without work rank 0 waits on its queue,
the others in the broadcast.
"""

import asyncio
import hashlib
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from llamarl.executors.compute import Command, ComputeThread
from llamarl.models.process_group import JOIN, form_group, meet

T = TypeVar("T")

KEYS_PER_ROUND = 14
STEP, STOP = 0, 1  # what a round's broadcast ends with
CALL_S = 60.0  # a call that reached rank 0 reaches the others within this, or never will
IDLE = timedelta(days=365)  # rank 0 may have no work for long; its death ends a broadcast


class Lockstep(ComputeThread):
    """A compute thread in step with those of the other ranks, once `join` has run on it.

    Before, it is a plain one. `work` must do the same on all ranks, and return the same. When a
    rank fails or dies, the next round fails on the others: `on_error` gets the error, and every
    call raises it from then on.
    """

    def __init__(
        self, name: str, on_error: Callable[[BaseException], None], *, rank: int, num_ranks: int
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._group: dist.ProcessGroupGloo | None = None
        self._early: defaultdict[int, deque[Command]] = defaultdict(deque)
        self._taken: list[Command] = []  # for this round
        self._error: BaseException | None = None
        super().__init__(name, on_error)

    def join(self, rendezvous: str) -> None:
        """Meet the other ranks at the file `rendezvous`, which no others use; call it on the
        thread."""
        store = meet(rendezvous, self._rank, self._num_ranks, JOIN)
        cpu = torch.device("cpu")
        self._group = form_group(cpu, store, self._rank, self._num_ranks, JOIN)

    async def run(self, call: Callable[[], T], key: object = "") -> T:
        """Run `call`, which all ranks get, between the same two steps on all of them.

        It runs even if the caller is cancelled: it does on the other ranks.
        """
        if self._error is not None:
            raise self._error
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._commands.put(Command(key, call, future))
        return await asyncio.wrap_future(future)

    def share(self, numbers: Sequence[int] | None) -> Sequence[int]:
        """As `ComputeThread.share`; on other ranks than 0 `numbers` count for nothing."""
        mine = torch.tensor([] if numbers is None else numbers, dtype=torch.int64)
        (num,) = self._broadcast(torch.tensor([len(mine)])).tolist()
        theirs = mine if self._rank == 0 else torch.zeros(num, dtype=torch.int64)
        shared: list[int] = self._broadcast(theirs).tolist()
        return shared

    def _next(self, has_work: bool) -> tuple[list[Command], bool]:
        if self._group is None and self._error is None:
            return self._take(has_work, most=1), not self._is_closing
        try:
            if self._error is not None:
                raise self._error
            return self._lead(has_work) if self._rank == 0 else self._follow()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the ranks are out of step
            self._break(error)
            return [], False

    def _lead(self, has_work: bool) -> tuple[list[Command], bool]:
        commands = self._taken = self._take(has_work, KEYS_PER_ROUND)
        ending = STEP if commands or not self._is_closing else STOP
        keys = [_digest(command.key) for command in commands]
        padding = [0] * (KEYS_PER_ROUND - len(keys))
        self._broadcast(torch.tensor([len(keys), ending, *keys, *padding]))
        return commands, ending == STEP

    def _follow(self) -> tuple[list[Command], bool]:
        num_keys, ending, *keys = self._broadcast(
            torch.zeros(2 + KEYS_PER_ROUND, dtype=torch.int64)
        ).tolist()
        if ending == STOP:
            self._refuse(RuntimeError("rank 0 of this replica was closed"))
            return [], False
        self._taken = []
        for key in keys[:num_keys]:
            self._taken.append(self._command(key))  # one by one, for the next may never come
        return self._taken, True

    def _command(self, key: int) -> Command:
        """The call with this key; waits for it."""
        deadline_s = time.monotonic() + CALL_S
        while not self._early[key]:
            try:
                command = self._commands.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(
                    f"rank {self._rank} never got a call that reached rank 0 {CALL_S:.0f} s ago"
                ) from None
            if command is None:
                self._is_closing = True  # so will rank 0 be, which ends the rounds
            else:
                self._early[_digest(command.key)].append(command)
        command = self._early[key].popleft()
        if not self._early[key]:
            del self._early[key]
        return command

    def _broadcast(self, frame: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, IDLE
        self._group.broadcast([frame], options).wait()  # type: ignore[attr-defined]
        return frame

    def _stop_work(self, error: BaseException) -> None:
        super()._stop_work(error)
        self._error = error

    def _break(self, error: BaseException) -> None:
        """Fail this rank's calls, and the other ranks' next rounds."""
        if self._work is not None:
            self._stop_work(error)
        self._error = error
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """Answer every call with `error`, until `close`."""
        self._error = error
        for line in (self._taken, *self._early.values()):
            for command in line:
                if command.future is not None and not command.future.done():
                    command.future.set_exception(error)
        while not self._is_closing:
            last = self._commands.get()
            if last is None:
                return
            if last.future is not None:
                last.future.set_exception(error)


def _digest(key: object) -> int:
    """63 bits of a key, equal in all processes."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
