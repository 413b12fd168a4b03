"""Parts of a run with random weights: decode steps of the embedded engine, and the trainer's layers
and head."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_bench.setting import Setting, make_checkpoint, num_parameters, synchronize
from sections import Facts

from gpu_session.timing import compute_ms, kernels, median_s, read_us
from llamarl.core.config import EmbeddedConfig
from llamarl.core.device.devices import send, use_device
from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.model import head
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.model.attention import make_packing
from llamarl.model.transformer import Transformer
from llamarl.trainer.parallel import compile_layer

NUM_LAYERS = 4  # of the trainer
EQUAL = (1023,) * 8
SPREAD = (  # tokens of rollouts, as many in all
    *(633, 600, 560, 512, 480, 420, 400, 380, 350, 311, 300, 290, 280, 270, 260, 250, 240, 222),
    *(200, 190, 180, 170, 160, 158, 148, 120, 90),
)
HEAD_TOKENS = 7168


def decode(setting: Setting) -> Iterator[Facts]:
    """A step of the embedded engine with its graphs, by the number of rollouts: seconds of the
    first one, which prefills and captures, then the mean of many, against reading weights, keys
    and values once."""
    device = torch.device(setting.device, 0) if setting.is_cuda else torch.device("cpu")
    use_device(device)
    num_warm, num_steps, num_tokens = (20, 200, 400) if setting.is_cuda else (1, 4, 8)
    config = EmbeddedConfig(
        max_num_seqs=max(setting.batches),
        max_model_len=setting.prompt_tokens + num_tokens,
        device=setting.device,
        dtype=setting.dtype,
    )
    architecture = read_architecture(make_checkpoint(setting, setting.model, has_weights=False))
    engine = EmbeddedEngine(architecture, config, is_padded=True)
    flat = torch.empty(engine.memory.num_elements, dtype=engine.memory.dtype, device=device)
    engine.commit(flat.normal_(0, 0.02), 0)
    item = engine.memory.dtype.itemsize
    weight_bytes = num_parameters(architecture) * item
    token_bytes = 2 * architecture.num_layers * architecture.num_kv_heads
    token_bytes *= architecture.head_dim * item
    rows = itertools.count()  # and so prompts: none is prefilled already
    for num_rows in setting.batches:
        for row in itertools.islice(rows, num_rows):
            engine.submit(_request(row, setting, num_tokens))
        first_s = _steps_s(setting, engine, 1)
        _steps_s(setting, engine, num_warm)
        step_s = _steps_s(setting, engine, num_steps) / num_steps
        mean = setting.prompt_tokens + 1 + num_warm + num_steps / 2
        floor_ms = read_us(setting, weight_bytes + num_rows * mean * token_bytes) / 1e3
        of = f"{num_rows} rows"
        yield Facts({"first_step_s": first_s, "step_ms": step_s * 1e3, "floor_ms": floor_ms}, of)
        yield Facts({"tokens_per_s": num_rows / step_s, "mean_tokens": mean}, of)
        if num_rows in (min(setting.batches), max(setting.batches)):
            yield from kernels(setting, lambda: [engine.step() for _ in range(10)], 10, of)
        while engine.has_work:
            engine.step()


def _request(row: int, setting: Setting, num_tokens: int) -> Request:
    vocab_size = setting.model["vocab_size"]
    ids = tuple((row * 7 + place) % vocab_size for place in range(setting.prompt_tokens))
    sampling = Sampling(max_tokens=num_tokens)
    return Request(row_id=row, prompt_ids=ids, sampling=sampling, seed=row)


def _steps_s(setting: Setting, engine: EmbeddedEngine, count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        engine.step()
    synchronize(setting)
    return time.perf_counter() - start_s


def trainer(setting: Setting) -> Iterator[Facts]:
    """Forward and backward of a layer and of the head in bfloat16, against their products alone at
    the card's published rate; the layers compiled at the end, which may take the rest of the
    limit."""
    device = torch.device(setting.device, 0) if setting.is_cuda else torch.device("cpu")
    use_device(device)
    few = setting.model | {"num_hidden_layers": NUM_LAYERS if setting.is_cuda else 1}
    architecture = read_architecture(make_checkpoint(setting, few, has_weights=False))
    with torch.device(device):
        model = Transformer(architecture).to(torch.bfloat16)
    cases = {"equal lengths": EQUAL, "different lengths": SPREAD}
    if not setting.is_cuda:
        cases = {"different lengths": (5, 9, 30)}
    for name, lengths in cases.items():
        for checkpointing in ("none", "selective"):
            model.set_checkpointing(checkpointing)
            yield from _layers(setting, model, lengths, f"{name}, checkpointing {checkpointing}")
    yield from _head(setting, model)
    if setting.is_cuda:
        model.set_checkpointing("none")
        for layer in model.layers:
            compile_layer(layer, "inductor")
        yield from _layers(setting, model, EQUAL, "equal lengths, compiled")


def _layers(
    setting: Setting, model: Transformer, lengths: tuple[int, ...], of: str
) -> Iterator[Facts]:
    device, num_tokens = model.head_weight.device, sum(lengths)
    ids = torch.randint(0, model.architecture.vocab_size, (num_tokens,), device=device)
    packing = send(make_packing(lengths), device)

    def work() -> None:
        hidden = model.hidden_states(ids, packing)
        hidden.backward(torch.ones_like(hidden))
        model.zero_grad()

    start_s = time.perf_counter()
    work()
    synchronize(setting)
    first_s = time.perf_counter() - start_s
    layers = model.architecture.num_layers
    layer_ms = median_s(setting, work, 5) / layers * 1e3
    floor_ms = compute_ms(setting, 6 * _layer_parameters(model.architecture) * num_tokens)
    yield Facts({"first_s": first_s, "layer_ms": layer_ms, "products_floor_ms": floor_ms}, of)
    yield from kernels(setting, work, layers, of)


def _layer_parameters(architecture: Architecture) -> int:
    one, two = (num_parameters(replace(architecture, num_layers=count)) for count in (1, 2))
    return two - one


def _head(setting: Setting, model: Transformer) -> Iterator[Facts]:
    weight, num_tokens = model.head_weight, HEAD_TOKENS if setting.is_cuda else 64
    shape = num_tokens, model.architecture.hidden_size
    hidden = torch.randn(shape, device=weight.device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, len(weight), (num_tokens,), device=weight.device)

    def work() -> None:
        head.token_stats(hidden, weight, targets, 1.0).logprobs.sum().backward()

    took_s = median_s(setting, work, 5)
    floor_ms = compute_ms(setting, 8 * num_tokens * weight.numel())
    yield Facts({"head_ms": took_s * 1e3, "products_floor_ms": floor_ms}, "head")
    yield from kernels(setting, work, 1, "head")
