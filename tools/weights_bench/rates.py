"""What this machine reaches in each kind of work of a publish, each measured by itself.

Memory, caches and messages are used by as many processes at once as in a publish, in blocks as
large, and after the same neighbours: what a receiver sums, a sender has just written from another
core.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from harness import Values

from llamarl.core.device.names import CPU
from llamarl.core.device.platform import Platform
from llamarl.planner.simulation.effort import Effort, Walk, walked
from llamarl.planner.simulation.publish_rates import PublishRates
from llamarl.publish.fingerprint import fingerprint, transfer
from llamarl.publish.transports.collective import TRAILER_BYTES
from llamarl.publish.transports.mapped import Segment, open_segment
from weights_bench.model import NUM_RANKS
from weights_bench.processes import Remote, call_all
from weights_bench.ranks import form_group

COLUMNS = 1024  # of float32
TINY = (4, 64)
NUM_REPEATS = 3
NUM_CALLS = 50
Span = tuple[float, float]
"""When it began and ended, on the clock that all processes share."""


class RatesRank:
    """One of the processes that measure: the first NUM_RANKS send, the others receive. Each holds
    `num_bytes`, a multiple of a tile; messages have `message_bytes`."""

    def __init__(self, rank: int, num_bytes: int, message_bytes: int) -> None:
        self._rank, self._message_bytes = rank, message_bytes
        self._source = torch.ones(num_bytes // 4)
        self._segment = Segment(f"llamarl-rates-{rank}", num_bytes)
        self._own = self._segment.flat.view(torch.float32)
        self._own.fill_(2)
        self._message = torch.ones(message_bytes, dtype=torch.uint8)

    def path(self) -> str:
        """Where others map its memory."""
        return self._segment.path

    def meet(self, paths: Sequence[str], folder: str) -> None:
        """Form the group of a sender and its receiver, whose memory the sender maps."""
        pair, side = self._rank % NUM_RANKS, self._rank // NUM_RANKS
        self._group = form_group(f"{folder}/rates-{pair}", side, 2)
        path = paths[pair + NUM_RANKS]
        self._there = open_segment(path, self._own.nbytes).view(torch.float32)

    def answer(self) -> None:
        """A call that does nothing."""

    def whole_copy(self) -> Span:
        """Of all memory, into a receiver's."""
        return _span(lambda: self._there.copy_(self._source))

    def copy(self) -> Span:
        """The same tile by tile: the C library copies what is much larger past the cache."""
        num_elements = Platform.tile_bytes // 4
        tiles = zip(self._there.split(num_elements), self._source.split(num_elements), strict=True)

        def copy() -> None:
            for target, source in tiles:
                target.copy_(source)

        return _span(copy)

    def read(self) -> Span:
        """The fingerprint of all memory, which a sender has just written."""
        values = self._own.view(-1, COLUMNS)
        return _span(lambda: fingerprint("a", values, (0, 0), values.shape, -1))

    def sum(self) -> Span:
        """Fingerprints of a tile that is in the cache, NUM_CALLS times."""
        values = self._source[: Platform.tile_bytes // 4].view(-1, COLUMNS)

        def add() -> None:
            for _ in range(NUM_CALLS):
                fingerprint("a", values, (0, 0), values.shape, -1)

        return _span(add)

    def fill(self, is_new: int) -> Span:
        """Of memory for a message, as the C library gives it, or once more. A receiver asks for it
        in a thread that has just begun."""
        found: list[Span] = []

        def fill() -> None:
            memory = torch.empty(self._message_bytes + TRAILER_BYTES, dtype=torch.uint8)
            found.extend(_span(lambda: memory.fill_(1)) for _ in range(2))

        if self._rank < NUM_RANKS:
            fill()
        else:
            thread = threading.Thread(target=fill)
            thread.start()
            thread.join()
        return found[0 if is_new else 1]

    def call(self) -> Span:
        """NUM_CALLS calls of torch, in walks over a box of a few bytes, each after other data has
        been through the cache; as long as these calls alone took."""
        source, target = torch.ones(TINY), torch.empty(TINY)
        num_elements = Platform.tile_bytes // 4
        total_s, num_walks = 0.0, NUM_CALLS
        for turn in range(num_walks):
            begin = turn * num_elements % len(self._own)
            part = slice(begin, begin + num_elements)
            self._own[part].copy_(self._source[part])
            start_s, end_s = _span(lambda: transfer("a", source, target, (0, 0), TINY, -1))
            total_s += end_s - start_s
        call_s = total_s / num_walks / _walk(TINY, is_copied=True).num_calls
        return 0.0, NUM_CALLS * call_s

    def exchange(self, num_bytes: int, count: int) -> Span:
        """So many messages of so many bytes, and one byte back for each."""
        message, back = self._message[:num_bytes], self._message[-1:]
        is_sender = self._rank < NUM_RANKS
        calls = (self._group.send, self._group.recv)
        there, here = calls if is_sender else calls[::-1]

        def exchange() -> None:
            for _ in range(count):
                there([message], int(is_sender), 0).wait()
                here([back], int(is_sender), 0).wait()

        return _span(exchange)


class Machine:
    """The processes that measure, of memory as large as a rank's and its messages; make it within a
    running event loop."""

    def __init__(self, rank_bytes: int, message_bytes: int) -> None:
        self.num_bytes = rank_bytes // Platform.tile_bytes * Platform.tile_bytes
        self.message_bytes = message_bytes
        ranks = range(2 * NUM_RANKS)
        self._ranks = [Remote(RatesRank, i, self.num_bytes, message_bytes) for i in ranks]
        self._senders, self._receivers = self._ranks[:NUM_RANKS], self._ranks[NUM_RANKS:]

    async def start(self, folder: str) -> None:
        """The groups have met, and everything was measured once."""
        await call_all(self._ranks, "meet", await call_all(self._ranks, "path"), folder)
        await self.measure()

    async def measure(self) -> Values:
        """Seconds of each kind of work, medians of some repeats: from when the first process begins
        until the last has ended."""
        senders, receivers, both = self._senders, self._receivers, self._ranks
        found: dict[str, list[float]] = {}

        async def ask(
            name: str, ranks: list[Remote], call: str, *args: int, count: int = 1
        ) -> None:
            starts, ends = zip(*await call_all(ranks, call, *args), strict=True)
            found.setdefault(name, []).append((max(ends) - min(starts)) / count)

        for _ in range(NUM_REPEATS):
            await ask("copy_s", senders, "copy")
            await ask("read_s", receivers, "read")
            await ask("call_s", senders, "call", count=NUM_CALLS)
            await ask("sum_s", senders, "sum", count=NUM_CALLS)
            for side, ranks in (("source", senders), ("target", receivers)):
                await ask(f"{side}_fill_s", ranks, "fill", 0)
                await ask(f"{side}_new_fill_s", ranks, "fill", 1)
            num_messages = NUM_REPEATS
            arguments = self.message_bytes, num_messages
            await ask("message_s", both, "exchange", *arguments, count=num_messages)
            await ask("empty_message_s", both, "exchange", 1, NUM_CALLS, count=NUM_CALLS)
            await ask("whole_copy_s", senders, "whole_copy")
            await ask("one_whole_copy_s", senders[:1], "whole_copy")
            start_s = time.perf_counter()
            await call_all(senders, "answer")
            found.setdefault("round_trip_s", []).append(time.perf_counter() - start_s)
        return {name: statistics.median(values) for name, values in found.items()}

    def rates(self, found: Values) -> tuple[PublishRates, PublishRates, float]:
        """(what a source rank reaches, what a target rank does, bytes per second of messages
        between two) by these seconds."""
        call_s = found["call_s"]
        num_rows, tile_rows = self.num_bytes // 4 // COLUMNS, Platform.tile_bytes // 4 // COLUMNS
        read_s = found["read_s"] - _walk((num_rows, COLUMNS)).num_calls * call_s
        sum_s = found["sum_s"] - _walk((tile_rows, COLUMNS)).num_calls * call_s
        copy_s = found["copy_s"] - self.num_bytes / Platform.tile_bytes * call_s
        source = PublishRates(
            moved_bytes_per_s=2 * self.num_bytes / copy_s,
            cached_bytes_per_s=Platform.tile_bytes / sum_s,
            summed_bytes_per_s=Platform.tile_bytes / sum_s,
            read_bytes_per_s=self.num_bytes / read_s,
            touched_bytes_per_s=self._touched(found, "source"),
            call_s=call_s,
            launch_s=call_s,
            message_s=found["empty_message_s"],
            phase_s=found["round_trip_s"],
        )
        target = replace(source, touched_bytes_per_s=self._touched(found, "target"))
        moving_s = found["message_s"] - found["empty_message_s"]
        return source, target, self.message_bytes / moving_s

    def _touched(self, found: Values, side: str) -> float:
        """Bytes per second of new memory; infinite where the C library gives what was freed."""
        more_s = found[f"{side}_new_fill_s"] - found[f"{side}_fill_s"]
        return self.message_bytes / more_s if more_s > 0 else math.inf

    def close(self) -> None:
        """End the processes."""
        for remote in self._ranks:
            remote.close()


def _span(run: Callable[[], object]) -> Span:
    start_s = time.perf_counter()
    run()
    return start_s, time.perf_counter()


def _walk(shape: tuple[int, int], is_copied: bool = False) -> Effort:
    """As the planner counts it."""
    walk = Walk(
        shape=shape,
        start=(0, 0),
        global_shape=shape,
        strides=(shape[1], 1),
        source_dtype="float32",
        dtype="float32",
        dim=-1,
        is_copied=is_copied,
    )
    return walked(walk, CPU)
