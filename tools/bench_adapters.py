"""What adapters cost the embedded engine, and what they would cost merged into the weights.

    python tools/bench_adapters.py [--json FILE] [--repeats 3] [--rank 16] [--new-tokens 64]
        [--updates 1 100 1000] [--batches 8 64]

Three ways to decode with W + scale B A, on a Llama of 3 million parameters with random weights:

    whole    all weights are trained: trainer and generator compute with the same rounded weights
    adapter  what llamarl does: the engine computes x W + scale (x A) B
    merged   W + scale B A is rounded to the engine's dtype at each commit

Adapters are as after that many updates of AdamW at a learning rate of 1e-5: A as it starts, and
numbers of that size in B. `apart` is the mean |log pi - log mu| of the tokens that the engine
sampled, pi being the trainer's in the same dtype; `moved` is how far the update moves a log-prob;
`kept` is the share of the update that is left in the weights after rounding, their change projected
on the update.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from generate_bench.engines import (
    ARCHITECTURE,
    make_engine,
    random_model,
    random_prompts,
    run_engine,
)
from harness import Bench, Values, ratio, seconds, turns
from torch import Tensor

from llamarl.config import EmbeddedConfig, LoraConfig
from llamarl.generation.engine import EmbeddedEngine
from llamarl.generation.parameters import DTYPES
from llamarl.generation.protocol import RequestOutput
from llamarl.models.adapter_inventory import adapted_modules, adapter_shapes
from llamarl.models.adapters import attach, initialize
from llamarl.models.attention import make_packing
from llamarl.models.transformer import Transformer
from llamarl.types import Request, Sampling

LR = 1e-5
NUM_ROLLOUTS = 64
CONTEXT = 128
Adapters = Mapping[str, Tensor]


def make_adapters(lora: LoraConfig, num_updates: int) -> dict[str, Tensor]:
    """As after that many updates."""
    shapes = adapter_shapes(ARCHITECTURE, lora)
    found = {name: torch.empty(shape) for name, shape in shapes.items()}
    initialize(found, 0)
    source = torch.Generator().manual_seed(1)
    for name, values in found.items():
        if "lora_B" in name:
            signs = torch.randint(0, 2, values.shape, generator=source) * 2 - 1
            values.copy_(signs * LR * num_updates)
    return found


def delta(adapters: Adapters, module: str, lora: LoraConfig) -> Tensor:
    """What is added to a matrix."""
    b, a = (adapters[f"{module}.lora_{half}.weight"] for half in "BA")
    return lora.scale * b @ a


def merged(model: Transformer, adapters: Adapters, lora: LoraConfig) -> Transformer:
    """The model with the adapters in its weights, float32."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for module in adapted_modules({name: tuple(a.shape) for name, a in adapters.items()}):
            found.get_submodule(module).weight.add_(delta(adapters, module, lora))
    return found


def adapted_engine(
    model: Transformer, adapters: Adapters, lora: LoraConfig, dtype: str, slots: int
) -> EmbeddedEngine:
    """With adapters beside its weights."""
    config = EmbeddedConfig(max_num_seqs=slots, max_model_len=CONTEXT, dtype=dtype)
    engine = EmbeddedEngine(ARCHITECTURE, config, lora=lora)
    assert engine._base is not None
    parameters = dict(model.named_parameters())
    for name in engine.layout.parameters:
        engine.layout.parameter(engine._base, name).copy_(parameters[name].detach())
    commit(engine, adapters)
    return engine


def commit(engine: EmbeddedEngine, adapters: Adapters) -> None:
    """Decode with these from now on."""
    flat = torch.zeros(engine.memory.num_elements, dtype=engine.memory.dtype)
    for name, layout in engine.memory.parameters.items():
        (box,) = layout.boxes
        flat.as_strided(box.shape, box.strides, box.offset).copy_(adapters[name])
    engine.commit(flat, 0)


def sample(engine: EmbeddedEngine, new_tokens: int) -> list[RequestOutput]:
    """Rollouts of random prompts."""
    for row, prompt in enumerate(random_prompts(NUM_ROLLOUTS).tolist()):
        sampling = Sampling(max_tokens=new_tokens)
        engine.submit(Request(row_id=row, prompt_ids=tuple(prompt), sampling=sampling, seed=row))
    done: list[RequestOutput] = []
    while engine.has_work:
        done += engine.step()
    return done


@torch.no_grad()
def trainer_logprobs(model: Transformer, items: list[RequestOutput]) -> Tensor:
    """Of all tokens that the rollouts wrote."""
    found = []
    for item in items:
        ids = torch.tensor([*item.request.prompt_ids, *item.written.ids.tolist()])
        stats = model(ids, make_packing([len(ids)]), ids.roll(-1), 1.0)
        found.append(stats.logprobs[len(item.request.prompt_ids) - 1 : -1])
    return torch.cat(found)


def compare(
    model: Transformer, lora: LoraConfig, dtype: str, num_updates: int, new_tokens: int
) -> dict[str, Values]:
    """The three ways in one dtype."""
    number, adapters = DTYPES[dtype], make_adapters(lora, num_updates)
    changed = merged(model, adapters, lora)
    rounded = copy.deepcopy(changed).to(number)
    trainer = copy.deepcopy(model).to(number)
    attach(trainer, {name: tuple(a.shape) for name, a in adapters.items()}, lora)
    for name, values in adapters.items():
        half = trainer.get_submodule(name.rpartition(".")[0])
        half.weight = torch.nn.Parameter(values.to(number))
    engines = {
        "whole": (make_engine(ARCHITECTURE, changed, dtype, NUM_ROLLOUTS, CONTEXT), rounded),
        "adapter": (adapted_engine(model, adapters, lora, dtype, NUM_ROLLOUTS), trainer),
        "merged": (make_engine(ARCHITECTURE, changed, dtype, NUM_ROLLOUTS, CONTEXT), trainer),
    }
    kept = kept_share(model, adapters, lora, number)
    found: dict[str, Values] = {}
    for way, (engine, policy) in engines.items():
        items = sample(engine, new_tokens)
        mu = torch.cat([torch.from_numpy(item.written.logprobs) for item in items])
        moved = (trainer_logprobs(changed, items) - trainer_logprobs(model, items)).abs()
        found[way] = {
            "apart": float((trainer_logprobs(policy, items).float() - mu).abs().mean()),
            "moved": float(moved.mean()),
            "kept": 1.0 if way == "adapter" else kept,
        }
    return found


def kept_share(
    model: Transformer, adapters: Adapters, lora: LoraConfig, dtype: torch.dtype
) -> float:
    """Of the update, in weights of this dtype to which it is added and which are rounded again."""
    above = below = 0.0
    for module in adapted_modules({name: tuple(a.shape) for name, a in adapters.items()}):
        update = delta(adapters, module, lora)
        weight = model.get_submodule(module).weight.detach().to(dtype).float()
        change = (weight + update).to(dtype).float() - weight
        above += float((change * update).sum())
        below += float(update.square().sum())
    return above / below


def merge_s(model: Transformer, adapters: Adapters, lora: LoraConfig, dtype: torch.dtype) -> float:
    """Seconds of W + scale B A into other memory, for all matrices."""
    modules = adapted_modules({name: tuple(a.shape) for name, a in adapters.items()})
    own = {m: model.get_submodule(m).weight.detach().to(dtype) for m in modules}
    halves = {name: each.to(dtype) for name, each in adapters.items()}
    target = {m: torch.empty_like(weight) for m, weight in own.items()}

    def merge() -> None:
        for m in modules:
            b, a = (halves[f"{m}.lora_{half}.weight"] for half in "BA")
            torch.addmm(own[m], b, a, alpha=lora.scale, out=target[m])

    merge()
    return min(seconds(merge) for _ in range(3))


def main() -> None:
    bench = Bench(__doc__)
    bench.option("--repeats", type=int, default=3)
    bench.option("--rank", type=int, default=16)
    bench.option("--updates", type=int, nargs="+", default=[1, 100, 1000])
    bench.option("--batches", type=int, nargs="+", default=[8, 64], help="whose speed is measured")
    bench.option("--new-tokens", type=int, default=64, help="of a rollout")
    arguments = bench.parse()
    new_tokens = arguments.new_tokens
    torch.set_num_threads(1)
    lora = LoraConfig(rank=arguments.rank, alpha=2.0 * arguments.rank)
    library = random_model(ARCHITECTURE, torch.float32, initializer_range=0.05)
    model = Transformer(ARCHITECTURE)
    model.load_state_dict(library.state_dict(), strict=False)
    for dtype in DTYPES:
        for num_updates in arguments.updates:
            found = compare(model, lora, dtype, num_updates, new_tokens)
            for way, values in found.items():
                bench.add_all(values, f"{dtype}, {num_updates} updates, {way}")
    sizes = [sum(torch.Size(s).numel() for s in shapes.values()) for shapes in (
        adapter_shapes(ARCHITECTURE, lora),
        {name: tuple(each.shape) for name, each in model.named_parameters()},
    )]  # fmt: skip
    bench.add("publish_bytes", 4 * sizes[0], "float32, adapters")
    bench.add("publish_bytes", 4 * sizes[1], "float32, whole weights")
    rounds: dict[str, list[Values]] = {}
    adapters = make_adapters(lora, 100)
    for dtype in DTYPES:
        for size in arguments.batches:
            prompts, lengths = random_prompts(size), [new_tokens] * size
            engines = {
                "whole": make_engine(ARCHITECTURE, model, dtype, size, CONTEXT),
                "adapter": adapted_engine(model, adapters, lora, dtype, size),
            }
            for _, way in turns(engines, arguments.repeats + 1):
                taken_s = seconds(partial(run_engine, engines[way], prompts, lengths))
                speed = {"tokens_per_s": size * new_tokens / taken_s}
                rounds.setdefault(f"{dtype}, batch {size}, {way}", []).append(speed)
            cases = [rounds[f"{dtype}, batch {size}, {way}"][1:] for way in engines]
            whole, adapted = ([each["tokens_per_s"] for each in case] for case in cases)
            bench.add("adapter_over_whole", ratio(adapted, whole), f"{dtype}, batch {size}")
        binding_s = min(seconds(partial(commit, engines["adapter"], adapters)) for _ in range(3))
        bench.add("commit_ms", 1e3 * binding_s, f"{dtype}, adapter")
        merging_s = merge_s(model, adapters, lora, DTYPES[dtype])
        bench.add("commit_ms", 1e3 * merging_s, f"{dtype}, merged")
    bench.add_medians({case: found[1:] for case, found in rounds.items()})
    bench.write(rounds)


if __name__ == "__main__":
    main()
