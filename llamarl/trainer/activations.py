"""The memory that a forward and backward of one micro-batch need besides parameters.

The real model with two layers runs on the meta device: nothing is computed and nothing is sent, and
every tensor that an operation makes is followed until it is freed, however the model's code keeps
it. The memory that is alive after the second layer and was not after the first is what each further
layer keeps. Tensor-parallel ranks run the real parallel code over a process group that sends
nothing.

Rules for what the meta device cannot know:

- Attention. A CPU runs `flash_cpu`. CUDA runs `flash` on bfloat16 and `efficient` on float32. The
  same kernel runs on the meta device.
- Head. In bfloat16 a CPU widens the head's weight to float32, which meta tensors do not.
- Experts. Each rank is taken to get as many tokens from others as it sends to them.
- Padding. Attention pads rollouts of one block to its longest (model/attention.py), so memory
  depends on their lengths. The worst packing counts: twice as many cells as tokens."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from llamarl.core.config import Config, LoraConfig
from llamarl.core.device.devices import PLATFORMS, MetaPlatform, send
from llamarl.core.device.names import CPU, GPU
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.adapters import attach
from llamarl.model.architecture import Architecture
from llamarl.model.attention import SPLIT_RATIO, ModelInputs, make_packing, packed_attention
from llamarl.model.experts import TokenExchange
from llamarl.model.transformer import Layer, Transformer
from llamarl.trainer.parallel import sparse_blocks, split

META = torch.device("meta")
MOST_TOKENS = 1 << 16  # passed through a block; from there on memory grows in a straight line


class Activations(NamedTuple):
    """The bytes of one rank in one micro-batch.

    `saved_bytes` are alive between forward and backward. Two come on top where each has its peak:
    `logits_bytes` in the head, `block_bytes` in a layer (recomputed activations, gradients). When
    all layers are done, `embedding_bytes` are alive in all."""

    saved_bytes: int
    logits_bytes: int
    block_bytes: int
    embedding_bytes: int


class _Measured(NamedTuple):
    """The bytes alive after the forward, and those of one layer among them; then the peaks until
    the head's backward, in the layers' backward, and after it."""

    saved: int
    layer: int
    head_peak: int
    layers_peak: int
    embedding_peak: int


def forecast_activations(config: Config, architecture: Architecture) -> Activations:
    """Return the bytes of a micro-batch that is as full as it can be:
    `trainer.tokens_per_micro_batch` tokens, or one rollout of the whole context if that is
    longer."""
    trainer, widened = config.trainer, 0
    if trainer.device == CPU and trainer.compute_dtype == "bfloat16":
        widened = 4 * architecture.vocab_size * architecture.hidden_size // trainer.tensor_parallel

    def most(num_tokens: int) -> Activations:
        found = _measure_all(config, architecture, num_tokens, is_trained=True)
        num_more = architecture.num_layers - 2
        return Activations(
            saved_bytes=max(each.saved + num_more * each.layer for each in found),
            logits_bytes=widened + max(max(each.head_peak - each.saved, 0) for each in found),
            block_bytes=max(max(each.layers_peak - each.saved, 0) for each in found),
            embedding_bytes=max(each.embedding_peak for each in found),
        )

    return Activations(*_at_budget(config, most))


def forecast_inference(config: Config, architecture: Architecture) -> int:
    """Return the most bytes that a forward of such a micro-batch without gradients needs on one
    rank."""

    def most(num_tokens: int) -> tuple[int]:
        found = _measure_all(config, architecture, num_tokens, is_trained=False)
        return (max(each.head_peak for each in found),)

    return _at_budget(config, most)[0]


def _at_budget(config: Config, measure: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the bytes that `measure` gives for `trainer.tokens_per_micro_batch` tokens; for more
    than MOST_TOKENS on a straight line through a half of them and all of them."""
    num_tokens = config.trainer.tokens_per_micro_batch
    if num_tokens <= MOST_TOKENS:
        return measure(num_tokens)
    more = (num_tokens - MOST_TOKENS) / (MOST_TOKENS - MOST_TOKENS // 2)
    pairs = zip(measure(MOST_TOKENS // 2), measure(MOST_TOKENS), strict=True)
    return tuple(whole + round(more * max(0, whole - half)) for half, whole in pairs)


def _measure_all(
    config: Config, architecture: Architecture, num_tokens: int, *, is_trained: bool
) -> list[_Measured]:
    """Measure each packing that may need the most. A forward alone keeps nothing of its layers, so
    one layer is enough."""
    trainer = config.trainer
    longest = config.generator.max_model_len - 1  # the last token is not fed
    kernel = "flash" if trainer.compute_dtype == "bfloat16" else "efficient"
    kernel = "flash_cpu" if trainer.device == CPU else kernel
    num_layers, experts = 2 if is_trained else 1, architecture.experts
    if experts is not None:  # of a layer with them, as they take more
        experts = replace(experts, dense_layers=())
    return [
        _measure(
            replace(architecture, num_layers=num_layers, experts=experts),
            lengths,
            trainer.compute_dtype,
            trainer.activation_checkpointing,
            trainer.tensor_parallel,
            trainer.expert_parallel,
            kernel,
            is_trained,
            (trainer.lora.rank, trainer.lora.dropout, *trainer.lora.targets),
        )
        for lengths in fullest_packings(num_tokens, longest)
    ]


class Watch(TorchDispatchMode):
    """Follows the memory of every tensor that an operation makes on `device` under it: the bytes
    alive now, and the most so far.

    Tensors that are there before (`known`, such as parameters) are not counted."""

    def __init__(self, known: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.num_bytes, self.peak_bytes = 0, 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in known:
            self._seen.add(_local(tensor).untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come here again
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device == self._device:
                self._notice(tensor.untyped_storage())
        return out

    def _notice(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            num_bytes = storage.nbytes()
            self._add(num_bytes)
            weakref.finalize(storage, self._add, -num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def restart(self) -> int:
        """Return the peak until now, and begin a new one."""
        peak, self.peak_bytes = self.peak_bytes, self.num_bytes
        return peak


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@lru_cache(maxsize=64)
def _measure(
    architecture: Architecture,
    lengths: tuple[int, ...],
    compute_dtype: str,
    checkpointing: str,
    num_tensor_ranks: int,
    num_expert_ranks: int,
    kernel: str,
    is_trained: bool,
    adapters: tuple[Any, ...],
) -> _Measured:
    """Measure one forward, and if trained its backward. `adapters`: rank, dropout and targets of
    `trainer.lora`."""
    rank, dropout, *targets = adapters
    lora = LoraConfig(rank=rank, dropout=dropout, targets=targets)
    with _tensor_mesh(num_tensor_ranks) as mesh:
        with META:
            model = Transformer(architecture).to(getattr(torch, compute_dtype))
        if mesh is not None:
            split(model, mesh)
        for block in sparse_blocks(model) if num_expert_ranks > 1 else ():
            block.experts.exchange = EvenExchange(num_expert_ranks)
            for name, parameter in [*block.experts.named_parameters()]:
                own = parameter.detach()[: len(parameter) // num_expert_ranks].clone()
                setattr(block.experts, name, nn.Parameter(own))
        if lora.is_used:
            attach(model, adapter_shapes(architecture, lora), lora, mesh)
            model.to(getattr(torch, compute_dtype))
        for layer in model.model.layers:
            assert isinstance(layer, Layer)
            layer.checkpointing = checkpointing
            layer.self_attn.attend = AttentionKernel(kernel).attend
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:  # whole ones are counted elsewhere
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        watch = Watch(model.parameters(), META)
        peaks: list[int] = []

        def mark(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:  # as soon as its gradient is there
                output.register_hook(lambda grad: peaks.append(watch.restart()))

        for module in (model.model.layers[-1], model.model.embed_tokens):
            module.register_forward_hook(mark)
        ends: list[int] = []  # bytes alive when a layer is done
        for layer in model.model.layers:
            layer.register_forward_hook(lambda *_: ends.append(watch.num_bytes))
        token_ids = torch.empty(sum(lengths), dtype=torch.int64, device=META)
        with (
            watch,
            in_pieces_of(CPU if kernel == "flash_cpu" else GPU),
            torch.set_grad_enabled(is_trained),
        ):
            packing = send(make_packing(lengths, model.num_tensor_ranks), META)
            stats = model(ModelInputs(token_ids, packing, token_ids), 1.0)
            saved = watch.num_bytes
            if not is_trained:
                return _Measured(saved, 0, watch.peak_bytes, 0, 0)
            (stats.logprobs.sum() + stats.entropy.sum()).backward()
            peaks.append(watch.restart())  # a frozen embedding has no gradient: the layers' is last
        head_peak, layers_peak, *rest = peaks
        embedding_peak = rest[0] if rest else 0
        return _Measured(saved, ends[1] - ends[0], head_peak, layers_peak, embedding_peak)


class EvenExchange(TokenExchange):
    """An exchange on the meta device in which each rank gets as many rows as it sends."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def announce(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.clone()

    def splits(self, counts: torch.Tensor, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        return [], []

    def send(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        return x.clone()


def fullest_packings(num_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Return lengths of rollouts, at most `longest`, of the micro-batches that may need the most.

    Short rollouts waste the most cells, up to as many as there are tokens. A rollout longer than
    the budget gets a micro-batch of its own."""
    mixed = (SPLIT_RATIO, *[1] * max(num_tokens - SPLIT_RATIO, 0))
    return [mixed, (longest,)] if longest > num_tokens else [mixed]


@contextmanager
def in_pieces_of(device: str) -> Iterator[None]:
    """Let the meta device compute in the same pieces as this kind of device."""
    before, PLATFORMS[META.type] = PLATFORMS[META.type], MetaPlatform(PLATFORMS[device])
    try:
        yield
    finally:
        PLATFORMS[META.type] = before


@contextmanager
def _tensor_mesh(num_ranks: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `num_ranks` tensor-parallel ranks, of which only the first exists: this
    process."""
    if num_ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a forecast with tensor_parallel must run outside any process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


class AttentionKernel(TorchFunctionMode):
    """Runs attention by the kernel `name`, which meta tensors would not choose."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self:
            return packed_attention(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if self._name == "efficient":
            return aten._scaled_dot_product_efficient_attention(*args, None, True, 0.0, True)[0]
        if self._name == "flash_cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(*args, 0.0, True)[0]
        return aten._scaled_dot_product_flash_attention(*args, 0.0, True)[0]
