"""What a publish of new weights costs, against a plain copy and what others do.

    python tools/bench_weights.py [--json FILE] [--megabytes 500] [--repeats 5] [--folder DIR]

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
    vLLM           gather and broadcast as above, into vLLM's own reload of whole parameters
                   (float32 only, and only where vLLM is installed)

Then a real generator executor decodes a batch of 64 while versions are published into it one after
the other, and without. Last, what the processes take beyond their weights, by `weights.staging`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from weights_bench.decoding import (
    DecodingGenerator,
    decode_spans,
    longest_gap_s,
    now_ns,
    tokens_per_s,
)
from weights_bench.memory import Peaks, private_bytes, shared_out_bytes
from weights_bench.model import Model, llama, model_of
from weights_bench.processes import Remote, call_all
from weights_bench.publishing import Executor, Generator, make_publisher
from weights_bench.ranks import GeneratorRank, TrainerRank
from weights_bench.vllm_rank import VllmRank

from llamarl.config import WeightsConfig
from llamarl.generation.vllm.installed import check_installed
from llamarl.weights.layout.reshard import plan
from llamarl.weights.sync.publisher import Publisher

GOALS = {
    "shared_memory_vs_memcpy": (0.7, "of the speed of memcpy, at least"),
    "decode_gap_share": (0.05, "of a publish is the longest gap between decode steps, at most"),
    "vs_file": (5.0, "times as fast as a file, at least"),
    "vs_gather_broadcast": (3.0, "times as fast as gather and broadcast, at least"),
}
TRANSPORTS = ("shared_memory", "collective")  # rdma: only between Monarch actors
BATCH = 64
CONTEXT_TOKENS = 384
DECODING_MODEL = Model(
    llama(8, vocab_size=4096, hidden_size=512, intermediate_size=1408, num_heads=8, num_kv_heads=4),
    "float32",
)  # 111 MB
WINDOW_S = 1.5
NUM_WINDOWS = 3
Seconds = dict[str, list[float]]
Way = Callable[[int], Awaitable[object]]  # brings a version across


async def bench_ways(model: Model, repeats: int, folder: str, with_vllm: bool) -> Seconds:
    """Seconds of each way, by repeat."""
    trainers = [Remote(TrainerRank, model, rank) for rank in range(2)]
    generators = [Remote(GeneratorRank, model, rank) for rank in range(2)]
    engines = []
    if with_vllm:
        rendezvous = f"{folder}/vllm"
        engines = [Remote(VllmRank, model, rank, rendezvous) for rank in range(2)]
    try:
        ways = await make_ways(model, trainers, generators, engines, folder)
        seconds: Seconds = {name: [] for name in ways}
        for version in range(1, repeats + 1):
            await call_all(trainers, "label", version)
            for name, way in ways.items():
                start_s = time.perf_counter()
                await way(version)
                seconds[name].append(time.perf_counter() - start_s)
    finally:
        for remote in trainers + generators + engines:
            remote.close()
    return seconds


async def make_ways(
    model: Model,
    trainers: list[Remote],
    generators: list[Remote],
    engines: list[Remote],
    folder: str,
) -> dict[str, Way]:
    """Everything that is timed, by name, connected and run once."""
    await call_all(trainers, "fill")
    await call_all(trainers, "label", 0)
    await call_all(generators, "reserve")
    ways: dict[str, Way] = {}
    for replica, transport in enumerate(TRANSPORTS):
        config = WeightsConfig(transport=transport)
        await call_all(
            generators, "reserve_weight_buffer", replica, config.staging, config.bucket_bytes
        )
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
    if engines:
        await asyncio.gather(
            call_all(trainers, "meet", folder, "vllm"), call_all(engines, "start", folder, "vllm")
        )
        ways["vLLM's reload"] = lambda version: asyncio.gather(
            call_all(trainers, "broadcast", "vllm"), call_all(engines, "receive")
        )
        await ways["vLLM's reload"](0)
        await call_all(engines, "check")
    await ways["memcpy"](0)
    return ways


async def bench_decoding(folder: str) -> dict[str, float]:
    """Decoding with and without publishes, in turns."""
    model = DECODING_MODEL
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
        await asyncio.sleep(WINDOW_S)
        quiet, busy, publishes = [], [], []
        for _ in range(NUM_WINDOWS):
            start_ns = now_ns()
            await asyncio.sleep(WINDOW_S)
            quiet.append((start_ns, now_ns()))
            start_ns = now_ns()
            while now_ns() < start_ns + WINDOW_S * 1e9:
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
        "gap_s": statistics.median(gaps),
        "gap_share": statistics.median(g / s for g, s in zip(gaps, seconds, strict=True)),
        "step_s": statistics.median((step.end_ns - step.start_ns) / 1e9 for step in steps),
        "quiet_gap_s": statistics.median(longest_gap_s(steps, *window) for window in quiet),
        "quiet_tokens_per_s": quiet_speed,
        "tokens_share": statistics.mean(tokens_per_s(steps, *w) for w in busy) / quiet_speed,
    }


async def bench_memory(model: Model, config: WeightsConfig, folder: str) -> dict[str, float]:
    """Most memory of a publish, over the weights of both sides, as a share of the model."""
    trainers = [Remote(TrainerRank, model, rank) for rank in range(2)]
    generators = [Remote(GeneratorRank, model, rank) for rank in range(2)]
    remotes = trainers + generators
    try:
        await call_all(trainers, "ready")
        await call_all(generators, "ready")
        pids = [remote.pid for remote in remotes]
        before_bytes = sum(map(shared_out_bytes, pids))
        await call_all(trainers, "fill")
        filled_bytes = list(map(private_bytes, pids))
        await call_all(generators, "reserve_weight_buffer", 0, config.staging, config.bucket_bytes)
        publisher = make_publisher(trainers, Generator(generators, 0), 0, config, folder)
        peaks = Peaks(pids)
        watching = asyncio.create_task(peaks.watch())
        await publisher.connect()
        for version in range(3):
            await call_all(trainers, "label", version)
            await publisher.publish(version)
        watching.cancel()
        peaks.look()
        await call_all(generators, "check", 0)
    finally:
        for remote in remotes:
            remote.close()
    grown = [peaks.private_bytes[pid] - size for pid, size in zip(pids, filled_bytes, strict=True)]
    return {
        "trainer_private": sum(grown[:2]) / model.num_bytes,
        "generator_private": sum(grown[2:]) / model.num_bytes,
        "all": (peaks.total_bytes - before_bytes) / model.num_bytes - 2,
    }


def print_ways(model: Model, seconds: Seconds) -> None:
    """Median seconds, GB/s and what the real publish takes by comparison."""
    size = f"{model.num_bytes / 1e6:.0f} MB"
    print(f"\nOne version of {size} in {model.dtype}, {len(seconds['memcpy'])} repeats")
    print(f"    {'':24}{'seconds':>9}{'GB/s':>8}{'publish, shared_memory is':>32}")
    for name, values in seconds.items():
        median_s = statistics.median(values)
        factor = ratio(values, seconds["publish, shared_memory"])
        print(
            f"    {name:24}{median_s:9.3f}{model.num_bytes / median_s / 1e9:8.2f}"
            f"{factor:21.2f} times as fast",
            flush=True,
        )


def ratio(above: list[float], below: list[float]) -> float:
    """Median over repeats of the ratio within one."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_decoding(found: dict[str, float]) -> None:
    f = found
    print(
        f"\nDecoding {BATCH} rollouts while versions of {f['model_megabytes']:.0f} MB are published"
        f" one after the other ({f['num_publishes']} in all), on {os.cpu_count()} cores\n"
        f"    a publish takes                 {f['publish_s'] * 1e3:8.1f} ms\n"
        f"    longest gap between two steps   {f['gap_s'] * 1e3:8.1f} ms"
        f"    {f['gap_share']:.1%} of the publish\n"
        f"    the same without publishes      {f['quiet_gap_s'] * 1e3:8.1f} ms"
        f"    (a step takes {f['step_s'] * 1e3:.0f} ms)\n"
        f"    tokens/s without publishes      {f['quiet_tokens_per_s']:8.0f}\n"
        f"    during publishes                {f['tokens_share']:8.1%} of that",
        flush=True,
    )


def print_memory(model: Model, found: dict[str, dict[str, float]]) -> None:
    print(
        f"\nMost memory of a publish beyond the weights of both sides, in sizes of the model"
        f" ({model.num_bytes / 1e6:.0f} MB)\n"
        f"    {'weights.staging':18}{'trainer, private':>20}{'generator, private':>20}"
        f"{'with shared memory':>20}"
    )
    for staging, shares in found.items():
        print(f"    {staging:18}" + "".join(f"{share:20.3f}" for share in shares.values()))


def main() -> None:
    """Run everything, print it, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--megabytes", type=float, default=500, help="least size of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the files go: a real disk (default: temporary)")
    arguments = parser.parse_args()
    try:
        check_installed()
        has_vllm = True
    except ValueError as error:
        has_vllm = False
        print(f"without vLLM: {error}")
    print("without rdma: Monarch's buffers exist only in its actors, so it needs a whole run")
    details: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        model = model_of(arguments.megabytes, dtype)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            is_with_vllm = has_vllm and dtype == "float32"
            seconds = asyncio.run(bench_ways(model, arguments.repeats, folder, is_with_vllm))
        print_ways(model, seconds)
        details[dtype] = {"model_bytes": model.num_bytes, "seconds": seconds}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        details["decoding"] = asyncio.run(bench_decoding(folder))
    print_decoding(details["decoding"])
    model = model_of(arguments.megabytes, "float32")
    details["memory"] = {}
    for staging in ("double_buffer", "host", "bucket"):
        config = WeightsConfig(staging=staging, bucket_bytes=model.num_bytes // 16)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            details["memory"][staging] = asyncio.run(bench_memory(model, config, folder))
    print_memory(model, details["memory"])
    seconds = details["float32"]["seconds"]
    real = seconds["publish, shared_memory"]
    results = {
        "shared_memory_vs_memcpy": ratio(seconds["memcpy"], real),
        "decode_gap_share": details["decoding"]["gap_share"],
        "vs_file": ratio(seconds["file"], real),
        "vs_gather_broadcast": ratio(seconds["gather and broadcast"], real),
    }
    if has_vllm:
        results["vs_vllm_reload"] = ratio(seconds["vLLM's reload"], real)
    print()
    for key, value in results.items():
        goal, meaning = GOALS.get(key, (None, "times as fast as vLLM's reload"))
        print(f"{key:26}{value:8.3f}  {meaning}" + ("" if goal is None else f" {goal:g} (goal)"))
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, "details": details}, indent=2) + "\n")


if __name__ == "__main__":
    main()
