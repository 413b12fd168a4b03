"""The work of a generator's compute thread, in one order on all ranks of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.core.compute import Command, ComputeThread
from llamarl.core.process_group import JOIN, form_group, meet
from llamarl.core.records import FinishReason, Request
from llamarl.generator.engine.scheduler import OpenGroups
from llamarl.generator.episodes import EpisodePart, Rank
from llamarl.generator.protocol import Engine, PartialOutput, RequestOutput
from llamarl.metrics.span import Spans
from llamarl.publish.offload import MemoryMover
from llamarl.publish.target import WeightBuffer
from llamarl.scoring.environment import Environments

Row = TypeVar("Row")
GATHER_S = 0.05  # several decode steps: rollouts of one moment travel in one message


class EngineOutput:
    """The stopped rollouts of an engine, on their way to `collect`. `put` and `fail` may be called
    on any thread; the other methods belong to `loop`.

    All ranks of a replica write the same: without `is_kept`, on ranks other than 0, rollouts are
    dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_kept: bool) -> None:
        self.loop, self._is_kept = loop, is_kept
        self._lock = threading.Lock()
        self._finished: list[RequestOutput] = []  # guarded by _lock, as are _open and _error
        self._open = OpenGroups()
        self.session = 0  # grows at each `reset`
        self._error: BaseException | None = None
        self._is_ready = asyncio.Event()

    def check(self) -> None:
        """Raise the error that ended the engine, if one did."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def fail(self, error: BaseException) -> None:
        """Note that the engine has ended with this error."""
        with self._lock:
            self._error = self._error or error
        self.loop.call_soon_threadsafe(self._is_ready.set)

    def expect(self, requests: Sequence[Request]) -> None:
        """Note that these rollouts will stop."""
        with self._lock:
            self._open.add(requests if self._is_kept else ())

    def put(self, finished: Sequence[RequestOutput]) -> None:
        """Add rollouts that stopped."""
        if not self._is_kept:
            return
        with self._lock:
            self._finished += finished
            is_ready = [self._open.stop(item.request, item.reason) for item in finished]
        if any(is_ready):
            self.loop.call_soon_threadsafe(self._is_ready.set)

    def reset(self) -> None:
        """Forget the stopped and the expected rollouts; a `take` that waits returns nothing."""
        with self._lock:
            self._finished, self._open = [], OpenGroups()
            self.session += 1
        self.loop.call_soon_threadsafe(self._is_ready.set)

    async def take(self, limit_s: float) -> tuple[list[RequestOutput], bool]:
        """Return the rollouts that stopped, and whether some prefix group is complete or a rollout
        is to go on. It waits for either, but at most `limit_s`, and then, unless a rollout is to go
        on, `GATHER_S` for more, as rollouts that stop while a report is on its way wait for the
        next. Raises the engine's error."""
        self.check()
        if not self._is_kept:
            return [], True
        session = self.session
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_ready.wait()
            with self._lock:  # a rollout that is to go on is waited for
                goes_on = any(item.reason is FinishReason.SEGMENT for item in self._finished)
            if not goes_on:
                await asyncio.sleep(GATHER_S)
        self.check()
        with self._lock:
            if session != self.session:
                return [], True
            finished, self._finished = self._finished, []
            is_ready = self._is_ready.is_set()
            self._is_ready.clear()
        return finished, is_ready


class KeptRows(Generic[Row]):
    """Rows that an executor has reported, numbered in the order in which they stopped.

    A row is kept until the next question confirms its arrival, so an answer can be lost on its way,
    also with the collector that asked. Numbers begin with the time, so that those of a later
    process or session are higher."""

    def __init__(self) -> None:
        self._first = time.time_ns()
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows that stopped after all others."""
        self._rows += rows

    def forget(self, received: int) -> None:
        """Forget the rows below this number, which have arrived."""
        num_rows = max(0, received - self._first)
        del self._rows[:num_rows]
        self._first += num_rows

    def report(self) -> tuple[int, list[Row]]:
        """Return the number of the first row, and all rows that are kept."""
        return self._first, [*self._rows]


T = TypeVar("T")

KEYS_PER_ROUND = 14
STEP, STOP = 0, 1  # what a round's broadcast ends with
CALL_S = 60.0  # a call that reached rank 0 reaches the others within this, or never will
IDLE = timedelta(days=365)  # rank 0 may have no work for long; its death ends a broadcast


class Lockstep(ComputeThread):
    """A compute thread in step with those of the other ranks, once `join` has run on it.

    Before that it is a plain one. `work` must do the same on all ranks, and return the same. When a
    rank fails or dies, the next round fails on the others: `on_error` gets the error, and every
    call raises it from then on."""

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

        It runs even if the caller is cancelled, as it does on the other ranks."""
        if self._error is not None:
            raise self._error
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._commands.put(Command(key, call, future))
        return await asyncio.wrap_future(future)

    def share(self, numbers: Sequence[int] | None) -> Sequence[int]:
        """Return rank 0's `numbers` on all ranks, as `ComputeThread.share`; those of other ranks
        are ignored."""
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
        """Wait for the call with this key, and return it."""
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
    """Return 63 bits of a key, equal in all processes."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Time = TypeVar("Time", int, float)


class Decoding:
    """Runs an engine, and passes its stopped rollouts to `output`. Only `run`, `check`, `fail` and
    `prefetch` may be called off the compute thread."""

    tags: tuple[str, ...] = ("weights", "kv")

    def __init__(
        self,
        engine: Engine,
        weight_buffer: WeightBuffer,
        mover: MemoryMover,
        spans: Spans,
        output: EngineOutput,
        thread: ComputeThread,
        *,
        rank: int = 0,
        environments: Environments | None = None,
    ) -> None:
        self.engine = engine
        self.check, self.fail = output.check, output.fail
        self._weight_buffer, self._mover = weight_buffer, mover
        self._spans, self._output, self._thread = spans, output, thread
        self._rows: set[int] = set()  # that have not stopped
        self._num_written_tokens = 0  # of those in spans
        self._turn_ends_ns: dict[int, int] = {}  # of rollouts whose turn ended here
        self.episodes = EpisodePart(
            Rank(
                number=rank,
                post=thread.post,
                share=thread.share,
                resume=self.resume,
                abort=engine.abort_requests,
                put=lambda item: output.put([item]),
                call_soon=output.loop.call_soon_threadsafe,
                fail=output.fail,
            ),
            environments,
        )
        self.standstill = Standstill(
            time.monotonic_ns, lambda name, start, end: spans.record(name, start, end, "wait")
        )

    async def run(self, call: Callable[[], T], key: object) -> T:
        """Run `call` on the thread between two steps, on all ranks between the same two; `key` says
        which call it is, and is the same on all ranks. Raises the engine's error."""
        self.check()
        return await self._thread.run(call, key)

    def work(self) -> bool:
        """Take one step. Returns False if there is nothing to do until the next command. Raises the
        error that has ended the engine."""
        self.check()
        if self.standstill.reason != "requests" or not self.engine.has_work:
            self.standstill.begin()
            return False
        self.standstill.end()
        engine, start_ns = self.engine, time.monotonic_ns()
        num_prefilled = engine.admit()
        if num_prefilled:
            start_ns = self._record("prefill", start_ns, num_prefilled)
        has_decoded = engine.num_running > 0
        finished = engine.decode()
        if has_decoded:
            num_tokens = engine.num_written_tokens - self._num_written_tokens
            self._num_written_tokens += num_tokens
            self._record("decode", start_ns, num_tokens)
        self._rows.difference_update(item.request.row_id for item in finished)
        whole = [item for item in finished if not item.request.has_turns]
        if whole:
            self._output.put(whole)
        for item in (each for each in finished if each.request.has_turns):
            self._turn_ends_ns[item.request.row_id] = time.monotonic_ns()
            self.episodes.leave_engine(item)
        self.episodes.stream(engine.peek)
        return True

    def submit(
        self, requests: Sequence[Request], written: dict[int, PartialOutput], session: int
    ) -> None:
        """Queue rollouts, unless their session has ended. Raises ValueError as the engine does."""
        if session != self._output.session:
            return
        for request in requests:
            before = written.get(request.row_id, PartialOutput())
            if request.has_turns:
                self._turn_ends_ns.pop(request.row_id, None)  # that of an earlier stay
                self.episodes.open(request, before)
            else:
                self.resume(request, before)

    def resume(self, request: Request, written: PartialOutput) -> None:
        """Let the engine go on with a rollout. Raises ValueError as the engine does."""
        self._rows.add(request.row_id)
        if (end_ns := self._turn_ends_ns.pop(request.row_id, None)) is not None:
            self._spans.record("turn", end_ns, time.monotonic_ns(), "mark", rows=1)
        self.engine.submit(request, written)

    def abort(self, row_ids: Sequence[int]) -> None:
        """Stop these rollouts; they come out, marked ABORTED."""
        self.episodes.abort(row_ids)
        self.engine.abort_requests(row_ids)

    def reset(self) -> None:
        """Forget all rollouts, prompts and versions, with all memory on the device: nothing decodes
        before the next commit."""
        for tag in self.tags:
            self.onload(tag)
        self.standstill.end()
        self.engine.abort_requests([*self._rows])
        while self.engine.decode():
            pass
        self.engine.forget_prompts()
        self.engine.version = -1
        self._weight_buffer.reset()
        self._rows.clear()
        self._turn_ends_ns.clear()
        self.episodes.reset()
        self._output.reset()

    def commit(self, version: int, processed: tuple[Tensor, Any] | None) -> int:
        """Take over the version. Returns the number of running rollouts.

        `processed` is memory and what the engine made of it beside decoding; it is used if that
        memory became the active one."""
        self.standstill.end()
        with self._spans.span("commit", version=version):
            flat = self._weight_buffer.commit(version)
            try:
                if processed is not None and processed[0].data_ptr() == flat.data_ptr():
                    weights = processed[1]
                else:
                    weights = self.engine.process_weights(flat)
                return self.engine.commit(weights, version)
            except BaseException as error:  # memory has changed, the engine has not followed
                self.fail(error)
                raise

    def offload(self, tag: str) -> int:
        """Move one tag's memory off the device and stop stepping. Returns the number of bytes."""
        if tag in self.standstill.away:
            return 0
        self.standstill.end()
        self.standstill.away.add(tag)
        tensors, is_kept = self.engine.movable(tag), True
        num_bytes = 0
        if tag == "weights":
            active = self._weight_buffer.active.data_ptr()
            movable = self._weight_buffer.movable()
            tensors += [flat for flat in movable if flat.data_ptr() == active]
            staging = [flat for flat in movable if flat.data_ptr() != active]
            num_bytes = self._mover.offload("staging", staging, keep=False)
        elif not self.engine.num_running:
            is_kept = False
            self.engine.forget_prompts()
        return num_bytes + self._mover.offload(tag, tensors, keep=is_kept)

    def prefetch(self, tag: str) -> None:
        """Start reading the offloaded memory of a tag."""
        self.check()
        self._mover.prefetch(tag)

    def onload(self, tag: str) -> int:
        """Bring one tag's memory back; once all tags are back, stepping goes on. Returns the number
        of bytes."""
        if tag not in self.standstill.away:
            return 0
        self.standstill.end()
        num_bytes = self._mover.onload(tag)
        if tag == "weights":
            num_bytes += self._mover.onload("staging")
        self.standstill.away.discard(tag)
        return num_bytes

    def _record(self, name: str, start_ns: int, num_tokens: int) -> int:
        end_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, end_ns, tokens=num_tokens, version=self.engine.version)
        return end_ns


class Standstill(Generic[Time]):
    """The reason why a generator does not decode, and since when; the clock is the caller's.

    `away` has the memory tags that are off the device. `record` gets each wait that ended: (reason,
    start, end)."""

    def __init__(self, now: Callable[[], Time], record: Callable[[str, Time, Time], None]) -> None:
        self.away: set[str] = set()
        self._now: Callable[[], Time] = now
        self._record: Callable[[str, Time, Time], None] = record
        self._waiting: tuple[str, Time] | None = None

    @property
    def reason(self) -> str:
        """The reason for which decoding may wait: "phase" while memory is away, else "requests"."""
        return "phase" if self.away else "requests"

    def begin(self) -> None:
        """Wait for `reason` from now on, if not already."""
        if self._waiting is None or self._waiting[0] != self.reason:
            self.end()
            self._waiting = self.reason, self._now()

    def end(self) -> None:
        """Record the wait until now, if there was one."""
        if self._waiting is not None:
            self._record(*self._waiting, self._now())
            self._waiting = None
