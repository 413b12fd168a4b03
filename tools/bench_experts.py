"""What routing replay gives, and what a mixture of experts costs.

    python tools/bench_experts.py [--json FILE] [--checkpoint FOLDER] [--rounds 5] [--rollouts 96]

A replica in bfloat16 writes rollouts of the quickstart's prompts with a mixture of experts: that in
FOLDER, which has the quickstart's tokenizer, or one of random weights in which 8 of 128 experts in
each of 12 layers serve a token. A trainer in bfloat16 computes their log-probs, with its own
routers and with the record: with the same weights (staleness 0), and after one optimizer step on
these rollouts at a learning rate of 1e-5 (staleness 1).

    mismatch, replayed   mean of |log pi - log mu| over response tokens, without and with replay
    mismatch_ratio       the first over the second
    tokens_moved         share of the fed tokens that go to another expert in some layer without
    record_bytes         of the column per token
    step_vs_dense        seconds of one optimizer step (four micro-batches of 2048 tokens, float32)
                         over those of a dense model with as many parameters per token, by turns
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from bench_training import CPU, QUICKSTART, make_rollouts
from generate_bench.engines import ARCHITECTURE
from harness import ROOT, Bench
from tokenizers import Tokenizer

from llamarl.core.config import EmbeddedConfig, LoraConfig
from llamarl.core.groups import BatchRollout
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    Request,
    Sampling,
)
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.model import hf
from llamarl.model.architecture import Architecture, ExpertSizes, read_architecture
from llamarl.model.experts import as_cell
from llamarl.model.transformer import Transformer
from llamarl.trainer.losses import algorithms, find_loss
from llamarl.trainer.passes import Passes, infer

MAX_TOKENS, LR = 64, 1e-5
EOS = 2
GAIN = 1.5  # of random matrices: the experts differ clearly
DENSE = replace(ARCHITECTURE, num_layers=3, hidden_size=256, intermediate_size=1024)
SPARSE = replace(
    DENSE,
    model_type="qwen3_moe",
    experts=ExpertSizes(num_experts=8, num_chosen=2, intermediate_size=512, normalized=True),
)
GOALS = {"mismatch_ratio": ">= 3", "step_vs_dense": "<= 1.3"}


def load(folder: Path) -> Transformer:
    """The model of a checkpoint, float32."""
    model = Transformer(read_architecture(folder))
    hf.load_into(dict(model.named_parameters()), folder)
    return model


def random_mixture() -> Transformer:
    """A mixture with as many experts per layer and token as Qwen3-30B-A3B, and random weights."""
    sizes = ExpertSizes(num_experts=128, num_chosen=8, intermediate_size=32, normalized=True)
    a = replace(read_architecture(QUICKSTART), model_type="qwen3_moe", num_layers=12, experts=sizes)
    torch.manual_seed(0)
    model = Transformer(a)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_()
            elif parameter.ndim > 1:
                gain = 1.0 if name.endswith("mlp.gate.weight") else GAIN
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
    return model


def write_rollouts(model: Transformer, num: int) -> Columns:
    """What a replica in bfloat16 writes, as storage has it."""
    config = EmbeddedConfig(max_num_seqs=64, max_model_len=160, dtype="bfloat16")
    engine = EmbeddedEngine(model.architecture, config)
    flat = torch.zeros(engine.memory.num_elements, dtype=engine.memory.dtype)
    weights = dict(model.named_parameters())
    for name in engine.layout.parameters:
        engine.layout.parameter(flat, name).copy_(weights[name].detach())
    engine.commit(flat, 0)
    tokenizer = Tokenizer.from_file(str(QUICKSTART / "tokenizer.json"))
    lines = (ROOT / "recipes" / "quickstart" / "prompts.jsonl").read_text().splitlines()
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=(EOS,))
    for row, line in enumerate(lines[:num]):
        ids = tuple(tokenizer.encode(json.loads(line)["question"]).ids)
        engine.submit(Request(row_id=row, prompt_ids=ids, sampling=sampling, seed=row))
    done = []
    while engine.has_work:
        done += engine.step()
    done.sort(key=lambda item: item.request.row_id)
    return {
        PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in done],
        RESPONSE_IDS: [item.written.ids for item in done],
        GENERATOR_LOGPROBS: [item.written.logprobs for item in done],
        TOKEN_VERSIONS: [item.written.versions for item in done],
        SAMPLING: [np.array([1, 0, 1, MAX_TOKENS, 0, 0], np.float64) for _ in done],
        ROUTED_EXPERTS: [as_cell(item.written.experts) for item in done],
    }


def passes_of(model: Transformer) -> Passes:
    algorithm, sampling = algorithms()["aipo"](), SimpleNamespace(temperature=1.0)
    spec = SimpleNamespace(
        algorithm=algorithm, sampling=sampling, config=SimpleNamespace(lora=LoraConfig())
    )
    return Passes(SimpleNamespace(model=model), CPU, spec, find_loss(algorithm))


def take_step(model: Transformer, columns: Columns) -> None:
    """One optimizer step, with advantages that are 1 or -1 at random."""
    random = np.random.default_rng(0)
    rows = [
        BatchRollout(
            row_id=i,
            group_id=0,
            num_prompt_tokens=len(prompt),
            num_tokens=len(response),
            num_generated=len(response),
            advantage=float(random.choice([-1, 1])),
            oldest_version=0,
        )
        for i, (prompt, response) in enumerate(
            zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        )
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    parts = [range(i, min(i + 32, len(rows))) for i in range(0, len(rows), 32)]
    passes_of(model).accumulate(rows, columns, parts)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad(set_to_none=True)


def mismatch(model: Transformer, columns: Columns) -> float:
    """The mean of |log pi - log mu|, in bfloat16."""
    mu = columns[GENERATOR_LOGPROBS]
    parts = [range(i, min(i + 32, len(mu))) for i in range(0, len(mu), 32)]
    found = infer(model, columns, parts, 1.0, CPU)
    return float(np.abs(np.concatenate([found[i] - mu[i] for i in range(len(mu))])).mean())


def tokens_moved(model: Transformer, columns: Columns) -> float:
    """The share of fed tokens that the model's own routers send to another expert somewhere."""
    chosen: list[torch.Tensor] = []
    blocks = [layer.mlp for layer in model.model.layers if layer.is_sparse]
    hooks = [
        block.register_forward_hook(lambda *call: chosen.append(call[1][1].chosen))
        for block in blocks
    ]
    free = {name: cells for name, cells in columns.items() if name != ROUTED_EXPERTS}
    moved: list[np.ndarray] = []
    for i in range(len(columns[ROUTED_EXPERTS])):
        chosen.clear()
        infer(model, free, [[i]], 1.0, CPU)
        own = torch.stack(chosen, 1).sort(-1).values.numpy()
        record = np.sort(columns[ROUTED_EXPERTS][i].reshape(own.shape), -1)
        moved.append((own != record).any((1, 2)))
    for hook in hooks:
        hook.remove()
    return float(np.concatenate(moved).mean())


class Timed:
    """A model that takes optimizer steps on random rollouts."""

    def __init__(self, a: Architecture) -> None:
        torch.manual_seed(0)
        self.model = Transformer(a)
        rows, columns = make_rollouts(96, a.vocab_size)
        self.rows, self.columns = rows, columns
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.passes = passes_of(self.model)

    def step_s(self) -> float:
        """Seconds of one step."""
        start_s = time.perf_counter()
        parts = [range(i, i + 24) for i in range(0, 96, 24)]
        self.passes.accumulate(self.rows, self.columns, parts)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start_s


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--checkpoint", type=Path, help="of a mixture of experts")
    bench.option("--rounds", type=int, default=5)
    bench.option("--rollouts", type=int, default=96)
    arguments = bench.parse()
    torch.set_num_threads(1)
    model = random_mixture() if arguments.checkpoint is None else load(arguments.checkpoint)
    columns = write_rollouts(model, arguments.rollouts)
    free = {name: cells for name, cells in columns.items() if name != ROUTED_EXPERTS}
    sizes = model.architecture.experts
    assert sizes is not None
    for staleness in (0, 1):
        if staleness:
            take_step(model, columns)
        rounded = Transformer(model.architecture).bfloat16()
        rounded.load_state_dict(model.state_dict())
        without, replayed = mismatch(rounded, free), mismatch(rounded, columns)
        case = f"staleness {staleness}"
        bench.add("mismatch", without, case)
        bench.add("replayed", replayed, case)
        bench.add("mismatch_ratio", without / replayed, case)
        bench.add("tokens_moved", tokens_moved(rounded, columns), case)
    item = np.dtype(sizes.index_dtype).itemsize
    bench.add("record_bytes", len(model.architecture.sparse_layers) * sizes.num_chosen * item)
    dense, sparse = Timed(DENSE), Timed(SPARSE)
    rounds = []
    for _ in range(1 + arguments.rounds):
        times = {"dense_s": dense.step_s(), "sparse_s": sparse.step_s()}
        rounds.append(times | {"step_vs_dense": times["sparse_s"] / times["dense_s"]})
    bench.add_medians({"": rounds[1:]})
    bench.write({"": rounds[1:]})


if __name__ == "__main__":
    main()
