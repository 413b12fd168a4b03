"""What the store of rollouts moves, against TransferQueue and against one memcpy.

    python tools/bench_store.py [--json FILE] [--tokens 64 1024 8192] [--units 1 2 4]
        [--consumers 1 4] [--rounds 5] [--quick]

One producer process writes rollouts (prompt ids, response ids, log-probs and versions of each
token, a reward; lengths vary) into storage units, which are processes, and notes them as ready;
consumer processes take rows, each row exactly once, and get their columns. A consumer has its rows
when every column is one array in its own memory. Rows per second are those of the whole flow: from
the first write to the last row in a consumer's memory. Opening the rows in the controller before,
and freeing them in the end, is not counted.

The rival is TransferQueue in the environment of `make rivals`, without it only our side is
measured; `store_bench/transferqueue.py` says how it is used. Both sides move the same rows, each
with the batch size and the number of calls under way that are fastest for it, chosen at the start;
then they run alternately and medians count. The first run of every setting checks that each row
arrived once and whole.

`rows_vs_transferqueue` is the ratio of rows per second at the fewest tokens,
`bytes_vs_transferqueue` that of bytes at the most, each with the number of units that is best for
each side, the lowest over the numbers of consumers. Our consumers ask the controller and read from
the units, as trainers and stages of a run do. `bytes_vs_memcpy` compares the same bytes with one
memcpy by one thread. `second_unit` is our throughput with two units over that with one, at the
most tokens and consumers, measured alternately. --quick: few rows, our side only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import numpy as np
from rivals import why_not
from store_bench.own import OwnStore
from store_bench.rival import TransferQueueRival
from store_bench.rows import Work, make_rows, num_bytes

from llamarl.cluster import exiting_process

MAX_ROWS, MAX_TOKENS = 16384, 2**23  # of one run
BATCH_SHARES = (32, 8, 4)  # of the rows of a run
DEPTHS = (1, 2)
NUM_TRIES = 2
QUICK_SHARE = 64

Run = Callable[..., Awaitable[float]]  # of a work, and whether it is checked


@dataclass(frozen=True, kw_only=True)
class Result:
    """The median seconds of one side with one setting."""

    side: str
    units: int
    work: Work
    bytes: int
    flow_s: float

    @property
    def rows_per_s(self) -> float:
        """Of the whole flow."""
        return self.work.rows / self.flow_s

    @property
    def case(self) -> str:
        """Its setting in words."""
        work = self.work
        return f"{self.side}, {self.units} units, {work.consumers} consumers, {work.tokens} tokens"

    def figures(self) -> dict[str, float]:
        """Rates of the flow, and the batch that was fastest."""
        return {
            "rows_per_s": self.rows_per_s,
            "gb_per_s": self.bytes / self.flow_s / 1e9,
            "batch_rows": self.work.batch_rows,
            "depth": self.work.depth,
        }


class Bench:
    """Both sides, and what was found."""

    def __init__(self, frame: harness.Bench, arguments: argparse.Namespace, own: OwnStore) -> None:
        self._frame, self._arguments, self._own = frame, arguments, own
        self.results: list[Result] = []

    async def compare(self, units: int, rival: TransferQueueRival | None) -> None:
        """All workloads with this number of units."""
        sides: dict[str, Run] = {"own": partial(self._own.run, units)}
        if rival is not None:
            sides["transferqueue"] = partial(asyncio.to_thread, rival.run)
        for tokens, consumers in itertools.product(
            self._arguments.tokens, self._arguments.consumers
        ):
            base = self._work(tokens, consumers)
            size = num_bytes(make_rows(base))
            pairs = {name: (run, await fastest(run, base)) for name, run in sides.items()}
            pairs["memcpy"] = make_memcpy(size), base
            for name, flow_s in (await alternate(pairs, self._arguments.rounds)).items():
                work = pairs[name][1]
                result = Result(side=name, units=units, work=work, bytes=size, flow_s=flow_s)
                self.results.append(result)
                self._frame.add_all(result.figures(), result.case)

    async def second_unit(self) -> float:
        """Our rows per second with two units over those with one."""
        work = next(
            result.work
            for result in reversed(self.results)
            if result.side == "own" and result.work.tokens == max(self._arguments.tokens)
        )
        runs = {str(units): (partial(self._own.run, units), work) for units in (1, 2)}
        found = await alternate(runs, self._arguments.rounds)
        return found["1"] / found["2"]

    def lowest_ratio(self, tokens: int, other: str) -> float | None:
        """Ours over another side's, each with its best number of units; the lowest over numbers of
        consumers."""
        best: dict[tuple[str, int], float] = {}
        for each in self.results:
            if each.work.tokens == tokens:
                key = each.side, each.work.consumers
                best[key] = max(best.get(key, 0.0), each.rows_per_s)
        ratios = [rate / best["own", n] for (side, n), rate in best.items() if side == other]
        return 1 / max(ratios) if ratios else None

    def _work(self, tokens: int, consumers: int) -> Work:
        rows = min(MAX_ROWS, MAX_TOKENS // tokens)
        if self._arguments.quick:
            rows //= QUICK_SHARE
        batch_rows = max(1, rows // BATCH_SHARES[0])
        return Work(tokens=tokens, rows=rows, consumers=consumers, batch_rows=batch_rows)


async def fastest(run: Run, base: Work) -> Work:
    """The fastest batch size and depth; a first run of each, which is checked, does not count."""
    found: dict[Work, float] = {}
    for share, depth in itertools.product(BATCH_SHARES, DEPTHS):
        work = dataclasses.replace(base, batch_rows=max(1, base.rows // share), depth=depth)
        await run(work, True)
        found[work] = min([await run(work) for _ in range(NUM_TRIES)])
    return min(found, key=found.__getitem__)


async def alternate(sides: dict[str, tuple[Run, Work]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each side, in turns, after a run of each that is checked."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for run, work in sides.values():
        await run(work, True)
    for _, name in harness.turns(sides, num_rounds):
        run, work = sides[name]
        found[name].append(await run(work))
    return {name: statistics.median(rounds) for name, rounds in found.items()}


def make_memcpy(size: int) -> Run:
    """One memcpy of `size` bytes by one thread, into memory that was used before."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    async def run(work: Work, is_checked: bool = False) -> float:
        start_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start_s

    return run


async def measure(frame: harness.Bench, arguments: argparse.Namespace) -> list[Result]:
    """Run everything."""
    reason = "--quick measures our side only" if arguments.quick else why_not("transfer_queue")
    if reason:
        print(f"without the rival: {reason}")
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        own = OwnStore(Path(folder))
        try:
            await own.start(sorted({1, 2, *arguments.units}), max(arguments.consumers))
            bench = Bench(frame, arguments, own)
            for units in arguments.units:
                make_rival = partial(TransferQueueRival, units, max(arguments.consumers))
                rival = None if reason else await asyncio.to_thread(make_rival)
                with contextlib.closing(rival) if rival else contextlib.nullcontext():
                    await bench.compare(units, rival)
            second_unit = await bench.second_unit()
        finally:
            await own.stop()
    fewest, most = min(arguments.tokens), max(arguments.tokens)
    frame.add("rows_vs_transferqueue", bench.lowest_ratio(fewest, "transferqueue"))
    frame.add("bytes_vs_transferqueue", bench.lowest_ratio(most, "transferqueue"))
    frame.add("bytes_vs_memcpy", bench.lowest_ratio(most, "memcpy"))
    frame.add("second_unit", second_unit)
    return bench.results


def main() -> None:
    """Measure."""
    goals = {"rows_vs_transferqueue": ">= 3", "bytes_vs_transferqueue": ">= 3"}
    frame = harness.Bench(__doc__, {**goals, "second_unit": ">= 1.6"})
    frame.option("--tokens", type=int, nargs="+", default=[64, 1024, 8192])
    frame.option("--units", type=int, nargs="+", default=[1, 2, 4])
    frame.option("--consumers", type=int, nargs="+", default=[1, 4])
    frame.option("--rounds", type=int, default=5)
    frame.option("--quick", action="store_true", help="few rows, without the rival")
    arguments = frame.parse()
    with exiting_process():
        results = asyncio.run(measure(frame, arguments))
        frame.write({result.case: dataclasses.asdict(result) for result in results})


if __name__ == "__main__":
    main()
