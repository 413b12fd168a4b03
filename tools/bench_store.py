"""What the store of rollouts moves, against TransferQueue and against one memcpy.

    python tools/bench_store.py [--json FILE] [--tokens 64 1024 8192] [--units 1 2 4]
        [--consumers 1 4] [--rounds 5] [--quick]

One producer process writes rollouts (prompt ids, response ids, log-probs and versions of each
token, a reward; lengths vary) into storage units, which are processes, and notes them as ready;
consumer processes take rows, each row exactly once, and get their columns. A consumer has its rows
when every column is one array in its own memory. Rows per second are those of the whole flow while
producer and consumers run together: from the first write to the last row in a consumer's memory.
What each part takes is measured with the producer first and the consumers after it; "units" is the
CPU time of all units, which says how busy they were and what another could give. Opening the
rows in the controller before, and freeing them in the end, is not counted.

The rival is TransferQueue in the environment of `make rivals`, without it only our side is
measured; `store_bench/transferqueue.py` says how it is used. Both sides move the same rows, each
with the form of cells, the batch size and the number of calls under way that are fastest for it,
chosen at the start; then they run alternately and medians count. The first run of every setting
checks that each row arrived once and whole.

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
import functools
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
from harness import Values, medians
from rivals import why_not
from store_bench.own import OwnStore
from store_bench.rival import TransferQueueRival
from store_bench.rows import Work, make_rows, num_bytes

from llamarl.cluster import exiting_process

MAX_ROWS, MAX_TOKENS = 16384, 2**23  # of one run
BATCH_SHARES = (32, 8, 4)  # of the rows of a run
DEPTHS = (1, 2)
FORMS = ("bytes", "jagged", "padded")  # of the rival
FORM_ROWS_SHARE = 8  # the slow forms take long
NUM_TRIES, NUM_FORM_TRIES = 2, 4
QUICK_SHARE = 64

Run = Callable[..., Awaitable[Values]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians of one side with one setting."""

    side: str
    units: int
    work: Work
    bytes: int
    times: Values

    @property
    def rows_per_s(self) -> float:
        """Of the whole flow."""
        return self.work.rows / self.times["flow_s"]

    @property
    def bytes_per_s(self) -> float:
        """Of the whole flow."""
        return self.bytes / self.times["flow_s"]

    @property
    def case(self) -> str:
        """Its setting in words."""
        work = self.work
        return f"{self.side}, {self.units} units, {work.consumers} consumers, {work.tokens} tokens"

    def figures(self) -> dict[str, float]:
        """Rates of the flow, the batch that was fastest, and each part in microseconds per row."""
        found = {
            "rows_per_s": self.rows_per_s,
            "gb_per_s": self.bytes_per_s / 1e9,
            "batch_rows": self.work.batch_rows,
            "depth": self.work.depth,
        }
        parts = {f"{part}_us": self.times.get(f"{part}_s", 0.0) for part in PARTS}
        return found | {name: took_s / self.work.rows * 1e6 for name, took_s in parts.items()}


PARTS = ("put", "notify", "take", "get", "units")


class Bench:
    """Both sides, and what was found."""

    def __init__(self, frame: harness.Bench, arguments: argparse.Namespace, own: OwnStore) -> None:
        self._frame, self._arguments, self._own = frame, arguments, own
        self.results: list[Result] = []
        self.forms: dict[int, dict[str, float]] = {}

    async def compare(self, units: int, rival: TransferQueueRival | None) -> None:
        """All workloads with this number of units."""
        sides: dict[str, Run] = {"own": functools.partial(self._own.run, units)}
        if rival is not None:
            sides["transferqueue"] = functools.partial(asyncio.to_thread, rival.run)
        for tokens, consumers in itertools.product(*self._axes()):
            base = self._work(tokens, consumers)
            if rival is not None and tokens not in self.forms:
                self.forms[tokens] = await self._try_forms(sides["transferqueue"], base)
            tuned = {name: await self._tune(name, run, base) for name, run in sides.items()}
            size = num_bytes(make_rows(base))
            pairs = {name: (sides[name], work) for name, work in tuned.items()}
            pairs["memcpy"] = make_memcpy(size), base
            for name, times in (await alternate(pairs, self._arguments.rounds)).items():
                work = pairs[name][1]
                result = Result(side=name, units=units, work=work, bytes=size, times=times)
                self.results.append(result)
                self._frame.add_all(result.figures(), result.case)

    async def second_unit(self) -> float:
        """Our rows per second with two units over those with one."""
        work = next(
            result.work
            for result in reversed(self.results)
            if result.side == "own" and result.work.tokens == max(self._arguments.tokens)
        )
        runs = {str(units): (functools.partial(self._own.run, units), work) for units in (1, 2)}
        found = await alternate(runs, self._arguments.rounds)
        return found["1"]["flow_s"] / found["2"]["flow_s"]

    def best(self, side: str, tokens: int, consumers: int) -> Result | None:
        """The number of units that is best for a side."""
        found = [
            result
            for result in self.results
            if (result.side, result.work.tokens, result.work.consumers) == (side, tokens, consumers)
        ]
        return max(found, key=lambda result: result.rows_per_s, default=None)

    def lowest_ratio(self, tokens: int, other: str) -> float | None:
        """Ours over another side's, the lowest over numbers of consumers."""
        ratios = []
        for consumers in self._arguments.consumers:
            own = self.best("own", tokens, consumers)
            rival = self.best(other, tokens, consumers)
            if own is not None and rival is not None:
                ratios.append(own.rows_per_s / rival.rows_per_s)
        return min(ratios, default=None)

    def _axes(self) -> tuple[list[int], list[int]]:
        return self._arguments.tokens, self._arguments.consumers

    def _work(self, tokens: int, consumers: int) -> Work:
        rows = min(MAX_ROWS, MAX_TOKENS // tokens)
        if self._arguments.quick:
            rows //= QUICK_SHARE
        batch_rows = max(1, rows // BATCH_SHARES[0])
        return Work(tokens=tokens, rows=rows, consumers=consumers, batch_rows=batch_rows)

    async def _try_forms(self, run: Run, base: Work) -> dict[str, float]:
        """Rows per second of the rival by form of its cells, the best of tries in turn."""
        rows = max(1, base.rows // FORM_ROWS_SHARE)
        batch_rows = max(1, rows // BATCH_SHARES[-1])
        found = dict.fromkeys(FORMS, 0.0)
        for _, form in itertools.product(range(NUM_FORM_TRIES), FORMS):
            work = dataclasses.replace(base, rows=rows, batch_rows=batch_rows, form=form)
            found[form] = max(found[form], rows / (await run(work, True))["flow_s"])
        return found

    async def _tune(self, name: str, run: Run, base: Work) -> Work:
        """The fastest batch size and depth."""
        if name == "transferqueue":
            forms = self.forms[base.tokens]
            base = dataclasses.replace(base, form=max(forms, key=forms.__getitem__))
        batch_rows = {max(1, base.rows // share) for share in BATCH_SHARES}
        works = [
            dataclasses.replace(base, batch_rows=rows, depth=depth)
            for rows, depth in itertools.product(sorted(batch_rows), DEPTHS)
        ]
        found = {work: await shortest(run, work) for work in works}
        return min(found, key=found.__getitem__)


async def shortest(run: Run, work: Work) -> float:
    """Seconds of the flow, the least of a few runs; the first, which is checked, does not count."""
    await run(work, True, True)
    return min([(await run(work, True))["flow_s"] for _ in range(NUM_TRIES)])


async def alternate(sides: dict[str, tuple[Run, Work]], num_rounds: int) -> dict[str, Values]:
    """Medians of each side: its flow while all run together, its parts one after another."""
    found: dict[str, list[Values]] = {name: [] for name in sides}
    for run, work in sides.values():
        await run(work, True, True)
    for _, name in harness.turns(sides, num_rounds):
        run, work = sides[name]
        parts = await run(work, False)
        found[name].append(parts | {"flow_s": (await run(work, True))["flow_s"]})
    return {name: medians(rounds) for name, rounds in found.items()}


def make_memcpy(size: int) -> Run:
    """One memcpy of `size` bytes by one thread, into memory that was used before."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    async def run(work: Work, is_streamed: bool, is_checked: bool = False) -> Values:
        start_s = time.perf_counter()
        np.copyto(target, source)
        return {"flow_s": time.perf_counter() - start_s}

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
                make_rival = functools.partial(TransferQueueRival, units, max(arguments.consumers))
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
    for tokens, forms in bench.forms.items():
        for form, rows_per_s in forms.items():
            frame.add("rows_per_s", rows_per_s, f"transferqueue, {tokens} tokens, as {form}")
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
