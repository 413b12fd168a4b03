"""What a publish of new weights costs, against a plain copy and what others do.

    python tools/bench_weights.py [--json FILE] [--megabytes 500] [--repeats 5] [--folder DIR]
        [--quick]

Four processes of one thread each: two trainer ranks that hold a Llama in uneven row shards, two
tensor-parallel generator ranks that want it by rows and by columns. Both sides have one dtype, and
all pages are touched before. GB/s count the model's bytes once. Within a repeat all ways take
turns; ratios are medians over repeats of ratios within one repeat. What arrived is compared with
what was sent, element by element, in a first round that is not timed.

    publish        the whole publish: offer, write with fingerprints, fingerprints of what arrived,
                   comparison, commit; over shared memory, and over gloo (loopback)
    memcpy         both trainer ranks copy their shards, whole, into shared memory; nothing else
    gather         parameter by parameter: gathered on trainer rank 0, broadcast to both generator
                   ranks, each copies its slice; over gloo (loopback)
    file           each trainer rank saves its shards as safetensors (no gather, two writers: faster
                   than one rank that saves all) and syncs; the generator ranks load their slices

Then a real generator executor decodes a batch of 64 while versions are published into it one after
the other, and without.
--quick: all of this once, with a narrow model and a short window; its figures say nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable

from harness import Bench, Values, ratio, turns
from weights_bench.decoding import (
    DecodingGenerator,
    decode_spans,
    longest_gap_s,
    now_ns,
    tokens_per_s,
)
from weights_bench.model import Model, llama, model_of
from weights_bench.processes import Remote, call_all
from weights_bench.publishing import Executor, Generator, make_publisher
from weights_bench.ranks import GeneratorRank, TrainerRank

from llamarl.core.config import WeightsConfig
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import plan

GOALS = {
    "shared_memory_vs_memcpy": ">= 0.5",
    "gap_share": "<= 0.05",
    "vs_file": ">= 5",
    "vs_gather_broadcast": ">= 3",
}
TRANSPORTS = ("shared_memory", "collective")
SECTIONS = ("ways", "decoding")
PUBLISH = "publish, shared_memory"
RATIOS = {  # of a way's seconds over those of PUBLISH
    "publish, collective": "vs_collective",
    "memcpy": "shared_memory_vs_memcpy",
    "gather and broadcast": "vs_gather_broadcast",
    "file": "vs_file",
}
BATCH = 64
CONTEXT_TOKENS = 384
DECODING_MODEL = Model(
    llama(8, vocab_size=4096, hidden_size=512, intermediate_size=1408, num_heads=8, num_kv_heads=4),
    "float32",
)  # 111 MB
WINDOW_S = 1.5
NUM_WINDOWS = 3
QUICK_MEGABYTES, QUICK_WINDOW_S = 4, 0.3
Seconds = dict[str, list[float]]
Way = Callable[[int], Awaitable[object]]  # brings a version across


async def bench_ways(model: Model, repeats: int, folder: str) -> Seconds:
    """Seconds of each way by repeat."""
    trainers = [Remote(TrainerRank, model, rank) for rank in range(2)]
    generators = [Remote(GeneratorRank, model, rank) for rank in range(2)]
    try:
        ways = await make_ways(trainers, generators, folder)
        seconds: Seconds = {name: [] for name in ways}
        for number, name in turns([*ways], repeats):
            await call_all(trainers, "label", number + 1)
            start_s = time.perf_counter()
            await ways[name](number + 1)
            seconds[name].append(time.perf_counter() - start_s)
    finally:
        for remote in trainers + generators:
            remote.close()
    return seconds


async def make_ways(
    trainers: list[Remote], generators: list[Remote], folder: str
) -> dict[str, Way]:
    """Everything that is timed, by name, connected and run once."""
    await call_all(trainers, "fill")
    await call_all(trainers, "label", 0)
    await call_all(generators, "reserve")
    ways: dict[str, Way] = {}
    for replica, transport in enumerate(TRANSPORTS):
        config = WeightsConfig(transport=transport)
        await call_all(generators, "reserve_weight_buffer", replica, config.staging)
        receiver = Generator(generators, replica)
        publisher = make_publisher(trainers, receiver, replica, config, folder)
        await publisher.connect()
        await publisher.publish(0)
        await call_all(generators, "check", replica)

        async def publish(version: int, publisher: Publisher = publisher) -> None:
            stats = await publisher.publish(version)
            assert not stats.lost, stats.lost

        ways[f"publish, {transport}"] = publish
    await call_all(trainers, "reserve_copy")
    ways["memcpy"] = lambda version: call_all(trainers, "copy")
    await asyncio.gather(
        call_all(trainers, "meet", folder, "gather"), call_all(generators, "meet", folder, "gather")
    )
    ways["gather and broadcast"] = lambda version: asyncio.gather(
        call_all(trainers, "broadcast", "gather"), call_all(generators, "receive")
    )
    copies = plan(await call_all(trainers, "layout"), await call_all(generators, "layout", 0))

    async def save_and_load(version: int) -> None:
        await call_all(trainers, "save", folder)
        await call_all(generators, "load", folder, copies)

    ways["file"] = save_and_load
    for name in ("gather and broadcast", "file"):
        await call_all(generators, "wipe")
        await ways[name](0)
        await call_all(generators, "check")
    await ways["memcpy"](0)
    return ways


async def bench_decoding(
    model: Model, folder: str, *, window_s: float = WINDOW_S, num_windows: int = NUM_WINDOWS
) -> Values:
    """Decoding with and without publishes, in turns."""
    trainers = [Remote(TrainerRank, model, rank) for rank in range(2)]
    generator = Remote(DecodingGenerator, model, folder, BATCH, CONTEXT_TOKENS)
    try:
        await asyncio.gather(call_all(trainers, "fill"), generator.call("start"))
        receiver = Executor(generator)
        publisher = make_publisher(trainers, receiver, 0, WeightsConfig(), folder)
        await call_all(trainers, "label", 0)
        await publisher.connect()
        await publisher.publish(0)
        await generator.call("submit", 4 * BATCH)
        await asyncio.sleep(window_s)
        quiet, busy, publishes = [], [], []
        for _ in range(num_windows):
            start_ns = now_ns()
            await asyncio.sleep(window_s)
            quiet.append((start_ns, now_ns()))
            start_ns = now_ns()
            while now_ns() < start_ns + window_s * 1e9:
                version = publisher.version + 1
                await call_all(trainers, "label", version)
                begin_ns = now_ns()
                await publisher.publish(version)
                publishes.append((begin_ns, now_ns()))
            busy.append((start_ns, now_ns()))
        await generator.call("close")
    finally:
        for remote in [*trainers, generator]:
            remote.close()
    steps = decode_spans(folder)
    seconds = [(end - start) / 1e9 for start, end in publishes]
    gaps = [longest_gap_s(steps, *window) for window in publishes]
    quiet_speed = statistics.mean(tokens_per_s(steps, *window) for window in quiet)
    return {
        "model_megabytes": model.num_bytes / 1e6,
        "num_publishes": len(publishes),
        "publish_s": statistics.median(seconds),
        "gap_ms": 1e3 * statistics.median(gaps),
        "gap_share": statistics.median(g / s for g, s in zip(gaps, seconds, strict=True)),
        "step_s": statistics.median((step.end_ns - step.start_ns) / 1e9 for step in steps),
        "quiet_gap_s": statistics.median(longest_gap_s(steps, *window) for window in quiet),
        "quiet_tokens_per_s": quiet_speed,
        "tokens_share": statistics.mean(tokens_per_s(steps, *w) for w in busy) / quiet_speed,
    }


def main() -> None:
    """Run everything."""
    bench = Bench(__doc__, GOALS)
    bench.option("--megabytes", type=float, default=500, help="least size of the model")
    bench.option("--repeats", type=int, default=5)
    bench.option("--folder", help="where the files go: a real disk (default: temporary)")
    bench.option("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    bench.option("--quick", action="store_true", help="all of it once, as small as it can be")
    arguments = bench.parse()
    if arguments.quick:
        arguments.megabytes, arguments.repeats = QUICK_MEGABYTES, 1
    sections = arguments.sections
    rounds: dict[str, Seconds] = {}
    for dtype in ("float32", "bfloat16") if "ways" in sections else ():
        model = model_of(arguments.megabytes, dtype)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rounds[dtype] = asyncio.run(bench_ways(model, arguments.repeats, folder))
        add_ways(bench, model, rounds[dtype])
    if "decoding" in sections:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if arguments.quick:
                model = model_of(arguments.megabytes, "float32")
                measured = bench_decoding(model, folder, window_s=QUICK_WINDOW_S, num_windows=1)
            else:
                measured = bench_decoding(DECODING_MODEL, folder)
            bench.add_all(asyncio.run(measured), "decoding")
    bench.write(rounds)


def add_ways(bench: Bench, model: Model, seconds: Seconds) -> None:
    """Median seconds, GB/s, and how many times as fast the publish over shared memory is."""
    bench.add("model_bytes", model.num_bytes, model.dtype)
    for way, values in seconds.items():
        median_s = statistics.median(values)
        bench.add("way_s", median_s, f"{model.dtype}, {way}", values)
        bench.add("gb_per_s", model.num_bytes / median_s / 1e9, f"{model.dtype}, {way}")
        if way in RATIOS and PUBLISH in seconds:
            bench.add(RATIOS[way], ratio(values, seconds[PUBLISH]), model.dtype)


if __name__ == "__main__":
    main()
