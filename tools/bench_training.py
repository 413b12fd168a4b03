"""How near a trainer's micro-batch comes to the machine's matrix products, and what bfloat16 gives.

    python tools/bench_training.py [--json FILE] [--rounds 5] [--widths 128 256 768]

Forward, loss and backward of one micro-batch of rollouts of 31 to 130 tokens, on one core, by the
trainer's own passes, for models of three widths (one of them the quickstart's). Per dtype:

    share_of_peak (of float32), share_of_bfloat16_peak
                     arithmetic of the model's matrix products (2 for each weight and token forward,
                     4 backward, 2 more for the head, which is computed again) per second, over the
                     rate of a product of two matrices of 1024 x 1024 in that dtype, in turns in one
                     run; attention and all else take time but do not count
    tokens_per_s     tokens of the micro-batch per second
    speed_up         tokens per second in bfloat16 over float32
    logprob_median   of bfloat16: the difference of a token's log-prob from float32's, in the middle
    logprob_largest  and at most
    gradient         the norm of the gradient's difference from float32's, over the norm
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from generate_bench.engines import ARCHITECTURE, LARGE
from harness import ROOT, Bench

from llamarl.core.config import LoraConfig
from llamarl.core.groups import BatchRollout
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
)
from llamarl.model import hf
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.model.transformer import Transformer
from llamarl.trainer.losses import algorithms, find_loss
from llamarl.trainer.passes import Passes, infer

CPU = torch.device("cpu")
PEAK_SIZE = 1024
PROMPT_TOKENS = 12
QUICKSTART = ROOT / "recipes" / "quickstart" / "checkpoint"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDTHS = (128, 256, 768)
GOALS = {"share_of_peak": ">= 0.75"}


def model_of(width: int) -> tuple[str, Architecture, int]:
    """Its name, the model, and the rollouts of a micro-batch."""
    if width == 128:
        return "width 128, the quickstart", read_architecture(QUICKSTART), 80
    if width == 256:
        return "width 256", ARCHITECTURE, 40
    return "width 768", replace(LARGE, num_layers=4), 24


def make_rollouts(num: int, vocab_size: int) -> tuple[list[BatchRollout], Columns]:
    random = np.random.default_rng(0)
    lengths = random.integers(20, 120, num).tolist()

    def ids(size: int) -> np.ndarray:
        return random.integers(0, vocab_size, size).astype(np.int32)

    columns = {
        PROMPT_IDS: [ids(PROMPT_TOKENS) for _ in lengths],
        RESPONSE_IDS: [ids(length) for length in lengths],
        GENERATOR_LOGPROBS: [-random.random(length).astype(np.float32) for length in lengths],
        TOKEN_VERSIONS: [np.zeros(length, np.int32) for length in lengths],
        SAMPLING: [np.array([1, 0, 1, 128, 0, 0], np.float64) for _ in lengths],
    }
    rows = [
        BatchRollout(
            row_id=i,
            group_id=0,
            num_prompt_tokens=PROMPT_TOKENS,
            num_tokens=length,
            num_generated=length,
            advantage=float(random.normal()),
            oldest_version=0,
        )
        for i, length in enumerate(lengths)
    ]
    return rows, columns


def flops(a: Architecture, num_tokens: int) -> float:
    """Of the matrix products of one micro-batch."""
    heads = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    layer = a.hidden_size * (heads + 3 * a.intermediate_size)
    return num_tokens * (6 * a.num_layers * layer + 8 * a.hidden_size * a.vocab_size)


class Trained:
    """A model with random weights and its passes."""

    def __init__(self, a: Architecture, num_rollouts: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)
        model = Transformer(a)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.04, generator=random)
        if a.vocab_size < ARCHITECTURE.vocab_size:  # the quickstart's, which are there
            hf.load_into(dict(model.named_parameters()), QUICKSTART)
        self.model = model.to(dtype)
        self.rows, self.columns = make_rollouts(num_rollouts, a.vocab_size)
        chosen, sampling = algorithms()["aipo"](), SimpleNamespace(temperature=1.0)
        config = SimpleNamespace(lora=LoraConfig())
        spec = SimpleNamespace(algorithm=chosen, sampling=sampling, config=config)
        policy = SimpleNamespace(model=self.model)
        self._passes = Passes(policy, CPU, spec, find_loss(chosen))
        self.num_tokens = sum(row.num_tokens + PROMPT_TOKENS - 1 for row in self.rows)

    def run(self) -> float:
        """Seconds of one micro-batch."""
        self.model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        self._passes.accumulate(self.rows, self.columns, [range(len(self.rows))])
        return time.perf_counter() - start_s

    def logprobs(self) -> np.ndarray:
        found = infer(self.model, self.columns, [range(len(self.rows))], 1.0, CPU)
        return np.concatenate([found[i] for i in range(len(self.rows))])

    def gradient(self) -> torch.Tensor:
        parameters = self.model.parameters()
        return torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None])


def product_s(dtype: torch.dtype) -> float:
    """Seconds of one product at the machine's rate."""
    matrix = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
    start_s = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    return (time.perf_counter() - start_s) / 4


def main() -> None:
    torch.set_num_threads(1)
    bench = Bench(__doc__, GOALS)
    bench.option("--rounds", type=int, default=5)
    bench.option("--widths", type=int, nargs="+", default=WIDTHS, choices=WIDTHS)
    options = bench.parse()
    for name, architecture, num_rollouts in map(model_of, options.widths):
        models = {kind: Trained(architecture, num_rollouts, each) for kind, each in DTYPES.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in models}
        peaks: dict[str, list[float]] = {kind: [] for kind in models}
        for _ in range(1 + options.rounds):  # the first one warms up
            for kind, trained in models.items():
                peaks[kind].append(product_s(DTYPES[kind]))
                seconds[kind].append(trained.run())
        for kind, trained in models.items():
            rate = flops(architecture, trained.num_tokens) / median(seconds[kind][1:])
            peak = 2 * PEAK_SIZE**3 / median(peaks[kind][1:])
            whose = "share_of_peak" if kind == "float32" else f"share_of_{kind}_peak"
            bench.add(whose, rate / peak, name)
            tokens_per_s = trained.num_tokens / median(seconds[kind][1:])
            bench.add("tokens_per_s", tokens_per_s, f"{name}, {kind}")
        wide, narrow = models["float32"], models["bfloat16"]
        apart = np.abs(narrow.logprobs() - wide.logprobs())
        difference = (narrow.gradient() - wide.gradient()).norm() / wide.gradient().norm()
        bench.add(
            "speed_up", median(seconds["float32"][1:]) / median(seconds["bfloat16"][1:]), name
        )
        bench.add("logprob_median", float(np.median(apart)), name)
        bench.add("logprob_largest", float(apart.max()), name)
        bench.add("gradient", float(difference), name)
    bench.write()


if __name__ == "__main__":
    main()
