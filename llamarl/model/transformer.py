"""The interface of a model for trainer and reference, and the decoder of Llama 3, Qwen2.5, Qwen3
and mixtures of experts, on packed rollouts.

Sharding, optimizer, checkpoints, export and publishing work on the interface alone. Parameters have
the names and shapes of the Hugging Face layout, so none of these needs a map of names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llamarl.core.device.devices import send
from llamarl.model.architecture import LINEARS, Architecture
from llamarl.model.attention import ModelInputs, Packing, make_packing, packed_attention
from llamarl.model.experts import (
    LayerRouting,
    RoutingStats,
    SparseFeedForward,
    routing_of,
    stats_of,
)
from llamarl.model.head import TokenStats, token_stats

if TYPE_CHECKING:  # it imports distributed tensors, which take a second; a generator needs none
    from llamarl.model.adapters import AdapterSwitch

aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._grouped_mm.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
]
"""The operations whose results selective checkpointing keeps: matrix products, attention, tensor
parallelism's sums, and tokens that came from other expert-parallel ranks."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""The cos and sin, float32 [N, 1, head_dim / 2], of the N tokens at hand."""


class TrainedModel(nn.Module, ABC):
    """A language model on packed rollouts, of our code or another library's, built on the meta
    device.

    Its `named_parameters` have the names and shapes of the checkpoint's tensors, and of adapters if
    it has any; `adapters` switches these off and on. With tensor parallelism over
    `num_tensor_ranks` it computes a multiple of as many tokens. A backward pass adds the gradient
    of the load-balancing loss, times `aux_loss_coefficient` and the number of tokens whose
    log-probs were asked for, so that dividing by all of those leaves a mean."""

    adapters: "AdapterSwitch | None" = None
    num_tensor_ranks = 1
    routing_stats: RoutingStats | None = None  # of the last pass, if there are experts
    aux_loss_coefficient = 0.0

    @property
    def root(self) -> nn.Module:
        """The module whose submodules have the names of the checkpoint."""
        return self

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, each of which is gathered by itself."""

    @abstractmethod
    def set_checkpointing(self, checkpointing: str) -> None:
        """Choose what the layers' backward pass recomputes (see TrainerConfig). It is applied
        inside the layers, below FSDP's hooks, so that recomputing gathers no weights."""

    def prepare(self) -> None:
        """Set buffers that no file holds; called on all ranks when the weights are in place."""

    @abstractmethod
    def forward(self, inputs: ModelInputs, temperature: float) -> TokenStats:
        """Return log-probs of the targets and entropies at `temperature`, float32 [N or T] each. No
        rollout sees another one. The packing's number of tokens is made a multiple of
        `num_tensor_ranks`."""


class Transformer(TrainedModel):
    """One decoder. Build it under `torch.device("meta")` and load weights, or train from scratch.

    `lm_head` is None if the architecture ties it to the embedding. `num_tensor_ranks` is set when
    tensor parallelism splits the model: between layers each rank then holds an equal share of the
    tokens."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.model = DecoderStack(architecture)
        self.lm_head = (
            None
            if architecture.tie_embeddings
            else nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        )

    def forward(self, inputs: ModelInputs, temperature: float) -> TokenStats:
        """See TrainedModel. Raises ValueError if the packing is of another number of tokens."""
        weight, targets = self.head_weight, inputs.targets
        chosen, kept = inputs.chosen, inputs.kept
        aux_weight = self.aux_loss_coefficient * len(targets if chosen is None else chosen)
        hidden = self.hidden_states(inputs.token_ids, inputs.packing, inputs.experts, aux_weight)
        if self.num_tensor_ranks == 1:
            return token_stats(hidden, weight, targets, temperature, None, chosen, kept)
        from torch.distributed.tensor import DTensor  # takes half a second, which a generator saves

        assert isinstance(weight, DTensor)
        group = weight.device_mesh.get_group()
        return token_stats(hidden, weight.to_local(), targets, temperature, group, chosen, kept)

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        packing: Packing,
        experts: torch.Tensor | None = None,
        aux_weight: float = 0.0,
    ) -> torch.Tensor:
        """Return the final normalised states [N, hidden_size] of packed rollouts, whose tokens go
        to these `experts` (see ModelInputs)."""
        num_tokens = len(token_ids)
        num_added = -num_tokens % self.num_tensor_ranks
        if len(packing.positions) != num_tokens + num_added:
            raise ValueError(
                f"packing must be of {num_tokens + num_added} tokens for {num_tokens} token ids, "
                f"got {len(packing.positions)}"
            )
        num_sparse, routing = len(self.architecture.sparse_layers), list[LayerRouting]()
        if num_sparse:
            num_real = num_tokens
            if self.num_tensor_ranks > 1:
                experts, num_real = self._share(experts, num_tokens, num_added)
            routing = routing_of(num_sparse, experts, num_real, aux_weight)
        if num_added:  # as a rollout of its own, whose states are dropped
            token_ids = F.pad(token_ids, (0, num_added))
        hidden = self.model(token_ids, packing, routing)
        self.routing_stats = stats_of(routing) if routing else None
        if self.num_tensor_ranks == 1:
            return hidden
        from torch.distributed.tensor import DTensor, Partial

        assert isinstance(hidden, DTensor)
        # In the head each rank has the gradient of its part of the vocabulary; these are summed.
        return hidden.full_tensor(grad_placements=[Partial()])[:num_tokens]

    def _share(
        self, experts: torch.Tensor | None, num_tokens: int, num_added: int
    ) -> tuple[torch.Tensor | None, int]:
        """Return the experts of this tensor-parallel rank's tokens, and how many of these are no
        padding."""
        from torch.distributed.tensor import DTensor

        weight = self.head_weight
        assert isinstance(weight, DTensor)
        size = (num_tokens + num_added) // self.num_tensor_ranks
        first = weight.device_mesh.get_local_rank() * size
        num_real = min(max(num_tokens - first, 0), size)
        if experts is not None:
            padding = torch.arange(experts.shape[2], device=experts.device, dtype=experts.dtype)
            padded = (experts, padding.expand(num_added, *experts.shape[1:]))
            experts = torch.cat(padded)[first : first + size]
        return experts, num_real

    def logits(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return all logits [N, vocab_size] at once of rollouts of these lengths: for tests and
        small models."""
        packing = send(make_packing(lengths, self.num_tensor_ranks), token_ids.device)
        return F.linear(self.hidden_states(token_ids, packing), self.head_weight)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def set_checkpointing(self, checkpointing: str) -> None:
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.checkpointing = checkpointing

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight [vocab_size, hidden_size] of the head, which is the embedding's where tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight


class DecoderStack(nn.Module):
    """Embedding, layers and final norm (the `model.` part of the parameter names)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            Layer(architecture, is_sparse=i in architecture.sparse_layers)
            for i in range(architecture.num_layers)
        )
        self.norm = RMSNorm(architecture.hidden_size, architecture.norm_eps)
        self._tables: Rotation | None = None

    def forward(
        self, token_ids: torch.Tensor, packing: Packing, routing: Sequence[LayerRouting] = ()
    ) -> torch.Tensor:
        """Map [N] token ids to [N, hidden_size]; `routing` is of the layers with experts."""
        rotation = self._rotation(packing)
        x = self.embed_tokens(token_ids)
        left = iter(routing)
        for layer in self.layers:
            x = layer(x, rotation, packing, next(left) if layer.is_sparse else None)
        return self.norm(x)

    def _rotation(self, packing: Packing) -> Rotation:
        """Return the rows of the tables for these positions. The tables grow on demand, and are not
        buffers, because those would stay empty in a model that was built on the meta device."""
        device = packing.positions.device
        tables = self._tables
        if tables is None or tables[0].device != device or len(tables[0]) < packing.num_positions:
            size = 1 << (packing.num_positions - 1).bit_length()
            cos, sin = rope_tables(self.architecture, size)
            tables = self._tables = (cos.to(device), sin.to(device))
        cos, sin = (table.index_select(0, packing.positions).unsqueeze(1) for table in tables)
        return cos, sin


class Layer(nn.Module):
    """One decoder layer.

    `checkpointing` says what its backward pass recomputes (see TrainerConfig). It is applied inside
    the module, below FSDP's hooks, so recomputing gathers no weights. `run` is the computation,
    which may be replaced by a compiled one. `around` may take the place of `recomputed`, which it
    calls.
    """

    def __init__(self, architecture: Architecture, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.checkpointing = "none"
        self.around: nn.Module | None = None
        self.is_sparse = is_sparse
        self.run: Callable[..., torch.Tensor] = self._run
        self.input_layernorm = RMSNorm(architecture.hidden_size, architecture.norm_eps)
        self.self_attn = Attention(architecture)
        self.post_attention_layernorm = RMSNorm(architecture.hidden_size, architecture.norm_eps)
        self.mlp = SparseFeedForward(architecture) if is_sparse else FeedForward(architecture)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        packing: Packing,
        routing: LayerRouting | None = None,
    ) -> torch.Tensor:
        """Map [N, hidden_size] to [N, hidden_size]; with tensor parallelism, this rank's N tokens.
        A layer with experts gets their `routing`."""
        run = recomputed if self.around is None else self.around
        out = run(self.checkpointing, self.run, x, rotation, packing, routing)
        assert isinstance(out, torch.Tensor)
        return out

    def _run(
        self, x: torch.Tensor, rotation: Rotation, packing: Packing, routing: LayerRouting | None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, packing)
        h = self.post_attention_layernorm(x)
        return x + (self.mlp(h, routing) if self.is_sparse else self.mlp(h))


def recomputed(checkpointing: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return run(*args, **kwargs), whose backward pass recomputes what `checkpointing` says (see
    TrainerConfig)."""
    if checkpointing == "none" or not torch.is_grad_enabled():
        return run(*args, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False}  # with the random numbers of the first time
    if checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)
    return checkpoint(run, *args, **options, **kwargs)


def _linear(architecture: Architecture, name: str) -> nn.Linear:
    """Return a matrix of a layer, by its name in LINEARS."""
    linear = LINEARS[name]
    num_outputs, num_inputs = architecture.size(linear.outputs), architecture.size(linear.inputs)
    return nn.Linear(num_inputs, num_outputs, bias=getattr(architecture, linear.bias))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        self.q_proj = _linear(architecture, "self_attn.q_proj")
        self.k_proj = _linear(architecture, "self_attn.k_proj")
        self.v_proj = _linear(architecture, "self_attn.v_proj")
        self.o_proj = _linear(architecture, "self_attn.o_proj")
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_all_heads = architecture.norms_all_heads
        if architecture.qk_norm:
            sizes = (self.head_dim, self.head_dim)
            if self.norms_all_heads:
                sizes = (architecture.size("queries"), architecture.size("keys"))
            self.q_norm, self.k_norm = (RMSNorm(size, architecture.norm_eps) for size in sizes)
        self.attend = packed_attention

    def forward(self, x: torch.Tensor, rotation: Rotation, packing: Packing) -> torch.Tensor:
        """Map [N, hidden_size] to [N, hidden_size]."""
        q, k, v = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None and self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self.o_proj(self.attend(q, k, v, packing).flatten(1))


class FeedForward(nn.Module):
    """The SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.gate_proj = _linear(architecture, "mlp.gate_proj")
        self.up_proj = _linear(architecture, "mlp.up_proj")
        self.down_proj = _linear(architecture, "mlp.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, hidden_size] to [N, hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in
        float32."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) by their angles, in float32.

    `x` [..., heads, head_dim]; `cos`, `sin` broadcast against [..., heads, head_dim / 2].
    """
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_tables(architecture: Architecture, num_positions: int) -> Rotation:
    """Return cos and sin of position times frequency: float32 [num_positions, head_dim / 2], on the
    CPU.

    Its float32 operations are those of transformers, because at position 100,000 one rounding of a
    frequency already rotates a head by a thousandth."""
    frequencies = _frequencies(architecture)
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def _frequencies(architecture: Architecture) -> torch.Tensor:
    """Return the radians per position, float32 [head_dim / 2]: theta^(-2i / head_dim), scaled if
    configured."""
    pairs = torch.arange(0, architecture.head_dim, 2, device="cpu").float()
    frequencies = 1.0 / architecture.rope_theta ** (pairs / architecture.head_dim)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_long = wavelengths > scaling.original_max_positions / low
    is_short = wavelengths < scaling.original_max_positions / high
    scaled = torch.where(is_long, frequencies / scaling.factor, between)
    return torch.where(is_short, frequencies, scaled)
