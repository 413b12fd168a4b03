"""Measure the embedded generator against transformers' `generate` and vLLM.

    python tools/bench_generate.py [--json FILE] [--repeats N] [--large] [--quick]

The pinned job: a 3.2M-parameter Llama (hidden 256, 4 layers, 8 query and 4 key-value heads of 32)
with random weights, 16 prompt tokens, 128 sampled tokens per rollout, end of sequence ignored,
one thread, float32 and bfloat16, batch 64 and 8.

transformers runs with its best CPU settings of those tried at the start (eager or sdpa attention,
dynamic or static cache), in inference mode. All are measured in turn within each repeat; ratios are
medians over repeats of ratios within one repeat.

vLLM (the CPU build, if it is installed) runs the same job in its own process, three ways: its LLM
class without log-probs and with them, and llamarl's engine over it. vs_vllm_cpu compares with the
faster of those that give log-probs, as rollouts need and the embedded engine always does;
vs_vllm_cpu_ids_only with the fastest of the three.

--large adds a model of 100M parameters with 32 sampled tokens, to be looked at: no goal.
--quick: once, with few short rollouts and without vLLM; its figures say little.

The long tail replays lengths drawn once from a log-normal distribution (p99 six times the mean,
cut at eight times): the engine with 64 slots against transformers in batches of 64, in arrival
order and sorted by length, whichever is faster.

Ratios above 1 mean the engine is faster. Of several dtypes (and batches) the JSON file holds the
lowest, too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import torch
from generate_bench.engines import (
    ARCHITECTURE,
    LARGE,
    NEW_TOKENS,
    PROMPT_TOKENS,
    make_engine,
    random_model,
    random_prompts,
    run_engine,
    run_transformers,
)
from harness import Bench, medians, ratio, seconds, turns
from vllm_rival import LLM, WAYS, WITH_LOGPROBS, VllmRival, why_not

from llamarl.generator.engine.weights import DTYPES
from llamarl.model.architecture import Architecture

NEW_TOKENS_LARGE = 32
VLLM_CONTEXT = 160  # whole blocks
TAIL_ROLLOUTS = 512
QUICK_TOKENS, QUICK_ROLLOUTS = 8, 16
TAIL_MEAN = 64
TAIL_BATCH = 64
TAIL_SIGMA = 0.974  # exp(2.326 sigma - sigma^2 / 2) = 6: the 99th percentile over the mean
GOALS = {
    "ratio_64": ">= 1.8",
    "ratio_8": ">= 1.8",
    "ratio_long_tail": ">= 3",
    "vs_vllm_cpu": ">= 1",
}
Times = dict[str, list[float]]  # by way, of each repeat
Figures = dict[str, float | str]


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
    architecture: Architecture,
    dtype: str,
    batch: int,
    new_tokens: int,
    repeats: int,
    vllm: VllmRival | None,
) -> Figures:
    """EmbeddedEngine, transformers and vLLM on one batch size."""
    is_large = architecture is LARGE
    length = min(NEW_TOKENS_LARGE, new_tokens) if is_large else new_tokens
    trial_tokens = 2 if is_large else min(32, new_tokens)
    model, cache, settings = best_settings(architecture, DTYPES[dtype], batch, trial_tokens)
    engine = make_engine(architecture, model, dtype, batch, PROMPT_TOKENS + length)
    prompts, lengths = random_prompts(batch, architecture.vocab_size), [length] * batch
    ways: dict[str, Callable[[], float]] = {
        "engine": lambda: seconds(lambda: run_engine(engine, prompts, lengths)),
        "transformers": lambda: seconds(lambda: run_transformers(model, prompts, length, cache)),
    }
    for way in WAYS if vllm else ():
        vllm.seconds(way, prompts.tolist(), 8)
        ways[way] = lambda way=way: vllm.seconds(way, prompts.tolist(), length)
    run_transformers(model, prompts, 8, cache)
    run_engine(engine, prompts, [2] * batch if is_large else lengths)
    times: Times = {name: [] for name in ways}
    for _, way in turns(ways, repeats):
        times[way].append(ways[way]())
    figures = compared(times, batch * length)
    if is_large:
        figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return figures | {"transformers_settings": settings}


def compared(times: Times, num_tokens: int) -> Figures:
    """Ratios over the engine within each repeat, and tokens per second."""
    figures: Figures = {"ratio": ratio(times["transformers"], times["engine"])}
    if LLM in times:
        for key, ways in (("vs_vllm_cpu", WITH_LOGPROBS), ("vs_vllm_cpu_ids_only", WAYS)):
            fastest = [*map(min, zip(*(times[way] for way in ways), strict=True))]
            figures[key] = ratio(fastest, times["engine"])
    for name, values in times.items():
        figures[f"{name}_tokens_per_s"] = num_tokens / statistics.median(values)
    return figures


def tail_lengths() -> list[int]:
    """TAIL_ROLLOUTS response lengths, log-normal, from a fixed seed, in arrival order."""
    draws = np.random.default_rng(0).lognormal(-(TAIL_SIGMA**2) / 2, TAIL_SIGMA, TAIL_ROLLOUTS)
    return np.clip(np.rint(draws * TAIL_MEAN), 1, 8 * TAIL_MEAN).astype(int).tolist()


def bench_long_tail(dtype: str, lengths: list[int], repeats: int) -> Figures:
    """Continuous batching against fixed batches on the same lengths."""
    trial_tokens = min(32, max(lengths))
    model, cache, settings = best_settings(ARCHITECTURE, DTYPES[dtype], TAIL_BATCH, trial_tokens)
    engine = make_engine(ARCHITECTURE, model, dtype, TAIL_BATCH, PROMPT_TOKENS + 8 * TAIL_MEAN)
    prompts = random_prompts(len(lengths))

    def batches(order: list[int]) -> None:
        for start in range(0, len(order), TAIL_BATCH):
            part = order[start : start + TAIL_BATCH]
            run_transformers(model, prompts[part], max(lengths[i] for i in part), cache)

    arrival = list(range(len(lengths)))
    by_length = sorted(arrival, key=lambda i: lengths[i])
    run_engine(engine, prompts[:TAIL_BATCH], lengths[:TAIL_BATCH])
    rounds = []
    for _ in range(repeats):
        found = {
            "engine_s": seconds(lambda: run_engine(engine, prompts, lengths)),
            "transformers_arrival_s": seconds(lambda: batches(arrival)),
            "transformers_sorted_s": seconds(lambda: batches(by_length)),
        }
        engine_s, *others_s = found.values()
        rounds.append({"ratio": min(others_s) / engine_s, **found})
    return {**medians(rounds), "transformers_settings": settings}


def main() -> None:
    """Run everything."""
    bench = Bench(__doc__, GOALS)
    bench.option("--repeats", type=int, default=5)
    bench.option("--large", action="store_true", help="also a model of 100M parameters")
    bench.option("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    bench.option("--quick", action="store_true", help="once, few short rollouts, without vLLM")
    arguments = bench.parse()
    new_tokens, lengths = NEW_TOKENS, tail_lengths()
    if arguments.quick:
        arguments.repeats, new_tokens = 1, QUICK_TOKENS
        lengths = [1 + length % QUICK_TOKENS for length in lengths[:QUICK_ROLLOUTS]]
    torch.set_num_threads(1)
    details: dict[str, Figures] = {}

    def record(name: str, figures: Figures) -> None:
        details[name] = figures
        bench.add_all(figures, name)

    reason = "--quick measures without it" if arguments.quick else why_not()
    if reason:
        print(f"without vLLM: {reason}")
    few = max(arguments.repeats // 2, 1)
    models = [(ARCHITECTURE, "", arguments.repeats)]
    models += [(LARGE, ", large", few)] if arguments.large else []
    with tempfile.TemporaryDirectory() as folder:

        @contextmanager
        def rival(architecture: Architecture, dtype: str) -> Iterator[VllmRival | None]:
            path = Path(folder) / f"{architecture.hidden_size}-{dtype}"
            vllm = None if reason else VllmRival(architecture, dtype, 64, VLLM_CONTEXT, path)
            yield vllm
            if vllm:
                vllm.close()

        for (architecture, size, repeats), dtype in product(models, arguments.dtypes):
            with rival(architecture, dtype) as vllm:
                for batch in (64, 8):
                    figures = bench_batch(architecture, dtype, batch, new_tokens, repeats, vllm)
                    record(f"{dtype}, batch {batch}{size}", figures)
            if architecture is ARCHITECTURE:
                record(f"{dtype}, long tail", bench_long_tail(dtype, lengths, few))

    def lowest(part: str, key: str) -> float:
        return min(float(f[key]) for name, f in details.items() if name.endswith(part) and key in f)

    bench.add("ratio_64", lowest("batch 64", "ratio"))
    bench.add("ratio_8", lowest("batch 8", "ratio"))
    bench.add("ratio_long_tail", lowest("long tail", "ratio"))
    for key in ("vs_vllm_cpu", "vs_vllm_cpu_ids_only") if reason is None else ():
        bench.add(key, lowest("batch 64", key))
    bench.write()


if __name__ == "__main__":
    main()
